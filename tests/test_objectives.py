import json
import math
import subprocess
import sys
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad
from scipy.special import expit, softmax
from torch.autograd import gradcheck
from torch.distributions import Normal, kl_divergence

from grove_adapters import objectives, seeding
from grove_adapters.errors import InputError

ROWS, COLUMNS, DIM = 5, 6, 3
ALL_PAIRS = ["csd", "pseudo", "sigmoid", "soft"]


def gaussian(rows=ROWS, dim=DIM, *, seed=0, dtype=torch.float64, grad=False):
    random = seeding.generator(seed)
    mean = torch.randn(rows, dim, generator=random, dtype=torch.float64).to(dtype)
    log_variance = torch.randn(rows, dim, generator=random, dtype=torch.float64).to(dtype) - 1
    return mean.requires_grad_(grad), log_variance.requires_grad_(grad)


def soft_labels(rows=ROWS, columns=COLUMNS):
    return torch.rand(rows, columns, generator=seeding.generator(9), dtype=torch.float64)


def pairwise(kind, image, text, labels=None, scale=1.5, shift=0.5, weights=None):
    more = {"scale": scale, "shift": shift, "weights": weights}
    if kind == "sigmoid":
        return objectives.sigmoid_pairwise(image, text, labels=labels, **more)
    if kind == "soft":
        noise = [
            torch.randn(len(x[0]), 3, x[0].shape[1], generator=seeding.generator(k), dtype=torch.float64).to(x[0])
            for k, x in enumerate((image, text))
        ]
        samples = [objectives.draw(x, e) for x, e in zip((image, text), noise, strict=True)]
        hard = None if labels is None else labels > 0.5
        return objectives.soft_contrastive(*samples, labels=hard, **more)
    return objectives.csd_matching(image, text, labels=labels, pseudo_positives=kind == "pseudo", **more)


def close(value, expected, tolerance=1e-8):
    assert float(value) == pytest.approx(float(expected), rel=tolerance, abs=tolerance)


# mutual likelihood -----------------------------------------------------------------------------------------------


def test_the_mutual_likelihood_is_the_integral_of_the_product():
    one, other = gaussian(4, 1, seed=1), gaussian(4, 1, seed=2)
    scores = objectives.mutual_likelihood_score(one, other)
    for row in range(4):
        p, q = (Normal(m[row, 0], (0.5 * v[row, 0]).exp()) for m, v in (one, other))
        product = lambda z, p=p, q=q: math.exp(  # noqa: E731
            float(p.log_prob(torch.tensor(z, dtype=torch.float64)) + q.log_prob(torch.tensor(z, dtype=torch.float64)))
        )
        close(scores[row], math.log(quad(product, -30, 30, points=[float(p.mean), float(q.mean)], epsabs=1e-13)[0]))


def test_the_mutual_likelihood_loss_is_minus_the_mean_score():
    one, other = gaussian(seed=1), gaussian(seed=2)
    density = Normal(other[0], (one[1].exp() + other[1].exp()).sqrt()).log_prob(one[0]).sum(1)
    torch.testing.assert_close(objectives.mutual_likelihood_score(one, other), density, rtol=1e-10, atol=1e-10)
    close(objectives.mutual_likelihood_loss(one, other), -density.mean())


def test_the_published_loss_is_twice_the_exact_one_without_its_constant():
    one, other = gaussian(seed=1), gaussian(seed=2)
    published = objectives.mutual_likelihood_loss(one, other, form="as_published")
    total = one[1].exp() + other[1].exp()
    close(published, ((one[0] - other[0]).square() / (1e-10 + total) + total.log()).sum(1).mean())
    exact = objectives.mutual_likelihood_loss(one, other)
    close(published, 2 * exact - DIM * math.log(2 * math.pi), 1e-6)


# matching on the closed-form sampled distance --------------------------------------------------------------------


