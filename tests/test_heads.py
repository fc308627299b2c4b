import pytest
import torch

from grove_adapters import heads, seeding
from grove_adapters.heads import HIGHEST, LOWEST, VarianceHead, bounded, mlp


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeding.generator(seed))


def test_the_mean_is_the_embedding_plus_the_offset_and_variances_are_positive():
    values = normal(7, 12)
    head = VarianceHead(12, hidden=16)
    mean, log_variance = head(values)
    assert torch.equal(mean, values)
    head.offset.fill_(2.0)
    assert torch.equal(head(values)[0], values + 2)
    assert log_variance.shape == (7, 12)
    assert bool((log_variance.exp() > 0).all())


def test_an_isotropic_head_gives_an_item_one_variance():
    mean, log_variance = VarianceHead(12, hidden=16, isotropic=True)(normal(7, 12))
    assert (mean.shape, log_variance.shape) == ((7, 12), (7, 1))


@pytest.mark.parametrize("dim", [1, 4096])
def test_any_width_works(dim):
    assert VarianceHead(dim, hidden=4)(normal(2, dim))[1].shape == (2, dim)


def test_bounds_are_smooth_and_never_crossed():
    values = torch.linspace(-1e4, 1e4, 2001, dtype=torch.float64, requires_grad=True)
    result = bounded(values, LOWEST, HIGHEST)
    assert float(result.detach().min()) >= LOWEST
    assert float(result.detach().max()) <= HIGHEST + 1e-9
    assert bool((result.diff() >= -1e-12).all())
    inside = torch.linspace(-14, -1, 20, dtype=torch.float64)
    torch.testing.assert_close(bounded(inside, LOWEST, HIGHEST), inside, atol=5e-3, rtol=0)
    assert torch.autograd.gradcheck(lambda x: bounded(x, -2.0, 1.0), normal(9).double().requires_grad_())


def test_extreme_inputs_give_finite_variances_in_float32():
    head = VarianceHead(3, hidden=4)
    log_variance = head(torch.tensor([[1e6, -1e6, 0.0], [-1e6, 1e6, 1.0]]))[1]
    variance = log_variance.exp()
    assert bool(torch.isfinite(variance).all())
    assert bool((variance > 0).all())


def test_standardised_inputs_have_zero_mean_and_unit_variance():
    values = 0.01 * normal(500, 6) + 5
    head = VarianceHead(6)
    head.standardise(values)
    inputs = (values - head.centre) / head.spread
    torch.testing.assert_close(inputs.mean(0), torch.zeros(6), atol=1e-3, rtol=0)
    assert float(inputs.var(0, correction=0).mean()) == pytest.approx(1, rel=1e-3)


def test_constant_inputs_are_no_obstacle():
    head = VarianceHead(6)
    head.standardise(torch.ones(5, 6))
    assert bool(torch.isfinite(head(torch.ones(2, 6))[1]).all())


@pytest.mark.parametrize(("asked", "got"), [(-6.0, -6.0), (-400.0, LOWEST + 1.3), (400.0, HIGHEST - 1.3)])
def test_variances_start_where_asked_but_inside_the_bounds(asked, got):
    head = VarianceHead(8)
    head.start_at(asked)
    assert float(head(normal(50, 8))[1].detach().mean()) == pytest.approx(got, abs=0.4)


def test_an_mlp_has_the_layers_asked_for():
    network = mlp(5, 7, 3, layers=2, dropout=0.5)
    kinds = [type(layer).__name__ for layer in network]
    assert kinds == ["Linear", "ReLU", "Dropout", "Linear", "ReLU", "Dropout", "Linear"]
    assert [layer.weight.shape for layer in network if isinstance(layer, torch.nn.Linear)] == [(7, 5), (7, 7), (3, 7)]
    assert len(mlp(5, 7, 3, layers=0)) == 1
    assert heads.mlp(5, 7, 3, layers=1)(normal(2, 5)).shape == (2, 3)
