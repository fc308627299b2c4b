"""Training objectives as pure functions of tensors, for post-hoc adapters and for training whole models alike.

Gaussians are given by their moments ``(mean, log_variance)``, each (B, D); ``log_variance`` is log σ², also (B, 1).
Half-precision inputs are computed in float32, also inside autocast; float64 stays float64. Objectives over all pairs
of a batch are summed in blocks of rows whose gradients are taken at once, so a batch of 16,384 × 512 needs less than
2 GiB. Every reduction is named; "as published" and "as coded" variants, where they differ, go by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softplus

from grove_adapters.errors import InputError

Moments = tuple[torch.Tensor, torch.Tensor]
"""(B, D) means and (B, D) or (B, 1) log variances."""

Number = torch.Tensor | float

BLOCK = 1 << 22  # entries of a temporary; 16 MiB in float32


def mutual_likelihood_score(one: Moments, other: Moments) -> torch.Tensor:
    """(B,) log ∫ p₁ p₂ = −½ Σ [(μ₁ − μ₂)² / (σ₁² + σ₂²) + log(σ₁² + σ₂²) + log 2π] of each row, in nats.

    Source: the mutual likelihood score of PFE (Shi and Jain 2019), with its constant.
    """
    one, other = _checked(one), _checked(other)
    terms = _mutual_terms(one, other)
    return -0.5 * (terms.sum(1) + terms.shape[1] * math.log(2 * math.pi))


def mutual_likelihood_loss(
    one: Moments,
    other: Moments,
    *,
    weights: torch.Tensor | None = None,
    form: Literal["exact", "as_published"] = "exact",
) -> torch.Tensor:
    """Mean over matching rows of what makes them unlikely to be the same point. There are no negatives.

    Args:
        one: B Gaussians.
        other: B Gaussians, row by row their true matches.
        weights: (B,) weights ≥ 0 of a weighted mean, or None where all rows count alike.
        form: ``"exact"`` is minus the mean of `mutual_likelihood_score`; ``"as_published"`` leaves the ½ and the
            constant out and adds 1e-10 to the variance under the square.

    Source: PFE's training loss, and its public code for the published form.
    """
    one, other = _checked(one), _checked(other)
    rows, dim = one[0].shape
    weight = _row_weights(weights, one[0], (rows,))

    def block(weight: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        return (weight * _mutual_terms(parts[:2], parts[2:], 0.0 if form == "exact" else 1e-10)).sum()

    mean = _over_rows(block, rows=(weight, *_expanded(one), *_expanded(other)), width=dim) / weight.sum()
    return 0.5 * (mean + dim * math.log(2 * math.pi)) if form == "exact" else mean


def sampled_distance(image: Moments, text: Moments) -> torch.Tensor:
    """(B_I, B_T) closed-form sampled distances E‖Z_i − Z_j‖² = ‖μ_i − μ_j‖² + Σ(σ_i² + σ_j²).

    Source: PCME++ (Chun 2024), Eq. 1.
    """
    image, text = _checked(image), _checked(text)
    return _square_distance(image[0], text[0]) + _total_variance(image)[:, None] + _total_variance(text)


def csd_matching(
    image: Moments,
    text: Moments,
    *,
    scale: Number,
    shift: Number,
    labels: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    pseudo_positives: bool = False,
) -> torch.Tensor:
    """Mean over all pairs of the binary cross-entropy of the logits shift − scale · CSD.

    CSD is the closed-form sampled distance, see `sampled_distance`.

    Args:
        image: B_I Gaussians.
        text: B_T Gaussians.
        scale: a > 0.
        shift: b.
        labels: (B_I, B_T) probabilities of a match, or None where exactly equal row numbers match.
        weights: (B_I, B_T) factors ≥ 0 of the cross-entropies, or None where all pairs count alike.
        pseudo_positives: Whether, for each image, every text as close as the text of its largest label gets that
            label. Swap the arguments (and transpose labels and weights) for the other way round.

    Source: PCME++ Eqs. 1–2 and section 2.3; in its App. A.4 the threshold is broadcast along the wrong axis.
    """
    image, text = _checked(image), _checked(text)
    other = (text[0], _total_variance(text))
    scale, shift = _as(scale, image[0]), _as(shift, image[0])

    def block(
        mean: torch.Tensor, total: torch.Tensor, truth: torch.Tensor, weight: torch.Tensor, *whole: torch.Tensor
    ) -> torch.Tensor:
        distance = _square_distance(mean, whole[0]) + total[:, None] + whole[1]
        truth = _block_labels(truth, distance)
        if pseudo_positives:
            best, where = truth.max(1, keepdim=True)
            truth = torch.where(distance <= distance.gather(1, where), best, truth)
        return binary_cross_entropy_with_logits(whole[3] - whole[2] * distance, truth, weight, reduction="sum")

    weight = _row_weights(weights, image[0], (len(image[0]), len(text[0])))
    rows = (image[0], _total_variance(image), _row_labels(labels, image, text), weight)
    total = _over_rows(block, rows=rows, whole=(*other, scale, shift), width=len(text[0]))
    return total / (len(image[0]) * len(text[0]))


def sigmoid_pairwise(
    image: Moments,
    text: Moments,
    *,
    scale: Number,
    shift: Number,
    labels: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """ProLIP's probabilistic pairwise contrastive loss: (1/B_I) Σ_ij softplus(−y_ij ℓ_ij), summed over all texts.

    The logits are ℓ_ij = scale · (1 − ½ CSD_ij) + shift, see `csd_matching`. For the unit means of the paper that is
    its scale · (μ_i·μ_j − ½ Σ(σ_i² + σ_j²)) + shift.

    Args:
        image: B_I Gaussians.
        text: B_T Gaussians.
        scale: a > 0, starting at 10 in the paper.
        shift: b, starting at −10.
        labels: (B_I, B_T) probabilities of a match in place of (y + 1) / 2, or None where equal row numbers match.
        weights: (B_I, B_T) factors ≥ 0 of the terms, or None where all pairs count alike.

    Source: ProLIP Eq. 2, with the sign of b that its code and its stated start of −10 imply: printed it is −b.
    """
    scale = _as(scale, image[0])
    mean = csd_matching(image, text, scale=0.5 * scale, shift=scale + shift, labels=labels, weights=weights)
    return mean * len(text[0])


def soft_contrastive(
    image: torch.Tensor,
    text: torch.Tensor,
    *,
    scale: Number,
    shift: Number,
    labels: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    logistic: Literal["sigmoid", "as_published"] = "sigmoid",
    reduction: Literal["mean", "sum"] = "mean",
) -> torch.Tensor:
    """PCME's soft contrastive loss: −log of the Monte Carlo probability that each pair does (or does not) match.

    The probability is the mean of logistic(±(shift − scale · ‖z_i − z_j‖)) over all pairs of samples; its logarithm is
    taken by logsumexp, so that improbable pairs keep a gradient. The distance is √(‖·‖² + 1e-6), which is
    differentiable at 0.

    Args:
        image: (B_I, K, D) samples, see `draw`.
        text: (B_T, K, D) samples.
        scale: a > 0.
        shift: b.
        labels: (B_I, B_T) booleans, or None where equal row numbers match.
        weights: (B_I, B_T) factors ≥ 0 of the terms, or None where all pairs count alike.
        logistic: ``"sigmoid"``, or ``"as_published"`` for exp(x) / (exp(x) + exp(−x)) = sigmoid(2x).
        reduction: ``"mean"`` over all pairs, or their ``"sum"`` (published, once for each direction).

    Source: PCME (Chun et al. 2021), the Monte Carlo form of its soft contrastive loss; the logistic function is
    sigmoid(2x) in its public code and the plain one in PCME++ App. A.3.
    """
    image, text = _wide(image), _wide(text)
    if image.ndim != 3 or text.ndim != 3 or image.shape[2] != text.shape[2]:
        raise InputError(
            f"expected (B, K, D) samples of one width, got {tuple(image.shape)} and {tuple(text.shape)}; see draw"
        )
    gain = 1.0 if logistic == "sigmoid" else 2.0
    draws = image.shape[1] * text.shape[1]

    def block(samples: torch.Tensor, truth: torch.Tensor, weight: torch.Tensor, *whole: torch.Tensor) -> torch.Tensor:
        square = _square_distance(samples.flatten(0, 1), whole[0].flatten(0, 1))
        distance = (square + 1e-6).sqrt().unflatten(1, whole[0].shape[:2]).unflatten(0, samples.shape[:2])
        sign = 2 * _block_labels(truth, distance[:, 0, :, 0]) - 1
        logits = gain * sign[:, None, :, None] * (whole[2] - whole[1] * distance)
        return (weight * (math.log(draws) - logsigmoid(logits).logsumexp(dim=(1, 3)))).sum()

    weight = _row_weights(weights, image, (len(image), len(text)))
    rows = (image, _row_labels(labels, (image, image), (text, text)), weight)
    whole = (text, _as(scale, image), _as(shift, image))
    total = _over_rows(block, rows=rows, whole=whole, width=len(text) * draws)
    return total / (len(image) * len(text)) if reduction == "mean" else total


def inclusion(
    inner: Moments,
    outer: Moments,
    *,
    log_epsilon: float = 0.0,
    form: Literal["exact", "as_published"] = "exact",
) -> torch.Tensor:
    """(B, D) inclusion test H(inner ⊂ outer) = log ∫ p² q − log ∫ p q² of each dimension; > 0 means included.

    In closed form, H = ½ log(σ₂²/σ₁²) + ½ log((σ₂² + 2σ₁²) / (σ₁² + 2σ₂²)) + Δμ² [1/(σ₂² + 2σ₁²) − 1/(σ₁² + 2σ₂²)].
    Its sign in one dimension is the order of the variances, whatever the means.

    Args:
        inner: B Gaussians.
        outer: B Gaussians, row by row those that should include the inner ones.
        log_epsilon: ln of the factor on every 1/σ², which stands for wider Gaussians; only the last term feels it.
            Everything is computed from log variances, so −100 underflows nothing that counts.
        form: ``"exact"``, or ``"as_published"`` with log(σ₂²/σ₁²) instead of half of it.

    Source: ProLIP Eqs. 3–4. Printed and coded, the first term is twice what the integral gives (compare its App. A.5).
    """
    (mean, inside), (other_mean, outside) = _checked(inner), _checked(outer)
    denominator = torch.logaddexp(outside, inside + math.log(2))  # log(σ₂² + 2σ₁²)
    other = torch.logaddexp(inside, outside + math.log(2))
    ratio = (0.5 if form == "exact" else 1.0) * (outside - inside)
    bracket = torch.exp(log_epsilon - denominator) - torch.exp(log_epsilon - other)
    return ratio + 0.5 * (denominator - other) + (mean - other_mean).square() * bracket


def inclusion_loss(
    inner: Moments,
    outer: Moments,
    *,
    log_epsilon: float = -100.0,
    sharpness: float = 10.0,
    form: Literal["exact", "as_published"] = "exact",
) -> torch.Tensor:
    """Mean over rows and dimensions of softplus(−sharpness · H(inner ⊂ outer)).

    Args:
        inner: B Gaussians.
        outer: B Gaussians that should include them.
        log_epsilon: ε, a logarithm: −20 in the paper's runs, −100 recommended by it.
        sharpness: c: 1000 in the paper's runs, 10 recommended by it.
        form: See `inclusion`.

    Source: ProLIP Eq. 5 and App. B.1.
    """
    inner, outer = _checked(inner), _checked(outer)
    rows, dim = inner[0].shape

    def block(*parts: torch.Tensor) -> torch.Tensor:
        test = inclusion((parts[0], parts[1]), (parts[2], parts[3]), log_epsilon=log_epsilon, form=form)
        return softplus(-sharpness * test).sum()

    return _over_rows(block, rows=(*_expanded(inner), *_expanded(outer)), width=dim) / (rows * dim)


def generalized_gaussian_nll(
    residual: torch.Tensor,
    scale: torch.Tensor,
    shape: torch.Tensor,
    *,
    form: Literal["exact", "as_published"] = "exact",
) -> torch.Tensor:
    """(…) negative log densities in nats, element by element: (|r|/α)^β − log β + log 2α + log Γ(1/β).

    Args:
        residual: r = z − μ.
        scale: α > 0.
        shape: β > 0.
        form: ``"exact"``; or ``"as_published"``, which multiplies by β where the density raises to it, cuts that
            product off at 1e-4 and 1e3 and leaves log 2 out. What it is the logarithm of has mass 2 at β = 1, 1.13 at
            β = 2.

    Source: the likelihood of ProbVLM (Upadhyay et al. 2023) and its public code.
    """
    residual, scale, shape = _wide(residual), _wide(scale), _wide(shape)  # half precision has no digits for lgamma
    relative = residual.abs() / scale
    constant = scale.log() - shape.log() + torch.lgamma(1 / shape)
    if form == "as_published":
        return (relative * shape).clamp(1e-4, 1e3) + constant
    zero = relative == 0  # there the derivative of a power below 1 is infinite
    power = relative.masked_fill(zero, 1.0).pow(shape).masked_fill(zero, 0.0)
    return power + constant + math.log(2)


def symmetric_cross_entropy(
    one: Sequence[torch.Tensor],
    other: Sequence[torch.Tensor],
    logits: Callable[..., torch.Tensor],
    *,
    shared: Sequence[torch.Tensor] = (),
    labels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean of −log Σ_{right answers} softmax over the rows of all logits, averaged with that over the columns, in nats.

    Args:
        one: Tensors of B_1 rows: the items that ask for rows of logits.
        other: Tensors of B_2 rows: those that ask for columns.
        logits: From some rows of `one`, some rows of `other` and `shared`, in this order, to their logits.
        shared: Tensors that all logits depend on, such as a temperature.
        labels: (B_1, B_2) whether a pair is a right answer, of which every row and column has one; None where equal row
            numbers are.

    Source: CLIP (Radford et al. 2021), section 2.3, with the sum over right answers of MIL-NCE (Miech et al. 2020).
    """
    one, other, shared = ([_wide(x) for x in part] for part in (one, other, shared))
    rows, columns = len(one[0]), len(other[0])
    if labels is None:
        labels = torch.eye(rows, columns, dtype=torch.bool, device=one[0].device)
    elif tuple(labels.shape) != (rows, columns):
        raise InputError(f"expected labels of shape {(rows, columns)}, one for each pair, got {tuple(labels.shape)}")
    labels = labels.bool()

    def surprise(values: torch.Tensor, right: torch.Tensor, axis: int) -> torch.Tensor:
        return (values.logsumexp(axis) - values.masked_fill(~right, -math.inf).logsumexp(axis)).sum()

    if rows * columns <= BLOCK:
        with torch.autocast(one[0].device.type, enabled=False):
            values = logits(*one, *other, *shared)
            return (surprise(values, labels, 1) / rows + surprise(values, labels, 0) / columns) / 2

    def across(right: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        return surprise(logits(*parts), right, 1)

    def down(right: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        mine, rest = parts[: len(other)], parts[len(other) :]
        return surprise(logits(*rest[: len(one)], *mine, *rest[len(one) :]), right.T, 0)

    by_row = _over_rows(across, rows=(labels, *one), whole=(*other, *shared), width=columns)
    by_column = _over_rows(down, rows=(labels.T, *other), whole=(*one, *shared), width=rows)
    return (by_row / rows + by_column / columns) / 2


def bottleneck(
    gaussian: Moments,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    form: Literal["exact", "as_coded"] = "exact",
) -> torch.Tensor:
    """The variational information bottleneck KL(N(μ, σ²) ‖ N(0, 1)) = ½ (σ² + μ² − 1 − log σ²) of every dimension.

    Args:
        gaussian: B Gaussians.
        reduction: ``"mean"`` over rows and dimensions (PCME++, ProLIP), or their ``"sum"`` (PCME).
        form: ``"exact"``, or ``"as_coded"`` by PCME and ProLIP, where log σ stands in the place of log σ².

    Source: PCME++ section 2.2 and ProLIP App. A.7, after Alemi et al. 2017.
    """
    mean, log_variance = _expanded(_checked(gaussian))
    rate = log_variance if form == "exact" else 0.5 * log_variance
    divergence = 0.5 * (torch.expm1(rate) + mean.square() - rate)
    return divergence.mean() if reduction == "mean" else divergence.sum()


def draw(gaussian: Moments, noise: torch.Tensor) -> torch.Tensor:
    """(B, K, D) samples μ + σ ε, differentiable in both moments.

    Args:
        gaussian: B Gaussians.
        noise: (B, K, D) standard normal ε.

    Source: Kingma and Welling 2014; with log σ² in hand, σ is exp(½ log σ²).
    """
    mean, log_variance = _checked(gaussian)
    return mean[:, None] + (0.5 * log_variance).exp()[:, None] * noise


def _over_rows(
    block: Callable[..., torch.Tensor],
    *,
    rows: Sequence[torch.Tensor],
    width: int,
    whole: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Sum of ``block(*some rows, *whole)`` over all rows, holding the temporaries of one block at a time.

    Args:
        block: From a block of rows and the whole tensors to a scalar.
        rows: Tensors that are cut into blocks along their first dimension.
        width: Entries of a temporary for each row.
        whole: Tensors that every block sees whole.
    """
    height = max(1, BLOCK // width)
    with torch.autocast(rows[0].device.type, enabled=False):
        if len(rows[0]) <= height:
            return block(*rows, *whole)
        keep_gradients = torch.is_grad_enabled()
        return _BlockwiseSum.apply(block, height, len(rows), keep_gradients, *rows, *whole)


class _BlockwiseSum(torch.autograd.Function):
    """A sum over blocks whose gradient is taken block by block on the way forward.

    The sum is a scalar, so its gradient only has to be scaled afterwards: nothing is computed twice, and no block is
    held longer than it takes. Differentiable once.
    """

    @staticmethod
    def forward(
        ctx: Any, block: Callable[..., torch.Tensor], height: int, n_rows: int, keep: bool, *tensors: torch.Tensor
    ) -> torch.Tensor:
        """The sum; with `keep`, the gradients are left in the context."""
        wanted = [keep and needed for needed in ctx.needs_input_grad[4:]]
        gradients = [torch.zeros_like(x) if want else None for x, want in zip(tensors, wanted, strict=True)]
        kind = next(x.dtype for x in tensors if x.is_floating_point())
        total = torch.zeros((), dtype=kind, device=tensors[0].device)
        for start in range(0, len(tensors[0]), height):
            cut = slice(start, start + height)
            parts = [x[cut] if k < n_rows else x for k, x in enumerate(tensors)]
            parts = [x.detach().requires_grad_(want) for x, want in zip(parts, wanted, strict=True)]
            with torch.set_grad_enabled(keep):
                value = block(*parts)
            total += value.detach()
            if not any(wanted):
                continue
            found = iter(torch.autograd.grad(value, [x for x in parts if x.requires_grad]))
            for k, gradient in enumerate(gradients):
                if gradient is not None:
                    (gradient[cut] if k < n_rows else gradient).add_(next(found))
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The kept gradients, scaled."""
        gradients = [None if gradient is None else gradient * scale for gradient in ctx.saved_tensors]
        return None, None, None, None, *gradients


def _mutual_terms(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], extra: float = 0.0) -> torch.Tensor:
    log_total = torch.logaddexp(one[1], other[1])
    square = (one[0] - other[0]).square()
    return log_total + (square * torch.exp(-log_total) if not extra else square / (extra + log_total.exp()))


def _square_distance(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    norms = rows.square().sum(1, keepdim=True) + columns.square().sum(1)
    return (norms - 2 * rows @ columns.T).clamp_min(0)


def _total_variance(gaussian: Moments) -> torch.Tensor:
    return _expanded(gaussian)[1].exp().sum(1)


def _row_labels(labels: torch.Tensor | None, image: Moments, text: Moments) -> torch.Tensor:
    """(B_I, B_T) labels, or the (B_I,) columns of the matches."""
    expected = (len(image[0]), len(text[0]))
    if labels is None:
        return torch.arange(expected[0], device=image[0].device)
    if tuple(labels.shape) != expected:
        raise InputError(f"expected labels of shape {expected}, one for each pair, got {tuple(labels.shape)}")
    return labels


def _row_weights(weights: torch.Tensor | None, like: torch.Tensor, expected: tuple[int, ...]) -> torch.Tensor:
    """Weights, two-dimensional, or (B, 1) ones."""
    if weights is None:
        return torch.ones(expected[0], 1, dtype=like.dtype, device=like.device)
    if tuple(weights.shape) != expected:
        raise InputError(f"expected weights of shape {expected}, got {tuple(weights.shape)}")
    return weights.to(like).reshape(expected[0], -1)


def _block_labels(truth: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Labels of a block as numbers."""
    if truth.ndim == 1:
        return (truth[:, None] == torch.arange(like.shape[1], device=like.device)).to(like.dtype)
    return truth.to(like.dtype)


def _checked(gaussian: Moments) -> Moments:
    mean, log_variance = gaussian
    if mean.ndim != 2 or log_variance.shape not in (mean.shape, (len(mean), 1)):
        raise InputError(
            f"expected (B, D) means and as many log variances, got shapes {tuple(mean.shape)} and "
            f"{tuple(log_variance.shape)}"
        )
    return _wide(mean), _wide(log_variance)


def _expanded(gaussian: Moments) -> Moments:
    return gaussian[0], gaussian[1].expand_as(gaussian[0])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _as(value: Number, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)
