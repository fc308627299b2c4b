"""The natural-gradient optimiser of the variational distributions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from grove_adapters.adapters.grove.gp import SparseProcess, cholesky


class NaturalGradient(torch.optim.Optimizer):
    """Natural-gradient steps of every q(u), which know the scale of their own problem and so need no tuned rate.

    Given the other modality the objective is quadratic in m with curvature T = I + (N/B) Σ τₙ rₙ rₙᵀ, kept as a running
    mean over minibatches, and m takes a share of a Newton step: m ← m − ρ T⁻¹ ∇. The factor F of S takes the
    natural-gradient step in its own coordinates, F ← F (I − ρ G / (1 + κ)) with G the lower triangle of Fᵀ ∇_F and its
    diagonal halved. The Fisher metric does not know the alignment, whose curvature is bounded by κ: without it a strong
    alignment makes the two S swing against each other. The step is cut to norm 1/2, so S stays positive definite.
    ρ = rate · min(1, B / M).

    Args:
        gps: The processes whose `mean` and `covariance` are optimised, by name.
        n_rows: N, the number of links.
        dim: D, by which the objective is divided as it is by N.
        rate: ρ of a minibatch of at least M links, in (0, 1].

    Source: Hensman, Fusi and Lawrence 2013 (stochastic variational inference for GPs); Lin, Nielsen, Khan and Schmidt
    2021 (local coordinates for triangular factors). GroVE uses Adam, whose rate of 1e-5 moves nothing.
    """

    def __init__(self, gps: Mapping[str, SparseProcess], n_rows: int, dim: int, rate: float) -> None:
        owned = [parameter for gp in gps.values() for parameter in (gp.mean, gp.covariance.root)]
        super().__init__(owned, {"rate": rate})
        self._gps = dict(gps)
        self._n_rows = n_rows
        self._dim = dim
        self._rate = rate
        self._share: dict[str, float] = {}
        self._stiffness: dict[str, float] = {}

    @torch.no_grad()
    def observe(
        self,
        name: str,
        features: torch.Tensor,
        variance: torch.Tensor,
        mean_weights: torch.Tensor,
        variance_weights: torch.Tensor,
    ) -> None:
        """Take note of a minibatch.

        Args:
            name: Whose.
            features: (B, M) r.
            variance: (B, 1) or (B, D) v.
            mean_weights: (B,) τ, second derivative of a link's objective by one output's mean.
            variance_weights: (B,) second derivative by log v, per output, of whatever in a link's objective is not
                linear in v.
        """
        gp, (batch, n_inducing) = self._gps[name], features.shape
        scale = self._n_rows / batch
        features = features.float()
        curvature = ((features.T * (scale * mean_weights).float()) @ features).double()
        curvature.diagonal().add_(1)
        self._share[name] = self._rate * min(1.0, batch / n_inducing)
        memory = self.state[gp.mean]
        if "curvature" in memory:
            memory["curvature"].lerp_(curvature, self._share[name])
        else:
            memory["curvature"] = curvature
        # ∂ log v / ∂E = 2 h hᵀ / v in local coordinates, h = Fᵀ r; row sums of (hᵢᵀ hⱼ)² / vᵢ vⱼ bound eigenvalues
        reached = gp.covariance.spread(features) / variance
        rows = (reached * (variance_weights[:, None] * reached).sum(0)).amax()
        self._stiffness[name] = float(4 * scale * rows)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step from the gradients of the objective per link and dimension."""
        for name, gp in self._gps.items():
            assert gp.mean.grad is not None
            assert gp.covariance.root.grad is not None
            curvature = self.state[gp.mean]["curvature"]
            factor, _ = cholesky(curvature, what=f"{name} curvature of the variational means")
            newton = torch.cholesky_inverse(factor).float() @ gp.mean.grad
            gp.mean.sub_(newton, alpha=self._share[name] * self._n_rows * self._dim)
            share = self._share[name] * self._n_rows * (self._dim / gp.dim) / (1 + self._stiffness[name])
            gp.covariance.natural_step(gp.covariance.root.grad, share)