def entropies(image, text, labels, scale=1.5, shift=0.5):
    """(B_I, B_T) cross-entropies and distances, one pair at a time."""
    rows, columns = len(image[0]), len(text[0])
    distances, values = np.empty((rows, columns)), np.empty((rows, columns))
    for i in range(rows):
        for j in range(columns):
            square = sum(float(image[0][i, d] - text[0][j, d]) ** 2 for d in range(DIM))
            distances[i, j] = square + sum(math.exp(image[1][i, d]) + math.exp(text[1][j, d]) for d in range(DIM))
            chance = expit(shift - scale * distances[i, j])
            values[i, j] = -labels[i, j] * math.log(chance) - (1 - labels[i, j]) * math.log1p(-chance)
    return values, distances


def test_sampled_distances_are_those_of_the_pairs():
    image, text = gaussian(seed=1), gaussian(COLUMNS, seed=2)
    distances = entropies(image, text, soft_labels())[1]
    np.testing.assert_allclose(objectives.sampled_distance(image, text), distances, rtol=1e-10)


@pytest.mark.parametrize("kind", ALL_PAIRS)
def test_weights_are_factors_of_the_terms_of_pairs(kind):
    """A loss with weights is the sum, over pairs, of weight × the loss with a weight of 1 for that pair alone."""
    image, text, labels = gaussian(seed=1), gaussian(COLUMNS, seed=2), soft_labels()
    weights = torch.rand(ROWS, COLUMNS, generator=seeding.generator(3), dtype=torch.float64)
    total = 0.0
    for i in range(ROWS):
        for j in range(COLUMNS):
            alone = torch.zeros_like(weights)
            alone[i, j] = 1
            total += float(weights[i, j] * pairwise(kind, image, text, labels, weights=alone))
    close(pairwise(kind, image, text, labels, weights=weights), total)
    close(pairwise(kind, image, text, labels, weights=torch.ones_like(weights)), pairwise(kind, image, text, labels))


def test_weights_of_the_mutual_likelihood_make_a_weighted_mean():
    one, other, weights = gaussian(seed=1), gaussian(seed=2), soft_labels()[:, 0]
    scores = objectives.mutual_likelihood_score(one, other)
    close(objectives.mutual_likelihood_loss(one, other, weights=weights), -(weights * scores).sum() / weights.sum())


def test_the_matching_loss_is_the_mean_cross_entropy_of_sigmoid_csd():
    image, text, labels = gaussian(seed=1), gaussian(COLUMNS, seed=2), soft_labels()
    close(pairwise("csd", image, text, labels), entropies(image, text, labels)[0].mean())


def test_csd_is_the_expected_square_distance():
    image, text = gaussian(2, seed=1), gaussian(2, seed=2)
    draws = [
        objectives.draw(x, torch.randn(2, 200_000, DIM, generator=seeding.generator(k), dtype=torch.float64))
        for k, x in enumerate((image, text))
    ]
    sampled = (draws[0] - draws[1]).square().sum(2).mean(1)
    for row in range(2):
        one = [part[row : row + 1] for part in image], [part[row : row + 1] for part in text]
        # with labels 1 the cross-entropy is softplus(−logit), from which the distance is read back
        loss = objectives.csd_matching(tuple(one[0]), tuple(one[1]), scale=1.0, shift=0.0)
        assert math.log(math.expm1(float(loss))) == pytest.approx(float(sampled[row]), rel=0.02)


def test_pseudo_positives_take_the_label_of_the_match_they_beat():
    image, text, labels = gaussian(seed=1), gaussian(COLUMNS, seed=2), soft_labels()
    _, distances = entropies(image, text, labels)
    relabelled = labels.clone()
    for i in range(ROWS):
        match = int(labels[i].argmax())
        for j in range(COLUMNS):
            if distances[i, j] <= distances[i, match]:
                relabelled[i, j] = labels[i, match]
    assert not torch.equal(relabelled, labels)
    close(pairwise("pseudo", image, text, labels), entropies(image, text, relabelled)[0].mean())


