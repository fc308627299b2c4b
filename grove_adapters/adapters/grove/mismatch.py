"""How far apart partners are, as a function of the latent that one of them alone is explained by."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from grove_adapters.adapters.grove.gp import SparseGP
from grove_adapters.adapters.grove.inference import blocks

RIDGES = tuple(10.0 ** (step / 2) for step in range(-10, 9))  # shares of the mean eigenvalue
SMALLEST = 1e-12  # squared distance; a partner that is the item itself still has a logarithm


class Mismatch(torch.nn.Module):
    """Log mean squared distance of an item to its partners, in nats, as a function of its latent x.

    A Gaussian process regression in the space of the features r(x) = L⁻¹ k(V, x) of the modality's own decoder: mean
    m + wᵀ (r(x) − r̄) with w by ridge, whose strength leaves the smallest leave-one-out error. What is learned is
    how much of the noise between modalities varies over the latent space: the partners of a vague caption lie further
    from it than those of a precise one, whatever decodes either.

    Args:
        n_inducing: M.

    Attributes:
        weights: w, (M,).
        centre: r̄, (M,).
        level: m.
        spread: Standard deviation of the regression over the fitted items; 0 where nothing varies.
    """

    def __init__(self, n_inducing: int) -> None:
        super().__init__()
        self.register_buffer("weights", torch.zeros(n_inducing, dtype=torch.float64))
        self.register_buffer("centre", torch.zeros(n_inducing, dtype=torch.float64))
        self.register_buffer("level", torch.zeros((), dtype=torch.float64))
        self.register_buffer("spread", torch.zeros((), dtype=torch.float64))

    weights: torch.Tensor
    centre: torch.Tensor
    level: torch.Tensor
    spread: torch.Tensor

    @torch.no_grad()
    def learn(self, gp: SparseGP, latents: torch.Tensor, distances: torch.Tensor) -> None:
        """Fit to items at latents (R, L), whose mean squared distances to their partners are (R,)."""
        features = _features(gp, latents)
        target = distances.double().clamp_min(SMALLEST).log()
        found = ridge(features, target)
        self.weights.copy_(found.weights)
        self.centre.copy_(features.mean(0))
        self.level.copy_(target.mean())
        self.spread.copy_((features @ found.weights).std(correction=0))

    @torch.no_grad()
    def forward(self, gp: SparseGP, latents: torch.Tensor) -> torch.Tensor:
        """Regression at latents (B, L), (B,) float64."""
        return self.level + (_features(gp, latents) - self.centre) @ self.weights

    def standardised(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the regression in standard deviations over the fitted items, within ±3; 0 where nothing varies."""
        if not float(self.spread):
            return torch.zeros_like(values)
        return ((values - self.level) / self.spread).clamp(-3, 3)


class Ridge(NamedTuple):
    """Weights (M,) and the mean squared leave-one-out error that chose their ridge."""

    weights: torch.Tensor
    error: float


def ridge(features: torch.Tensor, target: torch.Tensor) -> Ridge:
    """Ridge regression on centred (R, M) features, of the strength with the smallest leave-one-out error.

    The error of leaving row n out is (y_n − ŷ_n) / (1 − h_n), h the diagonal of the hat matrix, intercept included
    (Golub, Heath and Wahba 1979, PRESS), so that every strength costs two matrix–vector products after one
    eigendecomposition. A single row gives weights of 0.
    """
    features, target = features - features.mean(0), target - target.mean()
    n = len(target)
    if n < 2:
        return Ridge(features.new_zeros(features.shape[1]), float("inf"))
    values, axes = torch.linalg.eigh(features.T @ features)
    values = values.clamp_min(0)
    turned = features @ axes
    along, squares = turned.T @ target, turned.square()
    unit = values.mean().clamp_min(torch.finfo(values.dtype).tiny)

    def left_out(strength: float) -> float:
        shrunk = 1 / (values + strength * unit)
        residual = target - turned @ (along * shrunk)
        return float((residual / (1 - 1 / n - squares @ shrunk).clamp_min(1e-6)).square().mean())

    best = _smallest(left_out)
    return Ridge(axes @ (along / (values + best * unit)), left_out(best))


def _smallest(error: Callable[[float], float]) -> float:
    return min(RIDGES, key=error)


def _features(gp: SparseGP, latents: torch.Tensor) -> torch.Tensor:
    """(B, M) features, in blocks of one size, so that no row depends on how many there are."""
    factor = gp.factor()
    return torch.cat([gp.features(x, factor) for x in blocks(latents)])[: len(latents)]
