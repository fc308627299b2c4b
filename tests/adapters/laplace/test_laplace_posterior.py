import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from grove_adapters.adapters.laplace.posterior import KroneckerPosterior, Outputs
from grove_adapters.embeddings import Projection


def posterior(dim=4, width=5, *, bias=True, seed=0, items=30, tau=2.0, prior=0.7):
    """A posterior with random factors, and the dense precision of the weights [W b] in row-major order."""
    random = np.random.default_rng(seed)
    projection = Projection(random.normal(size=(dim, width)), random.normal(size=dim) if bias else None)
    made = KroneckerPosterior.around(projection)
    rows = width + bias
    a, b = (random.normal(size=(2 * n, n)) for n in (rows, dim))
    a, b = torch.tensor(a.T @ a / len(a)), torch.tensor(b.T @ b / len(b))
    made.condition(a, b, items)
    made.pseudo_data_count.fill_(tau)
    made.prior_precision.fill_(prior)
    dense = items * tau * torch.kron(b, a) + prior * torch.eye(dim * rows, dtype=torch.float64)
    return made, dense, a, b


def weights(made):
    return torch.cat([made.weight, made.bias[:, None]], 1).double() if len(made.bias) else made.weight.double()


@pytest.mark.parametrize("bias", [False, True])
def test_covariances_are_those_of_the_dense_precision(bias):
    made, dense, _, _ = posterior(bias=bias)
    features = torch.tensor(np.random.default_rng(1).normal(size=(6, 5)))
    outputs = made.outputs(features, made.covariances("exact"))
    covariance = torch.linalg.inv(dense)
    for row, inputs in enumerate(made.inputs(features)):
        jacobian = torch.kron(torch.eye(4, dtype=torch.float64), inputs[None])  # g = (I ⊗ φᵀ) vec W
        expected = jacobian @ covariance @ jacobian.T
        got = outputs.directions @ torch.diag(outputs.spread[row]) @ outputs.directions.T
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)  # eigenvectors are kept in float32
    torch.testing.assert_close(outputs.vectors, made.inputs(features) @ weights(made).T)


def test_factored_damping_is_the_published_form_and_smaller():
    made, _, a, b = posterior()
    root, prior = math.sqrt(30 * 2.0), math.sqrt(0.7)
    damped = [torch.linalg.inv(root * x + prior * torch.eye(len(x), dtype=torch.float64)) for x in (a, b)]
    features = torch.tensor(np.random.default_rng(1).normal(size=(3, 5)))
    outputs = made.outputs(features, made.covariances("factored"))
    for row, inputs in enumerate(made.inputs(features)):
        got = outputs.directions @ torch.diag(outputs.spread[row]) @ outputs.directions.T
        torch.testing.assert_close(got, (inputs @ damped[0] @ inputs) * damped[1], rtol=1e-5, atol=1e-7)
    assert (made.covariances("factored") <= made.covariances("exact")).all()


@pytest.mark.parametrize("bias", [False, True])
def test_evidence_against_a_dense_determinant(bias):
    made, dense, _, _ = posterior(bias=bias)
    size = len(dense)
    norm = float(weights(made).square().sum())
    expected = -0.7 * norm / 2 + size * math.log(0.7) / 2 - float(torch.logdet(dense)) / 2
    assert float(made.log_evidence()) == pytest.approx(expected, rel=1e-10)
    assert made.n_parameters == size
    gamma = size - 0.7 * float(torch.linalg.inv(dense).trace())
    assert float(made.effective_parameters()) == pytest.approx(gamma, rel=1e-10)


@settings(deadline=None, max_examples=30)
@given(
    dim=st.integers(1, 5),
    width=st.integers(1, 5),
    bias=st.booleans(),
    seed=st.integers(0, 100),
    tau=st.floats(1e-3, 1e3),
)
def test_the_prior_precision_maximises_the_evidence(dim, width, bias, seed, tau):
    made, _, _, _ = posterior(dim, width, bias=bias, seed=seed, tau=tau)
    made.maximise_evidence()
    found, value = float(made.prior_precision.log()), float(made.log_evidence())

    def negative(log):
        made.prior_precision.fill_(math.exp(log))
        return -float(made.log_evidence())

    best = optimize.minimize_scalar(negative, bounds=(found - 8, found + 8), method="bounded")
    assert value >= -best.fun - 1e-9
    assert all(negative(found + step) >= -value for step in (-0.1, 0.1))


