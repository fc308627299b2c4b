"""ProbVLM: frozen embeddings are reconstructed by residual networks that say how far off they expect to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.nn.functional import softplus

from grove_adapters import seeding
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.adapters.loop import LoopConfig, Terms, hold_out, minimise
from grove_adapters.embeddings import MODALITIES, Pairs
from grove_adapters.heads import mlp
from grove_adapters.objectives import generalized_gaussian_nll
from grove_adapters.posterior import GeneralizedGaussianEmbedding

SMALLEST_SHAPE, LARGEST_SHAPE = 0.5, 8.0
GAUSSIAN = math.log((2 - SMALLEST_SHAPE) / (LARGEST_SHAPE - 2))  # the logit at which β = 2, where networks start
SMALLEST_SCALE = 1e-3  # of α, relative to the standard deviation of a coordinate
SAMPLE = 4096  # links that decide constants of the networks
CHUNK = 1024  # held-out links looked at together


@dataclass(frozen=True, kw_only=True)
class ProbVLMConfig(LoopConfig):
    """Settings of ProbVLM; ``preset="paper"`` starts from those of its public code.

    Attributes:
        hidden: Width of the hidden layers before the residual connection.
        layers: Hidden layers before the residual connection.
        head_hidden: Width of the hidden layer of the three heads behind it; None is D, as published.
        dropout: Share of hidden units left out, in training and in the passes of a prediction. The public code trains
            with 0.05 or 0.1 and predicts with 0.3.
        passes: Networks with units left out whose means are compared for the epistemic variance; 0 leaves it out.
        l1_weight: T₁ of the mean absolute error.
        nll_weight: T₂ of the negative log likelihood.
        cross_weight: λ of both for the embedding of the *other* modality. The published 1e-4 leaves its part too small
            to be felt; at 1 the distribution of an item also has to reach what it is linked with.
        nll: ``"exact"``, or ``"as_published"``; see `objectives.generalized_gaussian_nll`.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "batch_size": 64,
            "learning_rate": 1e-4,
            "cross_weight": 1e-4,
            "nll": "as_published",
        },
    }

    hidden: int = 256
    layers: int = 2
    head_hidden: int | None = None
    dropout: float = 0.1
    passes: int = 15
    l1_weight: float = 1.0
    nll_weight: float = 0.05
    cross_weight: float = 1.0
    nll: Literal["exact", "as_published"] = "exact"

    def check(self) -> None:
        """Refuse settings out of range."""
        super().check()
        for name in ("hidden", "layers"):
            self.require(getattr(self, name) >= 1, name, "a whole number ≥ 1")
        self.require(self.head_hidden is None or self.head_hidden >= 1, "head_hidden", "a whole number ≥ 1 or None")
        self.require(0 <= self.dropout < 1, "dropout", "a share from 0 up to, not including, 1")
        self.require(self.passes == 0 or self.passes >= 2, "passes", "0, or a whole number ≥ 2")
        self.require(self.nll_weight > 0, "nll_weight", "a number > 0")
        for name in ("l1_weight", "cross_weight"):
            self.require(getattr(self, name) >= 0, name, "a number ≥ 0")


