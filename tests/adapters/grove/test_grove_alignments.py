import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from torch.distributions import Normal, kl_divergence

from grove_adapters import seeding
from grove_adapters.adapters.grove.alignments import (
    ALIGNMENTS,
    Harmonization,
    JensenShannon,
    SquaredWasserstein,
    SymmetricKL,
)
from grove_adapters.adapters.grove.gp import SparseGP


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeding.generator(seed), dtype=torch.float64)


def marginals(seed, dim=4, n=3, shared=True):
    return [(random(n, dim, seed=seed + k), random(n, 1 if shared else dim, seed=seed + k + 9).exp()) for k in (0, 1)]


@given(st.integers(0, 10_000), st.integers(1, 9), st.booleans())
@settings(deadline=None, max_examples=25)
def test_symmetric_kl_equals_torch_distributions(seed, dim, shared):
    a, b = marginals(seed, dim, shared=shared)
    first, second = Normal(a[0], a[1].sqrt()), Normal(b[0], b[1].sqrt())
    expected = 0.5 * (kl_divergence(first, second) + kl_divergence(second, first)).sum(1)
    torch.testing.assert_close(SymmetricKL().between(a, b), expected)


def one_dimensional(mean_a, variance_a, mean_b, variance_b):
    """Densities and the two Gaussians in one dimension."""
    a, b = (
        tuple(torch.tensor([[number]], dtype=torch.float64) for number in pair)
        for pair in ((mean_a, variance_a), (mean_b, variance_b))
    )

    def density(mean, variance):
        return lambda z: math.exp(-((z - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)

    return a, b, density(mean_a, variance_a), density(mean_b, variance_b)


CASES = [(0.0, 1.0, 0.0, 1.0), (0.3, 0.5, -0.4, 1.5), (1.0, 0.2, -1.0, 0.3), (0.0, 1.5, 0.1, 0.25)]


@pytest.mark.parametrize("case", CASES)
def test_symmetric_kl_equals_quadrature(case):
    a, b, p, q = one_dimensional(*case)
    integral = quad(lambda z: 0.5 * (p(z) - q(z)) * math.log(p(z) / q(z)), -12, 12)[0]
    assert SymmetricKL().between(a, b).item() == pytest.approx(integral, abs=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_squared_wasserstein_equals_quadrature_of_the_quantile_functions(case):
    a, b, _, _ = one_dimensional(*case)
    normal = torch.distributions.Normal(0.0, 1.0)

    def square(share):
        z = normal.icdf(torch.tensor(share, dtype=torch.float64)).item()
        return (case[0] + case[1] ** 0.5 * z - case[2] - case[3] ** 0.5 * z) ** 2

    assert SquaredWasserstein().between(a, b).item() == pytest.approx(
        quad(square, 0, 1, limit=200)[0], rel=1e-4, abs=1e-9
    )


@pytest.mark.parametrize("case", CASES)
def test_the_surrogate_is_the_entropy_of_the_matched_gaussian_and_bounds_jensen_shannon(case):
    a, b, p, q = one_dimensional(*case)

    def mixture(z):
        return 0.5 * (p(z) + q(z))

    mean = quad(lambda z: z * mixture(z), -15, 15)[0]
    variance = quad(lambda z: (z - mean) ** 2 * mixture(z), -15, 15)[0]
    own = 0.25 * (math.log(case[1]) + math.log(case[3]))
    value = JensenShannon().between(a, b).item()
    assert value == pytest.approx(0.5 * math.log(variance) - own, abs=1e-7)
    divergence = quad(
        lambda z: 0.5 * (p(z) * math.log(p(z) / mixture(z)) + q(z) * math.log(q(z) / mixture(z))), -12, 12
    )[0]
    assert value >= divergence - 1e-9


@pytest.mark.parametrize("name", ["kl", "js", "wasserstein2"])
@pytest.mark.parametrize("shared", [True, False])
def test_stiffness_bounds_the_second_derivatives(name, shared):
    alignment = ALIGNMENTS[name]()
    for seed in range(20):
        image, text = marginals(100 * seed, dim=1, n=1, shared=shared)
        by_mean, by_variance = alignment.stiffness(image, text)

        def at_mean(mean, image=image, text=text):
            return alignment.between((mean[None], image[1]), text)[0]

        def at_log_variance(log, image=image, text=text):
            return alignment.between((image[0], log[None].exp()), text)[0]

        assert torch.autograd.functional.hessian(at_mean, image[0][0]).item() <= by_mean.item() * (1 + 1e-9)
        curvature = torch.autograd.functional.hessian(at_log_variance, image[1][0].log()).item()
        assert curvature <= by_variance["image"].item() * (1 + 1e-9)


def test_harmonization_is_the_mean_square_difference_of_kernel_and_similarity_matrices():
    gps = {name: SparseGP(3, 2, 5, name) for name in ("image", "text")}
    x, batch = random(6, 2), {name: random(6, 5, seed=k + 1).float() for k, name in enumerate(gps)}
    expected = 0.0
    for modality, gp in gps.items():
        z = batch[modality].double()
        for i in range(6):
            for j in range(6):
                similarity = torch.cosine_similarity(z[i] - gp.constant, z[j] - gp.constant, dim=0)
                kernel = math.exp(-0.5 * float((x[i] - x[j]).square().sum()))
                expected += (kernel - similarity.item()) ** 2 / 36
    assert Harmonization()(x, batch, {}, gps).item() == pytest.approx(expected, rel=1e-5)


def test_none_aligns_nothing():
    image, text = marginals(0)
    alignment = ALIGNMENTS["none"]()
    assert alignment(random(3, 2), {}, {"image": image, "text": text}, {}).item() == 0
    assert float(alignment.stiffness(image, text)[0].max()) == 0
