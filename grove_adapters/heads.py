"""Networks from (B, D) embeddings to the moments of a Gaussian: (mean, log variance)."""

from __future__ import annotations

import itertools

import torch
from torch.nn.functional import softplus

LOWEST, HIGHEST = -20.0, 5.0  # log variance; e⁻²⁰ is a standard deviation of 5e-5 beside unit vectors


class VarianceHead(torch.nn.Module):
    """A frozen embedding, moved by a constant, as the mean, and the log variance from an MLP over it.

    The constant `offset` is 0 unless set. Inputs of the MLP are centred and scaled by constants of the fitted data
    (`standardise`), because the embeddings of a CLIP model share a large mean that says nothing about an item. Its
    output is softly bounded, because a log variance that runs away turns into 0 or infinity.

    Args:
        dim: D.
        hidden: Width of the hidden layers.
        layers: Hidden layers, each followed by a ReLU.
        isotropic: Whether an item has one variance for all dimensions instead of one for each.

    Source: GroVE, Appendix A.2 (D → 256 → 256 → D for PFE, PCME and PCME++); the bounds follow Chua et al. 2018
    (PETS), Appendix A.1. Standardised inputs are our addition.
    """

    offset: torch.Tensor
    centre: torch.Tensor
    spread: torch.Tensor

    def __init__(self, dim: int, *, hidden: int = 256, layers: int = 2, isotropic: bool = False) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(dim))
        self.register_buffer("centre", torch.zeros(dim))
        self.register_buffer("spread", torch.ones(()))
        self.mlp = mlp(dim, hidden, 1 if isotropic else dim, layers=layers)

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, D) mean and (B, D) or (B, 1) log variance in (`LOWEST`, `HIGHEST`) of (B, D) embeddings."""
        return values + self.offset, bounded(self.mlp((values - self.centre) / self.spread), LOWEST, HIGHEST)

    @torch.no_grad()
    def standardise(self, values: torch.Tensor) -> None:
        """Centre inputs at the mean of a (B, D) sample and scale them to a variance of 1, averaged over dimensions."""
        self.centre.copy_(values.mean(0))
        spread = values.var(0, correction=0).mean().sqrt()
        self.spread.fill_(float(spread) or 1.0)

    @torch.no_grad()
    def start_at(self, log_variance: float) -> None:
        """Set the last layer so that all variances start near the given one, and differ by what is learned."""
        inside = min(max(log_variance, LOWEST + 1), HIGHEST - 1)
        last = self.mlp[-1]
        assert isinstance(last, torch.nn.Linear)
        last.weight.mul_(0.01)
        last.bias.fill_(inside)


def mlp(width_in: int, hidden: int, width_out: int, *, layers: int = 2, dropout: float = 0.0) -> torch.nn.Sequential:
    """Linear layers with a ReLU, and dropout where there is any, after each hidden one.

    Args:
        width_in: Width of the input.
        hidden: Width of the hidden layers.
        width_out: Width of the output, which has no activation.
        layers: Hidden layers; 0 is a linear map.
        dropout: Share of hidden units that training zeroes.
    """
    widths = [width_in, *[hidden] * layers]
    blocks: list[torch.nn.Module] = []
    for left, right in itertools.pairwise(widths):
        blocks += [torch.nn.Linear(left, right), torch.nn.ReLU()]
        if dropout:
            blocks.append(torch.nn.Dropout(dropout))
    return torch.nn.Sequential(*blocks, torch.nn.Linear(widths[-1], width_out))


def bounded(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """`values` squeezed smoothly into (low, high): the identity well inside, with a gradient everywhere."""
    below = high - softplus(high - values)
    return low + softplus(below - low)
