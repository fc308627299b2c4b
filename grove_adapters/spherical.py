"""The von Mises–Fisher and Power Spherical laws on the unit sphere of R^D, stable for wide D and large κ.

Both have a density that depends on the cosine t = ⟨μ, x⟩ alone, with respect to the surface measure. Everything is
computed in float64 and returned in the type that came in, float32 for half precision, in which a log density of some
hundreds has no digits left; gradients reach the concentration.
"""

from __future__ import annotations

import abc
import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple, final

import torch

from grove_adapters import seeding

ORDER = 20.0  # Bessel orders below are reached by recurrence from above, where the expansion has float64's precision
TERMS = 14  # of the expansion


class Moments(NamedTuple):
    """What a rotationally symmetric law has besides its direction; tensors of the concentration's shape.

    Attributes:
        length: Of the mean, E t in [0, 1).
        along: Variance of t, in the mean direction.
        across: Variance in every direction orthogonal to it, E(1 − t²) / (D − 1).
    """

    length: torch.Tensor
    along: torch.Tensor
    across: torch.Tensor


class Law(abc.ABC):
    """A law on the unit sphere that is symmetric about its mean direction; D ≥ 2, concentration κ > 0."""

    @abc.abstractmethod
    def log_normaliser(self, concentration: torch.Tensor, dim: int) -> torch.Tensor:
        """Log of the factor that makes `exp(log_kernel)` a density on the sphere, in nats."""

    @abc.abstractmethod
    def log_kernel(self, cosine: torch.Tensor, concentration: torch.Tensor) -> torch.Tensor:
        """The part of the log density that depends on t; arguments broadcast."""

    @abc.abstractmethod
    def moments(self, concentration: torch.Tensor, dim: int) -> Moments:
        """Mean length and variances."""

    @abc.abstractmethod
    def _cosines(self, concentration: torch.Tensor, dim: int, n: int) -> torch.Tensor:
        """(N, n) float64 draws of t from the global random stream, for (N, 1) float64 concentrations."""

    @final
    def sample(self, direction: torch.Tensor, concentration: torch.Tensor, n: int, *, seed: int) -> torch.Tensor:
        """(N, n, D) unit vectors drawn around N unit vectors `direction` (N, D) with `concentration` (N,)."""
        dim, mean = direction.shape[1], direction.double()[:, None]
        with seeding.local(seed):
            cosine = self._cosines(concentration.double()[:, None], dim, n)[..., None]
            noise = torch.randn(len(direction), n, dim, dtype=torch.float64)
        noise -= (noise @ mean.mT) * mean
        noise /= noise.norm(dim=-1, keepdim=True)
        return (cosine * mean + (1 - cosine.square()).clamp_min(0).sqrt() * noise).to(direction)


