"""A classifier of one's own mistakes: is the best match of this item wrong?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from grove_adapters import seeding
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.adapters.loop import LoopConfig, Terms, hold_out, minimise
from grove_adapters.embeddings import MODALITIES, Embeddings, Modality, Pairs, as_float32
from grove_adapters.errors import InputError
from grove_adapters.heads import mlp

BLOCK = 1 << 22  # similarities held at once: 16 MiB
CHUNK = 1024  # held-out items looked at together
USUAL_SCALE = 20.0  # where attention starts for models whose logit scale is unknown
EPSILON = 1e-6  # least probability of a failure, so that variances stay above 0


@dataclass(frozen=True, kw_only=True)
class FailureHeadConfig(LoopConfig):
    """Settings of the failure head.

    Attributes:
        hidden: Width of the hidden layers.
        layers: Hidden layers.
        folds: Parts of the fitted images. What the head learns from about an item comes from the other parts.
        gallery_size: Images, with their texts, among which a match is right or wrong, at most. Larger galleries hold
            more mistakes.
        reference_size: Embeddings of each modality that stand for what there is to match, drawn at random.
        weight_decay: Of AdamW (decoupled).
    """

    hidden: int = 256
    layers: int = 2
    folds: int = 5
    gallery_size: int = 1000
    reference_size: int = 1024
    weight_decay: float = 0.1

    def check(self) -> None:
        """Refuse settings out of range."""
        super().check()
        for name in ("hidden", "reference_size"):
            self.require(getattr(self, name) >= 1, name, "a whole number ≥ 1")
        for name in ("folds", "gallery_size"):
            self.require(getattr(self, name) >= 2, name, "a whole number ≥ 2")
        self.require(self.layers >= 0, "layers", "a whole number ≥ 0")


class FailureHead(Adapter):
    """The probability that the frozen model's best match of an item is wrong, from the item and what it resembles.

    The head sees an item, the most similar embedding in a reference of the other modality, the mean of the reference
    under a softmax of the similarities, and how similar and how spread they are. It learns the answer to "is the top
    match wrong?" by binary cross-entropy in which failures and successes weigh the same.

    At prediction an item's true match is not in the reference. So it isn't in training: images are cut into folds that
    share no text and no class, matches are judged in galleries inside a fold, and what the head sees comes from a
    reference of the other folds.

    The uncertainty is the predicted probability p. It stands for galleries like those of the fit; a larger gallery
    raises the failure rate, not the order. The mean is the frozen embedding; the variance is isotropic and sums to p
    times the total variance of the other modality's reference: with probability p, the match could be anything.

    Source: ViLU (Lafon et al. 2025, "Learning Vision-Language Uncertainties for Failure Prediction"). Deliberate
    differences: attention over the reference has one learned temperature instead of projections; similarities are given
    as numbers besides; it serves texts as well; folds.
    """

    name = "failure_head"
    config_class = FailureHeadConfig

    config: FailureHeadConfig

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """Settings for data of a few hundred pairs: few labels, each a coin toss, so a linear head pulled to zero."""
        return {
            "layers": 0,
            "weight_decay": 10.0,
            "folds": 2,
            "validation_share": 0.0,
            "epochs": 20,
            "batch_size": 64,
            "reference_size": 256,
        }

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        pairs, validation = hold_out(pairs, validation, self.config.validation_share, run)
        linked = pairs.take_images(np.unique(pairs.links[:, 0]))
        groups = _groups(linked)
        if groups.max() == 0:
            raise InputError(
                f"{self.name} expected images in at least 2 groups that share no text and no class, got one; fit on "
                "more of them"
            )
        training = self._judged_by_folds(linked, groups, run.seed)
        module = self._started(linked, training, run)
        self._describe(training, run)

        def loss(judged: Judged, rows: torch.Tensor) -> torch.Tensor:
            total = torch.zeros((), device=run.device)
            for modality, values, wrong, reference in judged.batches(rows):
                head = module[modality]
                assert isinstance(head, Head)
                logits = head.logits(values.to(run.device), reference.to(run.device))
                total = total + head.cross_entropy(logits, wrong.to(run.device)).sum()
            return total / len(rows)

        validate: Callable[[], float] | None = None
        if validation is not None:
            held_out = self._judged_apart(validation, module, run.seed)

            def validate() -> float:
                chunks = torch.arange(len(held_out)).split(CHUNK)
                return sum(float(loss(held_out, rows)) * len(rows) for rows in chunks) / len(held_out)

        def objective(rows: torch.Tensor) -> Terms:
            return {"loss": loss(training, rows)}

        minimise(objective, module, len(training), self.config, run, validate=validate)
        return module

    def _judged_by_folds(self, pairs: Pairs, groups: np.ndarray, seed: int) -> Judged:
        """Every item, judged inside its fold, with a reference from the other folds."""
        random = np.random.default_rng(seeding.derive(seed, "folds"))
        order = random.permutation(len(groups))
        parts = np.array_split(random.permutation(groups.max() + 1), min(self.config.folds, groups.max() + 1))
        folds = [order[np.isin(groups[order], part)] for part in parts]
        others = (pairs.take_images(np.setdiff1d(order, fold)) for fold in folds)
        references = [self._reference(part, seeding.derive(seed, "fold", n)) for n, part in enumerate(others)]
        return Judged(pairs, references, folds, self.config.gallery_size)

    def _judged_apart(self, pairs: Pairs, module: torch.nn.ModuleDict, seed: int) -> Judged:
        """Held-out items, judged among themselves, with the reference of predictions."""
        references: dict[Modality, torch.Tensor] = {
            _other(own): module.get_submodule(own).get_buffer("reference").cpu() for own in MODALITIES
        }
        random = np.random.default_rng(seeding.derive(seed, "held out"))
        order = random.permutation(np.unique(pairs.links[:, 0]))
        return Judged(pairs, [references], [order], self.config.gallery_size)

    def _reference(self, pairs: Pairs, seed: int) -> dict[Modality, torch.Tensor]:
        random = np.random.default_rng(seed)
        return {
            part.modality: _sampled(part, self.config.reference_size, random) for part in (pairs.images, pairs.texts)
        }

    def _started(self, pairs: Pairs, training: Judged, run: FitRun) -> torch.nn.ModuleDict:
        reference = self._reference(pairs, seeding.derive(run.seed, "reference"))
        module = self._build(pairs.dim, {modality: len(values) for modality, values in reference.items()})
        for modality in MODALITIES:
            head = module[modality]
            assert isinstance(head, Head)
            scale = pairs.source.logit_scale or USUAL_SCALE
            head.start(reference[modality], reference[_other(modality)], scale, training.failure_rate(modality))
        return module.to(run.device)

    def _describe(self, training: Judged, run: FitRun) -> None:
        for modality in MODALITIES:
            rate, n = training.failure_rate(modality), int((training.modality == MODALITIES.index(modality)).sum())
            run.report.facts[modality] = {"failure_rate": rate, "judged": n}
            if rate in (0, 1):
                verdict = "right" if rate == 0 else "wrong"
                run.report.warnings.append(
                    f"the top match of every one of {n} {modality}s is {verdict}, so there is no difference to learn; "
                    "fit on more pairs, or change gallery_size"
                )

    def _facts(self) -> dict[str, Any]:
        return {
            modality: len(self.module_.get_submodule(_other(modality)).get_buffer("reference"))
            for modality in MODALITIES
        }

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.ModuleDict:
        config = self.config
        return torch.nn.ModuleDict(
            {own: Head(dim, facts[_other(own)], hidden=config.hidden, layers=config.layers) for own in MODALITIES}
        )

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        head = self.module_.get_submodule(batch.modality)
        assert isinstance(head, Head)
        height = max(1, BLOCK // len(head.reference))
        probability = torch.cat([head(part) for part in batch.values.split(height)])
        spread = head.reference.var(0, correction=0).sum() + EPSILON
        variance = probability.clamp_min(EPSILON) * spread / batch.values.shape[1]
        return {"mean": batch.values, "variance": variance[:, None], "uncertainty": probability}


class Head(torch.nn.Module):
    """From (B, D) embeddings to the probability that their best match is wrong.

    Args:
        dim: D.
        n_reference: R, reference embeddings of the other modality.
        hidden: Width of the hidden layers.
        layers: Hidden layers.
    """

    centre: torch.Tensor
    spread: torch.Tensor
    other_centre: torch.Tensor
    other_spread: torch.Tensor
    usual: torch.Tensor
    varying: torch.Tensor
    reference: torch.Tensor
    failure_rate: torch.Tensor

    def __init__(self, dim: int, n_reference: int, *, hidden: int, layers: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(dim))
        self.register_buffer("spread", torch.ones(()))
        self.register_buffer("other_centre", torch.zeros(dim))
        self.register_buffer("other_spread", torch.ones(()))
        self.register_buffer("usual", torch.zeros(3))
        self.register_buffer("varying", torch.ones(3))
        self.register_buffer("reference", torch.zeros(n_reference, dim))
        self.register_buffer("failure_rate", torch.full((), 0.5))
        self.log_temperature = torch.nn.Parameter(torch.zeros(()))
        self.mlp = mlp(3 * dim + 3, hidden, 1, layers=layers)
        last = self.mlp[-1]
        assert isinstance(last, torch.nn.Linear)
        torch.nn.init.zeros_(last.weight)  # the first steps follow what tells failures apart on the whole
        torch.nn.init.zeros_(last.bias)

    @torch.no_grad()
    def start(self, own: torch.Tensor, other: torch.Tensor, scale: float, failure_rate: float) -> None:
        """Take over constants of the fitted data: unit vectors of both modalities, logit scale, failure rate."""
        self.centre.copy_(own.mean(0))
        self.spread.copy_(_spread(own))
        self.other_centre.copy_(other.mean(0))
        self.other_spread.copy_(_spread(other))
        self.reference.copy_(other)
        self.log_temperature.fill_(math.log(scale))
        numbers, _, _ = self._seen(own, other)
        self.usual.copy_(numbers.mean(0))
        self.varying.copy_(numbers.std(0, correction=0) + EPSILON)
        self.failure_rate.fill_(min(max(failure_rate, EPSILON), 1 - EPSILON))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """(B,) probabilities of a failure at the failure rate of the fit."""
        return torch.sigmoid(self.logits(values, self.reference) + torch.logit(self.failure_rate))

    def logits(self, values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """(B,) log odds of a failure if failures and successes were equally frequent.

        Args:
            values: (B, D) embeddings.
            reference: (R, D) unit vectors of the other modality.
        """
        unit = normalize(values, dim=1)
        numbers, nearest, attended = self._seen(unit, reference)
        features = [
            (unit - self.centre) / self.spread,
            (nearest - self.other_centre) / self.other_spread,
            (attended - self.other_centre) / self.other_spread,
            (numbers - self.usual) / self.varying,
        ]
        return self.mlp(torch.cat(features, 1))[:, 0]

    def _seen(self, unit: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, 3) largest and mean similarity and entropy of the attention; (B, D) nearest and attended reference."""
        similarity = unit @ reference.T
        top, at = similarity.max(1)
        attention = (self.log_temperature.exp() * similarity).softmax(1)
        entropy = torch.special.entr(attention).sum(1)
        return torch.stack([top, similarity.mean(1), entropy], 1), reference[at], attention @ reference

    def cross_entropy(self, logits: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
        """(B,) binary cross-entropies, weighted so that failures and successes weigh the same in all."""
        rate = self.failure_rate
        weight = 0.5 / torch.where(wrong, rate, 1 - rate)
        return binary_cross_entropy_with_logits(logits, wrong.to(logits), weight, reduction="none")


class Judged:
    """Items of both modalities and whether their best match is wrong, row by row.

    Args:
        pairs: Where the items are.
        references: What the head may see of the items of each fold: unit vectors of both modalities.
        folds: Image rows of each fold, in random order.
        gallery_size: Images of a gallery at most; those of a fold are cut into galleries of equal size.

    Attributes:
        modality: (R,) index into `MODALITIES`.
        item: (R,) row of the embeddings.
        fold: (R,) index into the folds.
        wrong: (R,) whether the top match is wrong.
    """

    def __init__(
        self, pairs: Pairs, references: list[dict[Modality, torch.Tensor]], folds: list[np.ndarray], gallery_size: int
    ) -> None:
        self._pairs = pairs
        self._references = references
        parts = []
        for number, fold in enumerate(folds):
            for rows in np.array_split(fold, math.ceil(len(fold) / gallery_size)):
                gallery = pairs.take_images(rows)
                items = (rows, np.unique(pairs.links[np.isin(pairs.links[:, 0], rows), 1]))
                for column, (modality, item) in enumerate(zip(MODALITIES, items, strict=True)):
                    same = np.full(len(item), 1)
                    parts.append((column * same, item, number * same, failures(gallery, modality)))
        self.modality, self.item, self.fold, self.wrong = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )

    def __len__(self) -> int:
        return len(self.item)

    def failure_rate(self, modality: Modality) -> float:
        """Share of wrong top matches."""
        return float(self.wrong[self.modality == MODALITIES.index(modality)].mean())

    def batches(self, rows: torch.Tensor) -> Iterator[tuple[Modality, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The given rows by modality and fold: embeddings, whether wrong, and the reference of the other modality."""
        chosen = rows.numpy()
        for number, modality in enumerate(MODALITIES):
            part = (self._pairs.images, self._pairs.texts)[number]
            for fold, references in enumerate(self._references):
                here = chosen[(self.modality[chosen] == number) & (self.fold[chosen] == fold)]
                if len(here):
                    values = as_float32(part.values[self.item[here]])
                    yield modality, values, torch.from_numpy(self.wrong[here]), references[_other(modality)]


def failures(gallery: Pairs, modality: Modality) -> np.ndarray:
    """(n,) whether the most similar item of the other modality is no true match, for each item of one modality.

    True matches are links, positives and, where there are classes, items of an equal class.
    """
    parts = {part.modality: part for part in (gallery.images, gallery.texts)}
    queries, others = parts[modality], parts[_other(modality)]
    candidates = normalize(as_float32(others.values[:]), dim=1)
    height = max(1, BLOCK // len(candidates))
    top = np.concatenate([(normalize(x, dim=1) @ candidates.T).argmax(1).numpy() for x in queries.batches(height)])
    rows = np.arange(len(queries))
    images, texts = (rows, top) if modality == "image" else (top, rows)
    right = np.asarray(gallery.truth()[images, texts]).reshape(-1)
    if gallery.classes is not None:
        of_text = np.empty(len(gallery.texts), dtype=gallery.classes.dtype)
        of_text[gallery.links[:, 1]] = gallery.classes[gallery.links[:, 0]]
        right = right | (gallery.classes[images] == of_text[texts])
    return ~right


def _groups(pairs: Pairs) -> np.ndarray:
    """(N,) numbers from 0, equal for images that share a true match or a class, also through others."""
    from scipy.sparse import block_array, csr_array
    from scipy.sparse.csgraph import connected_components

    n = len(pairs.images)
    edges = [csr_array(pairs.truth())]
    if pairs.classes is not None:
        _, code = np.unique(pairs.classes, return_inverse=True)
        edges.append(csr_array((np.ones(n, dtype=bool), (np.arange(n), code))))
    blocks: list[list[Any]] = [[None, *edges], *([x.T, *[None] * len(edges)] for x in edges)]
    _, label = connected_components(block_array(blocks), directed=False)
    return np.unique(label[:n], return_inverse=True)[1]


def _sampled(embeddings: Embeddings, size: int, random: np.random.Generator) -> torch.Tensor:
    rows = np.sort(random.choice(len(embeddings), min(size, len(embeddings)), replace=False))
    return normalize(as_float32(embeddings.values[rows]), dim=1)


def _spread(values: torch.Tensor) -> torch.Tensor:
    return values.var(0, correction=0).mean().sqrt() + EPSILON


def _other(modality: str) -> Modality:
    return "text" if modality == "image" else "image"
