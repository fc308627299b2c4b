import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import special, stats

from grove_adapters.spherical import POWER_SPHERICAL, VON_MISES_FISHER

LAWS = {"vmf": VON_MISES_FISHER, "power": POWER_SPHERICAL}
RANDOM = np.random.default_rng(0)
NODES, GAUSS = np.polynomial.legendre.leggauss(2000)
ANGLES, WEIGHTS = torch.tensor((NODES + 1) * math.pi / 2), torch.tensor(GAUSS * math.pi / 2)


def exact_vmf(dim, concentration):
    """log C_D, A_D and the variance of t, in 50 digits."""
    with mpmath.workdps(50):
        nu, k = mpmath.mpf(dim) / 2 - 1, mpmath.mpf(concentration)
        bessel = mpmath.besseli(nu, k)
        log = nu * mpmath.log(k) - mpmath.mpf(dim) / 2 * mpmath.log(2 * mpmath.pi) - mpmath.log(bessel)
        length = mpmath.besseli(nu + 1, k) / bessel
        return float(log), float(length), float(1 - length**2 - (dim - 1) * length / k)


@pytest.mark.parametrize("dim", [2, 3, 10, 41, 43, 512, 768, 1024, 4096])
def test_vmf_against_mpmath(dim):
    concentrations = [1e-6, 0.5, 7.0, 100.0, 3000.0, 1e5]
    exact = np.array([exact_vmf(dim, k) for k in concentrations]).T
    k = torch.tensor(concentrations, dtype=torch.float64)
    moments = VON_MISES_FISHER.moments(k, dim)
    np.testing.assert_allclose(VON_MISES_FISHER.log_normaliser(k, dim), exact[0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(moments.length, exact[1], rtol=1e-14)
    np.testing.assert_allclose(moments.along, exact[2], rtol=1e-5, atol=1e-14)
    single = VON_MISES_FISHER.log_normaliser(k.float(), dim)
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, exact[0], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("dim", [2, 3, 17, 64])
@pytest.mark.parametrize("concentration", [0.3, 5.0, 400.0])
def test_density_and_moments_against_quadrature(name, dim, concentration):
    law, k = LAWS[name], torch.tensor(concentration, dtype=torch.float64)
    area = math.log(2) + (dim - 1) / 2 * math.log(math.pi) - special.gammaln((dim - 1) / 2)  # of S^(D−2)

    def expected(function):
        t = torch.cos(ANGLES)
        log = law.log_normaliser(k, dim) + law.log_kernel(t, k) + area + (dim - 2) * torch.sin(ANGLES).log()
        return float((WEIGHTS * function(t) * log.exp()).sum())

    assert expected(torch.ones_like) == pytest.approx(1, abs=1e-8)
    length, along, across = (float(x) for x in law.moments(k, dim))
    assert expected(lambda t: t) == pytest.approx(length, abs=1e-8)
    assert expected(lambda t: (t - length) ** 2) == pytest.approx(along, rel=1e-6, abs=1e-9)
    assert expected(lambda t: (1 - t * t) / (dim - 1)) == pytest.approx(across, rel=1e-6, abs=1e-9)


def test_vmf_density_against_scipy():
    mean = RANDOM.normal(size=7)
    mean /= np.linalg.norm(mean)
    points = stats.uniform_direction(7, seed=1).rvs(9)
    law = VON_MISES_FISHER
    k = torch.tensor(12.0, dtype=torch.float64)
    ours = law.log_normaliser(k, 7) + law.log_kernel(torch.tensor(points @ mean), k)
    np.testing.assert_allclose(ours, stats.vonmises_fisher(mean, 12.0).logpdf(points), rtol=1e-10)


@pytest.mark.parametrize("name", LAWS)
def test_gradcheck(name):
    k = torch.tensor([0.4, 3.0, 90.0], dtype=torch.float64, requires_grad=True)
    for dim in (2, 5, 64, 512):
        assert torch.autograd.gradcheck(lambda x, dim=dim: LAWS[name].log_normaliser(x, dim), k)
        assert torch.autograd.gradgradcheck(lambda x, dim=dim: LAWS[name].log_normaliser(x, dim), k, atol=1e-6)
    t = torch.tensor([-0.5, 0.1, 0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(LAWS[name].log_kernel, (t, k))


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize(("dim", "concentration"), [(2, 0.2), (3, 10.0), (32, 300.0), (512, 1e4)])
def test_draws_have_the_moments(name, dim, concentration):
    mean = torch.nn.functional.normalize(torch.tensor(RANDOM.normal(size=(2, dim))), dim=1)
    k = torch.tensor([concentration, 2 * concentration], dtype=torch.float64)
    draws = LAWS[name].sample(mean, k, 4000, seed=3)
    assert draws.shape == (2, 4000, dim)
    torch.testing.assert_close(draws.norm(dim=-1), torch.ones(2, 4000, dtype=torch.float64))
    assert torch.equal(draws, LAWS[name].sample(mean, k, 4000, seed=3))
    cosine = (draws * mean[:, None]).sum(-1)
    length, along, across = LAWS[name].moments(k, dim)
    error = (cosine.mean(1) - length) / (along / 4000).sqrt()
    assert float(error.abs().max()) < 4
    torch.testing.assert_close(cosine.var(1), along, rtol=0.15, atol=0)
    orthogonal = draws - cosine[..., None] * mean[:, None]
    torch.testing.assert_close(orthogonal.square().sum(-1).mean(1) / (dim - 1), across, rtol=0.05, atol=0)


def test_vmf_limits_are_finite_and_ordered():
    k = torch.logspace(-30, 12, 200, dtype=torch.float64)
    for dim in (2, 512):
        moments = VON_MISES_FISHER.moments(k, dim)
        assert bool(torch.isfinite(VON_MISES_FISHER.log_normaliser(k, dim)).all())
        assert bool((moments.length.diff() >= 0).all())
        assert bool((moments.along > 0).all())
        assert bool((moments.across > 0).all())
        uniform = special.gammaln(dim / 2) - math.log(2) - dim / 2 * math.log(math.pi)  # minus the log area
        assert float(VON_MISES_FISHER.log_normaliser(k[:1], dim)) == pytest.approx(uniform, rel=1e-12)


def test_power_spherical_is_finite_at_the_antipode():
    value = POWER_SPHERICAL.log_kernel(torch.tensor([-1.0, -1.0000001]), torch.tensor(1e5))
    assert bool(torch.isfinite(value).all())


@pytest.mark.parametrize("name", LAWS)
def test_half_precision_is_computed_and_returned_wider(name):
    k = torch.tensor([0.5, 12.0, 3000.0], dtype=torch.bfloat16, requires_grad=True)
    value = LAWS[name].log_normaliser(k, 512)
    assert value.dtype == torch.float32
    exact = LAWS[name].log_normaliser(k.detach().double(), 512)
    torch.testing.assert_close(value.detach().double(), exact, rtol=1e-6, atol=1e-4)
    value.sum().backward()
    assert k.grad.dtype == torch.bfloat16
    assert LAWS[name].moments(k.detach(), 512).length.dtype == torch.float32