def test_pseudo_positives_go_both_ways():
    image, text, labels = gaussian(seed=1), gaussian(COLUMNS, seed=2), soft_labels()
    forth, back = pairwise("pseudo", image, text, labels), pairwise("pseudo", text, image, labels.T)
    assert float(forth) != pytest.approx(float(back))
    close(pairwise("csd", image, text, labels), pairwise("csd", text, image, labels.T))


# ProLIP ----------------------------------------------------------------------------------------------------------


def test_the_sigmoid_loss_sums_over_texts_and_averages_over_images():
    (image, v), (text, w) = gaussian(seed=1), gaussian(seed=2)
    image, text = (torch.nn.functional.normalize(x, dim=1) for x in (image, text))  # where the printed form applies
    total = 0.0
    for i in range(ROWS):
        for j in range(ROWS):
            logit = 1.5 * (float(image[i] @ text[j]) - 0.5 * float(v[i].exp().sum() + w[j].exp().sum())) + 0.5
            total += math.log1p(math.exp(-logit if i == j else logit))
    close(pairwise("sigmoid", (image, v), (text, w)), total / ROWS)


def inclusion_by_quadrature(mean, variance, other_mean, other_variance):
    def density(z, m, v):
        return mpmath.exp(-((z - m) ** 2) / (2 * v)) / mpmath.sqrt(2 * mpmath.pi * v)

    p, q = (lambda z: density(z, mean, variance)), (lambda z: density(z, other_mean, other_variance))
    spread = 12 * mpmath.sqrt(max(variance, other_variance))
    points = sorted({mean - spread, mean, other_mean, other_mean + spread, mean + spread, other_mean - spread})
    inside = mpmath.quad(lambda z: p(z) ** 2 * q(z), points)
    return mpmath.log(inside) - mpmath.log(mpmath.quad(lambda z: p(z) * q(z) ** 2, points))


@pytest.mark.parametrize("case", [(0.0, 0.25, 0.0, 1.0), (0.3, 1.5, -0.4, 0.2), (0.0, 0.25, 5.0, 1.0), (1, 1, 1, 1)])
def test_inclusion_is_the_difference_of_two_integrals(case):
    mean, variance, other_mean, other_variance = (torch.tensor([[x]], dtype=torch.float64) for x in case)
    test = objectives.inclusion((mean, variance.log()), (other_mean, other_variance.log()))
    close(test, inclusion_by_quadrature(*case))


def test_epsilon_widens_both_gaussians():
    case = (0.3, 1.5, -0.4, 0.2)
    mean, variance, other_mean, other_variance = (torch.tensor([[x]], dtype=torch.float64) for x in case)
    test = objectives.inclusion((mean, variance.log()), (other_mean, other_variance.log()), log_epsilon=-2.0)
    wider = math.exp(2.0)
    close(test, inclusion_by_quadrature(0.3, 1.5 * wider, -0.4, 0.2 * wider))


@pytest.mark.parametrize("level", [-18.0, -10.0, -4.0, 0.0, 3.0, 4.0])
def test_epsilon_of_minus_100_underflows_nothing_in_float32(level):
    inner = torch.tensor([[0.1]]), torch.tensor([[level]], requires_grad=True)
    outer = torch.tensor([[0.0]]), torch.tensor([[level + 1.0]])
    test = objectives.inclusion(inner, outer, log_epsilon=-100.0)
    exact = 0.5 + 0.5 * math.log((math.e + 2) / (1 + 2 * math.e))  # means no longer count
    assert float(test.detach()) == pytest.approx(exact, abs=2e-6)
    test.backward()
    assert float(inner[1].grad) < 0


