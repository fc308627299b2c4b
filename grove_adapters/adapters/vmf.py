"""Directional posteriors: how concentrated on the unit sphere is what an item could mean?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch.nn.functional import normalize

from grove_adapters import seeding
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.adapters.loop import LoopConfig, Terms, hold_out, minimise
from grove_adapters.adapters.variance_heads import LinkBatch, Links
from grove_adapters.embeddings import MODALITIES, Modality, Pairs
from grove_adapters.errors import InputError
from grove_adapters.heads import bounded, mlp
from grove_adapters.objectives import symmetric_cross_entropy
from grove_adapters.posterior import DirectionalEmbedding, PowerSphericalEmbedding, VonMisesFisherEmbedding

LOWEST, HIGHEST = math.log(1e-2), math.log(1e5)  # log concentrations
POINT = 1e5  # concentration of a side that has no head
SAMPLE = 4096  # links that decide constants of the heads


@dataclass(frozen=True, kw_only=True)
class DirectionalConfig(LoopConfig):
    """Settings of the directional adapters.

    Attributes:
        sides: Which modality is uncertain: ``"text"`` as published, ``"image"`` or ``"both"``. The other one is a
            point, with a concentration of 1e5 and the same uncertainty for every item.
        hidden: Width of the hidden layers.
        layers: Hidden layers.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "sides": "text",
            "hidden": 1024,
            "layers": 3,
            "epochs": 200,
            "batch_size": 2048,
            "weight_decay": 5e-4,
            "validation_share": 0.0,
        },
    }

    sides: Literal["text", "image", "both"] = "both"
    hidden: int = 256
    layers: int = 2
    weight_decay: float = 1e-2

    def check(self) -> None:
        """Refuse settings out of range."""
        super().check()
        self.require(self.hidden >= 1, "hidden", "a whole number ≥ 1")
        self.require(self.layers >= 0, "layers", "a whole number ≥ 0")


