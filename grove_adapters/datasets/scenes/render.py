"""Drawing scenes: flat shapes with a soft shadow, then blur, grain and an occluding card.

A picture is drawn from its `Evidence` alone (see `evidence`), so what a degradation hides is truly not in the pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from grove_adapters.datasets.scenes.describe import Part
from grove_adapters.datasets.scenes.evidence import Evidence, evidence
from grove_adapters.datasets.scenes.world import GRID, Scene
from grove_adapters.errors import InputError

SIZE = 64
"""Side of a picture in pixels, unless asked otherwise: what the bundled model sees."""

RGB = {
    "red": (226, 45, 60), "blue": (38, 104, 230), "green": (28, 158, 84), "yellow": (250, 200, 24),
    "orange": (246, 130, 30), "purple": (134, 62, 196), "pink": (246, 120, 186),
    "white": (250, 248, 244), "navy": (30, 40, 72), "beige": (226, 206, 170), "mint": (176, 222, 202),
}  # fmt: skip
_UNKNOWN_OBJECT, _UNKNOWN_BACKGROUND = (140, 142, 148), (92, 94, 100)
_CARD, _CARD_EDGE = (112, 108, 116), (88, 84, 92)

_MARGIN = 0.03
"""Free border around the grid, in picture sides."""
_RADIUS = {"small": 0.29, "large": 0.46, None: 0.375}
"""Radius of an object in cells."""
_JITTER = 0.05
"""Largest shift of an object from the middle of its cell, in cells."""
_BLUR = (0.0, 0.012, 0.026, 0.05)
"""Standard deviation of the blur in picture sides, by level."""
_GRAIN = (0.0, 0.07, 0.14, 0.24)
"""Standard deviation of the grain, of 1 = white, by level."""
_SUPERSAMPLING = 8


def render(scene: Scene, size: int = SIZE) -> np.ndarray:
    """Draws a scene.

    Args:
        scene: What to draw.
        size: Side of the square picture in pixels, 16 to 2048.

    Returns:
        (size, size, 3) uint8 RGB. The same scene gives the same bytes.

    Raises:
        InputError: If `size` is out of range.
    """
    if not 16 <= size <= 2048:
        raise InputError(f"A picture needs a side of 16 to 2048 pixels, got {size}.")
    rng = np.random.default_rng(scene.look)
    blur, noise, *_ = scene.degradation
    canvas = _paint(evidence(scene), size, rng)
    if blur:
        # Pillow's box approximation keeps bytes in, bytes out; several times faster than an exact float kernel.
        picture = Image.fromarray(canvas.astype(np.uint8))
        canvas = np.asarray(picture.filter(ImageFilter.GaussianBlur(_BLUR[blur] * size)))
    if scene.degradation.covered:
        canvas = canvas.copy()
        _lay_card(canvas, scene.degradation.covered)
    if noise:
        grain = rng.standard_normal(canvas.shape, np.float32)
        canvas = np.clip(canvas + grain * (255 * _GRAIN[noise]), 0, 255)
    return canvas.astype(np.uint8)


def render_image(scene: Scene, size: int = SIZE) -> Image.Image:
    """`render` as a Pillow image, which is what people's preprocessing takes."""
    return Image.fromarray(render(scene, size))


def render_all(scenes: Iterable[Scene], size: int = SIZE) -> np.ndarray:
    """(N, size, size, 3) uint8: `render` of every scene."""
    return np.stack([render(scene, size) for scene in scenes])


