"""How far a predictive mean should go from the frozen embedding towards its decoding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from grove_adapters.embeddings import MODALITIES

SHARES = tuple(step / 20 for step in range(21))
SCALES = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0)  # inverse temperatures of the match distribution


def decoding_share(
    frozen: Mapping[str, torch.Tensor],
    decoded: Mapping[str, torch.Tensor],
    links: np.ndarray,
) -> float:
    """The share w of z + w (μ − z) with which held-out links find each other best.

    The loss is the cross-entropy of the match distribution over the given links in both directions, at
    the inverse temperature that suits the share best, so that flattening or sharpening gains nothing. Of the shares
    whose loss is less than a standard error (of the paired difference) worse than the best one's, the smallest is
    taken: the frozen embedding is left only for something.

    Args:
        frozen: (R, D) embeddings z of both ends of R links.
        decoded: (R, D) their decodings μ, each from its own modality alone.
        links: (R, 2) rows; links that share an image or a text count as matches of each other.

    Returns:
        w in [0, 1].
    """
    links_t = torch.as_tensor(links)
    matches = (links_t[:, None] == links_t).any(2).to(frozen["image"].device)
    losses = []
    for share in SHARES:
        image, text = (
            torch.nn.functional.normalize(torch.lerp(frozen[name], decoded[name], share), dim=1) for name in MODALITIES
        )
        each = [_losses(scale * (image @ text.T).double(), matches) for scale in SCALES]
        losses.append(min(each, key=lambda loss: float(loss.mean())))
    values = torch.stack(losses)
    excess = values - values[values.mean(1).argmin()]
    error = excess.std(1) / len(links) ** 0.5 if len(links) > 1 else torch.full_like(excess[:, 0], torch.inf)
    return SHARES[int((excess.mean(1) <= error).nonzero()[0])]


def _losses(logits: torch.Tensor, matches: torch.Tensor) -> torch.Tensor:
    """(R,) cross-entropies of both directions, in nats."""
    hidden = logits.masked_fill(~matches, -torch.inf)
    return sum((logits.logsumexp(d) - hidden.logsumexp(d) for d in (0, 1)), logits.new_zeros(len(logits)))
