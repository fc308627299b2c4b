"""Covariance functions of the latent space, with the derivatives that second-order latent inference needs."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

SMALLEST_DISTANCE = 1e-6  # in length scales; keeps the square root of a zero distance differentiable


class Local(Protocol):
    """One kernel between points x (B, L) and y (M, L), with its derivatives in x."""

    @property
    def value(self) -> torch.Tensor:
        """(B, M) float64 covariances."""

    def slopes(self) -> torch.Tensor:
        """(B, L, M) gradients ∇ₓ k(x, y)."""

    def pull(self, weights: torch.Tensor) -> torch.Tensor:
        """(B, L) sums Σₘ wₘ ∇ₓ k(x, yₘ) for weights (B, M), without a (B, L, M) tensor."""

    def bend(self, weights: torch.Tensor) -> torch.Tensor:
        """(B, L, L) sums Σₘ wₘ ∇²ₓ k(x, yₘ) for weights (B, M)."""


class Kernel(torch.nn.Module, abc.ABC):
    """k(x, y) with k(x, x) = s² everywhere and learned output scale s².

    Everything is computed in float64, because what follows is a Cholesky factor. The output scale is not in the GroVE
    paper, but normalised D-dim embeddings have a variance near 1/D and no unit-variance GP fits them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = torch.nn.Parameter(torch.zeros(()))

    @property
    def scale(self) -> torch.Tensor:
        """s² = k(x, x), float64."""
        return self.log_scale.double().exp()

    @property
    @abc.abstractmethod
    def reach(self) -> torch.Tensor:
        """The shortest distance over which k changes much, the unit of steps in latent space."""

    @abc.abstractmethod
    def start(self, distance: float) -> None:
        """Set the length scale, where there is one, from a typical distance between latents."""

    def facts(self) -> dict[str, Any]:
        """Learned numbers besides s², as JSON types."""
        return {}

    @abc.abstractmethod
    def local(self, x: torch.Tensor, y: torch.Tensor) -> Local:
        """Covariances of points x (B, L) and y (M, L), ready to be differentiated in x."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(B, M) float64 covariances of points x (B, L) and y (M, L)."""
        return self.local(x, y).value


