"""How well a whole ranking puts true matches first, where a query may have many."""

from __future__ import annotations

import numpy as np

from grove_adapters.similarity import Gaussians, paired
from grove_adapters.tasks.index import GALLERY_BLOCK, QUERY_BLOCK, Neighbours, tiles

CHUNK = 4096  # linked pairs compared at once
NEAR = 1e-9  # relative difference of similarities below which float64 sums are one tie


def ranking_signals(
    queries: Gaussians, gallery: Gaussians, found: Neighbours, hits: np.ndarray, matches: np.ndarray, *, similarity: str
) -> dict[str, np.ndarray]:
    """Where the true matches of each query stand, R being how many it has.

    Args:
        queries: Q distributions.
        gallery: G distributions.
        found: What `search` returned for them with a k of at least the largest R (or G).
        hits: (Q, k) whether those rows are true matches.
        matches: (M, 2) all true matches (query, gallery item).
        similarity: The similarity they were searched with.

    Returns:
        (Q,) float64 arrays. ``r_precision``: share of true matches among the first R. ``average_precision_at_r``: mean
        over the first R places of the precision up to there, counting places of true matches only; 1 where they come
        first. ``first_rank``: place of the first true match, from 1. Without a true match: 0, 0 and G + 1.

    Source: mAP@R and R-Precision of Musgrave et al. 2020, by which ECCV Caption ranks models.
    """
    true = np.bincount(matches[:, 0], minlength=queries.size)
    places = np.arange(1, hits.shape[1] + 1)
    counted = hits & (places <= true[:, None])
    precision = hits.cumsum(1) / places
    return {
        "r_precision": counted.sum(1) / np.maximum(true, 1),
        "average_precision_at_r": (precision * counted).sum(1) / np.maximum(true, 1),
        "first_rank": _first_rank(queries, gallery, found, hits, matches, similarity).astype(np.float64),
    }


def _first_rank(
    queries: Gaussians, gallery: Gaussians, found: Neighbours, hits: np.ndarray, matches: np.ndarray, similarity: str
) -> np.ndarray:
    seen: np.ndarray = hits.max(axis=1)
    rank = np.where(seen, hits.argmax(1) + 1, gallery.size + 1)
    pairs = matches[~seen[matches[:, 0]]]  # of queries whose first true match is not among those found
    chunks = [pairs[start : start + CHUNK] for start in range(0, len(pairs), CHUNK)]
    score = np.concatenate(
        [np.empty(0)]
        + [paired(similarity, queries.rows(chunk[:, 0]), gallery.rows(chunk[:, 1])).cpu().numpy() for chunk in chunks]
    )
    order = np.lexsort((pairs[:, 1], -score, pairs[:, 0]))
    missing, first = np.unique(pairs[order, 0], return_index=True)
    score, row = score[order][first], pairs[order][first, 1]
    for start in range(0, len(missing), QUERY_BLOCK):
        part = slice(start, start + QUERY_BLOCK)
        block = queries.rows(missing[part])
        exact = Gaussians(block.mean.double(), None if block.variance is None else block.variance.double())
        tie = NEAR * np.maximum(np.abs(score[part]), 1)[:, None]
        before = np.zeros(len(missing[part]), dtype=np.int64)
        for left, tile in tiles(exact, gallery, similarity, GALLERY_BLOCK):
            lead = tile.cpu().numpy() - score[part][:, None]
            earlier = np.arange(left, left + lead.shape[1]) < row[part][:, None]
            before += ((lead > tie) | ((np.abs(lead) <= tie) & earlier)).sum(1)
        rank[missing[part]] = np.maximum(before, found.rows.shape[1]) + 1
    return rank
