"""ProLIP's objective on frozen embeddings: variances that match, and that include what they are less specific than."""

from __future__ import annotations

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
from grove_adapters.embeddings import MODALITIES, Pairs


@dataclass(frozen=True, kw_only=True)
class ProLIPConfig(VarianceHeadsConfig):
    """Settings of ProLIP.

    Attributes:
        scale: Where a of the logits starts; 10 in the paper, see `scale_rate`.
        shift: Where b starts; −10 in the paper. None: where as many matches are expected as there are.
        inclusion_weight: α₁ of "the text includes the image".
        partial_weight: α₂ of "a partial view includes the whole", for images and texts with stored views.
        partial_share: Share of a minibatch for which a view is read.
        log_epsilon: ε of the inclusion loss, a logarithm.
        sharpness: c of the inclusion loss.
        form: Of the inclusion test, see `objectives.inclusion`.
        bottleneck_weight: β of the information bottleneck.
        bottleneck_form: ``"as_coded"`` puts log σ where log σ² belongs, see `objectives.bottleneck`.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "means": "frozen",
            "covariance": "diagonal",
            "scale": 10.0,
            "shift": -10.0,
            "epochs": 32,
            "batch_size": 512,
            "learning_rate": 5e-4,
            "scale_rate": 5e-4,
            "weight_decay": 0.2,
            "log_epsilon": -20.0,
            "sharpness": 1000.0,
            "form": "as_published",
            "validation_share": 0.0,
        }
    }

    scale: float = 3.0
    shift: float | None = None
    inclusion_weight: float = 1e-7
    partial_weight: float = 1e-3
    partial_share: float = 0.125
    log_epsilon: float = -100.0
    sharpness: float = 10.0
    form: Literal["exact", "as_published"] = "exact"
    bottleneck_weight: float = 1e-4
    bottleneck_form: Literal["exact", "as_coded"] = "exact"

    def check(self) -> None:
        """Refuse settings out of range."""
        super().check()
        for name in ("scale", "sharpness"):
            self.require(getattr(self, name) > 0, name, "a number > 0")
        for name in ("inclusion_weight", "partial_weight", "bottleneck_weight"):
            self.require(getattr(self, name) >= 0, name, "a number ≥ 0")
        self.require(0 < self.partial_share <= 1, "partial_share", "a share above 0 and up to 1")
        self.require(self.log_epsilon <= 0, "log_epsilon", "a number ≤ 0")


class ProLIP(Adapter):
    """Frozen embeddings as means, and variances learned by the pairwise sigmoid loss and the inclusion loss.

    The partial inputs are the store's views (crops of images, texts with words left out); without stored views that
    term is left out, and the report says so.

    Source: ProLIP (Chun et al. 2025), Eq. 6, as an adapter on a frozen model; the inclusion test is the exact one.
    The paper trains the means as well, for which frozen embeddings have no room. Matches are weighted by
    `variance_heads.balanced`, and b follows the share of matches of a minibatch, see `variance_heads.MatchingLogit`.
    """

    name = "prolip"
    config_class = ProLIPConfig

    config: ProLIPConfig

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """Settings for data of a few hundred pairs."""
        return {"hidden": 64, "epochs": 30, "batch_size": 64}

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        logit = MatchingLogit(self.config.scale, self.config.shift)
        for part in (pairs.images, pairs.texts):
            if not part.n_views and self.config.partial_weight:
                run.report.warnings.append(
                    f"{part.modality} embeddings have no stored views, so nothing says that a partial {part.modality} "
                    "is less certain than a whole one; extract the store with views=10"
                )

        def loss(heads: VarianceHeads, batch: LinkBatch, links: Links) -> Terms:
            return self._terms(heads, batch, links, logit)

        return variance_heads.fit(pairs, validation, run, self.config, loss, logit=logit, similarity=_similarity)

    def _terms(self, heads: VarianceHeads, batch: LinkBatch, links: Links, logit: MatchingLogit) -> Terms:
        config = self.config
        image, text = heads.scaled("image", batch.image), heads.scaled("text", batch.text)
        test: dict[str, Any] = {
            "log_epsilon": config.log_epsilon,
            "sharpness": config.sharpness,
            "form": config.form,
        }
        weights = balanced(batch.labels)
        shift = logit.shift_for(batch.labels, weights)
        match = objectives.sigmoid_pairwise(
            image, text, scale=logit.scale, shift=shift, labels=batch.labels, weights=weights
        )
        inclusion = objectives.inclusion_loss(image, text, **test)
        form = config.bottleneck_form
        bottleneck = objectives.bottleneck(image, form=form) + objectives.bottleneck(text, form=form)
        partial = match.new_zeros(())
        first = slice(0, max(1, round(config.partial_share * len(batch.rows))))
        rows = batch.rows[first]
        for modality, whole, part in zip(
            MODALITIES, (image, text), (links.pairs.images, links.pairs.texts), strict=True
        ):
            if part.n_views and config.partial_weight:
                which = torch.randint(part.n_views, (len(rows),))
                view = heads.scaled(modality, links.views(modality, rows, which))
                partial = partial + objectives.inclusion_loss((whole[0][first], whole[1][first]), view, **test)
        total = match + config.inclusion_weight * inclusion + config.partial_weight * partial
        total = total + config.bottleneck_weight * bottleneck
        return {
            "loss": total,
            "match": match,
            "text_includes_image": inclusion,
            "partial_includes_whole": partial,
            "bottleneck": bottleneck,
        }

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        return variance_heads.build(dim, self.config)

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        return variance_heads.predict(self.module_, batch)


def _similarity(image: objectives.Moments, text: objectives.Moments) -> torch.Tensor:
    return 1 - 0.5 * objectives.sampled_distance(image, text)