def test_the_published_inclusion_counts_the_variances_twice():
    inner, outer = gaussian(seed=1), gaussian(seed=2)
    exact, published = (objectives.inclusion(inner, outer, form=form) for form in ("exact", "as_published"))
    torch.testing.assert_close(published - exact, 0.5 * (outer[1] - inner[1]))
    known = torch.zeros(1, 1), torch.tensor([[0.25]]).log()
    published = objectives.inclusion(known, (torch.zeros(1, 1), torch.zeros(1, 1)), form="as_published")
    assert float(published) == pytest.approx(1.183562, abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.tuples(*[st.floats(-4, 4)] * 4), st.floats(-30, 0))
def test_inclusion_is_antisymmetric_and_ordered_by_the_variances(numbers, log_epsilon):
    one = tuple(torch.tensor([[x]], dtype=torch.float64) for x in numbers[:2])
    other = tuple(torch.tensor([[x]], dtype=torch.float64) for x in numbers[2:])
    forth = objectives.inclusion(one, other, log_epsilon=log_epsilon)
    back = objectives.inclusion(other, one, log_epsilon=log_epsilon)
    torch.testing.assert_close(forth, -back, rtol=1e-9, atol=1e-9)
    difference = numbers[3] - numbers[1]
    if abs(difference) > 1e-6:
        assert float(forth) * difference > 0


def test_the_inclusion_loss_averages_over_rows_and_dimensions():
    inner, outer = gaussian(seed=1), gaussian(seed=2)
    test = objectives.inclusion(inner, outer, log_epsilon=-3.0).numpy()
    loss = objectives.inclusion_loss(inner, outer, log_epsilon=-3.0, sharpness=7.0)
    close(loss, np.log1p(np.exp(-7.0 * test)).mean())


# PCME ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("logistic", "gain"), [("sigmoid", 1), ("as_published", 2)])
def test_the_soft_contrastive_loss_is_minus_the_log_of_the_sampled_probability(logistic, gain):
    image = torch.randn(3, 2, DIM, generator=seeding.generator(0), dtype=torch.float64)
    text = torch.randn(4, 5, DIM, generator=seeding.generator(1), dtype=torch.float64)
    labels = soft_labels(3, 4) > 0.5
    total = 0.0
    for i in range(3):
        for j in range(4):
            distances = [math.sqrt(float((a - b).square().sum()) + 1e-6) for a in image[i] for b in text[j]]
            chance = np.mean([expit(gain * (0.5 - 1.5 * distance)) for distance in distances])
            total -= math.log(chance if labels[i, j] else np.mean([expit(-gain * (0.5 - 1.5 * d)) for d in distances]))
    arguments = {"scale": 1.5, "shift": 0.5, "labels": labels, "logistic": logistic}
    close(objectives.soft_contrastive(image, text, **arguments), total / 12)
    close(objectives.soft_contrastive(image, text, **arguments, reduction="sum"), total)


