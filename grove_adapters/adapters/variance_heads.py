"""What PFE, PCME, PCME++ and ProLIP share: a variance head for each modality and how it is trained on links."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from grove_adapters import seeding
from grove_adapters.adapters.base import Batch, FitRun
from grove_adapters.adapters.loop import LoopConfig, Terms, hold_out, minimise
from grove_adapters.embeddings import MODALITIES, Modality, Pairs, as_float32
from grove_adapters.heads import VarianceHead
from grove_adapters.objectives import Moments

SAMPLE = 4096  # links that decide constants of the heads

PAPER: Mapping[str, Any] = {
    "means": "frozen",
    "covariance": "diagonal",
    "epochs": 200,
    "batch_size": 64,
    "learning_rate": 1e-8,
    "scale_rate": 1e-8,
    "validation_share": 0.0,
}
"""GroVE, Appendix A.2, for every baseline with variance heads. At this rate no weight moves by more than 0.002."""


@dataclass(frozen=True, kw_only=True)
class VarianceHeadsConfig(LoopConfig):
    """Settings of adapters that learn a variance for each frozen embedding.

    Attributes:
        hidden: Width of the hidden layers of a head.
        layers: Hidden layers of a head.
        means: ``"centred"`` moves images and texts by a constant each, so that both have the same centre, and
            computes objectives in units of their mean square around it; ``"frozen"`` leaves them as they are, as
            published. Between frozen embeddings lies the modality gap, which variances cannot tell from vagueness.
        covariance: ``"isotropic"`` gives an item one variance for all dimensions; ``"diagonal"``, as published, one
            for each. Objectives on distances read nothing but their sum. To PFE's likelihood they are as many chances
            to explain where in space a match lies instead of how far off: on rendered scenes, they rank the known
            ambiguity of captions backwards (Spearman −.88) where one variance ranks it (.93).
        scale_rate: Learning rate of the scale and shift of matching logits, where the objective has them; 0 keeps
            them where they start. To a matching objective the variance of an item is a bias of all its logits. A flat
            logistic makes it say how close the item is to the rest on the whole; a steep one, where learned scales
            tend to end, how many close neighbours it has.
        learning_rate: Of AdamW for the heads. The 1e-8 that GroVE prints for these baselines trains nothing.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": PAPER}

    means: Literal["centred", "frozen"] = "centred"
    covariance: Literal["isotropic", "diagonal"] = "isotropic"
    hidden: int = 256
    layers: int = 2
    scale_rate: float = 0.0
    learning_rate: float = 1e-3

    def check(self) -> None:
        """Refuse settings out of range."""
        super().check()
        self.require(self.hidden >= 1, "hidden", "a whole number ≥ 1")
        self.require(self.layers >= 0, "layers", "a whole number ≥ 0")
        self.require(self.scale_rate >= 0, "scale_rate", "a number ≥ 0")


@dataclass(frozen=True)
class LinkBatch:
    """A minibatch of links.

    Attributes:
        rows: (B,) link numbers.
        image: (B, D) embeddings.
        text: (B, D) embeddings.
        labels: (B, B) booleans: whether image i and text j belong together, by links, positives or equal classes.
    """

    rows: torch.Tensor
    image: torch.Tensor
    text: torch.Tensor
    labels: torch.Tensor


def balanced(labels: torch.Tensor) -> torch.Tensor:
    """(B, B) weights of pairs: 1 for a pair that does not match, and for those that do about 1 in all for each item.

    A vague caption may be true of a hundred images of a minibatch. Were each of them to count like the single image
    of a precise one, vague captions would be nearly all that is learned from, and of the logits of an item those that
    should be high would outnumber the rest, which makes its variance small.

    Args:
        labels: (B, B) probabilities of a match.
    """
    labels = labels.float()
    rows, columns = (labels.sum(axis, keepdim=True).clamp_min(1) for axis in (1, 0))
    return torch.where(labels > 0, (1 / rows + 1 / columns) / 2, torch.ones_like(labels))


