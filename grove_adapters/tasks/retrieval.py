"""Cross-modal retrieval: does the right caption come first for an image, and the right image for a caption?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from grove_adapters import _checks
from grove_adapters.errors import InputError
from grove_adapters.posterior import ProbabilisticEmbedding
from grove_adapters.similarity import SIMILARITIES, Gaussians, paired
from grove_adapters.tasks.base import TaskResult
from grove_adapters.tasks.index import search
from grove_adapters.tasks.matching import MATCH_UNCERTAINTIES, marginal_signals, match_signals, match_uncertainty
from grove_adapters.tasks.ranking import ranking_signals
from grove_adapters.tasks.reading import RankBy, check_pair, default_similarity, default_temperature, ranked
from grove_adapters.tasks.sampled import search_sampled
from grove_adapters.tasks.truth import Direction, Truth

UncertaintyOf = Literal[
    "auto",
    "posterior",
    "one_minus_max_similarity",
    "one_minus_confidence",
    "match_entropy",
    "one_minus_match_margin",
    "minus_match_kl",
    "true_pair_distance",
]

CHUNK = 4096  # linked pairs compared at once


def retrieve(
    images: ProbabilisticEmbedding,
    texts: ProbabilisticEmbedding,
    *,
    links: np.ndarray,
    positives: np.ndarray | None = None,
    direction: Direction = "i2t",
    rank_by: RankBy = "posterior",
    similarity: str = "auto",
    samples: int = 8,
    seed: int = 0,
    uncertainty: UncertaintyOf = "auto",
    temperature: float | None = None,
    marginal: Literal["uniform", "empirical"] = "uniform",
    k: int | Sequence[int] = (1, 5, 10),
    ranking: bool = False,
    unmatched: Literal["raise", "drop", "keep"] = "raise",
    progress: bool = False,
) -> TaskResult:
    """Rank the whole gallery for every query and see whether a true match comes first.

    Args:
        images: Posteriors of the images.
        texts: Posteriors of the texts, of the same source.
        links: (P, 2) rows (image, text) of the given pairs, as in `Pairs.links`.
        positives: (R, 2) rows of further true matches; a hit on any true match counts.
        direction: ``"i2t"``: images ask and texts are the gallery; ``"t2i"``: the reverse.
        rank_by: ``"posterior"``, or ``"backbone"`` for the cosine of the frozen embeddings underneath, which leaves
            every recall as it was and uses the posterior for the uncertainty alone.
        similarity: A name in `similarity.SIMILARITIES`. ``"auto"``: ``"csd"``, the expected squared distance, and
            ``"cosine"`` for posteriors that are gallery-aware or for the backbone. GroVE's tables use
            ``"wasserstein2"``. ``"sampled"`` ranks by the match distribution averaged over draws of both sides, see
            `tasks.search_sampled`.
        samples: Draws of every item where `similarity` is ``"sampled"``.
        seed: Address of these draws.
        uncertainty: ``"posterior"`` is the query's own. ``"one_minus_max_similarity"`` is 1 − the largest cosine to
            the gallery. ``"auto"`` is the former, or the latter where the query's posterior is gallery-aware.
            ``"true_pair_distance"`` is the cosine distance to the nearest true match: it **reads the answer** and is
            here only to reproduce published tables of the deterministic baseline. The others read the match
            distribution: ``"one_minus_confidence"``, ``"match_entropy"``, ``"one_minus_match_margin"`` and
            ``"minus_match_kl"``.
        temperature: Multiplier of the similarity that gives the logits of the match distribution. Default: the
            source's logit scale times the cosine (of the draws too) or half the ``"csd"`` or ``"wasserstein2"``; 1 for
            ``"likelihood"`` and ``"expected_likelihood"``, which are logits as they are.
        marginal: What ``match_kl`` is the divergence from: ``"uniform"`` over the gallery, or ``"empirical"``, the mean
            match distribution of the queries, which takes two more passes over the gallery.
        k: Depths of recall@k; the first answer alone decides `TaskResult.correct`.
        ranking: Whether to find out where all true matches stand, which takes a search as deep as the most true matches
            of any query, and for queries whose first true match lies deeper still a pass over the gallery.
        unmatched: Queries without any true match in the gallery: ``"raise"``, ``"drop"`` them and count them, or
            ``"keep"`` them, whose every answer is wrong.
        progress: Show a bar.

    Returns:
        One row a query. `confidence` is the largest probability of the match distribution, the softmax of
        temperature × similarity over the whole gallery; None without a temperature. `groups` holds, for texts, the row
        of the first image they are linked to. `detail` holds

        * for the largest k, (Q, K) ``top`` gallery rows, ``top_scores``, ``top_correct`` (true matches) and, where
          there is a temperature, ``top_probabilities``;
        * where there is a temperature, (Q,) ``match_entropy`` in nats, ``match_kl``, the divergence from the marginal
          in nats, ``match_margin``, the largest minus the second largest probability, and, with the empirical
          marginal, ``answer_hubness``, log G p̄ at the first answer: large for items that answer to everything;
        * with `ranking`, (Q,) ``r_precision``, ``average_precision_at_r`` and ``first_rank``, see
          `tasks.ranking.ranking_signals`;
        * (Q,) ``n_matches`` true matches, ``query_uncertainty`` and ``answer_uncertainty``, those of the query's and
          the first answer's posterior;
        * ``gallery_ids`` (G,), ``unmatched`` (how many queries have no true match) and ``unmatched_ids``.

    Raises:
        InputError: Swapped modalities, rows out of range, another width, queries without a match, no backbone, no
            temperature where the match distribution is asked for, no true match where its distance is.
        SourceMismatchError: Images and texts come from different models.

    Source: GroVE sec. 4; Recall@k counts any true match, as ECCV Caption does. The deterministic baseline's published
    uncertainty is ``"true_pair_distance"``.
    """
    check_pair(images, texts, task="retrieve")
    _checks.choice(direction, ("i2t", "t2i"), what="direction")
    _checks.choice(rank_by, ("posterior", "backbone"), what="rank_by")
    _checks.choice(similarity, ("auto", "sampled", *SIMILARITIES), what="similarity")
    _checks.choice(uncertainty, get_args(UncertaintyOf), what="uncertainty")
    _checks.choice(marginal, ("uniform", "empirical"), what="marginal")
    _checks.choice(unmatched, ("raise", "drop", "keep"), what="unmatched")
    depths = sorted({_checks.count(depth, what="k") for depth in ([k] if isinstance(k, int) else k)})
    if not depths:
        raise InputError("k expected at least one depth, got none; give for example k=(1, 5, 10)")

    queries, gallery = (images, texts) if direction == "i2t" else (texts, images)
    truth = Truth.of(links, positives, direction, len(images), len(texts))
    unanswerable = np.flatnonzero(truth.n_matches == 0)
    if len(unanswerable) and (unmatched == "raise" or (unmatched == "drop" and len(unanswerable) == len(queries))):
        raise InputError(
            f"{direction} retrieval expected a true match in the gallery for every query, got {len(unanswerable)} of "
            f"{len(queries)} {queries.modality}s without one (first: {str(queries.ids[unanswerable[0]])!r}); add their "
            "links or pass unmatched='drop' or 'keep'"
        )
    if len(unanswerable) and unmatched == "keep" and uncertainty == "true_pair_distance":
        raise InputError(
            "uncertainty='true_pair_distance' expected queries with a true match, got unmatched='keep' and "
            f"{len(unanswerable)} without one; pass unmatched='drop'"
        )
    asked = np.arange(len(queries)) if unmatched == "keep" else np.flatnonzero(truth.n_matches)

    if similarity == "auto":
        similarity = default_similarity(images, texts, rank_by)
    if uncertainty == "auto":
        uncertainty = "one_minus_max_similarity" if queries.gallery_aware else "posterior"
    if similarity == "sampled" and (ranking or marginal == "empirical"):
        raise InputError(
            "similarity='sampled' expected ranking=False and marginal='uniform', got "
            f"ranking={ranking} and marginal={marginal!r}; choose a similarity in closed form for these"
        )
    query_side, gallery_side = ranked(queries, rank_by, similarity), ranked(gallery, rank_by, similarity, gallery=True)
    query_side = query_side if len(asked) == len(queries) else query_side.rows(asked)
    if temperature is None:
        temperature = default_temperature(
            "cosine" if similarity == "sampled" else similarity, queries.source.logit_scale
        )
    needing = {f"uncertainty={uncertainty!r}": uncertainty in MATCH_UNCERTAINTIES}
    needing |= {"marginal='empirical'": marginal == "empirical", "similarity='sampled'": similarity == "sampled"}
    if temperature is None and any(needing.values()):
        asked_for = next(name for name, needs in needing.items() if needs)
        raise InputError(
            f"{asked_for} expected a temperature, got similarity={similarity!r} of a source whose logit_scale is "
            f"{queries.source.logit_scale}; give temperature=, the multiplier that makes the similarity a logit"
        )
    depth = max(depths[-1], 2, truth.n_matches.max() if ranking else 0)  # the margin needs two
    if similarity == "sampled":
        assert temperature is not None
        asking = queries if len(asked) == len(queries) else queries.take(asked)
        found = search_sampled(
            asking, gallery, k=depth, temperature=temperature, samples=samples, seed=seed, progress=progress
        )
    else:
        found = search(
            query_side, gallery_side, k=depth, similarity=similarity, temperature=temperature, progress=progress
        )
    hits = np.isin(asked[:, None] * len(gallery) + found.rows, truth.matches @ [len(gallery), 1])
    top, true = found.rows[:, : depths[-1]], hits[:, : depths[-1]]
    signals = {} if temperature is None else match_signals(found, len(gallery))
    if marginal == "empirical":
        signals |= marginal_signals(query_side, gallery_side, found, similarity=similarity, progress=progress)
    if ranking:
        asked_matches = np.stack([np.searchsorted(asked, truth.matches[:, 0]), truth.matches[:, 1]], 1)
        signals |= ranking_signals(query_side, gallery_side, found, hits, asked_matches, similarity=similarity)
    own, of_gallery = (side.uncertainty.detach().cpu().double().numpy() for side in (queries, gallery))
    if uncertainty == "posterior":
        uncertain = own[asked]
    elif uncertainty in MATCH_UNCERTAINTIES:
        uncertain = match_uncertainty(uncertainty, signals)
    elif uncertainty == "one_minus_max_similarity":
        nearest = found
        if similarity != "cosine":
            nearest = search(query_side, gallery_side, k=1, similarity="cosine", progress=progress)
        uncertain = 1 - nearest.scores[:, 0]
    else:
        uncertain = _true_pair_distance(
            ranked(queries, rank_by, "cosine"), ranked(gallery, rank_by, "cosine"), truth.matches
        )[asked]
    detail: dict[str, Any] = {
        "top": top,
        "top_scores": found.scores[:, : depths[-1]],
        "top_correct": true,
        "n_matches": truth.n_matches[asked],
        **{name: values for name, values in signals.items() if name != "confidence"},
        "query_uncertainty": own[asked],
        "answer_uncertainty": of_gallery[top[:, 0]],
        "gallery_ids": np.asarray(gallery.ids),
        "unmatched": len(unanswerable),
        "unmatched_ids": [str(name) for name in np.asarray(queries.ids)[unanswerable]],
    }
    if found.probabilities is not None:
        detail["top_probabilities"] = found.probabilities[:, : depths[-1]]
    groups = None
    if direction == "t2i":  # texts without any image stand alone
        groups = np.where(truth.partner < 0, len(gallery) + np.arange(len(queries)), truth.partner)[asked]
    return TaskResult(
        task="retrieval",
        direction=direction,
        ids=np.asarray(queries.ids)[asked],
        correct=true[:, 0],
        uncertainty=uncertain,
        confidence=signals.get("confidence"),
        recall_at={depth: true[:, :depth].max(axis=1) for depth in depths},
        groups=groups,
        detail=detail,
        provenance={
            "rank_by": rank_by,
            "similarity": similarity,
            "uncertainty": uncertainty,
            "logit_scale": queries.source.logit_scale,
            "temperature": temperature,
            "marginal": marginal,
            **({"samples": samples, "seed": seed} if similarity == "sampled" else {}),
            "k": depths,
            "n_queries": len(asked),
            "n_gallery": len(gallery),
            "source": queries.source.to_dict(),
            "query_maker": queries.maker,
            "gallery_maker": gallery.maker,
        },
    )


def _true_pair_distance(queries: Gaussians, gallery: Gaussians, matches: np.ndarray) -> np.ndarray:
    """(Q,) cosine distance of each query to its nearest true match; infinite where it has none."""
    distance = np.full(queries.size, np.inf)
    for start in range(0, len(matches), CHUNK):
        chunk = matches[start : start + CHUNK]
        cosines = paired("cosine", queries.rows(chunk[:, 0]), gallery.rows(chunk[:, 1]))
        np.minimum.at(distance, chunk[:, 0], 1 - cosines.cpu().numpy())
    return distance