def test_improbable_matches_keep_a_finite_loss_and_a_gradient():
    image = torch.zeros(1, 2, 3, requires_grad=True)
    loss = objectives.soft_contrastive(image, torch.full((1, 2, 3), 1e3), scale=15.0, shift=15.0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(15 * math.sqrt(3) * 1e3 - 15, rel=1e-5)
    assert float(image.grad.norm()) > 1


def test_equal_samples_have_a_gradient():
    image = torch.zeros(2, 2, 3, requires_grad=True)
    objectives.soft_contrastive(image, torch.zeros(2, 2, 3), scale=5.0, shift=5.0).backward()
    assert bool(torch.isfinite(image.grad).all())


# regulariser and samples -----------------------------------------------------------------------------------------


def test_the_bottleneck_is_the_divergence_from_the_standard_normal():
    mean, log_variance = gaussian()
    divergence = kl_divergence(Normal(mean, (0.5 * log_variance).exp()), Normal(0.0, 1.0))
    close(objectives.bottleneck((mean, log_variance)), divergence.mean())
    close(objectives.bottleneck((mean, log_variance), reduction="sum"), divergence.sum())
    single = torch.tensor([[0.1]], dtype=torch.float64), torch.tensor([[-10.0]], dtype=torch.float64)
    close(objectives.bottleneck(single), 4.505022699964881)
    close(objectives.bottleneck(single, form="as_coded"), 0.5 * (math.exp(-5) + 0.01 - 1 + 5))


def test_one_variance_for_all_dimensions_is_the_same_as_many():
    mean, log_variance = gaussian()
    shared, repeated = (mean, log_variance[:, :1]), (mean, log_variance[:, :1].expand_as(mean))
    other = gaussian(seed=2)
    for objective in (
        lambda x: pairwise("csd", x, other),
        lambda x: pairwise("sigmoid", x, other),
        lambda x: objectives.mutual_likelihood_loss(x, other),
        lambda x: objectives.inclusion_loss(x, other),
        lambda x: objectives.bottleneck(x),
        lambda x: objectives.draw(x, torch.ones(ROWS, 2, DIM, dtype=torch.float64)).sum(),
    ):
        close(objective(shared), objective(repeated))


def test_samples_have_the_moments_asked_for():
    mean, log_variance = gaussian(2)
    noise = torch.randn(2, 100_000, DIM, generator=seeding.generator(0), dtype=torch.float64)
    samples = objectives.draw((mean, log_variance), noise)
    torch.testing.assert_close(samples.mean(1), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(samples.var(1).log(), log_variance, atol=0.03, rtol=0)


# likelihoods and cross-entropies -------------------------------------------------------------------------------


def residuals(*shape):
    random = np.random.default_rng(0)
    residual = torch.tensor(random.normal(size=shape))
    scale, beta = (torch.tensor(random.uniform(low, high, shape)) for low, high in ((0.05, 2), (0.5, 8)))
    return residual, scale, beta


def test_nll_against_scipy():
    residual, scale, shape = residuals(40)
    expected = -stats.gennorm(shape.numpy(), 0, scale.numpy()).logpdf(residual.numpy())
    np.testing.assert_allclose(objectives.generalized_gaussian_nll(residual, scale, shape), expected, rtol=1e-8)
    at_zero = objectives.generalized_gaussian_nll(torch.zeros(40).double(), scale, shape)
    np.testing.assert_allclose(at_zero, -stats.gennorm(shape.numpy(), 0, scale.numpy()).logpdf(0), rtol=1e-8)


@pytest.mark.parametrize(("shape", "published"), [(1.0, 1.0), (2.0, 0.564), (4.0, 0.276), (0.7, 1.129)])
def test_only_the_exact_density_has_mass_one(shape, published):
    def mass(form):
        def density(z):
            arguments = (torch.tensor(x, dtype=torch.float64) for x in (z, 1.3, shape))
            return math.exp(-float(objectives.generalized_gaussian_nll(*arguments, form=form)))

        return 2 * quad(density, 0, 150, points=[0.01, 1, 10], limit=200)[0]

    assert mass("exact") == pytest.approx(1, abs=1e-8)
    assert mass("as_published") / 2 == pytest.approx(published, abs=2e-3)  # it leaves log 2 out


def test_nll_gradcheck_and_a_residual_of_zero():
    residual, scale, shape = (x.requires_grad_() for x in residuals(12))
    for form in ("exact", "as_published"):
        assert torch.autograd.gradcheck(
            lambda *x, form=form: objectives.generalized_gaussian_nll(*x, form=form), (residual, scale, shape)
        )
    zero = torch.zeros(3, requires_grad=True)
    objectives.generalized_gaussian_nll(zero, torch.ones(3), torch.tensor([0.5, 1.0, 2.0])).sum().backward()
    assert zero.grad.tolist() == [0, 0, 0]


def test_nll_in_float32():
    parts = residuals(200)
    single = objectives.generalized_gaussian_nll(*(x.float() for x in parts))
    exact = objectives.generalized_gaussian_nll(*parts)
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-5)
    halves = [x.bfloat16() for x in parts]
    wide = objectives.generalized_gaussian_nll(*(x.double() for x in halves))
    torch.testing.assert_close(objectives.generalized_gaussian_nll(*halves).double(), wide, rtol=1e-4, atol=1e-5)


def cross_entropy(logits, labels=None):
    """The loss of a given matrix of logits, of which the rows are cut."""
    columns = torch.arange(logits.shape[1])
    return objectives.symmetric_cross_entropy([logits], [columns], lambda rows, j: rows[:, j], labels=labels)


@pytest.mark.parametrize("block", [1 << 22, 20, 1])
def test_the_symmetric_cross_entropy_is_torchs_where_each_item_has_one_answer(monkeypatch, block):
    monkeypatch.setattr(objectives, "BLOCK", block)
    logits = torch.randn(7, 7, generator=seeding.generator(0), dtype=torch.float64, requires_grad=True)
    target = torch.arange(7)
    expected = sum(torch.nn.functional.cross_entropy(x, target) for x in (logits, logits.T)) / 2
    torch.testing.assert_close(cross_entropy(logits), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("block", [1 << 22, 1])
def test_several_right_answers_share_their_probability(monkeypatch, block):
    monkeypatch.setattr(objectives, "BLOCK", block)
    logits = torch.randn(4, 5, generator=seeding.generator(0), dtype=torch.float64)
    labels = torch.eye(4, 5, dtype=torch.bool)
    labels[0, 3] = labels[2, 4] = True
    chance = [softmax(logits.numpy(), axis=axis) for axis in (1, 0)]
    rows, columns = (-np.log((x * labels.numpy()).sum(axis)).mean() for axis, x in zip((1, 0), chance, strict=True))
    close(cross_entropy(logits, labels), (rows + columns) / 2)
    close(cross_entropy(logits, torch.ones(4, 5).bool()), 0.0)
    with pytest.raises(InputError, match=r"labels of shape \(4, 5\)"):
        cross_entropy(logits, labels.T)


@pytest.mark.parametrize("block", [1 << 22, 1])
def test_gradients_of_the_symmetric_cross_entropy(monkeypatch, block):
    monkeypatch.setattr(objectives, "BLOCK", block)
    one, other = (x.requires_grad_() for x in (gaussian(4, seed=1)[0], gaussian(4, seed=2)[0]))
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    labels = torch.eye(4, dtype=torch.bool)
    labels[0, 3] = True

    def loss(one, other, scale):
        logits = lambda x, y, a: a * x @ y.T  # noqa: E731
        return objectives.symmetric_cross_entropy([one], [other], logits, shared=[scale], labels=labels)

    assert gradcheck(loss, (one, other, scale))


# all of them -----------------------------------------------------------------------------------------------------


def every_objective(one, other):
    yield from (pairwise(kind, one, other) for kind in ALL_PAIRS)
    for form in ("exact", "as_published"):
        yield objectives.mutual_likelihood_loss(one, other, form=form)
        yield objectives.inclusion_loss(one, other, log_epsilon=-2.0, form=form)
    yield objectives.inclusion_loss(one, other)
    yield objectives.bottleneck(one)
    for form in ("exact", "as_published"):
        yield objectives.generalized_gaussian_nll(one[0], one[1].abs(), other[1].abs(), form=form).mean()
    yield objectives.symmetric_cross_entropy([one[0]], [other[0]], lambda x, y: 20 * x @ y.T)


@pytest.mark.parametrize("block", [1 << 22, 14])
def test_gradients_are_right_whole_and_in_blocks(monkeypatch, block):
    monkeypatch.setattr(objectives, "BLOCK", block)
    one, other = gaussian(4, 2, seed=1, grad=True), gaussian(4, 2, seed=2, grad=True)
    scale, shift = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1.5, 0.5))
    for kind in ALL_PAIRS:
        assert gradcheck(
            lambda *x, kind=kind: pairwise(kind, x[:2], x[2:4], scale=x[4], shift=x[5]), (*one, *other, scale, shift)
        )
    assert gradcheck(lambda *x: objectives.mutual_likelihood_loss(x[:2], x[2:]), (*one, *other))
    assert gradcheck(lambda *x: objectives.inclusion_loss(x[:2], x[2:], log_epsilon=-1.0), (*one, *other))
    assert gradcheck(lambda *x: objectives.bottleneck(x), one)