class ProbVLM(Adapter):
    """A generalized Gaussian in every dimension, from one residual network a modality.

    Minimised is L(I; z_I) + L(T; z_T) + λ (L(I; z_T) + L(T; z_I)) with L the weighted sum of the mean absolute error
    and the mean negative log likelihood. The aleatoric variance is α² Γ(3/β) / Γ(1/β); the epistemic one is the
    variance of the mean over networks with hidden units left out. A pass leaves out the same units for every item, so
    that items are compared by the same networks and a result doesn't depend on what else is in its batch.

    Source: ProbVLM (Upadhyay et al. 2023) and its public code. Deliberate differences: the density is the true one;
    α and β come from smooth, bounded outputs instead of ReLUs, which start out exactly zero for half the dimensions;
    inputs are standardised; total variance is the sum of both parts, where the public code multiplies them and mixes
    passes with rows.
    """

    name = "probvlm"
    config_class = ProbVLMConfig
    posterior_class = GeneralizedGaussianEmbedding

    config: ProbVLMConfig

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """Settings for data of a few hundred pairs."""
        return {"hidden": 32, "layers": 1, "head_hidden": 32, "epochs": 40, "batch_size": 64, "learning_rate": 3e-3}

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        pairs, validation = hold_out(pairs, validation, self.config.validation_share, run)
        module = self._build(pairs.dim, {})
        rows = torch.randperm(len(pairs), generator=seeding.generator(seeding.derive(run.seed, "start")))[:SAMPLE]
        for network, values in zip(module.values(), pairs.read(rows.numpy()), strict=True):
            assert isinstance(network, ResidualNetwork)
            network.standardise(values)
        module.to(run.device)

        def objective(rows: torch.Tensor) -> Terms:
            return self._terms(module, pairs, rows, run.device)

        validate = None if validation is None else self._validation(module, validation, run.device)
        minimise(objective, module, len(pairs), self.config, run, validate=validate)
        return module

    def _terms(self, module: torch.nn.ModuleDict, pairs: Pairs, rows: torch.Tensor, device: torch.device) -> Terms:
        config, targets = self.config, pairs.read(rows.numpy(), device)
        terms: Terms = {}
        for own, modality in enumerate(MODALITIES):
            location, scale, shape = module[modality](targets[own])
            for kind, target in (("intra", targets[own]), ("cross", targets[1 - own])):
                residual = location - target
                nll = generalized_gaussian_nll(residual, scale, shape, form=config.nll).mean()
                value = config.l1_weight * residual.abs().mean() + config.nll_weight * nll
                terms[f"{kind}_{modality}"] = value
        loss = sum(value * (config.cross_weight if name.startswith("cross") else 1) for name, value in terms.items())
        assert isinstance(loss, torch.Tensor)
        return {"loss": loss, **terms}

    def _validation(self, module: torch.nn.ModuleDict, validation: Pairs, device: torch.device) -> Callable[[], float]:
        """The objective of every held-out link."""

        def value() -> float:
            chunks = torch.arange(len(validation)).split(CHUNK)
            losses = [float(self._terms(module, validation, rows, device)["loss"]) * len(rows) for rows in chunks]
            return sum(losses) / len(validation)

        return value

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.ModuleDict:
        config = self.config
        shape = {"hidden": config.hidden, "layers": config.layers, "head_hidden": config.head_hidden or dim}
        return torch.nn.ModuleDict(
            {modality: ResidualNetwork(dim, **shape, dropout=config.dropout) for modality in MODALITIES}
        )

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        networks = self.module_
        assert isinstance(networks, torch.nn.ModuleDict)
        network = networks[batch.modality]
        assert isinstance(network, ResidualNetwork)
        location, scale, shape = network(batch.values)
        fields = {"location": location, "scale": scale, "shape": shape}
        if self.config.passes and self.config.dropout:
            seeds = [seeding.derive(batch.seed, "pass", number) for number in range(self.config.passes)]
            fields["epistemic"] = _variance(network.thinned(batch.values, seed) for seed in seeds)
        return fields


class ResidualNetwork(torch.nn.Module):
    """From (B, D) embeddings z to location, scale and shape of a generalized Gaussian in every dimension.

    Args:
        dim: D.
        hidden: Width of the hidden layers.
        layers: Hidden layers before the residual connection.
        head_hidden: Width of the hidden layer of each head.
        dropout: Share of hidden units that training leaves out.
    """

    centre: torch.Tensor
    spread: torch.Tensor

    def __init__(self, dim: int, *, hidden: int, layers: int, head_hidden: int, dropout: float) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(dim))
        self.register_buffer("spread", torch.ones(()))
        self.trunk = mlp(dim, hidden, dim, layers=layers, dropout=dropout)
        self.location, self.scale, self.shape = (mlp(dim, head_hidden, dim, layers=1) for _ in range(3))

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, D) locations, scales > 0 and shapes from `SMALLEST_SHAPE` to `LARGEST_SHAPE`."""
        inner = (values - self.centre) / self.spread
        inner = inner + self.trunk(inner)
        scale = self.spread * (softplus(self.scale(inner)) + SMALLEST_SCALE)
        shape = SMALLEST_SHAPE + (LARGEST_SHAPE - SMALLEST_SHAPE) * torch.sigmoid(self.shape(inner) + GAUSSIAN)
        return self._placed(inner), scale, shape

    def thinned(self, values: torch.Tensor, seed: int) -> torch.Tensor:
        """(B, D) locations by the network without the hidden units that `seed` draws."""
        start = inner = (values - self.centre) / self.spread
        random = seeding.generator(seed)
        for layer in self.trunk:
            if isinstance(layer, torch.nn.Dropout):
                kept = torch.rand(inner.shape[1], generator=random) >= layer.p
                inner = inner * (kept / (1 - layer.p)).to(inner)
            else:
                inner = layer(inner)
        return self._placed(start + inner)

    def _placed(self, inner: torch.Tensor) -> torch.Tensor:
        return self.centre + self.spread * self.location(inner)

    @torch.no_grad()
    def standardise(self, values: torch.Tensor) -> None:
        """Centre inputs at the mean of a (B, D) sample and scale them to a variance of 1, averaged over dimensions."""
        self.centre.copy_(values.mean(0))
        self.spread.fill_(float(values.var(0, correction=0).mean().sqrt()) or 1.0)


def _variance(values: Any) -> torch.Tensor:
    """Unbiased variance over an iterable of equal shapes, holding three of them at a time."""
    mean, square, n = torch.zeros(()), torch.zeros(()), 0
    for n, value in enumerate(values, start=1):
        step = value - mean
        mean = mean + step / n
        square = square + step * (value - mean)
    return square / (n - 1)