def contact_sheet(scenes: Iterable[Scene], *, columns: int = 8, size: int = 128, gap: int = 8) -> Image.Image:
    """Pictures side by side on white, row by row, for people to look at."""
    pictures = [render_image(scene, size) for scene in scenes]
    rows = math.ceil(len(pictures) / columns)
    step = size + gap
    sheet = Image.new("RGB", (columns * step + gap, rows * step + gap), "white")
    for i, picture in enumerate(pictures):
        sheet.paste(picture, (gap + i % columns * step, gap + i // columns * step))
    return sheet


def _cell_side(size: int) -> float:
    return size * (1 - 2 * _MARGIN) / GRID


def _paint(seen: Evidence, size: int, rng: np.random.Generator) -> np.ndarray:
    """(size, size, 3) float32 of 0 to 255: the background with the visible objects."""
    canvas = _background(seen.background, size).copy()
    margin, cell = _MARGIN * size, _cell_side(size)
    for part, place in zip(seen.parts, seen.cells, strict=True):
        shift_y, shift_x = (rng.random(2) * 2 - 1) * _JITTER
        premultiplied, transparency = _sprite(part, size)
        side = len(premultiplied)
        top = round(margin + (place // GRID + 0.5 + shift_y) * cell - side / 2)
        left = round(margin + (place % GRID + 0.5 + shift_x) * cell - side / 2)
        upper, lefter = max(-top, 0), max(-left, 0)
        window = canvas[max(top, 0) : top + side, max(left, 0) : left + side]
        inside = slice(upper, upper + window.shape[0]), slice(lefter, lefter + window.shape[1])
        window *= transparency[inside]
        window += premultiplied[inside]
    return canvas


@lru_cache(maxsize=64)
def _background(name: str | None, size: int) -> np.ndarray:
    """A plain colour, a little lighter at the top left and darker at the bottom right."""
    colour = np.array(RGB[name] if name else _UNKNOWN_BACKGROUND, np.float32)
    ramp = np.linspace(-1, 1, size, dtype=np.float32)
    shade = 1 - 0.02 * (ramp[:, None] + ramp)
    return np.clip(colour * shade[:, :, None], 0, 255).astype(np.float32)


@lru_cache(maxsize=4096)
def _sprite(part: Part, size: int) -> tuple[np.ndarray, np.ndarray]:
    """One object with its shadow: (S, S, 3) colour times opacity, and (S, S, 1) transparency."""
    cell = _cell_side(size)
    side = 2 * math.ceil(cell * 0.62)
    large = side * _SUPERSAMPLING
    unit = cell * _SUPERSAMPLING
    radius = _RADIUS[part.size] * unit
    outline = _outline(part.shape or "circle", large / 2, radius)
    colour = RGB[part.colour] if part.colour else _UNKNOWN_OBJECT
    silhouette = Image.new("L", (large, large))
    ImageDraw.Draw(silhouette).polygon(outline, fill=255)
    ink = _ink(part.fill, silhouette, outline, unit, radius)

    shadow = Image.new("L", (large, large))
    shadow.paste(70, (round(0.03 * unit), round(0.05 * unit)), ink)
    shadow = shadow.filter(ImageFilter.GaussianBlur(0.04 * unit))
    below = np.asarray(shadow.resize((side, side), Image.Resampling.BOX), np.float32) / 255
    above = np.asarray(ink.resize((side, side), Image.Resampling.BOX), np.float32) / 255
    premultiplied = above[:, :, None] * np.array(colour, np.float32)
    return premultiplied, ((1 - above) * (1 - below))[:, :, None]


def _ink(
    fill: str | None, silhouette: Image.Image, outline: list[tuple[float, float]], unit: float, radius: float
) -> Image.Image:
    """Where an object is opaque, at the supersampled size. An unknown fill is a uniform half tone."""
    if fill == "solid":
        return silhouette
    if fill is None:
        return silhouette.point(lambda value: value * 3 // 4)
    ink = Image.new("L", silhouette.size)
    draw = ImageDraw.Draw(ink)
    if fill == "striped":
        middle, period = silhouette.size[0] / 2, max(0.22 * unit, 0.5 * radius)
        for k in range(-4, 5):
            offset = middle + k * period
            draw.line(
                [(offset - unit, middle + unit), (offset + unit, middle - unit)], fill=255, width=round(0.32 * period)
            )
    edge = 0.3 * radius if fill == "hollow" else 0.05 * unit
    draw.line([*outline, outline[0], outline[1]], fill=255, width=round(2 * edge), joint="curve")
    return Image.fromarray(np.minimum(np.asarray(ink), np.asarray(silhouette)))


def _outline(shape: str, middle: float, radius: float) -> list[tuple[float, float]]:
    """Corners of a shape around (middle, middle), sized so that all shapes look equally large."""

    def at(angle: float, length: float) -> tuple[float, float]:
        return middle + radius * length * math.sin(angle), middle - radius * length * math.cos(angle)

    turn = 2 * math.pi
    if shape == "circle":
        return [at(turn * i / 96, 0.94) for i in range(96)]
    if shape == "square":
        return [at(turn * (i + 0.5) / 4, 1.17) for i in range(4)]
    if shape == "triangle":
        return [(x, y + 0.14 * radius) for x, y in (at(turn * i / 3, 1.16) for i in range(3))]
    if shape == "star":
        return [at(turn * i / 10, 0.5 if i % 2 else 1.14) for i in range(10)]
    if shape == "cross":
        arm, reach = 0.34, 1.0
        quarter = [(-arm, -reach), (arm, -reach), (arm, -arm), (reach, -arm), (reach, arm), (arm, arm)]
        half = [*quarter, (arm, reach), (-arm, reach), (-arm, arm), (-reach, arm), (-reach, -arm), (-arm, -arm)]
        return [(middle + x * radius, middle + y * radius) for x, y in half]
    # heart: the classical parametric curve, about 32 units wide
    curve = []
    for i in range(96):
        t = turn * i / 96
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        curve.append((middle + x / 16 * radius, middle - (y + 2.5) / 16 * radius))
    return curve


def _lay_card(canvas: np.ndarray, cells: tuple[int, ...]) -> None:
    """Covers a rectangle of cells with an opaque card, in place."""
    size = len(canvas)
    rows, columns = [cell // GRID for cell in cells], [cell % GRID for cell in cells]

    def line(index: int) -> int:
        """Where grid line `index` runs; the outer lines are the picture's own edges."""
        return {0: 0, GRID: size}.get(index, round(_MARGIN * size + index * _cell_side(size)))

    top, bottom, left, right = line(min(rows)), line(max(rows) + 1), line(min(columns)), line(max(columns) + 1)
    edge = max(1, size // 64)
    canvas[top:bottom, left:right] = _CARD_EDGE
    canvas[top + edge : bottom - edge, left + edge : right - edge] = _CARD
