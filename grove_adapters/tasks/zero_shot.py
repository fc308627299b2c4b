"""Zero-shot classification: the class whose prompts are closest, and how sure that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from grove_adapters import _checks
from grove_adapters.embeddings import as_float32
from grove_adapters.errors import InputError
from grove_adapters.posterior import GaussianEmbedding, ProbabilisticEmbedding
from grove_adapters.tasks.base import TaskResult
from grove_adapters.tasks.reading import check_pair, rows_by_id
from grove_adapters.tasks.retrieval import retrieve

CHUNK = 4096  # prompts summed at once


def classify(
    images: ProbabilisticEmbedding,
    prompts: ProbabilisticEmbedding,
    *,
    prompt_classes: Sequence[str] | Sequence[int] | np.ndarray,
    labels: Sequence[str] | Sequence[int] | np.ndarray,
    positives: np.ndarray | None = None,
    weights: Sequence[float] | np.ndarray | None = None,
    k: int | Sequence[int] = (1, 5),
    **settings: Any,
) -> TaskResult:
    """Give every image the class whose prompt ensemble is closest.

    A class is the mixture of its prompts' distributions, read by its first two moments (`class_mixtures`), and the
    classes are then a gallery that images retrieve from.

    Args:
        images: Posteriors of the N images.
        prompts: Posteriors of the T prompts, such as "a photo of a cat", as many for each class as one likes.
        prompt_classes: (T,) class of each prompt, a name or a number.
        labels: (N,) true class of each image, of the same kind.
        positives: (R, 2) rows (image, class) of further true classes, where classes are numbered in the order of
            ``detail["gallery_ids"]``: that in which the prompts name them first.
        weights: (T,) weights > 0 of the prompts within their class; equal by default.
        k: Depths of top-k accuracy.
        settings: Further settings of `retrieve`: ``rank_by``, ``similarity``, ``uncertainty``, ``temperature``,
            ``marginal``, ``progress``. ``rank_by="backbone"`` is the usual recipe: the cosine to the mean of the
            normalised frozen prompts.

    Returns:
        One row an image. `confidence` is the probability of the class given, the softmax over classes with the
        source's logit scale; `recall_at` holds the top-k accuracies. `detail` is that of `retrieve` with classes for
        gallery items, and further ``predicted`` and ``label`` (N,) names.

    Raises:
        InputError: A label that no prompt has, lengths that disagree, weights ≤ 0, or what `retrieve` refuses.
        InputTypeError: No posteriors.
        SourceMismatchError: Images and prompts come from different models.
    """
    check_pair(images, prompts, task="classify")
    classes = class_mixtures(prompts, prompt_classes, weights=weights)
    names = np.asarray([str(label) for label in labels])
    _checks.same_rows(len(images), len(names), what="labels of the images")
    place, there = rows_by_id(classes.ids, names)
    if not there.all():
        raise InputError(
            f"classify expected labels that have a prompt, got {str(names[there.argmin()])!r} without one; "
            f"there are {len(classes)} classes such as {str(classes.ids[0])!r}"
        )
    found = retrieve(
        images, classes, links=np.stack([np.arange(len(images)), place], 1), positives=positives, k=k, **settings
    )
    detail = {name: value for name, value in found.detail.items() if name not in ("unmatched", "unmatched_ids")}
    predicted = detail["gallery_ids"][detail["top"][:, 0]]
    return dataclasses.replace(
        found,
        task="classification",
        direction="",
        detail={**detail, "predicted": predicted, "label": names},
        provenance={**found.provenance, "n_prompts": len(prompts)},
    )


def class_mixtures(
    prompts: ProbabilisticEmbedding,
    prompt_classes: Sequence[str] | Sequence[int] | np.ndarray,
    *,
    weights: Sequence[float] | np.ndarray | None = None,
) -> GaussianEmbedding:
    """The Gaussian of the same mean and variance as each class's mixture of prompt distributions.

    Mean Σ w μ and variance Σ w (σ² + (μ − mean)²): prompts that disagree make a class uncertain, and so do prompts
    that are uncertain themselves. One prompt is its own class.

    Args:
        prompts: Posteriors of the T prompts.
        prompt_classes: (T,) class of each prompt, a name or a number.
        weights: (T,) weights > 0 of the prompts within their class; equal by default.

    Returns:
        One Gaussian a class, in the order in which the classes come first, with the class as its id. Its `backbone` is
        the normalised weighted mean of the normalised frozen prompts.

    Raises:
        InputError: Lengths that disagree, or weights that are not finite and > 0.
    """
    names = np.asarray([str(name) for name in prompt_classes])
    _checks.same_rows(len(prompts), len(names), what="prompt_classes")
    distinct, first, code = np.unique(names, return_index=True, return_inverse=True)
    in_order = np.argsort(first)
    code = np.argsort(in_order)[code]
    weight = np.ones(len(names)) if weights is None else np.asarray(weights, dtype=np.float64)
    _checks.same_rows(len(names), len(weight), what="weights of prompts")
    _checks.finite(weight, what="weights of prompts")
    if weight.min() <= 0:
        raise InputError(f"weights of prompts expected numbers > 0, got {weight.min():g}; leave such a prompt out")
    share = torch.as_tensor(weight / np.bincount(code, weight)[code])
    place = torch.as_tensor(code)

    def mixed(values: Any, *, square: bool = False) -> torch.Tensor:
        """(C, D) weighted sums over each class's prompts."""
        total = torch.zeros(len(distinct), values.shape[1], dtype=torch.float64)
        for start in range(0, len(place), CHUNK):
            rows = slice(start, start + CHUNK)
            block = torch.as_tensor(values[rows]).double()
            if square:
                block = (block - mean[place[rows]]).square()
            total.index_add_(0, place[rows], share[rows, None] * block)
        return total

    mean = mixed(prompts.mean)
    variance = mixed(prompts.variance) + mixed(prompts.mean, square=True)
    backbone = None
    if prompts.backbone is not None:
        backbone = normalize(mixed(normalize(as_float32(prompts.backbone).double(), dim=1)), dim=1).float()
    return GaussianEmbedding(
        mean=mean.to(prompts.mean.dtype),
        variance=variance.to(prompts.mean.dtype),
        ids=distinct[in_order],
        modality="text",
        source=prompts.source,
        gallery_aware=prompts.gallery_aware,
        backbone=backbone,
        maker={**prompts.maker, "classes": "moment-matched mixtures of prompts"},
    )
