"""The match distribution of distributions that are known by their draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from grove_adapters import _checks, seeding
from grove_adapters.posterior import ProbabilisticEmbedding
from grove_adapters.tasks.index import Neighbours

QUERY_BLOCK = 128
GALLERY_BLOCK = 2048  # with QUERY_BLOCK and 8 samples: tiles of 8 MiB in float32


def search_sampled(
    queries: ProbabilisticEmbedding,
    gallery: ProbabilisticEmbedding,
    *,
    k: int,
    temperature: float,
    samples: int = 8,
    seed: int = 0,
    progress: bool = False,
) -> Neighbours:
    """The k gallery items that are likeliest on average over draws of everything.

    p(g | q) is the mean over S joint draws of the softmax over the gallery of temperature × cosine of the drawn
    vectors. So the uncertainty of query and gallery alike flattens it, whatever the shape of their distributions.
    Needs two passes over tiles of S products each; nothing of size Q × G is kept.

    Args:
        queries: Posteriors of Q queries.
        gallery: Posteriors of G items.
        k: Neighbours of each query; at most G are returned.
        temperature: Multiplier of the cosine, the source's logit scale.
        samples: S draws.
        seed: Address of the draws; those of an item depend on its row.
        progress: Show a bar over the blocks of both passes.

    Returns:
        Neighbours whose `scores` are log p(g | q), with temperature 1 and log partition 0.

    Source: the Monte Carlo match of PCME (Chun et al. 2021), with a softmax over the gallery for its sigmoid.
    """
    _checks.same_dim(queries.dim, gallery.dim, what="gallery")
    _checks.count(samples, what="samples")
    k = min(_checks.count(k, what="k"), len(gallery))

    def tiles() -> Iterator[tuple[slice, int, torch.Tensor]]:
        """Query rows, first gallery row and (S, B, C) logits."""
        starts: Any = range(0, len(gallery), GALLERY_BLOCK)
        if progress:
            from tqdm import tqdm

            starts = tqdm(starts, desc="sampling", unit="block")
        for start in starts:
            drawn = _draws(gallery, start, GALLERY_BLOCK, samples, seeding.derive(seed, "gallery"))
            for top in range(0, len(queries), QUERY_BLOCK):
                asked = _draws(queries, top, QUERY_BLOCK, samples, seeding.derive(seed, "queries"))
                dtype = torch.promote_types(asked.dtype, drawn.dtype)
                yield slice(top, top + QUERY_BLOCK), start, temperature * asked.to(dtype) @ drawn.to(dtype).mT

    log_partition = torch.full((samples, len(queries)), -torch.inf, dtype=torch.float64)
    for rows, _, tile in tiles():
        log_partition[:, rows] = torch.logaddexp(log_partition[:, rows], tile.logsumexp(2).double())
    entropy = torch.zeros(len(queries), dtype=torch.float64)
    best: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # scores and gallery rows, by the block's first query
    for rows, start, tile in tiles():
        log_p = (tile.double() - log_partition[:, rows, None]).logsumexp(0) - math.log(samples)
        entropy[rows] -= (log_p.exp() * log_p).sum(1)
        found = log_p.topk(min(k, log_p.shape[1]), dim=1)
        near = (found.values, found.indices + start)
        if start:
            scores, places = (torch.cat(pair, 1) for pair in zip(best[rows.start], near, strict=True))
            kept = scores.topk(min(k, scores.shape[1]), dim=1)
            near = (kept.values, places.gather(1, kept.indices))
        best[rows.start] = near
    joined = [torch.cat(part).numpy() for part in zip(*best.values(), strict=True)]
    return Neighbours(joined[1], joined[0], 1.0, np.zeros(len(queries)), entropy.clamp_min(0).numpy())


def _draws(posterior: ProbabilisticEmbedding, start: int, size: int, samples: int, seed: int) -> torch.Tensor:
    """(S, ≤ size, D) unit draws of a block of items."""
    rows = np.arange(start, min(start + size, len(posterior)))
    drawn = posterior.take(rows).sample(samples, seed=seeding.derive(seed, start))
    return normalize(drawn, dim=2).transpose(0, 1)