@final
class VonMisesFisher(Law):
    """Density C_D(κ) exp(κ t), C_D(κ) = κ^ν / ((2π)^(D/2) I_ν(κ)) with ν = D/2 − 1.

    log I_ν by its uniform expansion for large orders, smaller orders by the recurrence of I, which is stable downwards.

    Source: Mardia & Jupp, Directional Statistics, 9.3; NIST DLMF 10.41.3–10.41.11 (expansion), 10.29.1 (recurrence).
    """

    def log_normaliser(self, concentration: torch.Tensor, dim: int) -> torch.Tensor:
        """log C_D(κ), finite at κ = 0 too."""
        return _LogNormaliser.apply(concentration, dim)

    def log_kernel(self, cosine: torch.Tensor, concentration: torch.Tensor) -> torch.Tensor:
        """κ t."""
        return concentration * cosine

    def moments(self, concentration: torch.Tensor, dim: int) -> Moments:
        """A = I_{ν+1}/I_ν, 1 − A² − (D − 1) A/κ and A/κ."""
        wide = concentration.double()
        across, _ = _ratio(wide, dim)
        return Moments(*(_narrowed(x, concentration) for x in (wide * across, _along(wide, across, dim), across)))

    def _cosines(self, concentration: torch.Tensor, dim: int, n: int) -> torch.Tensor:
        """Rejection from a transformed Beta; at least two of three proposals are accepted (Ulrich 1984, Wood 1994)."""
        k, size = concentration.expand(-1, n), (len(concentration), n)
        b = (dim - 1) / (2 * k + (4 * k.square() + (dim - 1) ** 2).sqrt())
        x = (1 - b) / (1 + b)
        bound = k * x + (dim - 1) * (1 - x.square()).log()
        result, open_ = torch.empty(size, dtype=torch.float64), torch.ones(size, dtype=torch.bool)
        while bool(open_.any()):
            half = torch.full((int(open_.sum()),), (dim - 1) / 2, dtype=torch.float64)
            one, two = torch._standard_gamma(half), torch._standard_gamma(half)
            z = one / (one + two)
            t = (1 - (1 + b[open_]) * z) / (1 - (1 - b[open_]) * z)
            height = k[open_] * t + (dim - 1) * (1 - x[open_] * t).log() - bound[open_]
            accepted = height >= torch.rand_like(t).log()
            places = open_.nonzero()[accepted]
            result[places[:, 0], places[:, 1]] = t[accepted]
            open_[places[:, 0], places[:, 1]] = False
        return result


@final
class PowerSpherical(Law):
    """Density proportional to (1 + t)^κ, so that (1 + t)/2 ~ Beta(α, β) with β = (D − 1)/2 and α = β + κ.

    Source: De Cao & Aziz, The Power Spherical distribution (2020).
    """

    def log_normaliser(self, concentration: torch.Tensor, dim: int) -> torch.Tensor:
        """−(α + β) log 2 − β log π − log Γ(α) + log Γ(α + β)."""
        beta = (dim - 1) / 2
        alpha = concentration.double() + beta
        value = (alpha + beta).lgamma() - alpha.lgamma() - (alpha + beta) * math.log(2) - beta * math.log(math.pi)
        return _narrowed(value, concentration)

    def log_kernel(self, cosine: torch.Tensor, concentration: torch.Tensor) -> torch.Tensor:
        """κ log(1 + t), finite at the antipode too, where the density is 0."""
        return concentration * cosine.clamp_min(torch.finfo(cosine.dtype).eps - 1).log1p()

    def moments(self, concentration: torch.Tensor, dim: int) -> Moments:
        """(α − β)/(α + β), 4αβ/((α + β)²(α + β + 1)) and 2α/((α + β)(α + β + 1))."""
        beta = (dim - 1) / 2
        alpha = concentration.double() + beta
        total = alpha + beta
        across = 2 * alpha / (total * (total + 1))
        parts = (concentration.double() / total, 2 * beta * across / total, across)
        return Moments(*(_narrowed(x, concentration) for x in parts))

    def _cosines(self, concentration: torch.Tensor, dim: int, n: int) -> torch.Tensor:
        beta = torch.full((len(concentration), n), (dim - 1) / 2, dtype=torch.float64)
        one, two = torch._standard_gamma(beta + concentration), torch._standard_gamma(beta)
        return (one - two) / (one + two)


VON_MISES_FISHER = VonMisesFisher()
POWER_SPHERICAL = PowerSpherical()


