"""Seeded augmentations of single items, for test-time data augmentation.

A view depends on the seed, the item's id and the view's number only, so it is the same in every batch, worker and run.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from grove_adapters import seeding

SCALE = (0.08, 1.0)
"""Range of the crop's share of the picture's area."""
RATIO = (3 / 4, 4 / 3)
"""Range of the crop's width over its height."""
FLIP = 0.3
"""Probability of a horizontal flip."""
DROP = 0.3
"""Probability of each word to be dropped."""
RECIPE = (
    f"image: random resized crop (scale {SCALE[0]}–{SCALE[1]:g}, ratio 3/4–4/3), flip p={FLIP}; "
    f"text: words dropped p={DROP}"
)
"""What was done, as text for manifests."""


def image_view(image: Image.Image, size: tuple[int, int], *, id: str, view: int, seed: int) -> Image.Image:
    """One random resized crop of a picture, perhaps flipped.

    Args:
        image: The picture.
        size: (height, width) in pixels to resize the crop to; the size that the encoder sees.
        id: The image's id.
        view: Number of the view, from 0.
        seed: Address of all views.

    Source: test-time augmentation as GroVE's paper compares with it (random resized crop, flip p = .3); it states no
    scale, so the crop has torchvision's and Inception's range.
    """
    random = np.random.default_rng(seeding.derive(seed, "image view", id, view))
    left, top, width, height = _crop(*image.size, random)
    crop = image.resize(size[::-1], Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < FLIP else crop


def text_view(text: str, *, id: str, view: int, seed: int) -> str:
    """A caption with each word dropped independently; one random word stays where all would go.

    Args:
        text: The caption.
        id: The caption's id.
        view: Number of the view, from 0.
        seed: Address of all views.

    Source: the paper masks words with p = .3; CLIP has no mask token, so words are dropped.
    """
    random = np.random.default_rng(seeding.derive(seed, "text view", id, view))
    words = text.split()
    keep = random.random(len(words)) >= DROP
    keep[random.integers(len(words))] |= not keep.any()
    return " ".join(word for word, kept in zip(words, keep, strict=True) if kept)


def _crop(width: int, height: int, random: np.random.Generator) -> tuple[int, int, int, int]:
    """A random (left, top, width, height) inside the picture; the largest central one where ten tries don't fit."""
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(random.integers(width - crop_width + 1))
            top = int(random.integers(height - crop_height + 1))
            return left, top, crop_width, crop_height
    crop_width = min(width, max(1, round(height * RATIO[1])))
    crop_height = min(height, max(1, round(width / RATIO[0])))
    return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height
