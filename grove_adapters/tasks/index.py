"""Exact search of a gallery in tiles of fixed size, so that the Q × G matrix never exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grove_adapters import _checks
from grove_adapters.similarity import SIMILARITIES, Gaussians, gaussians, paired

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
        log_partition: (Q,) float64 log Σ_g exp(temperature · similarity) over the whole gallery, or None if no
            temperature was given.
    """

    rows: np.ndarray
    scores: np.ndarray
    log_partition: np.ndarray | None = None


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
        temperature: Multiplier of the similarity in `Neighbours.log_partition`.
        query_block: Queries scored together.
        gallery_block: Gallery items scored together.
        progress: Show a bar over query blocks.

    Raises:
        InputError: An unknown similarity, other dimensions, or bare vectors where distributions are needed.
    """
    _checks.choice(similarity, tuple(SIMILARITIES), what="similarity")
    _checks.count(query_block, what="query_block")
    _checks.count(gallery_block, what="gallery_block")
    q, g = (gaussians(side, need_variance=similarity != "cosine") for side in (queries, gallery))
    _checks.same_dim(q.dim, g.dim, what="gallery")
    k = min(_checks.count(k, what="k"), g.size)

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
    rows, scores, log_partition = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Neighbours(rows, scores, None if temperature is None else log_partition)


def _search_block(
    q: Gaussians,
    g: Gaussians,
    k: int,
    similarity: str,
    temperature: float | None,
    gallery_block: int,
    square: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    width = min(k + SLACK, g.size)
    scores = torch.empty(q.size, 0, dtype=q.mean.dtype, device=q.mean.device)
    rows = torch.empty(q.size, 0, dtype=torch.int64, device=q.mean.device)
    log_partition = torch.full((q.size,), -torch.inf, dtype=torch.float64, device=q.mean.device)
    for start, tile in _tiles(q, g, similarity, gallery_block):
        if temperature is not None:
            log_partition = torch.logaddexp(log_partition, (tile * temperature).logsumexp(1).double())
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
    return nearest, nearest_scores, log_partition.cpu().numpy()


def _settle(
    q: Gaussians, g: Gaussians, k: int, similarity: str, threshold: float, gallery_block: int
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest rows of one query among every item whose rough score reaches the threshold."""
    near = [
        np.flatnonzero(tile[0].cpu() >= threshold) + start for start, tile in _tiles(q, g, similarity, gallery_block)
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


def _tiles(q: Gaussians, g: Gaussians, similarity: str, gallery_block: int) -> Iterator[tuple[int, torch.Tensor]]:
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
