"""Exact search of a gallery in tiles of fixed size, so that the Q × G matrix never exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from grove_adapters import _checks
from grove_adapters.errors import InputError
from grove_adapters.similarity import POINT_GALLERIES, SIMILARITIES, Gaussians, gaussians, paired

QUERY_BLOCK = 512
GALLERY_BLOCK = 4096  # with QUERY_BLOCK: tiles of 8 MiB in float32
SLACK = 16  # candidates beyond k that are scored again in float64
PAIRS = 1 << 17  # float64 entries gathered at once when pairs are scored again: 1 MiB an operand


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The k closest gallery rows of each of Q queries.

    Attributes:
        rows: (Q, k) int64 gallery rows, closest first; of equally close ones the lower row comes first.
        scores: (Q, k) float64 similarities, falling along a row.
        temperature: Multiplier that makes the similarities logits, or None; without it there is no distribution.
        log_partition: (Q,) float64 log Σ_g exp(temperature · similarity) over the whole gallery, or None.
        entropy: (Q,) float64 entropy in nats, from 0 to log G, of the softmax of the logits over the whole gallery,
            or None.
    """

    rows: np.ndarray
    scores: np.ndarray
    temperature: float | None = None
    log_partition: np.ndarray | None = None
    entropy: np.ndarray | None = None

    @property
    def probabilities(self) -> np.ndarray | None:
        """(Q, k) softmax of the logits over the whole gallery, at these rows; None without a temperature."""
        if self.temperature is None:
            return None
        assert self.log_partition is not None
        return np.exp(np.minimum(self.temperature * self.scores - self.log_partition[:, None], 0))


class Softmax(NamedTuple):
    """Q softmax distributions of which parts of the support have been seen.

    Attributes:
        peak: (Q,) largest logit m.
        mass: (Q,) float64 Σ exp(l − m).
        moment: (Q,) float64 Σ exp(l − m)(l − m); the entropy is log(mass) − moment / mass, without the cancellation of
            log Z − Σ p l at large logits.
    """

    peak: torch.Tensor
    mass: torch.Tensor
    moment: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> Softmax:
        """Of (Q, G) logits."""
        peak = logits.amax(1)
        below = logits - peak[:, None]
        weight = below.exp()
        return cls(peak.double(), weight.sum(1, dtype=torch.float64), below.mul_(weight).sum(1, dtype=torch.float64))

    def joined(self, other: Softmax) -> Softmax:
        """Of both supports together."""
        peak = torch.maximum(self.peak, other.peak)
        masses, moments = [], []
        for part in (self, other):
            below = part.peak - peak
            weight = below.exp()
            masses.append(weight * part.mass)
            moments.append(weight * (part.moment + below * part.mass))
        return Softmax(peak, masses[0] + masses[1], moments[0] + moments[1])

    @property
    def log_partition(self) -> torch.Tensor:
        """(Q,) log Σ exp(l)."""
        return self.peak + self.mass.log()

    @property
    def entropy(self) -> torch.Tensor:
        """(Q,) entropies ≥ 0 in nats."""
        return (self.mass.log() - self.moment / self.mass).clamp_min(0)


def search(
    queries: Any,
    gallery: Any,
    *,
    k: int,
    similarity: str = "csd",
    temperature: float | None = None,
    query_block: int = QUERY_BLOCK,
    gallery_block: int = GALLERY_BLOCK,
    progress: bool = False,
) -> Neighbours:
    """The exact k nearest gallery items of every query, equal to sorting all similarities, ties included.

    Tiles are matrix products in the embeddings' precision. Their rounding depends on the tile's shape, so the best
    k + 16 candidates are scored again pair by pair in float64. Where rounding could have kept an item out of the k
    (its score is too near, as in a gallery full of copies), all items that near are scored again. Results therefore
    do not depend on tile sizes or threads.

    Args:
        queries: Q distributions, ``(mean, variance)`` or, for cosine, (Q, D) vectors; memory maps are read in blocks.
        gallery: G of the same.
        k: Neighbours of each query; at most G are returned.
        similarity: A name in `similarity.SIMILARITIES`.
        temperature: Positive multiplier that makes similarities logits; with it `Neighbours` describes their softmax
            over the gallery, gathered tile by tile.
        query_block: Queries scored together.
        gallery_block: Gallery items scored together.
        progress: Show a bar over query blocks.

    Raises:
        InputError: An unknown similarity, other dimensions, or bare vectors where distributions are needed.
    """
    _checks.choice(similarity, tuple(SIMILARITIES), what="similarity")
    _checks.count(query_block, what="query_block")
    _checks.count(gallery_block, what="gallery_block")
    q = gaussians(queries, need_variance=similarity != "cosine")
    g = gaussians(gallery, need_variance=similarity not in POINT_GALLERIES)
    _checks.same_dim(q.dim, g.dim, what="gallery")
    k = min(_checks.count(k, what="k"), g.size)
    if temperature is not None and not 0 < temperature < np.inf:
        raise InputError(f"temperature expected a finite number > 0, got {temperature}; larger sharpens the softmax")

    starts: Any = range(0, q.size, query_block)
    if progress:
        from tqdm import tqdm

        starts = tqdm(starts, desc="searching", unit="block")
    largest = _largest_square(g, similarity, gallery_block)
    parts = []
    for start in starts:
        block = q.rows(slice(start, start + query_block))
        square = largest + _largest_square(block, similarity, query_block)
        parts.append(_search_block(block, g, k, similarity, temperature, gallery_block, square))
    rows, scores = (np.concatenate(part) for part in zip(*((rows, scores) for rows, scores, _ in parts), strict=True))
    if temperature is None:
        return Neighbours(rows, scores)
    softmax = Softmax(*(torch.cat(part).cpu() for part in zip(*(part for _, _, part in parts), strict=True)))
    return Neighbours(rows, scores, temperature, softmax.log_partition.numpy(), softmax.entropy.numpy())


