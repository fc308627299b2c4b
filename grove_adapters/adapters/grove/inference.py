"""The latent of an embedding never seen: posterior mode by quasi-Newton steps, and its Laplace covariance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from grove_adapters.adapters.grove.gp import SparseGP

BLOCK = 256  # rows worked on together, always as many: then no result depends on how many there are
MAX_STEPS = 200
MAX_ROUNDS = 3
ROUGHLY = 5e-4  # quasi-Newton step, in length scales, from which exact steps take over
LONGEST_STEP = 1.0  # in length scales
SUFFICIENT = 1e-4  # share of the predicted decrease that a step must reach (Armijo)
SMALLEST_CURVATURE = 1e-3

Targets = dict[str, torch.Tensor]
"""What is left of each row by modality: (·, M), see `_Reduced.target`."""


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

    With k = k(V, x), α = K⁻¹(E[u] − c) and D s² − kᵀ Q k the variance summed over the outputs, the negative expected
    log-likelihood is, up to a constant, (kᵀ W k − 2 kᵀ β) / 2 with W = (α αᵀ − Q) / σ² (M, M) and
    β = α (z − c) / σ² (M numbers per row).
    """

    def __init__(self, gp: SparseGP) -> None:
        factor = gp.factor()
        identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        self.kernel = gp.kernel
        self.inducing = gp.inducing.double()
        self.dim = gp.dim
        self.alpha = inverse.T @ gp.mean.double()
        self.gram = self.alpha @ self.alpha.T
        self.weights = (self.gram - inverse.T @ gp.variance_loss() @ inverse) / gp.noise
        self.noise = gp.noise
        self._constant = gp.constant

    def target(self, values: torch.Tensor) -> torch.Tensor:
        """β of rows z, (B, M) float64."""
        return (values - self._constant).double() @ self.alpha.T / self.noise

    def propagated(self, slopes: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
        """tr(C JᵀJ) / D from ∇k (B, L, M) and C (B, L, L)."""
        return (_quadratic(slopes, self.gram) * covariance).sum((1, 2)) / self.dim


class LatentInference:
    """Finds argmax p(x | z) for new rows of one modality, or of several at once for pairs.

    Every row is searched from its `restarts` best anchors, ranked by the objective itself, with BFGS steps that begin
    from the average curvature at anchors; the best end is finished by Newton steps on the exact Hessian, whose last one
    must be below `tolerance` length scales, and that Hessian gives the Laplace covariance. A quasi-Newton step costs
    O(M²) per row whatever D and L.

    No random number is drawn, rows never meet, and whatever is computed has `BLOCK` rows, a finished one making room
    for the next. So results depend neither on the seed nor, bit for bit, on which other rows are asked about.

    Args:
        gps: Fitted GPs by modality.
        anchors: (A, L) latents to start from.
        prior: Whether x ~ N(0, I) a priori; without, only the likelihood counts.
        restarts: Starts per row.
        tolerance: Of the last step, in length scales.

    Source: GroVE, section 3.3, which takes an unstated number of gradient steps from one random start (its public
    code 20 steps of Adam) and leaves the posterior of x out. Nocedal and Wright 2006, Eqs. 3.4, 6.17 and 6.20.
    """

    @torch.no_grad()
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
        self._prior = float(prior)
        self._restarts = min(restarts, len(anchors))
        self._reach = min(float(reduced.kernel.reach) for reduced in self._reduced.values())
        self._tolerance = tolerance * self._reach
        self._anchors = anchors.double()
        self._anchor_energy = 0.5 * self._prior * self._anchors.square().sum(1)
        self._anchor_covariances = {}
        self._identity = torch.eye(anchors.shape[1], dtype=torch.float64, device=anchors.device)
        curvature = (self._prior * self._identity).expand(len(anchors), -1, -1)
        for modality, reduced in self._reduced.items():
            local = reduced.kernel.local(self._anchors, reduced.inducing)
            turned = local.value @ reduced.weights
            residual = turned - local.value @ reduced.gram / reduced.noise  # of an embedding decoded from the anchor
            self._anchor_covariances[modality] = local.value
            self._anchor_energy = self._anchor_energy + 0.5 * (turned * local.value).sum(1)
            curvature = curvature + _quadratic(local.slopes(), reduced.weights) + local.bend(residual)
        self._typical = _inverse(curvature)[0].mean(0)

    @torch.no_grad()
    def __call__(self, values: Mapping[str, torch.Tensor], guess: torch.Tensor | None = None) -> LatentPosterior:
        """Laplace posteriors of the latents of rows.

        Args:
            values: (B, D) embeddings by modality; rows of different modalities belong together.
            guess: (B, L) latents to start from instead of the anchors.
        """
        n = len(next(iter(values.values())))
        targets = {
            modality: torch.cat([self._reduced[modality].target(block) for block in blocks(rows)])
            for modality, rows in values.items()
        }
        if guess is None:
            anchors = torch.cat([self._nearest(block) for block in _zipped(targets)])[:n]
            owner = torch.arange(n, device=anchors.device).repeat_interleave(self._restarts)
            mode, energy = self._search(targets, owner, self._anchors[anchors.flatten()])
            best = energy.view(n, -1).argmin(1)
            mode = mode.view(n, self._restarts, -1)[torch.arange(n, device=mode.device), best]
        else:
            mode, _ = self._search(targets, torch.arange(n, device=guess.device), guess.double())
        mode, covariance, log_det, converged = self._finish(targets, mode)
        for _ in range(MAX_ROUNDS):
            rest = (~converged).nonzero()[:, 0]
            if not len(rest):
                break
            again, _ = self._search(targets, rest, mode[rest], covariance[rest])
            for whole, part in zip(
                (mode, covariance, log_det, converged),
                self._finish({modality: target[rest] for modality, target in targets.items()}, again),
                strict=True,
            ):
                whole[rest] = part
        entropy = 0.5 * (mode.shape[1] * math.log(2 * math.pi * math.e) + log_det)
        return LatentPosterior(mode, covariance, entropy, converged)

    def propagated(self, modality: str, posterior: LatentPosterior) -> torch.Tensor:
        """(B,) variance of the decoded mean over p(x | z), averaged over the D outputs: tr(C JᵀJ) / D."""
        reduced = self._reduced[modality]
        parts = [
            reduced.propagated(reduced.kernel.local(mode, reduced.inducing).slopes(), covariance)
            for mode, covariance in zip(blocks(posterior.mode), blocks(posterior.covariance), strict=True)
        ]
        return torch.cat(parts)[: len(posterior.mode)]

    def _nearest(self, targets: Targets) -> torch.Tensor:
        """Numbers of the best anchors of each row, (B, restarts)."""
        energies = self._anchor_energy.expand(len(next(iter(targets.values()))), -1)
        for modality, target in targets.items():
            energies = energies - target @ self._anchor_covariances[modality].T
        return energies.topk(self._restarts, dim=1, largest=False).indices

    def _search(
        self, targets: Targets, owner: torch.Tensor, starts: torch.Tensor, inverses: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where BFGS ends, (T, L), and its energy, (T,).

        Args:
            targets: Of all rows.
            owner: (T,) row that each search is for.
            starts: (T, L).
            inverses: (T, L, L) inverse curvatures to begin with; by default the average one at the anchors.
        """
        if inverses is None:
            inverses = self._typical.expand(len(starts), -1, -1)
        ends, energies = starts.clone(), starts.new_full((len(starts),), math.inf)
        waiting = min(BLOCK, len(starts))
        task = torch.arange(BLOCK, device=starts.device).clamp_max(len(starts) - 1)
        busy = torch.arange(BLOCK, device=starts.device) < waiting
        mine = {modality: target[owner[task]] for modality, target in targets.items()}
        x, inverse, trial = starts[task], inverses[task], starts[task]
        energy, gradient = torch.full_like(x[:, 0], math.inf), torch.zeros_like(x)
        expected, share, steps = torch.zeros_like(energy), torch.ones_like(energy), torch.zeros_like(task)
        while bool(busy.any()):
            reached, slope = self._energy(trial, mine)
            better = reached <= energy + SUFFICIENT * expected
            fresh = torch.isinf(energy)
            inverse = _updated(inverse, trial - x, slope - gradient, better & ~fresh)
            x = torch.where(better[:, None], trial, x)
            gradient = torch.where(better[:, None], slope, gradient)
            energy = torch.where(better, reached, energy)
            share = torch.where(better, 1.0, 0.3 * share)
            step = -(inverse @ gradient[:, :, None])[:, :, 0]
            length = step.norm(dim=1)
            steps += 1
            done = busy & ((better & (length < ROUGHLY * self._reach)) | (share < 1e-6) | (steps >= MAX_STEPS))
            if bool(done.any()):
                places = done.nonzero()[:, 0]
                ends[task[places]], energies[task[places]] = x[places], energy[places]
                new = torch.arange(waiting, min(waiting + len(places), len(starts)), device=starts.device)
                waiting += len(new)
                busy[places[len(new) :]] = False
                places = places[: len(new)]
                task[places] = new
                x[places], inverse[places], energy[places] = starts[new], inverses[new], math.inf
                gradient[places], step[places], steps[places] = 0.0, 0.0, 0
                share[places], length[places] = 1.0, 0.0
                for modality, target in targets.items():
                    mine[modality][places] = target[owner[new]]
            step = step * (share * (LONGEST_STEP * self._reach / length.clamp_min(1e-300)).clamp_max(1))[:, None]
            expected = (step * gradient).sum(1)
            trial = x + step
        return ends, energies

    def _finish(self, targets: Targets, mode: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Newton's last steps: modes, covariances, their log-determinants and whether the last step was small."""
        parts = [self._newton(target, x) for target, x in zip(_zipped(targets), blocks(mode), strict=True)]
        return tuple(torch.cat(items)[: len(mode)] for items in zip(*parts, strict=True))

    def _newton(
        self, targets: Targets, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        covariance, log_det = _inverse(self._hessian(x, targets))
        energy, gradient = self._energy(x, targets)
        length = torch.full_like(energy, math.inf)
        for _ in range(2):  # the second corrects for the curvature's change over the first
            step = -(covariance @ gradient[:, :, None])[:, :, 0]
            length = step.norm(dim=1)
            trial = x + step
            reached, slope = self._energy(trial, targets)
            better = (reached <= energy + 1e-12 * energy.abs()) & (length < self._reach)
            x = torch.where(better[:, None], trial, x)
            gradient = torch.where(better[:, None], slope, gradient)
            energy = torch.where(better, reached, energy)
        return x, covariance, log_det, length <= self._tolerance

    def _energy(self, x: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, torch.Tensor]:
        """−log p(z | x) − log p(x) up to a constant of each row, (B,), and its gradient (B, L)."""
        energy, gradient = 0.5 * self._prior * x.square().sum(1), self._prior * x
        for modality, target in targets.items():
            reduced = self._reduced[modality]
            local = reduced.kernel.local(x, reduced.inducing)
            turned = local.value @ reduced.weights
            energy = energy + (local.value * (0.5 * turned - target)).sum(1)
            gradient = gradient + local.pull(turned - target)
        return energy, gradient

    def _hessian(self, x: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Second derivatives of `_energy`, (B, L, L)."""
        hessian = (self._prior * self._identity).expand(len(x), -1, -1)
        for modality, target in targets.items():
            reduced = self._reduced[modality]
            local = reduced.kernel.local(x, reduced.inducing)
            residual = local.value @ reduced.weights - target
            hessian = hessian + _quadratic(local.slopes(), reduced.weights) + local.bend(residual)
        return hessian


def blocks(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows in blocks of exactly `BLOCK`; the last row is repeated to fill the last one."""
    missing = -len(rows) % BLOCK
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]).split(BLOCK)


def _zipped(targets: Targets) -> list[Targets]:
    parts = {modality: blocks(target) for modality, target in targets.items()}
    return [dict(zip(parts, items, strict=True)) for items in zip(*parts.values(), strict=True)]


def _quadratic(slopes: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """(B, L, L) J A Jᵀ; one (B·L, M) × (M, M) product, because batched ones run at the speed of memory."""
    turned = slopes.reshape(-1, slopes.shape[2]) @ matrix
    return turned.view(slopes.shape) @ slopes.mT


def _inverse(curvature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse and its log-determinant of symmetric (B, L, L); eigenvalues by modulus, so that saddles repel."""
    factor, failed = torch.linalg.cholesky_ex(curvature)
    smallest = factor.diagonal(dim1=1, dim2=2).amin(1).square()
    poor = ((failed > 0) | ~(smallest > SMALLEST_CURVATURE)).nonzero()[:, 0]
    factor[poor] = torch.eye(curvature.shape[1], dtype=curvature.dtype, device=curvature.device)
    inverse = torch.cholesky_inverse(factor)
    log_det = -2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    if len(poor):
        values, axes = torch.linalg.eigh(curvature[poor])
        values = values.abs().clamp_min(SMALLEST_CURVATURE)
        inverse[poor] = (axes / values[:, None]) @ axes.mT
        log_det[poor] = -values.log().sum(1)
    return inverse, log_det


def _updated(inverse: torch.Tensor, step: torch.Tensor, change: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """BFGS update of inverse curvatures (B, L, L) where it is wanted and keeps them positive definite."""
    along = (step * change).sum(1)
    wanted = wanted & (along > 1e-8 * step.norm(dim=1) * change.norm(dim=1))
    along = torch.where(wanted, along, 1.0)[:, None]
    step = torch.where(wanted[:, None], step, 0.0)
    turned = (inverse @ change[:, :, None])[:, :, 0]
    other = (0.5 * (along + (change * turned).sum(1, keepdim=True)) / along * step - turned) / along
    return torch.baddbmm(inverse, torch.stack([step, other], 2), torch.stack([other, step], 1))