class Directional(Adapter):
    """A law on the unit sphere about each item, fitted to tell matches from mismatches.

    An uncertain item j has log likelihood ℓ_ij = log p(x_i; μ_j, κ_j) of the frozen unit vectors x_i of the other
    modality, in which one network makes κ_j μ_j. Minimised is the symmetric cross-entropy of τ ℓ over the minibatch,
    with a learned temperature τ; further true matches in a minibatch count as right answers too. The mean direction is
    learned as well, because with the frozen one an item that has drifted towards the mean of its modality needs a large
    κ to tell its match from the rest: on `datasets.synthetic` such concentrations rank the known noise the wrong way
    round (Spearman −.4 to −.6), while these are right (.8). `tasks.retrieve` can still rank by the backbone.

    Source: AsymVLM (Ju et al. 2025, "Exploiting the Asymmetric Uncertainty Structure of Pre-trained VLMs on the Unit
    Hypersphere"). Deliberate differences: by default both modalities are uncertain; the normaliser of the von
    Mises–Fisher law is exact instead of an approximation; inputs are standardised; τ is kept positive and κ bounded;
    AdamW takes the place of momentum SGD.
    """

    config_class = DirectionalConfig
    posterior_class: ClassVar[type[DirectionalEmbedding]]

    config: DirectionalConfig

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """Settings for data of a few hundred pairs."""
        return {"hidden": 64, "layers": 1, "epochs": 30, "batch_size": 64}

    @final
    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        if pairs.dim < 2:
            raise InputError(f"{self.name} expected embeddings of at least 2 dimensions, got 1; a sphere needs two")
        pairs, validation = hold_out(pairs, validation, self.config.validation_share, run)
        links, module = Links(pairs, run.device), self._build(pairs.dim, {})
        sample = links.sample(SAMPLE, seeding.derive(run.seed, "start"))
        for side, head in module.items():
            assert isinstance(head, Head)
            head.standardise((sample.image if side == "image" else sample.text).cpu())
        module.to(run.device)

        def objective(rows: torch.Tensor) -> Terms:
            return self._terms(module, links.batch(rows))

        validate = None
        if validation is not None:
            held_out = Links(validation, run.device)

            def validate() -> float:
                batches = held_out.sweep(self.config.batch_size)
                return sum(float(self._terms(module, x)["loss"]) * len(x.rows) for x in batches) / len(held_out)

        minimise(objective, module, len(pairs), self.config, run, validate=validate)
        run.report.facts = {
            side: {"temperature": float(head.log_temperature.detach().exp())}
            for side, head in module.items()
            if isinstance(head, Head)
        }
        return module

    def _terms(self, module: torch.nn.ModuleDict, batch: LinkBatch) -> Terms:
        law, values = self.posterior_class.law, {"image": batch.image, "text": batch.text}

        def logits(points: torch.Tensor, *items: torch.Tensor) -> torch.Tensor:
            direction, concentration, normaliser, log_temperature = items
            cosine = (points @ direction.T).clamp(-1, 1)
            return log_temperature.exp() * (law.log_kernel(cosine, concentration) + normaliser)

        terms: Terms = {}
        for side, head in module.items():
            assert isinstance(head, Head)
            direction, concentration = head(values[side])
            normaliser = law.log_normaliser(concentration, direction.shape[1])
            terms[side] = symmetric_cross_entropy(
                [normalize(values[_other(side)], dim=1)],
                [direction, concentration, normaliser],
                logits,
                shared=[head.log_temperature],
                labels=batch.labels if side == "text" else batch.labels.T,  # rows are the other modality
            )
        return {"loss": torch.stack(list(terms.values())).sum(), **terms}

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.ModuleDict:
        config = self.config
        sides = MODALITIES if config.sides == "both" else (config.sides,)
        return torch.nn.ModuleDict({side: Head(dim, hidden=config.hidden, layers=config.layers) for side in sides})

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        heads = self.module_
        assert isinstance(heads, torch.nn.ModuleDict)
        if batch.modality not in heads:
            point = torch.full_like(batch.values[:, 0], POINT)
            return {"direction": normalize(batch.values, dim=1), "concentration": point}
        direction, concentration = heads[batch.modality](batch.values)
        return {"direction": direction, "concentration": concentration}


@final
class VonMisesFisher(Directional):
    """Each item as a von Mises–Fisher law; see `Directional`."""

    name = "vmf"
    posterior_class = VonMisesFisherEmbedding


@final
class PowerSpherical(Directional):
    """Each item as a Power Spherical law, whose density is polynomial in the cosine; see `Directional`."""

    name = "power_spherical"
    posterior_class = PowerSphericalEmbedding


class Head(torch.nn.Module):
    """From (B, D) embeddings to (B, D) unit mean directions μ and (B,) concentrations κ, by one network for κμ.

    Args:
        dim: D.
        hidden: Width of the hidden layers.
        layers: Hidden layers.
    """

    centre: torch.Tensor
    spread: torch.Tensor

    def __init__(self, dim: int, *, hidden: int, layers: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(dim))
        self.register_buffer("spread", torch.ones(()))
        self.mlp = mlp(dim, hidden, dim, layers=layers)
        self.log_temperature = torch.nn.Parameter(torch.zeros(()))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean directions and concentrations in (0.01, 1e5)."""
        output = self.mlp((values - self.centre) / self.spread)
        log = (output.square().sum(1) + torch.finfo(output.dtype).tiny).log() / 2
        return normalize(output, dim=1), bounded(log, LOWEST, HIGHEST).exp()

    @torch.no_grad()
    def standardise(self, values: torch.Tensor) -> None:
        """Centre inputs at the mean of a (B, D) sample and scale them to a variance of 1, averaged over dimensions."""
        self.centre.copy_(values.mean(0))
        self.spread.fill_(float(values.var(0, correction=0).mean().sqrt()) or 1.0)


def _other(modality: str) -> Modality:
    return "text" if modality == "image" else "image"
