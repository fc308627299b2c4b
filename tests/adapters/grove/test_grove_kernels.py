import math

import pytest
import torch

from grove_adapters import seeding
from grove_adapters.adapters.grove.kernels import KERNELS

L = 3


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeding.generator(seed), dtype=torch.float64)


def make(name, *, ard=False):
    kernel = KERNELS[name](L, ard=ard)
    with torch.no_grad():
        kernel.log_scale.fill_(-0.4)
        if name != "cosine":
            kernel.log_lengthscale.copy_(torch.tensor([0.2, -0.3, 0.5]) if ard else torch.tensor(0.2))
    return kernel.requires_grad_(False)


KINDS = [("rbf", False), ("rbf", True), ("matern15", False), ("matern25", True), ("cosine", False)]


def test_the_rbf_is_the_squared_exponential_of_section_3_2_and_not_the_printed_one():
    kernel = KERNELS["rbf"](2)
    kernel.start(0.8)
    x, y = torch.zeros(1, 2), torch.tensor([[1.442, 0.0]])
    expected = math.exp(-(1.442**2) / (2 * 0.8**2))  # .197; the printed form gives .105
    assert kernel(x, y).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "nu"), [("matern15", 1.5), ("matern25", 2.5)])
def test_materns_equal_the_definition_with_a_bessel_function(name, nu):
    from scipy.special import gamma, kv

    kernel = make(name)
    x, y = random(4, L), random(5, L, seed=1)
    scaled = math.sqrt(2 * nu) * torch.cdist(x, y).numpy() / math.exp(0.2)
    expected = math.exp(-0.4) * 2 ** (1 - nu) / gamma(nu) * scaled**nu * kv(nu, scaled)
    torch.testing.assert_close(kernel(x, y), torch.from_numpy(expected), rtol=1e-6, atol=0)


def test_the_cosine_is_the_cosine_and_has_the_rank_of_the_latent_space():
    kernel = make("cosine")
    x, y = random(4, L), random(9, L, seed=1)
    expected = math.exp(-0.4) * torch.cosine_similarity(x[:, None], y[None], dim=2)
    torch.testing.assert_close(kernel(x, y), expected, rtol=1e-6, atol=1e-9)
    assert torch.linalg.matrix_rank(kernel(y, y)).item() == L


def test_ard_weighs_every_dimension_by_its_length_scale():
    kernel = make("rbf", ard=True)
    x, y = random(4, L), random(5, L, seed=1)
    scales = torch.tensor([0.2, -0.3, 0.5]).double().exp()
    expected = math.exp(-0.4) * torch.exp(-0.5 * torch.cdist(x / scales, y / scales).square())
    torch.testing.assert_close(kernel(x, y), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "ard"), KINDS)
def test_derivatives_are_those_of_autograd(name, ard):
    kernel = make(name, ard=ard)
    x, y, weights = random(2, L), random(5, L, seed=1), random(2, 5, seed=2)
    local = kernel.local(x, y)
    for row in range(2):

        def weighed(at, row=row):
            return (kernel(at[None], y)[0] * weights[row]).sum()

        slopes = torch.autograd.functional.jacobian(lambda at: kernel(at[None], y)[0], x[row])
        torch.testing.assert_close(local.slopes()[row], slopes.T)
        torch.testing.assert_close(local.pull(weights)[row], torch.autograd.functional.jacobian(weighed, x[row]))
        torch.testing.assert_close(local.bend(weights)[row], torch.autograd.functional.hessian(weighed, x[row]))


@pytest.mark.parametrize(("name", "ard"), KINDS)
def test_everything_is_finite_where_points_coincide(name, ard):
    kernel = make(name, ard=ard).requires_grad_(True)
    x = random(4, L).requires_grad_(True)
    kernel(x, x).sum().backward()
    assert bool(torch.isfinite(x.grad).all())
    local = kernel.requires_grad_(False).local(x.detach(), x.detach())
    weights = torch.ones(4, 4, dtype=torch.float64)
    for value in (local.slopes(), local.pull(weights), local.bend(weights)):
        assert bool(torch.isfinite(value).all())
    torch.testing.assert_close(local.value.diagonal(), kernel.scale.expand(4), rtol=1e-9, atol=0)