class Links:
    """Minibatches of the links of some pairs, read when asked for, with every true match marked.

    Args:
        pairs: Whose links.
        device: Where minibatches go.
    """

    def __init__(self, pairs: Pairs, device: torch.device) -> None:
        self.pairs = pairs
        self.device = device
        self._truth = pairs.truth()

    def __len__(self) -> int:
        return len(self.pairs)

    def batch(self, rows: torch.Tensor) -> LinkBatch:
        """The given links."""
        image, text = self.pairs.read(rows.numpy(), self.device)
        links = self.pairs.links[rows.numpy()]
        labels = self._truth[links[:, 0]][:, links[:, 1]].toarray()
        if self.pairs.classes is not None:
            classes = self.pairs.classes[links[:, 0]]
            labels |= classes[:, None] == classes
        return LinkBatch(rows, image, text, torch.from_numpy(labels).to(self.device))

    def sample(self, n: int, seed: int) -> LinkBatch:
        """At most `n` links, drawn without replacement."""
        rows = torch.randperm(len(self), generator=seeding.generator(seed))[:n]
        image, text = self.pairs.read(rows.numpy(), self.device)
        return LinkBatch(rows, image, text, torch.empty(0))

    def sweep(self, size: int) -> Iterator[LinkBatch]:
        """Every link once, in order."""
        for rows in torch.arange(len(self)).split(size):
            yield self.batch(rows)

    def views(self, modality: Modality, rows: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """(B, D) one stored view of the images or texts of the given links."""
        column = MODALITIES.index(modality)
        embeddings = (self.pairs.images, self.pairs.texts)[column]
        items = self.pairs.links[rows.numpy(), column]
        return as_float32(embeddings.views[items][np.arange(len(items)), which.numpy()], self.device)


class VarianceHeads(torch.nn.Module):
    """One `VarianceHead` for images and one for texts, and the unit in which objectives see their output.

    Args:
        dim: D.
        hidden: Width of the hidden layers.
        layers: Hidden layers.
        isotropic: Whether an item has one variance for all dimensions.
    """

    def __init__(self, dim: int, hidden: int, layers: int, *, isotropic: bool) -> None:
        super().__init__()
        self.image = VarianceHead(dim, hidden=hidden, layers=layers, isotropic=isotropic)
        self.text = VarianceHead(dim, hidden=hidden, layers=layers, isotropic=isotropic)
        self.register_buffer("unit", torch.ones(()))

    unit: torch.Tensor

    def of(self, modality: str) -> VarianceHead:
        """The head of a modality."""
        return self.image if modality == "image" else self.text

    def scaled(self, modality: str, values: torch.Tensor) -> Moments:
        """Moments of (B, D) embeddings, in units of length √`unit`."""
        mean, log_variance = self.of(modality)(values)
        return mean / self.unit.sqrt(), log_variance - self.unit.log()

    @torch.no_grad()
    def start_from(self, image: torch.Tensor, text: torch.Tensor, *, centred: bool) -> None:
        """Set every constant from a sample of linked embeddings, (B, D) each.

        Variances start where they explain the squared distance of links.
        """
        self.image.standardise(image)
        self.text.standardise(text)
        if centred:
            gap = self.text.centre - self.image.centre
            self.image.offset.copy_(gap / 2)
            self.text.offset.copy_(-gap / 2)
            square = [(x - x.mean(0)).square().sum(1).mean() for x in (image, text)]
            self.unit.fill_(float(sum(square)) / 2 or 1.0)
        distance = float((image + self.image.offset - text - self.text.offset).square().mean())
        for head in (self.image, self.text):
            head.start_at(math.log(max(distance / 2, 1e-12)))


class MatchingLogit(torch.nn.Module):
    """The affine map between a similarity and the logit of a match: a positive scale and a shift.

    Both belong to minibatches with a certain share of matches. Among fewer candidates a match is likelier, so the
    shift moves by the difference of the log odds of the two shares (Bayes' rule). Without that, held-out links, which
    come in smaller minibatches than those of training, ask for smaller variances, and a fit stops long before its
    variances are ordered: on `datasets.synthetic` they rank the known noise backwards (Spearman −.75 and −.53).

    Args:
        scale: Where the scale starts.
        shift: Where the shift starts; None for where as many matches are expected as there are.
        gain: Factor of the logit inside the logistic function, 2 for PCME's published one.
    """

    share: torch.Tensor | None

    def __init__(self, scale: float, shift: float | None, *, gain: float = 1.0) -> None:
        super().__init__()
        self.log_scale = torch.nn.Parameter(torch.tensor(math.log(scale)))
        self.shift = torch.nn.Parameter(torch.tensor(0.0 if shift is None else shift))
        self._find_shift = shift is None
        self._gain = gain
        self.register_buffer("share", None)

    @property
    def scale(self) -> torch.Tensor:
        """a > 0."""
        return self.log_scale.exp()

    def shift_for(self, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """b for a minibatch with the given (B, B) labels and weights, by the share of matches among them."""
        if self.share is None:
            return self.shift
        return self.shift + (torch.logit(_share(labels, weights)) - torch.logit(self.share)) / self._gain

    @torch.no_grad()
    def start(self, similarity: torch.Tensor, labels: torch.Tensor) -> None:
        """Take the share of matches from a minibatch and, where none was given, the shift.

        Args:
            similarity: (B, B) similarities at the start of the fit.
            labels: (B, B) whether they match.
        """
        weights = balanced(labels)
        self.share = _share(labels, weights)
        if not self._find_shift:
            return
        logits = (self._gain * self.scale * similarity).double()
        low, high = -float(logits.max()) - 50.0, -float(logits.min()) + 50.0
        for _ in range(60):  # the expected share grows with the shift
            middle = (low + high) / 2
            too_few = _share(torch.sigmoid(logits + middle), weights) < self.share
            low, high = (middle, high) if too_few else (low, middle)
        self.shift.fill_(middle / self._gain)

    def facts(self) -> dict[str, float]:
        """Both numbers, for the report."""
        return {"scale": float(self.scale.detach()), "shift": float(self.shift.detach())}


Loss = Callable[[VarianceHeads, LinkBatch, Links], Terms]
"""From heads, a minibatch and where it comes from to the terms of an objective."""

Similarity = Callable[[Moments, Moments], torch.Tensor]
"""From images and texts to what the scale of a matching logit multiplies, (B, B)."""


def build(dim: int, config: VarianceHeadsConfig) -> VarianceHeads:
    """Heads of the right shapes, to be loaded into."""
    return VarianceHeads(dim, config.hidden, config.layers, isotropic=config.covariance == "isotropic")


def fit(
    pairs: Pairs,
    validation: Pairs | None,
    run: FitRun,
    config: VarianceHeadsConfig,
    loss: Loss,
    *,
    logit: MatchingLogit | None = None,
    similarity: Similarity | None = None,
) -> VarianceHeads:
    """Train the heads so that the loss of held-out links is smallest.

    Args:
        pairs: Links to fit on.
        validation: Links to choose by, or None to hold out some.
        run: Seed, device, report.
        config: Shapes of the heads and settings of the loop.
        loss: The objective of a minibatch.
        logit: Scale and shift that the loss uses, trained with a rate of their own.
        similarity: What the scale multiplies; it goes with `logit`.
    """
    pairs, validation = hold_out(pairs, validation, config.validation_share, run)
    links = Links(pairs, run.device)
    heads = build(pairs.dim, config)
    sample = links.sample(SAMPLE, seeding.derive(run.seed, "start"))
    heads.start_from(sample.image.cpu(), sample.text.cpu(), centred=config.means == "centred")
    if logit is not None and similarity is not None:
        with torch.no_grad():
            batch = Links(pairs, torch.device("cpu")).batch(sample.rows[: config.batch_size])
            moments = heads.scaled("image", batch.image), heads.scaled("text", batch.text)
            logit.start(similarity(*moments), batch.labels)
    module = torch.nn.ModuleDict({"heads": heads, "logit": logit or torch.nn.Module()}).to(run.device)
    groups: list[dict[str, Any]] = [{"params": list(heads.parameters())}]
    if logit is not None and config.scale_rate:
        groups.append({"params": list(logit.parameters()), "lr": config.scale_rate, "weight_decay": 0.0})
    held_out = None if validation is None else Links(validation, run.device)

    def validate() -> float:
        assert held_out is not None
        with seeding.local(seeding.derive(run.seed, "validation noise")):  # the same draws after every epoch
            parts = [
                (float(loss(heads, batch, held_out)["loss"]), len(batch.rows))
                for batch in held_out.sweep(config.batch_size)
            ]
        return sum(value * size for value, size in parts) / len(held_out)

    minimise(
        lambda rows: loss(heads, links.batch(rows), links),
        module,
        len(links),
        config,
        run,
        groups=groups,
        validate=None if held_out is None else validate,
    )
    run.report.facts["unit"] = float(heads.unit)
    if logit is not None:
        run.report.facts |= logit.facts()
    return heads


def predict(module: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """The fields of a Gaussian posterior for a batch."""
    assert isinstance(module, VarianceHeads)
    mean, log_variance = module.of(batch.modality)(batch.values)
    return {"mean": mean, "variance": log_variance.exp()}


def _share(labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Share of matches; a minibatch where all or none match is taken for one in which nearly so."""
    return ((labels * weights).sum() / weights.sum()).float().clamp(1e-6, 0.99)
