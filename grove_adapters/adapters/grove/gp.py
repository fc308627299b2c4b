"""Sparse variational Gaussian processes with D outputs that share kernel and inducing inputs, and their noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from grove_adapters.adapters.grove.covariances import make_covariance
from grove_adapters.adapters.grove.kernels import KERNELS
from grove_adapters.errors import NumericalError

JITTERS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Shares of the mean diagonal that are added to it, tried in turn."""


def cholesky(matrix: torch.Tensor, *, what: str) -> tuple[torch.Tensor, float]:
    """Lower Cholesky factor of a positive semi-definite matrix plus the smallest jitter that lets it exist.

    Args:
        matrix: (M, M) float64, symmetric.
        what: Name of the matrix for the error.

    Returns:
        The factor and the jitter used, as a share of the mean diagonal.

    Raises:
        NumericalError: The matrix holds NaN or infinity, or no jitter up to 1e-2 helps; the message names the matrix
            and its condition number.
    """
    if not bool(torch.isfinite(matrix.sum())):  # one NaN or infinity anywhere is enough
        raise NumericalError(f"{what}: expected finite entries, got NaN or infinity; lower the learning rates")
    diagonal = matrix.diagonal().mean()
    for jitter in JITTERS:
        raised = matrix.clone()
        raised.diagonal().add_(jitter * diagonal)
        factor, failed = torch.linalg.cholesky_ex(raised)
        if not failed:
            return factor, jitter
    values = torch.linalg.eigvalsh(matrix.detach())
    raise NumericalError(
        f"{what}: expected a positive definite {len(matrix)}×{len(matrix)} matrix, got eigenvalues from "
        f"{float(values[0]):.3g} to {float(values[-1]):.3g} (condition {float(values[-1] / values.abs().min()):.3g}) "
        f"that jitter up to {JITTERS[-1]:g} does not mend; use fewer inducing points"
    )