class Stationary(Kernel):
    """s² φ(r²), with r the distance in length scales, one ℓ for all latent dimensions or one for each (ARD).

    Args:
        latent_dim: L.
        ard: Whether every latent dimension has a length scale of its own.
    """

    def __init__(self, latent_dim: int, *, ard: bool = False) -> None:
        super().__init__()
        self.log_lengthscale = torch.nn.Parameter(torch.zeros(latent_dim if ard else ()))

    @abc.abstractmethod
    def profile(self, square: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """φ, 2 φ′ and 4 φ″ at r² ≥ 0."""

    @property
    def lengthscale(self) -> torch.Tensor:
        """ℓ, () or (L,), float64."""
        return self.log_lengthscale.double().exp()

    @property
    def reach(self) -> torch.Tensor:
        """The smallest ℓ."""
        return self.lengthscale.min()

    @torch.no_grad()
    def start(self, distance: float) -> None:
        """Every ℓ at the given distance."""
        self.log_lengthscale.fill_(math.log(distance))

    def facts(self) -> dict[str, Any]:
        """ℓ, one number or L of them."""
        return {"lengthscale": self.lengthscale.tolist()}

    def local(self, x: torch.Tensor, y: torch.Tensor) -> StationaryLocal:
        """Covariances of points x (B, L) and y (M, L), ready to be differentiated in x."""
        lengthscale, scale = self.lengthscale, self.scale
        u, v = x.double() / lengthscale, y.double() / lengthscale
        square = torch.addmm(v.square().sum(1), u, v.T, alpha=-2).add(u.square().sum(1, keepdim=True)).clamp_min(0)
        value, first, second = self.profile(square)
        return StationaryLocal(u, v, lengthscale, scale, scale * value, first, second)


@dataclass(frozen=True)
class StationaryLocal:
    """With u = x / ℓ the gradient of s² φ is s² a (u − v) and the Hessian s² [a I + b (u − v)(u − v)ᵀ], by ℓ.

    Attributes:
        u: (B, L) x in length scales.
        v: (M, L) y in length scales.
        lengthscale: (L,) ℓ, or () where it is one.
        scale: s².
        value: (B, M) covariances.
        first: (B, M) a = 2 φ′.
        second: (B, M) b = 4 φ″.
    """

    u: torch.Tensor
    v: torch.Tensor
    lengthscale: torch.Tensor
    scale: torch.Tensor
    value: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor

    def slopes(self) -> torch.Tensor:
        """(B, L, M) gradients ∇ₓ k(x, y)."""
        # scaled and contiguous while small, so that the large tensor is gone through twice only
        width = (self.scale / self.lengthscale).expand(self.u.shape[1])[:, None]
        return (width * self.u[:, :, None] - (width * self.v.T).contiguous()).mul_(self.first[:, None])

    def pull(self, weights: torch.Tensor) -> torch.Tensor:
        """(B, L) sums Σₘ wₘ ∇ₓ k(x, yₘ)."""
        first = weights * self.first
        return (first.sum(1, keepdim=True) * self.u - first @ self.v) * (self.scale / self.lengthscale)

    def bend(self, weights: torch.Tensor) -> torch.Tensor:
        """(B, L, L) sums Σₘ wₘ ∇²ₓ k(x, yₘ)."""
        u, v, width = self.u, self.v, self.u.shape[1]
        first, second = (weights * self.first).sum(1), weights * self.second
        # Σ b (u − v)(u − v)ᵀ term by term: one product with all v vᵀ instead of B small ones
        outer = (second @ (v[:, :, None] * v[:, None]).reshape(len(v), -1)).view(-1, width, width)
        cross = (second @ v)[:, :, None] * u[:, None]
        outer = outer - cross - cross.mT + second.sum(1)[:, None, None] * (u[:, :, None] * u[:, None])
        identity, lengths = torch.eye(width, dtype=u.dtype, device=u.device), self.lengthscale.expand(width)
        return (outer + first[:, None, None] * identity) * (self.scale / (lengths[:, None] * lengths))


class RBF(Stationary):
    """s² exp(−r² / 2).

    Source: GroVE, section 3.2; its printed Eq. 14 leaves out the square and the 1/2.
    """

    def profile(self, square: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """φ, 2 φ′ and 4 φ″ at r² ≥ 0."""
        value = torch.exp(-0.5 * square)
        return value, -value, value


class Matern15(Stationary):
    """s² (1 + √3 r) exp(−√3 r), whose draws are once differentiable.

    Source: Rasmussen and Williams 2006, Eq. 4.17, ν = 3/2.
    """

    def profile(self, square: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """φ, 2 φ′ and 4 φ″ at r² ≥ 0; the last is unbounded at 0, where it multiplies 0."""
        distance = math.sqrt(3) * square.clamp_min(SMALLEST_DISTANCE**2).sqrt()
        decay = torch.exp(-distance)
        return (1 + distance) * decay, -3 * decay, 9 * decay / distance


class Matern25(Stationary):
    """s² (1 + √5 r + 5 r² / 3) exp(−√5 r), whose draws are twice differentiable.

    Source: Rasmussen and Williams 2006, Eq. 4.17, ν = 5/2.
    """

    def profile(self, square: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """φ, 2 φ′ and 4 φ″ at r² ≥ 0."""
        distance = math.sqrt(5) * square.clamp_min(SMALLEST_DISTANCE**2).sqrt()
        decay = torch.exp(-distance)
        return (1 + distance + distance.square() / 3) * decay, -5 / 3 * (1 + distance) * decay, 25 / 3 * decay


class Cosine(Kernel):
    """s² x·y / (‖x‖ ‖y‖): a linear model of directions, of rank at most L.

    K(V, V) is therefore singular for M > L and leans on the jitter; the length of a latent is held by its prior alone.

    Args:
        latent_dim: L.
        ard: Has no meaning here and must be False.
    """

    def __init__(self, latent_dim: int, *, ard: bool = False) -> None:
        super().__init__()
        assert not ard, "the cosine has no length scales"

    @property
    def reach(self) -> torch.Tensor:
        """1, the spread of the latents."""
        return torch.ones_like(self.scale)

    def start(self, distance: float) -> None:
        """Nothing to set."""

    def local(self, x: torch.Tensor, y: torch.Tensor) -> CosineLocal:
        """Covariances of points x (B, L) and y (M, L), ready to be differentiated in x."""
        (n, length), (v, _) = _direction(x), _direction(y)
        return CosineLocal(n, v, length, self.scale, self.scale * (n @ v.T))


@dataclass(frozen=True)
class CosineLocal:
    """Derivatives of a direction: they see the part of each y that is perpendicular to x.

    Attributes:
        n: (B, L) directions of x.
        v: (M, L) directions of y.
        length: (B, 1) ‖x‖.
        scale: s².
        value: (B, M) covariances.
    """

    n: torch.Tensor
    v: torch.Tensor
    length: torch.Tensor
    scale: torch.Tensor
    value: torch.Tensor

    def slopes(self) -> torch.Tensor:
        """(B, L, M) gradients ∇ₓ k(x, y)."""
        n, v = self.n, self.v
        return (v.T - n[:, :, None] * (n @ v.T)[:, None]) * (self.scale / self.length)[:, :, None]

    def pull(self, weights: torch.Tensor) -> torch.Tensor:
        """(B, L) sums Σₘ wₘ ∇ₓ k(x, yₘ)."""
        n, towards = self.n, weights @ self.v
        return (towards - n * (n * towards).sum(1, keepdim=True)) * (self.scale / self.length)

    def bend(self, weights: torch.Tensor) -> torch.Tensor:
        """(B, L, L) sums Σₘ wₘ ∇²ₓ k(x, yₘ)."""
        n, towards = self.n, weights @ self.v
        cross = towards[:, :, None] * n[:, None]
        along = (n * towards).sum(1)[:, None, None]
        identity = torch.eye(n.shape[1], dtype=n.dtype, device=n.device)
        outer = cross + cross.mT + along * (identity - 3 * n[:, :, None] * n[:, None])
        return -outer * (self.scale / self.length.square())[:, :, None]


KERNELS: dict[str, type[Stationary] | type[Cosine]] = {
    "rbf": RBF,
    "matern15": Matern15,
    "matern25": Matern25,
    "cosine": Cosine,
}
"""The kernels by the name that settings use."""


def _direction(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors and lengths (·, 1)."""
    x = x.double()
    length = x.norm(dim=1, keepdim=True).clamp_min(SMALLEST_DISTANCE)
    return x / length, length
