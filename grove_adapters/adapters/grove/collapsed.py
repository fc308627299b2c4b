"""The bound of all links at once, with every q(u) at its optimum and out of the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from grove_adapters.adapters.grove.alignments import Marginal
from grove_adapters.adapters.grove.gp import JITTERS, SparseGP
from grove_adapters.adapters.grove.model import Objective
from grove_adapters.embeddings import MODALITIES


@dataclass
class Statistics:
    """All that the bound needs to know of N rows, float64.

    Attributes:
        gram: Σ r rᵀ, (M, M), with r the features of a row.
        cross: Σ r (z − c)ᵀ, (M, D).
        square: Σ ‖z − c‖².
        n_rows: N.
    """

    gram: torch.Tensor
    cross: torch.Tensor
    square: torch.Tensor
    n_rows: int = 0

    @classmethod
    def empty(cls, gp: SparseGP) -> Statistics:
        """Of no rows."""
        zeros = gp.mean.new_zeros(gp.mean.shape, dtype=torch.float64)
        return cls(zeros @ zeros.T, zeros, zeros[0, 0])

    def add(self, gp: SparseGP, factor: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> None:
        """Take in rows at latents x (B, L) with values (B, D); what a gradient needs of them is computed again then."""
        gram, cross, square = checkpoint(_summed, gp, factor, x, values, use_reentrant=False, preserve_rng_state=False)
        self.gram, self.cross, self.square = self.gram + gram, self.cross + cross, self.square + square
        self.n_rows += len(values)


def _summed(
    gp: SparseGP, factor: torch.Tensor, x: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    features, deviation = gp.features(x, factor), (values - gp.constant).double()
    return features.T @ features, features.T @ deviation, deviation.square().sum()


def evidence_bound(gp: SparseGP, sums: Statistics) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lower bound of log p(Z | X) in nats, summed over rows and outputs; exact where every row is inducing.

    Args:
        gp: Kernel, inducing inputs and noise; its q(u) does not enter.
        sums: Statistics of all rows.

    Returns:
        The bound, and the optimal q(w): its mean m (M, D) and the factor R of its precision, S⁻¹ = R Rᵀ, (M, M).

    Source: Titsias 2009, Eq. 9, whitened: B = I + Φ / σ² with Φ = Σ r rᵀ and Ψ = Σ r (z − c)ᵀ gives
    −½ [N D log 2πσ² + D log |B| + Σ‖z − c‖² / σ² − tr(Ψᵀ B⁻¹ Ψ) / σ⁴ + D (N s² − tr Φ) / σ²].
    """
    noise, dim = gp.noise, gp.dim
    precision = sums.gram / noise + torch.eye(len(sums.gram), dtype=torch.float64, device=sums.gram.device)
    root = torch.linalg.cholesky(precision)
    turned = torch.linalg.solve_triangular(root, sums.cross / noise, upper=False)
    log_det = 2 * root.diagonal().log().sum()
    unexplained = sums.n_rows * gp.kernel.scale - sums.gram.trace()
    bound = -0.5 * (
        sums.n_rows * dim * torch.log(2 * math.pi * noise)
        + dim * log_det
        + sums.square / noise
        - turned.square().sum()
        + dim * unexplained / noise
    )
    return bound, torch.linalg.solve_triangular(root.T, turned, upper=True), root


class CollapsedObjective(Objective):
    """`Objective` for all links at once: q(u) is a function of the rest, so no optimiser has to follow it.

    One evaluation sweeps the links in chunks and keeps M numbers squared, not N; the backward pass sweeps them again.

    Args:
        exact: Whether the inducing inputs are the latents themselves. Then the bound is the log marginal likelihood,
            which is the most that any inducing inputs reach; its slope by them is 0 and needs not be followed.
        arguments: Of `Objective`, without `natural`.
    """

    def __init__(self, *arguments: object, exact: bool, **settings: object) -> None:
        super().__init__(*arguments, natural=None, **settings)  # type: ignore[arg-type]
        self._exact = exact

    def __call__(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Terms of all links; everything but the loss in nats per link, summed over dimensions."""
        n, gps = len(self._data), self._decoders.gps
        if self._exact:
            self.follow()
        factors = {modality: gp.factor() for modality, gp in gps.items()}
        sums = {modality: Statistics.empty(gp) for modality, gp in gps.items()}
        distance = torch.zeros((), dtype=torch.float64, device=self._latents.weight.device)
        for chunk, batch in self._data.sweep():
            x = self._at(chunk)
            distance = distance + x.double().square().sum()
            for modality, gp in gps.items():
                sums[modality].add(gp, factors[modality], x, batch[modality])
        bounds, optima = {}, {}
        for modality, gp in gps.items():
            bounds[modality], *optima[modality] = evidence_bound(gp, sums[modality])
            gp.set_optimal(sums[modality].gram.detach(), sums[modality].cross.detach())
        bound = (bounds["image"] + bounds["text"]) / n
        alignment = bound.new_zeros(())
        if self._weight:
            for chunk, batch in self._data.sweep():
                share = checkpoint(
                    self._alignment_at, chunk, batch, factors, optima, use_reentrant=False, preserve_rng_state=False
                )
                alignment = alignment + share * (len(chunk) / n)
        total = self._weight * alignment - bound
        if self._prior:
            total = total + 0.5 * distance / n
        divergence = sum((gps[modality].divergence() for modality in MODALITIES), bound.new_zeros(())).detach() / n
        return {
            "loss": total / self._data.dim,
            "log_likelihood": bound.detach() + divergence,
            "alignment": alignment.detach(),
            "divergence": divergence,
        }

    @torch.no_grad()
    def settle(self) -> None:
        """Put q(u), which is left one step behind, where it belongs."""
        self(torch.arange(len(self._data)))

    @torch.no_grad()
    def follow(self) -> None:
        """Put the inducing inputs where the latents are."""
        for gp in self._decoders.gps.values():
            gp.inducing.copy_(self._latents.weight)

    def _at(self, chunk: torch.Tensor) -> torch.Tensor:
        return self._latents(chunk.to(self._latents.weight.device))

    def _alignment_at(
        self,
        chunk: torch.Tensor,
        batch: dict[str, torch.Tensor],
        factors: dict[str, torch.Tensor],
        optima: dict[str, list[torch.Tensor]],
    ) -> torch.Tensor:
        x, marginals = self._at(chunk), {}
        for modality, gp in self._decoders.gps.items():
            marginals[modality] = _marginal(gp, gp.features(x, factors[modality]), *optima[modality])
        return self._alignment(x, batch, self._shifted(marginals), self._decoders.gps)


def _marginal(gp: SparseGP, features: torch.Tensor, mean: torch.Tensor, root: torch.Tensor) -> Marginal:
    """`SparseGP.marginal` of the optimal q(w), in float64 and differentiable in all that made it."""
    spread = torch.linalg.solve_triangular(root, features.T, upper=False).square().sum(0)
    variance = gp.kernel.scale - features.square().sum(1) + spread
    return features @ mean, variance.clamp_min(JITTERS[0] * gp.kernel.scale.detach())[:, None]
