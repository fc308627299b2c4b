"""Covariance functions of the latent space, with the derivatives that second-order latent inference needs."""

from __future__ import annotations

import torch


class RBF(torch.nn.Module):
    """k(x, y) = s² exp(−‖x − y‖² / 2ℓ²), isotropic, with learned output scale s² and length scale ℓ.

    Everything is computed in float64, because what follows is a Cholesky factor.

    Source: GroVE, section 3.2; its printed Eq. 14 leaves out the square and the 1/2 (erratum E2). The output scale is
    not in the paper, but normalised D-dim embeddings have a variance near 1/D and no unit-variance GP fits them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_lengthscale = torch.nn.Parameter(torch.zeros(()))
        self.log_scale = torch.nn.Parameter(torch.zeros(()))

    @property
    def scale(self) -> torch.Tensor:
        """s² = k(x, x), float64."""
        return self.log_scale.double().exp()

    @property
    def precision(self) -> torch.Tensor:
        """1/ℓ², float64."""
        return (-2 * self.log_lengthscale.double()).exp()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(B, M) float64 covariances of points x (B, L) and y (M, L)."""
        x, y = x.double(), y.double()
        square = x.square().sum(1, keepdim=True) - 2 * x @ y.T + y.square().sum(1)
        return self.scale * torch.exp(-0.5 * self.precision * square.clamp_min(0))

    def slopes(self, covariances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second derivative factors from the covariances themselves.

        Args:
            covariances: What `forward` gave for x and y.

        Returns:
            (B, M) a and b such that ∇ₓk = a (x − y) and ∇²ₓk = a I + b (x − y)(x − y)ᵀ, a form that every stationary
            isotropic kernel has.
        """
        first = -self.precision * covariances
        return first, -self.precision * first
