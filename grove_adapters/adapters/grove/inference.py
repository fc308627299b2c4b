"""The latent of an embedding never seen: posterior mode by quasi-Newton steps, and its Laplace covariance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from grove_adapters.adapters.grove.gp import SparseGP, SparseProcess
from grove_adapters.adapters.grove.kernels import Local

BLOCK = 256  # rows worked on together, always as many: then no result depends on how many there are
MAX_STEPS = 200
MAX_ROUNDS = 3
ROUGHLY = 5e-4  # quasi-Newton step, in length scales, from which exact steps take over
LONGEST_STEP = 1.0  # in length scales
SUFFICIENT = 1e-4  # share of the predicted decrease that a step must reach (Armijo)
SMALLEST_CURVATURE = 1e-3

Targets = dict[str, torch.Tensor]
"""What is left of each row by modality: (·, M) or (·, M + 1), see `_Reduced.target`."""


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


class _Form:
    """q(x) = ½ kᵀ W k − kᵀ b with k = k(V, x), and its derivatives by x.

    Args:
        process: Whose kernel and inducing inputs V.
        weights: W, (M, M) float64, symmetric.
    """

    def __init__(self, process: SparseProcess, weights: torch.Tensor) -> None:
        self._kernel = process.kernel
        self._inducing = process.inducing.double()
        self.weights = weights

    def local(self, x: torch.Tensor) -> Local:
        """k and its derivatives at x (B, L)."""
        return self._kernel.local(x, self._inducing)

    def slope(self, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q (B,) and its gradient (B, L) for b (B, M) or (M,)."""
        local = self.local(x)
        turned = local.value @ self.weights
        return (local.value * (0.5 * turned - b)).sum(1), local.pull(turned - b)

    def curvature(self, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The Hessian of q, (B, L, L)."""
        local = self.local(x)
        return _quadratic(local.slopes(), self.weights) + local.bend(local.value @ self.weights - b)


class _Reduced:
    """One GP seen from latent space: ‖z − μ(x)‖² and the variance need no D-dim vector once α(z − c) is known.

    With k = k(V, x), α = K⁻¹(E[u] − c) and D s² − kᵀ Q k the variance summed over the outputs, the negative expected
    log-likelihood is, up to a constant, (kᵀ W k − 2 kᵀ β) / 2 with W = (α αᵀ − Q) / σ² (M, M) and
    β = α (z − c) / σ² (M numbers per row).
    """

    def __init__(self, gp: SparseGP) -> None:
        inverse = _inverse_factor(gp)
        self.kernel = gp.kernel
        self.dim = gp.dim
        self.alpha = inverse.T @ gp.mean.double()
        self.gram = self.alpha @ self.alpha.T
        self.constant = gp.constant
        self.precision = 1 / gp.noise
        self.form = _Form(gp, (self.gram - inverse.T @ gp.variance_loss() @ inverse) * self.precision)

    def target(self, values: torch.Tensor) -> torch.Tensor:
        """β of rows z, (B, M) float64."""
        return (values - self.constant).double() @ self.alpha.T * self.precision

    def decoded(self, x: torch.Tensor) -> torch.Tensor:
        """`target` of the embeddings decoded from x (B, L)."""
        return self.form.local(x).value @ self.gram * self.precision

    def linear(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The energy at x (A, L) of any target t is a + t · b: a (A,) and b (A, M)."""
        k = self.form.local(x).value
        return 0.5 * (k @ self.form.weights * k).sum(1), -k

    def energy(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Negative expected log-likelihood up to a constant of each row, (B,), and its gradient (B, L)."""
        return self.form.slope(x, target)

    def hessian(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Its second derivatives, (B, L, L)."""
        return self.form.curvature(x, target)

    def propagated(self, x: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
        """tr(C JᵀJ) / D at x (B, L) with C (B, L, L)."""
        return (_quadratic(self.form.local(x).slopes(), self.gram) * covariance).sum((1, 2)) / self.dim


class _VaryingNoise(_Reduced):
    """The same where log σ²(x) = l + h(x) is uncertain: the energy is ½ D m(x) + e(x) p(x).

    m is the mean of h and p = E[1 / σ²] = exp(−l − m + v / 2), whose exponent is a form in the kernel of the noise.
    What it multiplies is e = ½ E‖z − g(x)‖², a form as before for σ² = 1, whose part ½ (‖z − c‖² + D s²) now counts:
    it is the last number of a target.
    """

    def __init__(self, gp: SparseGP, process: SparseProcess) -> None:
        super().__init__(gp)
        self.form = _Form(gp, self.form.weights / self.precision)
        self.precision = torch.ones_like(self.precision)
        self.rest = 0.5 * gp.dim * gp.kernel.scale
        inverse = _inverse_factor(process)
        self.slant = (inverse.T @ process.mean.double())[:, 0]
        self.noise_form = _Form(process, inverse.T @ process.variance_loss() @ inverse)
        self.offset = 0.5 * process.kernel.scale - gp.log_noise.double()

    def target(self, values: torch.Tensor) -> torch.Tensor:
        """β and ½ (‖z − c‖² + D s²), (B, M + 1) float64."""
        square = (values - self.constant).double().square().sum(1, keepdim=True)
        return torch.cat([super().target(values), 0.5 * square + self.rest], 1)

    def decoded(self, x: torch.Tensor) -> torch.Tensor:
        """`target` of the embeddings decoded from x (B, L)."""
        k, beta = self.form.local(x).value, super().decoded(x)
        return torch.cat([beta, 0.5 * (beta * k).sum(1, keepdim=True) + self.rest], 1)

    def linear(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The energy at x (A, L) of any target t is a + t · b: a (A,) and b (A, M + 1)."""
        a, b = super().linear(x)
        precision = self._precision(x)[0]
        level = 0.5 * self.dim * (self.noise_form.local(x).value @ self.slant)
        return level + precision * a, precision[:, None] * torch.cat([b, torch.ones_like(b[:, :1])], 1)

    def energy(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Negative expected log-likelihood up to a constant of each row, (B,), and its gradient (B, L)."""
        misfit, slope = self.form.slope(x, target[:, :-1])
        misfit = misfit + target[:, -1]
        precision, bend = self._precision(x)
        noise = self.noise_form.local(x)
        rise = noise.pull(self.slant.expand_as(noise.value))
        energy = 0.5 * self.dim * (noise.value @ self.slant) + precision * misfit
        return energy, 0.5 * self.dim * rise + precision[:, None] * (slope - misfit[:, None] * bend)

    def hessian(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Its second derivatives, (B, L, L)."""
        misfit, slope = self.form.slope(x, target[:, :-1])
        misfit = misfit + target[:, -1]
        precision, bend = self._precision(x)
        noise = self.noise_form.local(x)
        level = 0.5 * self.dim * noise.bend(self.slant.expand_as(noise.value))
        cross = slope[:, :, None] * bend[:, None]
        twice = bend[:, :, None] * bend[:, None] - self.noise_form.curvature(x, -self.slant)
        inner = self.form.curvature(x, target[:, :-1]) - cross - cross.mT + misfit[:, None, None] * twice
        return level + precision[:, None, None] * inner

    def _precision(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """p (B,) and the gradient of −log p (B, L)."""
        value, slope = self.noise_form.slope(x, -self.slant)
        return torch.exp(self.offset - value), slope


def _reduced(gp: SparseGP) -> _Reduced:
    return _Reduced(gp) if gp.noise_process is None else _VaryingNoise(gp, gp.noise_process)


def _inverse_factor(process: SparseProcess) -> torch.Tensor:
    """L⁻¹."""
    factor = process.factor()
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(factor, identity, upper=False)


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
        self._reduced = {modality: _reduced(gp) for modality, gp in gps.items()}
        self._prior = float(prior)
        self._restarts = min(restarts, len(anchors))
        self._reach = min(float(reduced.kernel.reach) for reduced in self._reduced.values())
        self._tolerance = tolerance * self._reach
        self._anchors = anchors.double()
        self._anchor_energy = 0.5 * self._prior * self._anchors.square().sum(1)
        self._anchor_slopes = {}
        self._identity = torch.eye(anchors.shape[1], dtype=torch.float64, device=anchors.device)
        for modality, reduced in self._reduced.items():
            energy, self._anchor_slopes[modality] = reduced.linear(self._anchors)
            self._anchor_energy = self._anchor_energy + energy
        decoded = {modality: reduced.decoded(self._anchors) for modality, reduced in self._reduced.items()}
        self._typical = _inverse(self._hessian(self._anchors, decoded))[0].mean(0)

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
            reduced.propagated(mode, covariance)
            for mode, covariance in zip(blocks(posterior.mode), blocks(posterior.covariance), strict=True)
        ]
        return torch.cat(parts)[: len(posterior.mode)]

    def _nearest(self, targets: Targets) -> torch.Tensor:
        """Numbers of the best anchors of each row, (B, restarts)."""
        energies = self._anchor_energy.expand(len(next(iter(targets.values()))), -1)
        for modality, target in targets.items():
            energies = energies + target @ self._anchor_slopes[modality].T
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
            value, slope = self._reduced[modality].energy(x, target)
            energy, gradient = energy + value, gradient + slope
        return energy, gradient

    def _hessian(self, x: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Second derivatives of `_energy`, (B, L, L)."""
        hessian = (self._prior * self._identity).expand(len(x), -1, -1)
        for modality, target in targets.items():
            hessian = hessian + self._reduced[modality].hessian(x, target)
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