class _LogNormaliser(torch.autograd.Function):
    """log C_D, whose derivative is −A_D."""

    @staticmethod
    def forward(ctx: Any, concentration: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.save_for_backward(concentration)
        ctx.dim = dim
        return _narrowed(_ratio(concentration.double(), dim)[1], concentration)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (concentration,) = ctx.saved_tensors
        return (-gradient * _MeanLength.apply(concentration, ctx.dim)).to(concentration), None


class _MeanLength(torch.autograd.Function):
    """A_D, whose derivative is the variance of t."""

    @staticmethod
    def forward(ctx: Any, concentration: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.save_for_backward(concentration)
        ctx.dim = dim
        wide = concentration.double()
        return _narrowed(wide * _ratio(wide, dim)[0], concentration)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (concentration,) = ctx.saved_tensors
        wide = concentration.double()
        return (gradient * _along(wide, _ratio(wide, ctx.dim)[0], ctx.dim)).to(concentration), None


def _narrowed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return value.to(torch.promote_types(like.dtype, torch.float32))


def _ratio(concentration: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A_D(κ)/κ and log C_D(κ) of float64 concentrations.

    Both are written without κ^ν and without differences of large logarithms, so κ → 0 and κ → ∞ are plain numbers:
    with s = √(ν² + κ²) and p = ν/s, I_{ν+1}/(κ I_ν) is 1/(s + ν) − Σ W_k(p)/ν^(k+1) / (s Σ U_k(p)/ν^k), in which
    W_k = p U_k/2 + p² U_k' collects what the expansions of I'_ν and I_ν don't share.
    """
    order = dim / 2 - 1
    shifts = max(0, math.ceil(ORDER - order))
    nu = order + shifts
    s = torch.hypot(concentration, torch.full_like(concentration, nu))
    p = nu / s
    u, w = (_polynomial(coefficients, p) for coefficients in _series(nu))
    ratio = 1 / (s + nu) - w / (u * s)
    log = nu * (nu + s).log() - s + 0.5 * (2 * math.pi * s).log() - u.log()
    for step in range(shifts, 0, -1):
        ratio = 1 / (2 * (order + step) + concentration.square() * ratio)
        log = log + ratio.log()
    return ratio, log - dim / 2 * math.log(2 * math.pi)


def _along(concentration: torch.Tensor, across: torch.Tensor, dim: int) -> torch.Tensor:
    """Variance of t; where κ is so large that the terms cancel, its limit (D − 1)/(2κ²) from below."""
    difference = 1 - (concentration * across).square() - (dim - 1) * across
    return torch.maximum(difference, (dim - 1) / 2 * across.square())


@functools.cache
def _expansion() -> tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]:
    """Coefficients of U_k and W_k by ascending powers, k = 0 … TERMS − 1 (DLMF 10.41.9)."""
    u = [Fraction(1)]
    pairs = []
    for _ in range(TERMS):
        slope = [power * c for power, c in enumerate(u)][1:]
        w = _added(_shifted([c / 2 for c in u], 1), _shifted(slope, 2))
        pairs.append((tuple(map(float, u)), tuple(map(float, w))))
        half = [c / 2 for c in slope]
        integrand = _added(u, _shifted([-5 * c for c in u], 2))
        integral = [Fraction(0)] + [c / (8 * (power + 1)) for power, c in enumerate(integrand)]
        u = _added(_added(_shifted(half, 2), _shifted([-c for c in half], 4)), integral)
    return tuple(pairs)


@functools.cache
def _series(nu: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Coefficients, by ascending powers of p, of Σ U_k(p)/ν^k and Σ W_k(p)/ν^(k+1)."""
    u, w = [0.0] * (3 * TERMS), [0.0] * (3 * TERMS)
    for k, (inner, outer) in enumerate(_expansion()):
        for total, part, weight in ((u, inner, nu**-k), (w, outer, nu ** -(k + 1))):
            for power, coefficient in enumerate(part):
                total[power] += coefficient * weight
    return tuple(u), tuple(w)


def _added(one: list[Fraction], two: list[Fraction]) -> list[Fraction]:
    size = max(len(one), len(two))
    padded = [part + [Fraction(0)] * (size - len(part)) for part in (one, two)]
    return [a + b for a, b in zip(*padded, strict=True)]


def _shifted(coefficients: list[Fraction], by: int) -> list[Fraction]:
    return [Fraction(0)] * by + coefficients


def _polynomial(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    value = torch.zeros_like(x)
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value
