"""Shapes that the covariance S_d of a whitened variational Gaussian q(w_d) = N(m_d, S_d) may have."""

from __future__ import annotations

import abc

import torch


class Covariance(torch.nn.Module, abc.ABC):
    """S_d = F_d F_dᵀ for D outputs, with the few things that a sparse GP asks of it.

    Attributes:
        root: F, whatever of it is stored.
    """

    root: torch.nn.Parameter

    def __init__(self, n_inducing: int, dim: int) -> None:
        super().__init__()
        self.n_inducing, self.dim = n_inducing, dim

    @abc.abstractmethod
    def spread(self, features: torch.Tensor) -> torch.Tensor:
        """rᵀ S_d r for features (B, M): (B, D), or (B, 1) where all outputs share it."""

    @abc.abstractmethod
    def total(self) -> torch.Tensor:
        """Σ_d S_d, (M, M) float64."""

    @abc.abstractmethod
    def divergence(self) -> torch.Tensor:
        """Σ_d [tr S_d − M − log det S_d] / 2, the covariances' part of KL(q ‖ p), in nats."""

    @abc.abstractmethod
    def set_optimal(self, precision: torch.Tensor) -> None:
        """Set every S_d to the member of the family nearest to the inverse of `precision` (M, M) by that divergence."""

    @abc.abstractmethod
    def natural_step(self, gradient: torch.Tensor, share: float) -> None:
        """F ← F (I − G) with G the `share` of Fᵀ ∇_F that has the shape of F, its diagonal halved and cut to norm ½."""


class FullCovariance(Covariance):
    """Any covariance, its lower triangular factor shared by the outputs or one for each.

    Whatever changes the factor leaves zeros above its diagonal, so nobody need look there.

    Args:
        n_inducing: M.
        dim: D.
        shared: One factor, M² numbers, instead of D of them.
    """

    def __init__(self, n_inducing: int, dim: int, *, shared: bool) -> None:
        super().__init__(n_inducing, dim)
        identity = torch.eye(n_inducing)
        self.root = torch.nn.Parameter(identity if shared else identity.repeat(dim, 1, 1))

    def spread(self, features: torch.Tensor) -> torch.Tensor:
        """rᵀ S_d r for features (B, M): (B, D), or (B, 1) where all outputs share it."""
        square = (features @ self.root).square().sum(-1)
        return square[:, None] if square.ndim == 1 else square.T

    def total(self) -> torch.Tensor:
        """Σ_d S_d, (M, M) float64."""
        root = self.root.double()
        product = root @ root.mT
        return self.dim * product if product.ndim == 2 else product.sum(0)

    def divergence(self) -> torch.Tensor:
        """Σ_d [tr S_d − M − log det S_d] / 2, the covariances' part of KL(q ‖ p), in nats."""
        root = self.root.double().view(-1, self.n_inducing, self.n_inducing)
        log_det = 2 * root.diagonal(dim1=1, dim2=2).abs().log().sum()
        return 0.5 * (self.dim / len(root)) * (root.square().sum() - len(root) * self.n_inducing - log_det)

    @torch.no_grad()
    def set_optimal(self, precision: torch.Tensor) -> None:
        """Set every S_d to the inverse of `precision` (M, M)."""
        upper = torch.linalg.cholesky(precision.flip(0, 1)).flip(0, 1)  # precision = U Uᵀ, so F = U⁻ᵀ is lower
        identity = torch.eye(len(precision), dtype=precision.dtype, device=precision.device)
        self.root.copy_(torch.linalg.solve_triangular(upper.T, identity, upper=False))

    @torch.no_grad()
    def natural_step(self, gradient: torch.Tensor, share: float) -> None:
        """F ← F (I − G) with G the `share` of the lower triangle of Fᵀ ∇_F, diagonal halved and cut to norm ½."""
        root = self.root
        local = (root.mT @ gradient).tril_()
        local.diagonal(dim1=-2, dim2=-1).mul_(0.5)
        local.mul_(share if self.root.ndim == 2 else share * self.dim)
        local.div_((2 * local.flatten(-2).norm(dim=-1)).clamp_min(1.0)[..., None, None])
        self.root.copy_(root - root @ local)


class DiagonalCovariance(Covariance):
    """A variance for each inducing value of each output, M·D numbers: mean field.

    Args:
        n_inducing: M.
        dim: D.
    """

    def __init__(self, n_inducing: int, dim: int) -> None:
        super().__init__(n_inducing, dim)
        self.root = torch.nn.Parameter(torch.ones(n_inducing, dim))

    def spread(self, features: torch.Tensor) -> torch.Tensor:
        """rᵀ S_d r for features (B, M): (B, D)."""
        return features.square() @ self.root.square()

    def total(self) -> torch.Tensor:
        """Σ_d S_d, (M, M) float64."""
        return torch.diag(self.root.double().square().sum(1))

    def divergence(self) -> torch.Tensor:
        """Σ_d [tr S_d − M − log det S_d] / 2, the covariances' part of KL(q ‖ p), in nats."""
        square = self.root.double().square()
        return 0.5 * (square - 1 - square.log()).sum()

    @torch.no_grad()
    def set_optimal(self, precision: torch.Tensor) -> None:
        """Set every S_d to the inverse diagonal of `precision` (M, M)."""
        self.root.copy_(precision.diagonal().rsqrt()[:, None].expand_as(self.root))

    @torch.no_grad()
    def natural_step(self, gradient: torch.Tensor, share: float) -> None:
        """F ← F (I − G) with G half the `share` of F ∇_F, output by output, cut to norm ½."""
        local = 0.5 * share * self.dim * self.root * gradient
        self.root.sub_(self.root * local / (2 * local.norm(dim=0)).clamp_min(1.0))


def make_covariance(kind: str, n_inducing: int, dim: int) -> Covariance:
    """The shape that settings call ``"shared"``, ``"diagonal"`` or ``"per_dim"``."""
    if kind == "diagonal":
        return DiagonalCovariance(n_inducing, dim)
    return FullCovariance(n_inducing, dim, shared=kind == "shared")
