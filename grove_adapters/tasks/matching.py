"""How sure is a match? What the softmax over a whole gallery says about each query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from grove_adapters.similarity import Gaussians
from grove_adapters.tasks.index import GALLERY_BLOCK, QUERY_BLOCK, Neighbours, tiles

MATCH_UNCERTAINTIES = ("one_minus_confidence", "match_entropy", "one_minus_match_margin", "minus_match_kl")
"""Uncertainties read from the match distribution, larger = less certain."""


def match_signals(found: Neighbours, n_gallery: int) -> dict[str, np.ndarray]:
    """Signals of the match distribution p(g | q), the softmax of temperature × similarity over the gallery.

    Args:
        found: What `search` returned with a temperature and k ≥ 2 (or the whole of a smaller gallery).
        n_gallery: G.

    Returns:
        (Q,) float64 arrays: ``confidence``, the largest probability; ``match_entropy`` H in nats; ``match_kl``, the
        Kullback–Leibler divergence from the uniform distribution, log G − H; ``match_margin``, the largest probability
        minus the second largest. Larger is surer, except of the entropy.
    """
    probabilities = found.probabilities
    assert probabilities is not None
    assert found.entropy is not None
    second = probabilities[:, 1] if probabilities.shape[1] > 1 else np.zeros(len(probabilities))
    return {
        "confidence": probabilities[:, 0],
        "match_entropy": found.entropy,
        "match_kl": np.maximum(np.log(n_gallery) - found.entropy, 0),
        "match_margin": probabilities[:, 0] - second,
    }


def match_uncertainty(name: str, signals: dict[str, np.ndarray]) -> np.ndarray:
    """(Q,) one of `MATCH_UNCERTAINTIES` from what `match_signals` gave."""
    if name == "match_entropy":
        return signals[name]
    if name == "minus_match_kl":
        return -signals["match_kl"]
    return 1 - signals[name.removeprefix("one_minus_")]


def marginal_signals(
    queries: Gaussians,
    gallery: Gaussians,
    found: Neighbours,
    *,
    similarity: str,
    query_block: int = QUERY_BLOCK,
    gallery_block: int = GALLERY_BLOCK,
    progress: bool = False,
) -> dict[str, np.ndarray]:
    """Signals against the marginal p̄, the mean of the match distributions of these queries.

    Gallery items that are close to everything ("hubs") have a large p̄, and a query that finds one has learnt little.
    Costs two more passes over the tiles.

    Args:
        queries: Q distributions.
        gallery: G distributions.
        found: What `search` returned for them with a temperature.
        similarity: The similarity they were searched with.
        query_block: Queries scored together.
        gallery_block: Gallery items scored together.
        progress: Show a bar over query blocks of each pass.

    Returns:
        (Q,) float64 arrays: ``match_kl``, KL(p(· | q) ‖ p̄) in nats, whose mean is the mutual information of query and
        answer; ``answer_hubness``, log G p̄ at the first answer, 0 for an item that draws its equal share.
    """

    def log_match() -> Iterator[tuple[slice, slice, torch.Tensor]]:
        starts: Any = range(0, queries.size, query_block)
        if progress:
            from tqdm import tqdm

            starts = tqdm(starts, desc="marginal", unit="block")
        assert found.temperature is not None
        assert found.log_partition is not None
        for start in starts:
            rows = slice(start, start + query_block)
            block = queries.rows(rows)
            log_partition = torch.as_tensor(found.log_partition[rows]).to(block.mean.device)[:, None]
            for left, tile in tiles(block, gallery, similarity, gallery_block):
                yield rows, slice(left, left + tile.shape[1]), tile.double() * found.temperature - log_partition

    total = torch.zeros(gallery.size, dtype=torch.float64)
    for _, columns, tile in log_match():
        total[columns] += tile.exp().sum(0).cpu()
    log_marginal = total.log() - np.log(queries.size)
    divergence = np.zeros(queries.size)
    for rows, columns, tile in log_match():
        weight = tile.exp()
        terms = torch.where(weight > 0, weight * (tile - log_marginal[columns].to(tile.device)), 0)
        divergence[rows] += terms.sum(1).cpu().numpy()
    return {
        "match_kl": np.maximum(divergence, 0),
        "answer_hubness": log_marginal.numpy()[found.rows[:, 0]] + np.log(gallery.size),
    }
