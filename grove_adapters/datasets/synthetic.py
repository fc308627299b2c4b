"""A toy world of embeddings whose noise is known: what an uncertainty should rank, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grove_adapters import _checks
from grove_adapters.embeddings import Embeddings, Pairs, Projection, Source


@dataclass(frozen=True, eq=False)
class SyntheticWorld:
    """Pairs and the noise level of every item.

    Attributes:
        pairs: One text for each image, K views and the features of each.
        image_noise: (N,) share of each image that is noise, in [0, 1].
        text_noise: (N,) the same for the texts, independent of the images'.
    """

    pairs: Pairs
    image_noise: np.ndarray
    text_noise: np.ndarray


def make_pairs(
    n: int = 400,
    *,
    dim: int = 32,
    concept_dims: int = 4,
    views: int = 8,
    features: bool = True,
    noise: float = 0.8,
    seed: int = 0,
) -> SyntheticWorld:
    """Draw a world of `n` pairs.

    A concept u ~ N(0, I) in `concept_dims` dimensions has a clean unit vector c(u) on a smooth curved surface in R^D.
    An item of noise level s ~ U(0, noise) has lost that share of its content: its embedding is the unit vector along
    (1 − s) c + s g_m + s ε / 2 with g_m the generic direction of its modality and ‖ε‖ ≈ 1, as vague captions drift to
    the mean caption. Views repeat ε anew, so their spread grows with s too.

    The encoder of a modality ends in a random linear layer with a bias that reads 3D/2 features: of those that it maps
    to the vector above before its normalisation, the shortest, and s times noise that it maps to nothing.

    Args:
        n: Number of pairs.
        dim: D, the width of the embeddings.
        concept_dims: Dimensions of the concepts.
        views: K, views of each item; 0 for none.
        features: Whether to give the features of the last linear layer and that layer.
        noise: Largest noise level, in (0, 1].
        seed: Address of every random number drawn.

    Raises:
        InputError: A number out of range.
    """
    _checks.count(n, what="number of pairs")
    _checks.count(dim, what="dim")
    # two streams, so that a larger world of the same seed lies on the same surface; a third, so that features change
    # nothing else
    surface, random, encoder = (np.random.default_rng([seed, stream]) for stream in range(3))
    weights = surface.normal(size=(concept_dims, dim)) * 0.7
    phases = surface.uniform(0, 2 * np.pi, dim)
    generic = {modality: _unit(surface.normal(size=dim)) for modality in ("image", "text")}
    concepts = random.normal(size=(n, concept_dims))
    clean = _unit(np.sin(concepts @ weights + phases))
    parts, levels = {}, {}
    for modality in ("image", "text"):
        level = random.uniform(0, noise, (n, 1))
        content = (1 - level) * clean + level * generic[modality]
        repeats = random.normal(size=(n, 1 + views, dim)) / np.sqrt(dim)
        vectors = content[:, None] + level[:, None] * repeats / 2
        values = _unit(vectors).astype(np.float32)
        projection = Projection(encoder.normal(size=(dim, 3 * dim // 2)), encoder.normal(size=dim))
        levels[modality] = level[:, 0]
        parts[modality] = Embeddings(
            values[:, 0],
            np.array([f"{modality}-{row:06d}" for row in range(n)]),
            modality=modality,
            source=Source(model="synthetic", pretrained=f"seed-{seed}", logit_scale=20.0),
            views=values[:, 1:] if views else None,
            features=_features(vectors[:, 0], projection, level, encoder) if features else None,
            projection=projection if features else None,
        )
    rows = np.arange(n)
    pairs = Pairs(parts["image"], parts["text"], np.stack([rows, rows], 1))
    return SyntheticWorld(pairs, levels["image"], levels["text"])


def _features(
    vectors: np.ndarray, projection: Projection, level: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """(N, F) float32 features that the projection maps to `vectors`, with noise in the space that it maps to zero."""
    inverse = np.linalg.pinv(projection.weight.astype(np.float64))
    noise = level * random.normal(size=(len(vectors), projection.width)) / np.sqrt(projection.width)
    unseen = noise - noise @ projection.weight.T @ inverse.T
    return ((vectors - projection.bias) @ inverse.T + unseen).astype(np.float32)


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
