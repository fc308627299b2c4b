"""Probabilistic face embeddings: variances that make linked embeddings likely to be one and the same point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from grove_adapters import objectives
from grove_adapters.adapters import variance_heads
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.adapters.loop import Terms
from grove_adapters.adapters.variance_heads import LinkBatch, Links, VarianceHeads, VarianceHeadsConfig, balanced
from grove_adapters.embeddings import Pairs


@dataclass(frozen=True, kw_only=True)
class PFEConfig(VarianceHeadsConfig):
    """Settings of PFE.

    Attributes:
        means: ``"frozen"`` or ``"centred"``. A likelihood without negatives is not led astray by the modality gap.
        form: Of the mutual likelihood loss, see `objectives.mutual_likelihood_loss`.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {**variance_heads.PAPER, "form": "as_published"},
    }

    means: Literal["centred", "frozen"] = "frozen"
    learning_rate: float = 3e-4
    form: Literal["exact", "as_published"] = "exact"


class PFE(Adapter):
    """Frozen embeddings as means, and variances that maximise the mutual likelihood score of matching pairs.

    Positives are the linked pairs of a minibatch and, where classes or further positives are known, every pair of it
    that they join, weighted so that each item counts about alike. There are no negatives.

    Source: PFE (Shi and Jain 2019) as GroVE, Appendix A.2, carries it over to image and text.
    """

    name = "pfe"
    config_class = PFEConfig

    config: PFEConfig

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """Settings for data of a few hundred pairs."""
        return {"hidden": 64, "epochs": 30, "batch_size": 64}

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        return variance_heads.fit(pairs, validation, run, self.config, self._loss)

    def _loss(self, heads: VarianceHeads, batch: LinkBatch, links: Links) -> Terms:
        image, text = heads.scaled("image", batch.image), heads.scaled("text", batch.text)
        i, j = batch.labels.nonzero(as_tuple=True)
        one, other = (image[0][i], image[1][i]), (text[0][j], text[1][j])
        weights = balanced(batch.labels)[i, j]
        return {"loss": objectives.mutual_likelihood_loss(one, other, weights=weights, form=self.config.form)}

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        return variance_heads.build(dim, self.config)

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        return variance_heads.predict(self.module_, batch)
