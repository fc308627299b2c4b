"""Contrastive similarities read as density ratios: how far does an item narrow the other modality down?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from grove_adapters import seeding
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.config import Config
from grove_adapters.embeddings import MODALITIES, Embeddings, Modality, Pairs, as_float32
from grove_adapters.errors import InputError

BLOCK = 1 << 22  # logits held at once: 16 MiB
PROBES = 512  # items of each modality on which a fit looks for saturation
SATURATED = 0.01  # nats that D_KL is short of its ceiling log n
WORRYING_SHARE = 0.1  # of saturated items
SMALLEST_VARIANCE = 1e-6  # summed over dimensions; a softmax on a single item has none


@dataclass(frozen=True, kw_only=True)
class DensityRatioConfig(Config):
    """Settings of the density-ratio adapter.

    Attributes:
        measure: ``"kl"`` D_KL(p(·|item) ‖ p(·)), the information gain; ``"reverse_kl"`` D_KL(p(·) ‖ p(·|item));
            ``"whitened"`` a² (v − v̄)ᵀ G (v − v̄) with G the covariance of the other modality, twice the second-order
            term of the divergences; ``"centred"`` a² ‖v − v̄‖².
        reference_size: n, embeddings of each modality kept as the reference corpus, drawn at random.
        logit_scale: a, the multiplier of cosines the model was trained with; None takes the source's.
    """

    measure: Literal["kl", "reverse_kl", "whitened", "centred"] = "kl"
    reference_size: int = 10_000
    logit_scale: float | None = None

    def check(self) -> None:
        """Refuse settings out of range."""
        self.require(self.reference_size >= 2, "reference_size", "a whole number ≥ 2")
        self.require(self.logit_scale is None or self.logit_scale > 0, "logit_scale", "a number > 0 or None")


class DensityRatio(Adapter):
    """What the frozen model itself says about an item: exp(a ⟨v, t⟩) ∝ p(t | item) / p(t). Nothing is trained.

    Over a reference corpus of the other modality, the softmax q of the logits is the model's p(· | item). An item that
    could go with anything leaves q near uniform. The uncertainty is minus the chosen measure, up to a constant: for
    ``"kl"`` it is the entropy H(q) = log n − D_KL in nats, which still orders items where D_KL has reached its ceiling
    log n to all digits; for the others it is the negated measure.

    The mean is the frozen embedding. The variance is that of the other modality's embedding given the item, Var_q(t) in
    every dimension, over the logit scale, whatever the measure. It says what an item could go with, not how far its
    embedding is off. Undivided, it would outweigh the differences between cosines in a search: with OpenAI's ViT-B/32
    on half of ImageNet's classes, ranking photos by the expected distance takes R@1 from .77 to .29. Over the scale it
    lowers a logit by half its sum, no more than half the variance of the corpus, and R@1 stays.

    Source: "CLIP-like Model as a Foundational Density Ratio Estimator" (Uchiyama et al.), Eqs. 8–15 and the definitions
    of D_W and D_C. Deliberate differences: D_KL is log n − H(q), where the printed Eq. 10 has the logits inside its
    second logarithm; both norms are centred at the mean of the item's own modality and G is a covariance (1/n), where
    the paper's definitions mix two means and its values come from an unnormalised scatter; and D_W approximates 2 D_KL,
    as its Eq. 19 lacks a factor ½.
    """

    name = "density_ratio"
    config_class = DensityRatioConfig

    config: DensityRatioConfig

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """Settings for data of a few hundred pairs."""
        return {"reference_size": 400}

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        scale = self.config.logit_scale or pairs.source.logit_scale
        if scale is None:
            raise InputError(
                f"{self.name} expected the logit scale the model was trained with, got a source without one "
                f"({pairs.source}); give logit_scale=100 for OpenAI's CLIP, or what your model's training ended with"
            )
        random = np.random.default_rng(run.seed)
        module = torch.nn.Module()
        module.register_buffer("scale", torch.tensor(scale))
        for embeddings in (pairs.images, pairs.texts):
            module.register_buffer(embeddings.modality, _sampled(embeddings, self.config.reference_size, random))
        if self.config.measure == "kl":
            self._look_for_saturation(module.to(run.device), run)
        return module

    def _look_for_saturation(self, module: torch.nn.Module, run: FitRun) -> None:
        chosen = seeding.generator(seeding.derive(run.seed, "probes"))
        for modality in MODALITIES:
            own, other = module.get_buffer(modality), module.get_buffer(_other(modality))
            probes = own[torch.randperm(len(own), generator=chosen)[:PROBES].to(own.device)]
            entropy = torch.cat([entropies(x) for _, x in _logits(probes, other, module.get_buffer("scale"))])
            share, ceiling = float((entropy < SATURATED).float().mean()), math.log(len(other))
            run.report.facts[modality] = {
                "mean_divergence": ceiling - float(entropy.mean()),
                "ceiling": ceiling,
                "saturated_share": share,
            }
            if share > WORRYING_SHARE:
                run.report.warnings.append(
                    f"D_KL of {share:.0%} of the {modality}s is within {SATURATED} of its ceiling log {len(other)} = "
                    f"{ceiling:.2f}: there their order hangs on two reference items; raise reference_size, lower "
                    'logit_scale or use measure="reverse_kl"'
                )

    def _facts(self) -> dict[str, Any]:
        return {modality: len(self.module_.get_buffer(modality)) for modality in MODALITIES}

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_buffer("scale", torch.empty(()))
        for modality in MODALITIES:
            module.register_buffer(modality, torch.empty(facts[modality], dim))
        return module

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        scale, own = self.module_.get_buffer("scale"), self.module_.get_buffer(batch.modality)
        other = self.module_.get_buffer(_other(batch.modality))
        unit, centre = torch.nn.functional.normalize(batch.values, dim=1), own.mean(0)
        at_centre = scale * (other @ centre)
        variances, uncertainties = [], []
        for part, logits in _logits(unit, other, scale):
            variances.append(_conditional_variance(logits, other) / scale)
            uncertainties.append(self._uncertainty(logits, logits - at_centre, scale * (part - centre)))
        return {"mean": batch.values, "variance": torch.cat(variances), "uncertainty": torch.cat(uncertainties)}

    def _uncertainty(self, logits: torch.Tensor, moved_logits: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        measure = self.config.measure
        if measure == "centred":
            return -moved.square().sum(1)
        if measure == "whitened":  # vᵀGv is the variance of ⟨v, t⟩ over the corpus
            return -moved_logits.var(1, correction=0)
        return entropies(logits) if measure == "kl" else -reverse_divergences(logits)


def entropies(logits: torch.Tensor) -> torch.Tensor:
    """(B,) entropies H in nats of the softmax over each row; log n − H is D_KL against the uniform distribution.

    With the largest logit taken out, H = log1p(Σ' eˣ) − Σ q x is a sum of two terms ≥ 0, so an entropy of 1e-20 keeps
    its digits where log n − H would be log n.

    Args:
        logits: (B, n).
    """
    largest, at = logits.max(1, keepdim=True)
    shifted = logits - largest
    others = shifted.exp().scatter(1, at, 0.0)
    rest = others.sum(1)
    return rest.log1p() - (others * shifted).sum(1) / (1 + rest)


def reverse_divergences(logits: torch.Tensor) -> torch.Tensor:
    """(B,) divergences of the uniform distribution from the softmax over each row: log mean eˣ − mean x, in nats.

    Args:
        logits: (B, n).
    """
    return logits.logsumexp(1) - math.log(logits.shape[1]) - logits.mean(1)


def _conditional_variance(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    weights = logits.softmax(1)
    centre = reference.mean(0)  # squares to be cancelled get smaller
    moved = reference - centre
    variance = weights @ moved.square() - (weights @ moved).square()
    return variance.clamp_min(SMALLEST_VARIANCE / reference.shape[1])


def _logits(
    unit: torch.Tensor, reference: torch.Tensor, scale: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Some rows of unit vectors after others, with their logits against the reference."""
    for part in unit.split(max(1, BLOCK // len(reference))):
        yield part, scale * (part @ reference.T)


def _sampled(embeddings: Embeddings, size: int, random: np.random.Generator) -> torch.Tensor:
    rows = np.sort(random.choice(len(embeddings), min(size, len(embeddings)), replace=False))
    return torch.nn.functional.normalize(as_float32(embeddings.values[rows]), dim=1)


def _other(modality: Modality) -> Modality:
    return "text" if modality == "image" else "image"
