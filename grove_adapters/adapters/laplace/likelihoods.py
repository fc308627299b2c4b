"""What the losses of contrastive training say as likelihoods of matches: their curvature, and predictive densities.

An item with the vector g is compared with M candidates of the other modality, which are held fixed. The logits are
z = a T û (+ b) with the (M, D) unit candidates T and û = g / ‖g‖. The generalised Gauss–Newton matrix of one item's
loss in g is Jᵀ Λ J with J = a T (I − ûûᵀ) / ‖g‖ and Λ the Hessian of the loss in z, which knows no labels. Sums of it
over items come down to matrix products; no (B, D, D) tensor is held.

Source: BayesVLM (Baumann et al., "Post-hoc Probabilistic Vision-Language Models"), which takes the other modality as
observed for either loss. The predictive density is that of logits shrunk by their variance, z / √(1 + π Var z / 8),
the usual approximation of a logistic function (and by extension of a softmax) averaged over a Gaussian: MacKay 1992.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import logsigmoid, normalize

BLOCK = 1 << 22  # logits held at once: 32 MiB in float64


class Likelihood(Protocol):
    """The likelihood of an item's matches among candidates."""

    def curvature(self, vectors: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """(D, D) Σ Jᵀ Λ J over (B, D) vectors g, not normalised, given (M, D) unit candidates."""

    def surprise(self, mean: torch.Tensor, variance: torch.Tensor, matches: torch.Tensor) -> torch.Tensor:
        """Negative log predictive density of the matches in nats an item, averaged over both modalities.

        Args:
            mean: (B, M) means of cosines.
            variance: (B, M) variances of cosines.
            matches: (B, M) whether the two belong together; every row and column has a match.
        """


@dataclass(frozen=True)
class Softmax:
    """One match among the candidates, as in InfoNCE: Λ = diag(p) − ppᵀ.

    Attributes:
        scale: a > 0.
    """

    scale: float

    def curvature(self, vectors: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        candidates = candidates - candidates.mean(0)  # a softmax knows no shift; squares to be cancelled get smaller
        total = vectors.new_zeros(vectors.shape[1], vectors.shape[1])
        for unit, factor in _blocks(vectors, self.scale, len(candidates)):
            cosines = unit @ candidates.T
            p = (self.scale * cosines).softmax(1)
            centre = p @ candidates
            centre = centre - (unit * centre).sum(1, keepdim=True) * unit
            total += _second_moments(unit, candidates, factor * p, cosines) - (factor * centre).T @ centre
        return (total + total.T) / 2

    def surprise(self, mean: torch.Tensor, variance: torch.Tensor, matches: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        logits = self.scale * mean / _widening(self.scale, variance)
        right = logits.masked_fill(~matches, -math.inf)
        ways = [(logits.logsumexp(axis) - right.logsumexp(axis)).mean() for axis in (0, 1)]
        return (ways[0] + ways[1]) / 2


@dataclass(frozen=True)
class Sigmoid:
    """Every pair matches or not, as in SigLIP: Λ = diag(σ(z) (1 − σ(z))).

    Attributes:
        scale: a > 0.
        bias: b.
    """

    scale: float
    bias: float

    def curvature(self, vectors: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        total = vectors.new_zeros(vectors.shape[1], vectors.shape[1])
        for unit, factor in _blocks(vectors, self.scale, len(candidates)):
            cosines = unit @ candidates.T
            p = (self.scale * cosines + self.bias).sigmoid()
            total += _second_moments(unit, candidates, factor * p * (1 - p), cosines)
        return (total + total.T) / 2

    def surprise(self, mean: torch.Tensor, variance: torch.Tensor, matches: torch.Tensor) -> torch.Tensor:
        """See `Likelihood`."""
        logits = (self.scale * mean + self.bias) / _widening(self.scale, variance)
        total = -logsigmoid(torch.where(matches, logits, -logits)).sum()
        return (total / len(matches) + total / matches.shape[1]) / 2


def _widening(scale: float, variance: torch.Tensor) -> torch.Tensor:
    return (1 + math.pi / 8 * scale**2 * variance).sqrt()


def _blocks(vectors: torch.Tensor, scale: float, candidates: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Unit vectors û and (b, 1) factors a² / ‖g‖² of some items after others."""
    for part in vectors.split(max(1, BLOCK // candidates)):
        yield normalize(part, dim=1), scale**2 / part.square().sum(1, keepdim=True)


def _second_moments(
    unit: torch.Tensor, candidates: torch.Tensor, weights: torch.Tensor, cosines: torch.Tensor
) -> torch.Tensor:
    """(D, D) Σ_im w_im (P_i t_m)(P_i t_m)ᵀ with P_i t = t − û_i ⟨û_i, t⟩, multiplied out."""
    weighted = weights * cosines
    mixed = unit.T @ (weighted @ candidates)
    along = (weighted * cosines).sum(1, keepdim=True)
    return (candidates.T * weights.sum(0)) @ candidates - mixed - mixed.T + (along * unit).T @ unit