def test_it_is_exact_for_linear_regression_with_gaussian_noise():
    """With squared errors the curvature is the same for every item, and the posterior is the one of textbooks."""
    random = np.random.default_rng(0)
    inputs, noise, prior = random.normal(size=(40, 3)), 0.5, 2.0
    truth = random.normal(size=(2, 3))
    targets = inputs @ truth.T + noise * random.normal(size=(40, 2))
    precision = inputs.T @ inputs / noise**2 + prior * np.eye(3)
    mode = np.linalg.solve(precision, inputs.T @ targets / noise**2).T
    made = KroneckerPosterior.around(Projection(mode))
    made.condition(torch.tensor(inputs.T @ inputs / 40), torch.eye(2, dtype=torch.float64) / noise**2, 40)
    made.prior_precision.fill_(prior)
    query = torch.tensor(random.normal(size=(5, 3)))
    mean, variance = made.outputs(query, made.covariances("exact")).moments()
    np.testing.assert_allclose(mean, query.numpy() @ mode.T, rtol=1e-5)
    expected = np.einsum("bi,ij,bj->b", query.numpy(), np.linalg.inv(precision), query.numpy())
    np.testing.assert_allclose(variance, np.stack([expected, expected], 1), rtol=1e-5)
    marginal = inputs @ inputs.T / prior + noise**2 * np.eye(40)
    evidence = sum(stats.multivariate_normal(np.zeros(40), marginal).logpdf(targets[:, k]) for k in range(2))
    likelihood = stats.norm(inputs @ mode.T, noise).logpdf(targets).sum()
    assert likelihood + float(made.log_evidence()) == pytest.approx(evidence, rel=1e-6)


def gaussians(n=5, dim=48, size=0.1, seed=0):
    """Vectors with covariances of very unequal eigenvalues in random directions."""
    random = np.random.default_rng(seed)
    directions = np.linalg.qr(random.normal(size=(dim, dim)))[0]
    spread = size**2 * random.exponential(size=(n, dim)) ** 2
    return Outputs(*(torch.tensor(x) for x in (random.normal(size=(n, dim)) * 2, spread, directions)))


@pytest.mark.parametrize("size", [0.05, 0.3, 1.0])
def test_unit_moments_against_sampling(size):
    outputs = gaussians(size=size)
    mean, variance = outputs.unit_moments()
    noise = torch.randn(40_000, 5, 48, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = outputs.vectors + (noise * outputs.spread.sqrt()) @ outputs.directions.T
    draws = torch.nn.functional.normalize(draws, dim=2)
    tolerance = {0.05: 0.01, 0.3: 0.05, 1.0: 0.25}[size]  # of the mean's length and of the total variance
    assert float((draws.mean(0) - mean).norm(dim=1).max()) < tolerance
    torch.testing.assert_close(draws.var(0).sum(1), variance.sum(1), rtol=tolerance, atol=0)
    ratio = draws.var(0) / variance
    assert float((ratio.log().abs()).max()) < {0.05: 0.1, 0.3: 0.2, 1.0: 1.0}[size]
    torch.testing.assert_close(mean.square().sum(1) + variance.sum(1), torch.ones(5, dtype=torch.float64))


def test_to_first_order_unit_moments_are_the_delta_method():
    outputs = gaussians(size=1e-4)
    _, variance = outputs.unit_moments()
    for row, vector in enumerate(outputs.vectors):
        jacobian = torch.autograd.functional.jacobian(lambda g: g / g.norm(), vector)
        covariance = outputs.directions @ torch.diag(outputs.spread[row]) @ outputs.directions.T
        expected = (jacobian @ covariance @ jacobian.T).diagonal()
        torch.testing.assert_close(variance[row], expected, rtol=1e-5, atol=1e-12)


def test_moments_of_the_vectors_themselves():
    outputs = gaussians(dim=6)
    mean, variance = outputs.moments()
    assert torch.equal(mean, outputs.vectors)
    for row in range(5):
        covariance = outputs.directions @ torch.diag(outputs.spread[row]) @ outputs.directions.T
        torch.testing.assert_close(variance[row], covariance.diagonal())


def test_factors_that_are_not_quite_symmetric_or_positive_are_mended():
    made, _, a, b = posterior()
    made.condition(a + 1e-12 * torch.triu(torch.ones_like(a)), torch.outer(b[0], b[0]) - 1e-15 * torch.eye(4), 10)
    assert (made.output_values >= 0).all()
    assert torch.isfinite(made.covariances("exact")).all()
    made.maximise_evidence()
    assert 0 < float(made.prior_precision) < math.inf