def _search_block(
    q: Gaussians,
    g: Gaussians,
    k: int,
    similarity: str,
    temperature: float | None,
    gallery_block: int,
    square: float,
) -> tuple[np.ndarray, np.ndarray, Softmax | None]:
    width = min(k + SLACK, g.size)
    scores = torch.empty(q.size, 0, dtype=q.mean.dtype, device=q.mean.device)
    rows = torch.empty(q.size, 0, dtype=torch.int64, device=q.mean.device)
    softmax: Softmax | None = None
    for start, tile in tiles(q, g, similarity, gallery_block):
        if temperature is not None:
            part = Softmax.of(tile * temperature)
            softmax = part if softmax is None else softmax.joined(part)
        best = tile.topk(min(width, tile.shape[1]), dim=1)
        scores, rows = torch.cat([scores, best.values], 1), torch.cat([rows, best.indices + start], 1)
        if scores.shape[1] > width:
            kept = scores.topk(width, dim=1)
            scores, rows = kept.values, rows.gather(1, kept.indices)

    candidates = rows.cpu().numpy()
    exact = _score_again(q, g, similarity, candidates)
    order = np.lexsort((candidates, -exact), axis=1)[:, :k]
    nearest, nearest_scores = np.take_along_axis(candidates, order, 1), np.take_along_axis(exact, order, 1)
    if width < g.size:
        rough = scores.double().cpu().numpy()
        # Rounding errors of a product over D terms grow like √D (Higham & Mary 2019); the candidates, chosen for their
        # rough scores, may show too little of it.
        rounding = np.sqrt(q.dim) * torch.finfo(scores.dtype).eps * max(square, np.abs(rough).max())
        margin = max(rounding, 4 * np.abs(rough - exact).max())
        for query in np.flatnonzero(nearest_scores[:, -1] <= rough.min(1) + margin):
            nearest[query], nearest_scores[query] = _settle(
                q.rows(slice(query, query + 1)), g, k, similarity, nearest_scores[query, -1] - margin, gallery_block
            )
    return nearest, nearest_scores, softmax


def _settle(
    q: Gaussians, g: Gaussians, k: int, similarity: str, threshold: float, gallery_block: int
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest rows of one query among every item whose rough score reaches the threshold."""
    near = [
        np.flatnonzero(tile[0].cpu() >= threshold) + start for start, tile in tiles(q, g, similarity, gallery_block)
    ]
    candidates = np.concatenate(near)
    exact = _score_again(q, g, similarity, candidates[None])[0]
    order = np.lexsort((candidates, -exact))[:k]
    return candidates[order], exact[order]


def _largest_square(x: Gaussians, similarity: str, block: int) -> float:
    """One side of what a tile's rounding is proportional to: the largest ‖μ‖² + Σσ², though most of it cancels.

    A cosine is a product of unit vectors, and the other similarities cancel in float64.
    """
    if similarity == "cosine":
        return 0.5
    if similarity not in ("csd", "wasserstein2"):
        return 0.0
    blocks = (x.rows(slice(start, start + block)) for start in range(0, x.size, block))
    return max(float((rows.mean.square() + rows.variance).sum(1).max()) for rows in blocks)


def tiles(q: Gaussians, g: Gaussians, similarity: str, gallery_block: int) -> Iterator[tuple[int, torch.Tensor]]:
    """First gallery row and (Q, ≤ gallery_block) similarities of each tile of a block of queries."""
    for start in range(0, g.size, gallery_block):
        yield start, SIMILARITIES[similarity](q, g.rows(slice(start, start + gallery_block)))


def _score_again(q: Gaussians, g: Gaussians, similarity: str, rows: np.ndarray) -> np.ndarray:
    """(Q, C) float64 similarities of each query to its own candidate gallery rows."""
    exact = np.empty(rows.shape)
    width = max(1, min(rows.shape[1], PAIRS // q.dim))
    height = max(1, PAIRS // (q.dim * width))
    for top in range(0, len(rows), height):
        left = q.rows(slice(top, top + height))
        for start in range(0, rows.shape[1], width):
            chosen = rows[top : top + height, start : start + width]
            right = g.rows(chosen.ravel())
            shape = (*chosen.shape, q.dim)
            scores = paired(
                similarity,
                Gaussians(left.mean[:, None], None if left.variance is None else left.variance[:, None]),
                Gaussians(right.mean.view(shape), None if right.variance is None else right.variance.reshape(shape)),
            )
            exact[top : top + height, start : start + width] = scores.cpu().numpy()
    return exact
