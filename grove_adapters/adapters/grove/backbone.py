"""What held-out links say: how far to go from the frozen embedding, and how wide the likelihood of a partner is."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from grove_adapters.embeddings import MODALITIES, Pairs, match_matrix

SHARES = tuple(step / 20 for step in range(21))
SCALES = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0)  # inverse temperatures, for distances whose mean square is 1


def decoding_share(start: Mapping[str, torch.Tensor], end: Mapping[str, torch.Tensor], matches: torch.Tensor) -> float:
    """The share w of start + w (end − start) with which held-out links find each other best.

    The loss is the cross-entropy of the match distribution over the given links in both directions, a softmax of
    negative squared distances at the inverse temperature that suits the share best, so that flattening or sharpening
    gains nothing. Of the shares whose loss is less than a standard error (of the paired difference) worse than the best
    one's, the smallest is taken: the start is left only for something.

    Args:
        start: (R, D) one end of the way, by modality, for both items of R links.
        end: (R, D) the other end, made of each item alone.
        matches: (R, R) whether the image of one link and the text of another are linked. Further positives do not help
            here: a vague caption, true of many images, would pay for a start that tells them apart.

    Returns:
        w in [0, 1].
    """
    losses = []
    for share in SHARES:
        image, text = (torch.lerp(start[name], end[name], share).double() for name in MODALITIES)
        square = torch.cdist(image, text).square()
        square = square / square.mean().clamp_min(1e-300)
        each = [_losses(-scale * square, matches) for scale in SCALES]
        losses.append(min(each, key=lambda loss: float(loss.mean())))
    values = torch.stack(losses)
    excess = values - values[values.mean(1).argmin()]
    error = excess.std(1) / len(matches) ** 0.5 if len(matches) > 1 else torch.full_like(excess[:, 0], torch.inf)
    return SHARES[int((excess.mean(1) <= error).nonzero()[0])]


def matching(pairs: Pairs, rows: np.ndarray, *, positives: bool) -> torch.Tensor:
    """(R, R) whether the image of one of the given links matches the text of another, by links or by positives too."""
    chosen = pairs.links[rows]
    table = match_matrix(len(pairs.images), len(pairs.texts), pairs.links, pairs.positives if positives else None)
    return torch.as_tensor(table[chosen[:, 0]][:, chosen[:, 1]].toarray())


WIDTHS = tuple(step * math.log(2) / 4 for step in range(-16, 17))  # log of a cross prediction's variance / its start
SLOPES = tuple(step / 10 for step in range(11))  # of its log variance with a standard deviation of the mismatch


def cross_noise(
    square: torch.Tensor, mismatch: torch.Tensor, matches: torch.Tensor, start: float
) -> tuple[float, float]:
    """(a, b) of the variance exp(a + b · mismatch) with which held-out queries find their partners by likelihood.

    The loss is the cross-entropy of the softmax of −½ squared distance / variance over the given gallery, plus
    4 (log variance / start)² + 16 b² nats in all, which decide where few or easy queries do not. Such a variance is
    wider than the mean squared error of a dimension, because an isotropic Gaussian counts the same error once for every
    dimension that shares it.

    Args:
        square: (R, G) squared distances of predictions to the gallery.
        mismatch: (R,) of the queries, standardised.
        matches: (R, G) whether an item is a true match; each query has one.
        start: A variance to begin with, 1 / logit scale of the frozen model where that is known.
    """
    square = square.double()
    best, found = math.inf, (math.log(start), 0.0)
    for rise in WIDTHS:
        for slope in SLOPES:
            logits = -0.5 * square / torch.exp(math.log(start) + rise + slope * mismatch)[:, None]
            loss = float((logits.logsumexp(1) - logits.masked_fill(~matches, -torch.inf).logsumexp(1)).sum())
            loss += 4 * rise**2 + 16 * slope**2
            if loss < best:
                best, found = loss, (math.log(start) + rise, slope)
    return found


def _losses(logits: torch.Tensor, matches: torch.Tensor) -> torch.Tensor:
    """(R,) cross-entropies of both directions, in nats."""
    hidden = logits.masked_fill(~matches, -torch.inf)
    return sum((logits.logsumexp(d) - hidden.logsumexp(d) for d in (0, 1)), logits.new_zeros(len(logits)))
