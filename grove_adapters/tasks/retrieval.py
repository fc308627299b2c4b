"""Cross-modal retrieval: does the right caption come first for an image, and the right image for a caption?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from grove_adapters import _checks
from grove_adapters.embeddings import link_rows
from grove_adapters.errors import InputError, InputTypeError, SourceMismatchError
from grove_adapters.posterior import ProbabilisticEmbedding
from grove_adapters.similarity import SIMILARITIES, Gaussians, gaussians, paired
from grove_adapters.tasks.base import TaskResult
from grove_adapters.tasks.index import search
from grove_adapters.tasks.matching import MATCH_UNCERTAINTIES, kl_to_marginal, match_signals, match_uncertainty

Direction = Literal["i2t", "t2i"]
RankBy = Literal["posterior", "backbone"]
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

NATS_PER_LOGIT = {"cosine": 1.0, "csd": 0.5, "wasserstein2": 0.5}
"""What the source's logit scale multiplies. Between unit vectors −½‖μ_q − μ_g‖² is the cosine up to a constant, so
half the negated squared distances carry the logits of the frozen model, lowered by half the variances (ProLIP)."""

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
    uncertainty: UncertaintyOf = "auto",
    temperature: float | None = None,
    marginal: Literal["uniform", "empirical"] = "uniform",
    k: int | Sequence[int] = (1, 5, 10),
    unmatched: Literal["raise", "drop"] = "raise",
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
            ``"wasserstein2"``.
        uncertainty: ``"posterior"`` is the query's own. ``"one_minus_max_similarity"`` is 1 − the largest cosine to
            the gallery. ``"auto"`` is the former, or the latter where the query's posterior is gallery-aware.
            ``"true_pair_distance"`` is the cosine distance to the nearest true match: it **reads the answer** and is
            here only to reproduce published tables of the deterministic baseline. The others read the match
            distribution: ``"one_minus_confidence"``, ``"match_entropy"``, ``"one_minus_match_margin"`` and
            ``"minus_match_kl"``.
        temperature: Multiplier of the similarity that gives the logits of the match distribution. Default: the
            source's logit scale times the cosine or half the ``"csd"`` or ``"wasserstein2"``; 1 for
            ``"expected_likelihood"``, which is a logit as it is.
        marginal: What ``match_kl`` is the divergence from: ``"uniform"`` over the gallery, or ``"empirical"``, the mean
            match distribution of the queries, which takes two more passes over the gallery.
        k: Depths of recall@k; the first answer alone decides `TaskResult.correct`.
        unmatched: Queries without any true match in the gallery: ``"raise"``, or ``"drop"`` them and count them.
        progress: Show a bar.

    Returns:
        One row a query. `confidence` is the largest probability of the match distribution, the softmax of
        temperature × similarity over the whole gallery; None without a temperature. `groups` holds, for texts, the row
        of the first image they are linked to. `detail` holds

        * ``top`` (Q, K) gallery rows and ``top_scores`` (Q, K) for the largest k, ``n_matches`` (Q,) true matches;
        * where there is a temperature, (Q,) ``match_entropy`` in nats, ``match_kl``, the divergence from the marginal
          in nats, and ``match_margin``, the largest minus the second largest probability;
        * (Q,) ``query_uncertainty`` and ``answer_uncertainty``, those of the query's and the first answer's posterior;
        * ``gallery_ids`` (G,), ``unmatched`` (how many queries were dropped) and ``unmatched_ids``.

    Raises:
        InputError: Swapped modalities, rows out of range, another width, queries without a match, no backbone, or no
            temperature where the match distribution is asked for.
        SourceMismatchError: Images and texts come from different models.

    Source: GroVE sec. 4; Recall@k counts any true match, as ECCV Caption does. The deterministic baseline's published
    uncertainty is ``"true_pair_distance"``.
    """
    _check_posteriors(images, texts)
    _checks.choice(direction, ("i2t", "t2i"), what="direction")
    _checks.choice(rank_by, ("posterior", "backbone"), what="rank_by")
    _checks.choice(similarity, ("auto", *SIMILARITIES), what="similarity")
    _checks.choice(uncertainty, get_args(UncertaintyOf), what="uncertainty")
    _checks.choice(marginal, ("uniform", "empirical"), what="marginal")
    _checks.choice(unmatched, ("raise", "drop"), what="unmatched")
    depths = sorted({_checks.count(depth, what="k") for depth in ([k] if isinstance(k, int) else k)})
    if not depths:
        raise InputError("k expected at least one depth, got none; give for example k=(1, 5, 10)")

    columns = [0, 1] if direction == "i2t" else [1, 0]
    queries, gallery = (images, texts) if direction == "i2t" else (texts, images)
    links = link_rows(links, len(images), len(texts), what="links")[:, columns]
    if positives is None:
        matches = np.unique(links, axis=0)
    else:
        positives = link_rows(positives, len(images), len(texts), what="positives")[:, columns]
        matches = np.unique(np.concatenate([links, positives]), axis=0)
    n_matches = np.bincount(matches[:, 0], minlength=len(queries))
    asked = np.flatnonzero(n_matches)
    if len(asked) < len(queries) and (unmatched == "raise" or not len(asked)):
        first = np.flatnonzero(n_matches == 0)[0]
        raise InputError(
            f"{direction} retrieval expected a true match in the gallery for every query, got "
            f"{len(queries) - len(asked)} of {len(queries)} {queries.modality}s without one (first: "
            f"{str(queries.ids[first])!r}); add their links or pass unmatched='drop'"
        )

    gallery_aware = queries.gallery_aware or gallery.gallery_aware
    if similarity == "auto":
        similarity = "cosine" if rank_by == "backbone" or gallery_aware else "csd"
    if uncertainty == "auto":
        uncertainty = "one_minus_max_similarity" if queries.gallery_aware else "posterior"
    query_side, gallery_side = (_ranked(side, rank_by, similarity) for side in (queries, gallery))
    query_side = query_side if len(asked) == len(queries) else query_side.rows(asked)
    if temperature is None:
        temperature = _temperature(similarity, queries.source.logit_scale)
    if temperature is None and (uncertainty in MATCH_UNCERTAINTIES or marginal == "empirical"):
        asked_for = f"uncertainty={uncertainty!r}" if uncertainty in MATCH_UNCERTAINTIES else f"marginal={marginal!r}"
        raise InputError(
            f"{asked_for} expected a temperature, got similarity={similarity!r} of a source whose logit_scale is "
            f"{queries.source.logit_scale}; give temperature=, the multiplier that makes the similarity a logit"
        )
    found = search(
        query_side,
        gallery_side,
        k=max(depths[-1], 2),  # the margin needs two
        similarity=similarity,
        temperature=temperature,
        progress=progress,
    )
    top, top_scores = found.rows[:, : depths[-1]], found.scores[:, : depths[-1]]
    keys = matches[:, 0] * len(gallery) + matches[:, 1]
    hits = np.isin(asked[:, None] * len(gallery) + top, keys).astype(np.float64)
    signals = {} if temperature is None else match_signals(found, len(gallery))
    if marginal == "empirical":
        signals["match_kl"] = kl_to_marginal(query_side, gallery_side, found, similarity=similarity, progress=progress)
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
            _ranked(queries, rank_by, "cosine"), _ranked(gallery, rank_by, "cosine"), matches
        )[asked]
    detail: dict[str, Any] = {
        "top": top,
        "top_scores": top_scores,
        "n_matches": n_matches[asked],
        **{name: values for name, values in signals.items() if name != "confidence"},
        "query_uncertainty": own[asked],
        "answer_uncertainty": of_gallery[top[:, 0]],
        "gallery_ids": np.asarray(gallery.ids),
        "unmatched": len(queries) - len(asked),
        "unmatched_ids": [str(name) for name in np.asarray(queries.ids)[n_matches == 0]],
    }
    return TaskResult(
        task="retrieval",
        direction=direction,
        ids=np.asarray(queries.ids)[asked],
        correct=hits[:, 0],
        uncertainty=uncertain,
        confidence=signals.get("confidence"),
        recall_at={depth: hits[:, :depth].max(1) for depth in depths},
        groups=None if direction == "i2t" else _first_partner(len(queries), matches, np.unique(links, axis=0))[asked],
        detail=detail,
        provenance={
            "rank_by": rank_by,
            "similarity": similarity,
            "uncertainty": uncertainty,
            "logit_scale": queries.source.logit_scale,
            "temperature": temperature,
            "marginal": marginal,
            "k": depths,
            "n_queries": len(asked),
            "n_gallery": len(gallery),
            "source": queries.source.to_dict(),
            "query_maker": queries.maker,
            "gallery_maker": gallery.maker,
        },
    )


