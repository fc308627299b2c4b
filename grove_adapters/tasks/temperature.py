"""The temperature under which held-out queries find their true matches likeliest."""

from __future__ import annotations

import math

import numpy as np

from grove_adapters import _checks
from grove_adapters.errors import InputError
from grove_adapters.posterior import ProbabilisticEmbedding
from grove_adapters.similarity import SIMILARITIES, paired
from grove_adapters.tasks.index import search
from grove_adapters.tasks.reading import RankBy, check_pair, default_similarity, default_temperature, ranked
from grove_adapters.tasks.truth import Direction, Truth

CHUNK = 4096  # true pairs compared at once
WIDEST = 1e3  # factor by which the temperature may leave its starting point
PRECISION = 1e-3  # of its logarithm


def fit_temperature(
    images: ProbabilisticEmbedding,
    texts: ProbabilisticEmbedding,
    *,
    links: np.ndarray,
    positives: np.ndarray | None = None,
    direction: Direction = "i2t",
    rank_by: RankBy = "posterior",
    similarity: str = "auto",
) -> float:
    """The temperature for `retrieve` that makes true matches of held-out queries likeliest.

    It minimises the mean over queries of −log Σ p(g | q) over their true matches g, where p is the softmax of
    temperature × similarity over the gallery. Queries without a true match are left out. Each of some twenty trials
    searches the gallery once. Where every first answer is right there is no best temperature, and the largest that is
    tried is returned, 1,000 times the default one.

    Args:
        images: Posteriors of held-out images.
        texts: Posteriors of held-out texts.
        links: (P, 2) rows (image, text).
        positives: (R, 2) rows of further true matches.
        direction: As `retrieve`'s.
        rank_by: As `retrieve`'s.
        similarity: As `retrieve`'s.

    Raises:
        InputError: As `retrieve`; or no query has a true match.

    Source: Guo et al. 2017; with many true matches, the likelihood that the answer is any of them.
    """
    from scipy.optimize import minimize_scalar

    check_pair(images, texts, task="fit_temperature")
    _checks.choice(direction, ("i2t", "t2i"), what="direction")
    _checks.choice(rank_by, ("posterior", "backbone"), what="rank_by")
    _checks.choice(similarity, ("auto", *SIMILARITIES), what="similarity")
    truth = Truth.of(links, positives, direction, len(images), len(texts))
    if not len(truth.matches):
        raise InputError("fit_temperature expected queries with a true match, got none; give their links")
    if similarity == "auto":
        similarity = default_similarity(images, texts, rank_by)
    sides = (images, texts) if direction == "i2t" else (texts, images)
    queries, gallery = (ranked(side, rank_by, similarity) for side in sides)
    asked = np.flatnonzero(truth.n_matches)
    rows = queries.rows(asked)
    of_query = np.searchsorted(asked, truth.matches[:, 0])
    starts = np.searchsorted(of_query, np.arange(len(asked)))  # matches are sorted by query
    parts = (truth.matches[start : start + CHUNK] for start in range(0, len(truth.matches), CHUNK))
    true = np.concatenate(
        [paired(similarity, queries.rows(part[:, 0]), gallery.rows(part[:, 1])).cpu().numpy() for part in parts]
    )

    def loss(log_temperature: float) -> float:
        temperature = math.exp(log_temperature)
        found = search(rows, gallery, k=1, similarity=similarity, temperature=temperature)
        assert found.log_partition is not None
        return float(np.mean(found.log_partition - np.logaddexp.reduceat(temperature * true, starts)))

    start = default_temperature(similarity, images.source.logit_scale) or 1 / (true.std() or 1.0)
    around, room = math.log(start), math.log(WIDEST)
    best = minimize_scalar(loss, bounds=(around - room, around + room), method="bounded", options={"xatol": PRECISION})
    return math.exp(best.x)