@pytest.mark.parametrize("labelled", [True, False])
def test_blocks_change_nothing(monkeypatch, labelled):
    def values():
        labels = soft_labels(ROWS, ROWS) if labelled else None
        weights = 1 - labels if labelled else None
        one, other = gaussian(seed=1, grad=True), gaussian(seed=2, grad=True)
        for kind in ALL_PAIRS:
            loss = pairwise(kind, one, other, labels, weights=weights)
            yield loss.detach(), *torch.autograd.grad(loss, (*one, *other))

    whole = list(values())
    monkeypatch.setattr(objectives, "BLOCK", 1)
    for expected, got in zip(whole, values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def realistic(rows, dim, dtype, seed):
    mean, log_variance = gaussian(rows, dim, seed=seed)
    return torch.nn.functional.normalize(mean, dim=1).to(dtype), (log_variance - math.log(dim)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_lose_no_more_than_float32(dtype):
    """Against float64 on the same rounded inputs: 1e-5 relative, whatever the type of the inputs."""
    one, other = realistic(40, 64, dtype, 1), realistic(40, 64, dtype, 2)
    exact = every_objective(*(tuple(part.double() for part in x) for x in (one, other)))
    for got, expected in zip(every_objective(one, other), exact, strict=True):
        assert got.dtype == torch.float32
        close(got, expected, 1e-5)


def test_autocast_changes_nothing():
    one, other = realistic(40, 64, torch.float32, 1), realistic(40, 64, torch.float32, 2)
    plain = [float(value) for value in every_objective(one, other)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = [float(value) for value in every_objective(one, other)]
    assert mixed == plain


@pytest.mark.parametrize("dim", [1, 4096])
def test_one_pair_and_any_width(dim):
    one, other = realistic(1, dim, torch.float32, 1), realistic(1, dim, torch.float32, 2)
    assert all(math.isfinite(float(value)) for value in every_objective(one, other))


def test_shapes_that_do_not_fit_are_refused_in_words():
    one, other = gaussian(), gaussian(COLUMNS)
    with pytest.raises(InputError, match=r"\(B, D\) means"):
        objectives.bottleneck((one[0], one[1][:, :2]))
    with pytest.raises(InputError, match=r"labels of shape \(5, 6\)"):
        pairwise("csd", one, other, soft_labels(5, 5))
    with pytest.raises(InputError, match=r"weights of shape \(5, 6\)"):
        pairwise("csd", one, other, weights=soft_labels(6, 5))
    with pytest.raises(InputError, match="samples"):
        objectives.soft_contrastive(one[0], other[0], scale=1.0, shift=0.0)


MEMORY = Path(__file__).parents[1] / "benchmarks" / "objectives_memory.py"
MEASURED = ["mutual_likelihood_loss", "csd_matching", "csd_matching, labelled and weighted"]
MEASURED += ["csd_matching, pseudo-positives", "sigmoid_pairwise", "soft_contrastive, 8 draws", "inclusion_loss"]
MEASURED += ["bottleneck", "generalized_gaussian_nll", "symmetric_cross_entropy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_a_batch_of_16384_by_512_fits_in_2_gib(name):
    done = subprocess.run([sys.executable, MEMORY, "--only", name], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["own_mib"] < 2048