def _check_posteriors(images: ProbabilisticEmbedding, texts: ProbabilisticEmbedding) -> None:
    for side, modality in ((images, "image"), (texts, "text")):
        if not isinstance(side, ProbabilisticEmbedding):
            raise InputTypeError(
                f"retrieve expected a posterior of {modality}s, got {type(side).__name__}; "
                "predict one with an adapter, e.g. create_adapter('deterministic')"
            )
        if side.modality != modality:
            raise InputError(
                f"retrieve expected {modality}s, got {side.modality}s; the order is retrieve(images, texts, …) "
                "in both directions"
            )
    if images.source.fingerprint != texts.source.fingerprint:
        raise SourceMismatchError(
            f"retrieve expected images and texts of one model, got {images.source} and {texts.source} "
            f"({images.source.difference(texts.source)}); embed both with the same model and settings"
        )
    _checks.same_dim(images.dim, texts.dim, what="images", got_from=" in texts")


def _ranked(side: ProbabilisticEmbedding, rank_by: str, similarity: str) -> Gaussians:
    if rank_by == "posterior":
        return gaussians(side)
    if side.backbone is None:
        raise InputError(
            f"rank_by='backbone' expected {side.modality} posteriors that carry their frozen embeddings, got none; "
            "use rank_by='posterior', or predict them again with an adapter"
        )
    if similarity != "cosine":
        raise InputError(
            f"rank_by='backbone' expected similarity='cosine', got {similarity!r}; frozen embeddings have no variance"
        )
    return gaussians(side.backbone, need_variance=False)


def _temperature(similarity: str, logit_scale: float | None) -> float | None:
    if similarity == "expected_likelihood":  # log ∫ p_q p_g is a log-likelihood already
        return 1.0
    if logit_scale is None or similarity not in NATS_PER_LOGIT:
        return None
    return logit_scale * NATS_PER_LOGIT[similarity]


def _first_partner(n: int, *pairs: np.ndarray) -> np.ndarray:
    """(n,) first gallery row paired with each query; later lists of sorted pairs overrule earlier ones."""
    first = np.full(n, -1)
    for rows in pairs:
        first[rows[::-1, 0]] = rows[::-1, 1]  # of several writes the last one stays, which is the lowest row
    return first


def _true_pair_distance(queries: Gaussians, gallery: Gaussians, matches: np.ndarray) -> np.ndarray:
    """(Q,) cosine distance of each query to its nearest true match; infinite where it has none."""
    distance = np.full(queries.size, np.inf)
    for start in range(0, len(matches), CHUNK):
        chunk = matches[start : start + CHUNK]
        cosines = paired("cosine", queries.rows(chunk[:, 0]), gallery.rows(chunk[:, 1]))
        np.minimum.at(distance, chunk[:, 0], 1 - cosines.cpu().numpy())
    return distance
