"""PCME++: variances under which the closed-form sampled distance tells matches from the rest."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from grove_adapters import objectives
from grove_adapters.adapters import variance_heads
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.adapters.loop import Terms
from grove_adapters.adapters.variance_heads import (
    LinkBatch,
    Links,
    MatchingLogit,
    VarianceHeads,
    VarianceHeadsConfig,
    balanced,
)
from grove_adapters.embeddings import Pairs


@dataclass(frozen=True, kw_only=True)
class PCMEPPConfig(VarianceHeadsConfig):
    """Settings of PCME++.

    Attributes:
        scale: Where a of the logits b − a · CSD starts; 5 in the paper, see `scale_rate`.
        shift: Where b starts; 5 in the paper. None: where as many matches are expected as there are.
        pseudo_weight: α of the pseudo-positive terms; 0.1 in the paper, which trains means as well. Variances alone
            can lower these terms only by denying matches, and the larger α, the less they rank ambiguity.
        bottleneck_weight: β of the information bottleneck.
        weighting: ``"published"``: BCE + α · mean of both pseudo-positive directions + β · bottleneck; or
            ``"as_coded"``: 2 BCE + α · their sum + β · bottleneck, where β counts half as much.
        mixed_share: Share of the images of a minibatch that are mixed with another one of it, with soft labels.
        smoothing: ε that moves labels to [ε, 1 − ε].
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {**variance_heads.PAPER, "scale": 5.0, "shift": 5.0, "pseudo_weight": 0.1, "smoothing": 1e-4}
    }

    scale: float = 1.5
    shift: float | None = None
    pseudo_weight: float = 1e-3
    bottleneck_weight: float = 1e-4
    weighting: Literal["published", "as_coded"] = "published"
    mixed_share: float = 0.25
    smoothing: float = 0.0

    def check(self) -> None:
        """Refuse settings out of range."""
        super().check()
        self.require(self.scale > 0, "scale", "a number > 0")
        for name in ("pseudo_weight", "bottleneck_weight"):
            self.require(getattr(self, name) >= 0, name, "a number ≥ 0")
        self.require(0 <= self.mixed_share <= 1, "mixed_share", "a share from 0 to 1")
        self.require(0 <= self.smoothing < 0.5, "smoothing", "a number from 0 up to, not including, 0.5")


class PCMEPP(Adapter):
    """Frozen embeddings as means, and variances learned by binary cross-entropy on the closed-form sampled distance.

    Mixing takes embeddings of images instead of their pixels: λ z_i + (1 − λ) z_j, rescaled to the length that its two
    parts have on average, with λ ~ Beta(2, 2), j the mirror image of i in the minibatch, and labels mixed alike.

    Source: PCME++ (Chun 2024), Eqs. 1–3, sections 2.2–2.4, with heads as in GroVE, Appendix A.2. Pseudo-positives go
    both ways, as in its public code; App. A.4 prints one. Matches are weighted by `variance_heads.balanced`, and b
    follows the share of matches of a minibatch, see `variance_heads.MatchingLogit`.
    """

    name = "pcmepp"
    config_class = PCMEPPConfig

    config: PCMEPPConfig

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """Settings for data of a few hundred pairs."""
        return {"hidden": 64, "epochs": 30, "batch_size": 64}

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        logit = MatchingLogit(self.config.scale, self.config.shift)

        def loss(heads: VarianceHeads, batch: LinkBatch, links: Links) -> Terms:
            images, labels = batch.image, batch.labels.float()
            if heads.training and self.config.mixed_share:
                images, labels = mixed(images, labels, self.config.mixed_share)
            return self._terms(heads.scaled("image", images), heads.scaled("text", batch.text), labels, logit)

        return variance_heads.fit(pairs, validation, run, self.config, loss, logit=logit, similarity=_similarity)

    def _terms(
        self, image: objectives.Moments, text: objectives.Moments, labels: torch.Tensor, logit: MatchingLogit
    ) -> Terms:
        config = self.config
        weights = balanced(labels)
        matching = functools.partial(objectives.csd_matching, scale=logit.scale, shift=logit.shift_for(labels, weights))
        labels = labels.clamp(config.smoothing, 1 - config.smoothing)
        match = matching(image, text, labels=labels, weights=weights)
        pseudo = matching(image, text, labels=labels, weights=weights, pseudo_positives=True)
        pseudo = pseudo + matching(text, image, labels=labels.T, weights=weights.T, pseudo_positives=True)
        bottleneck = objectives.bottleneck(image) + objectives.bottleneck(text)
        total = match + 0.5 * config.pseudo_weight * pseudo
        if config.weighting == "as_coded":
            total = 2 * total
        total = total + config.bottleneck_weight * bottleneck
        return {"loss": total, "match": match, "pseudo_match": 0.5 * pseudo, "bottleneck": bottleneck}

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        return variance_heads.build(dim, self.config)

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        return variance_heads.predict(self.module_, batch)


def _similarity(image: objectives.Moments, text: objectives.Moments) -> torch.Tensor:
    return -objectives.sampled_distance(image, text)


def mixed(images: torch.Tensor, labels: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A share of the images mixed with their mirror image in the minibatch, and the labels that go with it.

    Args:
        images: (B, D) embeddings.
        labels: (B, B) labels.
        share: How many images are mixed, on average.
    """
    rows = len(images)
    weight = torch.distributions.Beta(2.0, 2.0).sample((rows, 1)).to(images)
    weight = torch.where(torch.rand(rows, 1).to(images) < share, weight, torch.ones_like(weight))
    blend = weight * images + (1 - weight) * images.flip(0)
    length = weight * images.norm(dim=1, keepdim=True) + (1 - weight) * images.flip(0).norm(dim=1, keepdim=True)
    blend = blend * (length / blend.norm(dim=1, keepdim=True).clamp_min(1e-12))
    return blend, weight * labels + (1 - weight) * labels.flip(0)
