"""The baseline without a posterior of its own: how far is the nearest thing of the other modality?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.config import Config
from grove_adapters.embeddings import MODALITIES, Pairs, as_float32

SMALLEST_DISTANCE = 1e-6  # squared; an embedding that is in the reference still gets a variance > 0


@dataclass(frozen=True, kw_only=True)
class DeterministicConfig(Config):
    """Settings of the deterministic baseline.

    Attributes:
        reference_size: Embeddings of each modality kept as the reference, drawn at random from the fitted ones.
    """

    reference_size: int = 2048

    def check(self) -> None:
        """Refuse an empty reference."""
        self.require(self.reference_size >= 1, "reference_size", "a whole number ≥ 1")


class Deterministic(Adapter):
    """Frozen embeddings as they are, with 1 − max similarity as their uncertainty.

    The mean is the frozen embedding, and the variance is isotropic with Σσ² equal to the squared distance 2(1 − cos)
    between the unit vectors of the item and of its nearest reference embedding of the other modality. The uncertainty
    is 1 − max cos. A reader that holds a gallery replaces it by 1 − max similarity to that gallery, since
    `gallery_aware` is set.

    Source: the "deterministic" rows of GroVE (Tables 1–2) use the distance of the *true* pair, which reads the answer;
    that form exists in `tasks.retrieve` by name only.
    """

    name = "deterministic"
    config_class = DeterministicConfig
    gallery_aware = True

    config: DeterministicConfig

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        random = np.random.default_rng(run.seed)
        module = torch.nn.Module()
        for embeddings in (pairs.images, pairs.texts):
            size = min(self.config.reference_size, len(embeddings))
            rows = np.sort(random.choice(len(embeddings), size, replace=False))
            reference = torch.nn.functional.normalize(as_float32(embeddings.values[rows]), dim=1)
            module.register_buffer(embeddings.modality, reference)
        return module

    def _facts(self) -> dict[str, Any]:
        return {modality: len(self.module_.get_buffer(modality)) for modality in MODALITIES}

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        module = torch.nn.Module()
        for modality in MODALITIES:
            module.register_buffer(modality, torch.empty(facts[modality], dim))
        return module

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        other = self.module_.get_buffer("text" if batch.modality == "image" else "image")
        nearest = (torch.nn.functional.normalize(batch.values, dim=1) @ other.T).amax(1)
        distance = (2 * (1 - nearest)).clamp_min(SMALLEST_DISTANCE)
        variance = distance[:, None] / batch.values.shape[1]
        return {"mean": batch.values, "variance": variance, "uncertainty": 1 - nearest}
