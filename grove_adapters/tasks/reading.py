"""How tasks read a pair of posteriors: what they check, what they rank by, and what makes a similarity a logit."""

from __future__ import annotations

from typing import Literal

import numpy as np

from grove_adapters import _checks
from grove_adapters.errors import InputError, InputTypeError, SourceMismatchError
from grove_adapters.posterior import ProbabilisticEmbedding
from grove_adapters.similarity import Gaussians, gaussians

RankBy = Literal["posterior", "backbone"]

NATS_PER_LOGIT = {"cosine": 1.0, "csd": 0.5, "wasserstein2": 0.5}
"""What the source's logit scale multiplies. Between unit vectors −½‖μ_q − μ_g‖² is the cosine up to a constant, so
half the negated squared distances carry the logits of the frozen model, lowered by half the variances (ProLIP)."""


def check_pair(images: ProbabilisticEmbedding, texts: ProbabilisticEmbedding, *, task: str) -> None:
    """Refuse what are no posteriors of images and texts of one model.

    Raises:
        InputError: Swapped modalities, or another width.
        InputTypeError: One of them is no posterior.
        SourceMismatchError: They come from different models.
    """
    for side, modality in ((images, "image"), (texts, "text")):
        if not isinstance(side, ProbabilisticEmbedding):
            raise InputTypeError(
                f"{task} expected a posterior of {modality}s, got {type(side).__name__}; "
                "predict one with an adapter, e.g. create_adapter('deterministic')"
            )
        if side.modality != modality:
            raise InputError(
                f"{task} expected {modality}s, got {side.modality}s; the order is {task}(images, texts, …)"
            )
    if images.source.fingerprint != texts.source.fingerprint:
        raise SourceMismatchError(
            f"{task} expected images and texts of one model, got {images.source} and {texts.source} "
            f"({images.source.difference(texts.source)}); embed both with the same model and settings"
        )
    _checks.same_dim(images.dim, texts.dim, what="images", got_from=" in texts")


def ranked(side: ProbabilisticEmbedding, rank_by: RankBy, similarity: str, *, gallery: bool = False) -> Gaussians:
    """What is compared: the posterior, or the frozen embeddings underneath.

    A gallery whose likelihood is asked for is what was observed, so its frozen embeddings where it has them.

    Raises:
        InputError: There are no frozen embeddings, or they are asked for a variance.
    """
    if rank_by == "posterior":
        if gallery and similarity == "likelihood":
            return gaussians(side.mean if side.backbone is None else side.backbone, need_variance=False)
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


def rows_by_id(ids: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(W,) row of each wanted id, and (W,) whether it is there at all; rows of ids that are not mean nothing."""
    order = np.argsort(ids)
    rows = order[np.searchsorted(ids, wanted, sorter=order).clip(max=len(ids) - 1)]
    return rows, ids[rows] == wanted


def default_similarity(images: ProbabilisticEmbedding, texts: ProbabilisticEmbedding, rank_by: RankBy) -> str:
    """What ranks where nothing was chosen: frozen embeddings and points have no variance that could matter."""
    return "cosine" if rank_by == "backbone" or images.gallery_aware or texts.gallery_aware else "csd"


def default_temperature(similarity: str, logit_scale: float | None) -> float | None:
    """What makes a similarity a logit; None where nobody knows."""
    if similarity in ("expected_likelihood", "likelihood"):  # logits as they are
        return 1.0
    if logit_scale is None or similarity not in NATS_PER_LOGIT:
        return None
    return logit_scale * NATS_PER_LOGIT[similarity]
