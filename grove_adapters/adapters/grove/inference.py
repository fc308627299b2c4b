"""The latent of an embedding never seen: posterior mode by Newton's method, and its Laplace covariance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from grove_adapters.adapters.grove.gp import SparseGP

ROWS = 256  # starts worked on together, so that memory stays bounded
MAX_STEPS = 50
DAMPING = 1e-3  # first Levenberg–Marquardt damping, as a share of the mean curvature
SMALLEST_CURVATURE = 1e-3


@dataclass(frozen=True)
class LatentPosterior:
    """Laplace approximations of p(x | z).

    Attributes:
        mode: (B, L) float64.
        covariance: (B, L, L) float64.
        entropy: (B,) differential entropy in nats.
        converged: (B,) whether the search met its tolerance.
    """

    mode: torch.Tensor
    covariance: torch.Tensor
    entropy: torch.Tensor
    converged: torch.Tensor


class _Reduced:
    """One GP seen from latent space: ‖z − μ(x)‖² and the variance need no D-dim vector once α(z − c) is known.

    With k = k(V, x), α = K⁻¹(E[u] − c) and v(x) = s² − kᵀ Q k, the negative expected log-likelihood is, up to a
    constant, (kᵀ W k − 2 kᵀ β) / 2σ² with W = α αᵀ − D Q (M, M) and β = α (z − c) (M numbers per row).
    """

    def __init__(self, gp: SparseGP) -> None:
        factor = gp.factor()
        identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        self.gp = gp
        self.inducing = gp.inducing.double()
        self.alpha = inverse.T @ gp.mean.double()
        self.gram = self.alpha @ self.alpha.T
        spread = gp.root.tril().double().T @ inverse
        self.loss = inverse.T @ inverse - spread.T @ spread
        self.weights = (self.gram - gp.dim * self.loss) / gp.noise

    def target(self, values: torch.Tensor) -> torch.Tensor:
        """β / σ² of rows z, (B, M) float64."""
        return (values - self.gp.constant).double() @ self.alpha.T / self.gp.noise


class LatentInference:
    """Finds argmax p(x | z) for new rows of one modality, or of several at once for pairs.

    Every row is searched from its `restarts` best anchors, ranked by the objective itself, with damped Newton steps
    on the exact Hessian (eigenvalues by modulus, so saddles repel) until the step is below `tolerance` length scales;
    the best end wins. A step costs O(M²L) per row whatever D. No random number is drawn and rows never meet, so
    results depend neither on the seed nor on the batch.

    Args:
        gps: Fitted GPs by modality.
        anchors: (A, L) latents to start from.
        prior: Whether x ~ N(0, I) a priori; without, only the likelihood counts.
        restarts: Starts per row.
        tolerance: Of the last step, in length scales.

    Source: GroVE, section 3.3, which takes an unstated number of gradient steps from one random start (its public
    code 20 steps of Adam) and leaves the posterior of x out (errata E5–E7).
    """

    def __init__(
        self,
        gps: Mapping[str, SparseGP],
        anchors: torch.Tensor,
        *,
        prior: bool = True,
        restarts: int = 2,
        tolerance: float = 1e-5,
    ) -> None:
        self._reduced = {modality: _Reduced(gp) for modality, gp in gps.items()}
        self._anchors = anchors.double()
        self._prior = float(prior)
        self._restarts = min(restarts, len(anchors))
        self._tolerance = tolerance

    def __call__(self, values: Mapping[str, torch.Tensor], guess: torch.Tensor | None = None) -> LatentPosterior:
        """Laplace posteriors of the latents of rows.

        Args:
            values: (B, D) embeddings by modality; rows of different modalities belong together.
            guess: (B, L) latents to start from instead of the anchors.
        """
        targets = {modality: self._reduced[modality].target(rows) for modality, rows in values.items()}
        n_rows = len(next(iter(targets.values())))
        parts = []
        for start in range(0, n_rows, ROWS):
            chunk = {modality: target[start : start + ROWS] for modality, target in targets.items()}
            starts = self._starts(chunk) if guess is None else guess[None, start : start + ROWS].double()
            parts.append(self._search(chunk, starts))
        mode, hessian, converged = (torch.cat(items) for items in zip(*parts, strict=True))
        curvatures, axes = torch.linalg.eigh(hessian)
        curvatures = curvatures.clamp_min(SMALLEST_CURVATURE)
        covariance = (axes / curvatures[:, None]) @ axes.mT
        entropy = 0.5 * (mode.shape[1] * math.log(2 * math.pi * math.e) - curvatures.log().sum(1))
        return LatentPosterior(mode, covariance, entropy, converged)

    def propagated(self, modality: str, posterior: LatentPosterior) -> torch.Tensor:
        """(B,) variance of the decoded mean over p(x | z), averaged over the D outputs: tr(C JᵀJ) / D."""
        reduced = self._reduced[modality]
        parts = []
        for start in range(0, len(posterior.mode), ROWS):
            slope = self._slope(reduced, posterior.mode[start : start + ROWS])[1]
            square = slope.mT @ (reduced.gram @ slope)
            parts.append((square * posterior.covariance[start : start + ROWS]).sum((1, 2)) / reduced.gp.dim)
        return torch.cat(parts)

    def _search(
        self, targets: dict[str, torch.Tensor], starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Modes (B, L), Hessians (B, L, L) and convergence (B,) of one chunk of rows from (restarts, B, L)."""
        restarts, n_rows, _ = starts.shape
        x = starts.reshape(restarts * n_rows, -1).clone()
        targets = {modality: target.repeat(restarts, 1) for modality, target in targets.items()}
        energy = self._energy(x, targets)
        damping = torch.full_like(energy, DAMPING)
        active = torch.arange(len(x), device=x.device)
        tolerance = self._tolerance * min(
            float(reduced.gp.kernel.precision.rsqrt()) for reduced in self._reduced.values()
        )
        for _ in range(MAX_STEPS):
            mine = {modality: target[active] for modality, target in targets.items()}
            gradient, hessian = self._derivatives(x[active], mine)
            curvatures, axes = torch.linalg.eigh(hessian)
            curvatures = curvatures.abs()
            curvatures = curvatures + damping[active, None] * curvatures.mean(1, keepdim=True) + 1e-12
            step = -(axes @ ((axes.mT @ gradient[:, :, None]) / curvatures[:, :, None]))[:, :, 0]
            trial = x[active] + step
            reached = self._energy(trial, mine)
            better = reached <= energy[active]
            x[active] = torch.where(better[:, None], trial, x[active])
            energy[active] = torch.where(better, reached, energy[active])
            damping[active] = torch.where(better, damping[active] / 10, damping[active] * 10).clamp_min(1e-9)
            active = active[step.norm(dim=1) > tolerance]
            if not len(active):
                break
        converged = torch.ones(len(x), dtype=torch.bool, device=x.device)
        converged[active] = False
        rows = energy.reshape(restarts, n_rows).argmin(0) * n_rows + torch.arange(n_rows, device=x.device)
        chosen = {modality: target[rows] for modality, target in targets.items()}
        return x[rows], self._derivatives(x[rows], chosen)[1], converged[rows]

    def _starts(self, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        """The best anchors of each row, (restarts, B, L)."""
        energies = 0.5 * self._prior * self._anchors.square().sum(1)
        for modality, target in targets.items():
            reduced = self._reduced[modality]
            covariances = reduced.gp.kernel(self._anchors, reduced.inducing)
            quadratic = 0.5 * ((covariances @ reduced.weights) * covariances).sum(1)
            energies = energies + quadratic - target @ covariances.T
        return self._anchors[energies.topk(self._restarts, dim=1, largest=False).indices.T]

    def _energy(self, x: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        """−log p(z | x) − log p(x) up to a constant of each row, (R,)."""
        energy = 0.5 * self._prior * x.square().sum(1)
        for modality, target in targets.items():
            reduced = self._reduced[modality]
            covariances = reduced.gp.kernel(x, reduced.inducing)
            energy = energy + (covariances * (0.5 * covariances @ reduced.weights - target)).sum(1)
        return energy

    def _slope(self, reduced: _Reduced, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """k (R, M), its gradient (R, M, L), and the offsets x − V (R, M, L)."""
        covariances = reduced.gp.kernel(x, reduced.inducing)
        first, _ = reduced.gp.kernel.slopes(covariances)
        offsets = x[:, None] - reduced.inducing
        return covariances, first[:, :, None] * offsets, offsets

    def _derivatives(self, x: torch.Tensor, targets: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradient (R, L) and Hessian (R, L, L) of `_energy`."""
        identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        gradient = self._prior * x
        hessian = self._prior * identity.expand(len(x), -1, -1)
        for modality, target in targets.items():
            reduced = self._reduced[modality]
            covariances, slope, offsets = self._slope(reduced, x)
            first, second = reduced.gp.kernel.slopes(covariances)
            residual = covariances @ reduced.weights - target
            gradient = gradient + (residual[:, None] @ slope)[:, 0]
            # one (R·L, M) × (M, M) product: batched over rows it would run at the speed of memory
            turned = slope.mT.reshape(-1, slope.shape[1]) @ reduced.weights
            hessian = hessian + turned.view(len(x), x.shape[1], -1) @ slope
            hessian = hessian + (residual * first).sum(1)[:, None, None] * identity
            hessian = hessian + offsets.mT @ ((residual * second)[:, :, None] * offsets)
        return gradient, hessian