class _Whitened(torch.autograd.Function):
    """R = L⁻¹ C with L Lᵀ = K, as (B, M) features Rᵀ, and its gradient by K and C.

    Going through L, autograd forms L̄ = −L⁻ᵀ R̄ Rᵀ and then Lᵀ L̄ again; the lower triangle that the factorisation's
    gradient takes of the latter is that of −R̄ Rᵀ itself, because L⁻ᵀ and Lᵀ are upper triangular.

    Source: Murray 2016, Differentiation of the Cholesky decomposition, Eq. 10.
    """

    @staticmethod
    def forward(ctx: Any, covariance: torch.Tensor, cross: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        features = torch.linalg.solve_triangular(factor, cross, upper=False).T
        ctx.save_for_backward(factor, features)
        return features

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        factor, features = ctx.saved_tensors
        local = -(gradient.T @ features).tril_()
        local.diagonal().mul_(0.5)
        half = torch.linalg.solve_triangular(factor, local, upper=False, left=False)
        both = torch.linalg.solve_triangular(factor.T, torch.cat([half, gradient.T], 1), upper=True)
        whole = both[:, : len(factor)]
        return 0.5 * (whole + whole.T), both[:, len(factor) :], None


@dataclass(frozen=True)
class Noise:
    """A noise variance σ², known or known in distribution: the three moments that are asked for.

    Attributes:
        log: E[log σ²], () or (B, 1) float64.
        precision: E[1 / σ²].
        variance: E[σ²].
    """

    log: torch.Tensor
    precision: torch.Tensor
    variance: torch.Tensor

    @classmethod
    def known(cls, variance: torch.Tensor) -> Self:
        """σ² itself."""
        return cls(variance.log(), 1 / variance, variance)

    @classmethod
    def log_normal(cls, mean: torch.Tensor, variance: torch.Tensor) -> Self:
        """log σ² ~ N(mean, variance)."""
        return cls(mean, torch.exp(0.5 * variance - mean), torch.exp(0.5 * variance + mean))


class SparseProcess(torch.nn.Module):
    """g: Rᴸ → Rᴰ with g_d ~ GP(0, k), seen through u = g(V) = L w with K(V, V) = L Lᵀ and q(w_d) = N(m_d, S_d).

    Kernel and inducing inputs V are shared over the D outputs, so K is factorised once and a minibatch costs
    O(M²B + M³ + MBD) instead of D times O(M²B + M³). Sharing S too loses nothing: with a Gaussian likelihood of one
    noise variance the evidence bound depends on d through m_d alone, and so does an alignment of marginals whose
    variance is the same in every d, hence the best S_d are all equal.

    Args:
        n_inducing: M.
        latent_dim: L.
        dim: D.
        name: For messages.
        kernel: Name in `KERNELS`.
        ard: Whether the kernel has a length scale for each latent dimension.
        covariance: Shape of S_d, ``"shared"``, ``"diagonal"`` or ``"per_dim"``.

    Attributes:
        kernel: k.
        inducing: V, (M, L).
        mean: m, (M, D), whitened.
        covariance: S_d.
        jitter: The largest share of the mean diagonal that K has needed.

    Source: GroVE, section 3.2 and Eqs. 11–13, with a plus for the printed minus of Eq. 13; the public code mixes 512
    latent GPs instead.
    """

    def __init__(
        self,
        n_inducing: int,
        latent_dim: int,
        dim: int,
        name: str = "",
        *,
        kernel: str = "rbf",
        ard: bool = False,
        covariance: str = "shared",
    ) -> None:
        super().__init__()
        self.kernel = KERNELS[kernel](latent_dim, ard=ard)
        self.inducing = torch.nn.Parameter(torch.zeros(n_inducing, latent_dim))
        self.mean = torch.nn.Parameter(torch.zeros(n_inducing, dim))
        self.covariance = make_covariance(covariance, n_inducing, dim)
        self.jitter = 0.0
        self.name = name

    @property
    def dim(self) -> int:
        """D."""
        return self.mean.shape[1]

    def factor(self) -> torch.Tensor:
        """L, (M, M) float64 with L Lᵀ = K(V, V) + jitter.

        Raises:
            NumericalError: K has no factor; the message names it and its condition.
        """
        return self._factor_of(self.kernel(self.inducing, self.inducing))

    def _factor_of(self, covariance: torch.Tensor) -> torch.Tensor:
        factor, jitter = cholesky(covariance, what=f"{self.name} kernel matrix of the inducing inputs")
        self.jitter = max(self.jitter, jitter)
        return factor

    def differentiable_features(self, x: torch.Tensor) -> torch.Tensor:
        """`features` with the gradient that training needs in closed form, which saves a fifth of a step; (B, M)."""
        covariance = self.kernel(self.inducing, self.inducing)
        factor = self._factor_of(covariance.detach())
        return _Whitened.apply(covariance, self.kernel(self.inducing, x), factor)

    def features(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """L⁻¹ k(V, x) for each row of x, (B, M) float64."""
        return torch.linalg.solve_triangular(factor, self.kernel(self.inducing, x), upper=False).T

    def marginal(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q(g(x)): (B, D) mean, float32, and its variance, float64.

        k(x, x) + rᵀ (S_d − I) r, with r the features: (B, D), or (B, 1) where all outputs share it. Float64 is kept for
        the difference, where digits cancel; the rest is float32. A floor of the smallest jitter keeps rounding from
        making it ≤ 0.
        """
        single, scale = features.float(), self.kernel.scale
        variance = scale - features.square().sum(1, keepdim=True) + self.covariance.spread(single)
        return single @ self.mean, variance.clamp_min(JITTERS[0] * scale.detach())

    def variance_loss(self) -> torch.Tensor:
        """A = Σ_d (I − S_d), (M, M) float64: the marginal variances add up to D k(x, x) − rᵀ A r."""
        identity = torch.eye(len(self.mean), dtype=torch.float64, device=self.mean.device)
        return self.dim * identity - self.covariance.total()

    def divergence(self) -> torch.Tensor:
        """KL(q(u) ‖ p(u)), summed over the D outputs, in nats."""
        means = self.mean.flatten()
        return self.covariance.divergence() + 0.5 * torch.dot(means, means)


class SparseGP(SparseProcess):
    """A modality's decoder: embeddings are c + g(x) plus noise of variance σ², the same for the D outputs.

    With ``n_noise`` the noise varies over latent space: log σ²(x) is a second sparse process with one output around
    `log_noise`.

    Args:
        n_inducing: M.
        latent_dim: L.
        dim: D.
        name: For messages.
        n_noise: Inducing inputs of the noise's process; 0 for noise that is the same everywhere.
        kinds: Kernel, ARD and covariance, see `SparseProcess`.

    Attributes:
        log_noise: Log of the likelihood's variance σ², or its mean a priori where it varies.
        constant: c, (D,), the mean of the training embeddings.
        noise_process: log σ²(x) − `log_noise`, or None.

    Source: Lázaro-Gredilla and Titsias 2011 (variational heteroscedastic GP regression), with the sparse process for
    the log noise of Saul, Hensman, Vehtari and Lawrence 2016 (chained GPs). GroVE has one σ² for everything.
    """

    def __init__(
        self, n_inducing: int, latent_dim: int, dim: int, name: str = "", *, n_noise: int = 0, **kinds: Any
    ) -> None:
        super().__init__(n_inducing, latent_dim, dim, name, **kinds)
        self.log_noise = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("constant", torch.zeros(dim))
        self.noise_process: SparseProcess | None = None
        if n_noise:
            kernel, ard = kinds.get("kernel", "rbf"), kinds.get("ard", False)
            self.noise_process = SparseProcess(n_noise, latent_dim, 1, f"{name} noise", kernel=kernel, ard=ard)

    constant: torch.Tensor

    @property
    def noise(self) -> torch.Tensor:
        """σ², float64; where it varies, the one around which it does."""
        return self.log_noise.double().exp()

    def noise_given(self, marginal: tuple[torch.Tensor, torch.Tensor] | None) -> Noise:
        """The noise where its process has the given marginal, or the constant one."""
        if marginal is None:
            return Noise.known(self.noise)
        mean, variance = marginal
        return Noise.log_normal(self.log_noise.double() + mean, variance)

    def noise_at(self, x: torch.Tensor) -> Noise:
        """The noise at latents x (B, L)."""
        process = self.noise_process
        return self.noise_given(None if process is None else process.marginal(process.features(x, process.factor())))

    def follows_optimum(self, *, inducing_too: bool) -> None:
        """Leave q(u), and the inducing inputs where asked, to whoever sets them: no optimiser moves them."""
        for parameter in (self.mean, self.covariance.root, *([self.inducing] if inducing_too else [])):
            parameter.requires_grad_(False)

    @torch.no_grad()
    def facts(self) -> dict[str, Any]:
        """Learned hyperparameters and the jitter needed, for the fit report."""
        return {
            "noise": float(self.noise),
            "scale": float(self.kernel.scale),
            **self.kernel.facts(),
            "jitter": self.jitter,
            **({} if self.noise_process is None else {"log_noise_variance": float(self.noise_process.kernel.scale)}),
        }

    @torch.no_grad()
    def set_optimal(self, gram: torch.Tensor, cross: torch.Tensor) -> None:
        """Set q(u) to the maximiser of the evidence bound for the current kernel, latents and noise.

        Args:
            gram: Σₙ rₙ rₙᵀ over the training rows, (M, M) float64.
            cross: Σₙ rₙ (zₙ − c)ᵀ, (M, D) float64.

        Source: Titsias 2009, Eq. 10, whitened: S⁻¹ = I + Σ r rᵀ / σ², m = S Σ r (z − c)ᵀ / σ².
        """
        precision = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) + gram / self.noise
        self.covariance.set_optimal(precision)
        factor = torch.linalg.cholesky(precision)
        self.mean.copy_(torch.cholesky_solve(cross / self.noise, factor))
