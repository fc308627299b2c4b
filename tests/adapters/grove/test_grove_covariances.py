import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from grove_adapters import seeding
from grove_adapters.adapters.grove.covariances import make_covariance
from grove_adapters.adapters.grove.gp import SparseGP

M, D = 5, 3
KINDS = ["shared", "diagonal", "per_dim"]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeding.generator(seed))


def make(kind):
    """A covariance with every number away from its default, and the (D, M, M) matrices that it stands for."""
    covariance = make_covariance(kind, M, D)
    with torch.no_grad():
        covariance.root.copy_(0.3 * random(*covariance.root.shape))
        if kind == "diagonal":
            return covariance, torch.stack([torch.diag(column) for column in covariance.root.T.square()])
        covariance.root.add_(torch.eye(M)).tril_()
        root = covariance.root.expand(D, M, M)
    return covariance, root @ root.mT


@pytest.mark.parametrize("kind", KINDS)
def test_spread_total_and_divergence_are_those_of_the_matrices(kind):
    covariance, matrices = make(kind)
    features = random(4, M, seed=1)
    expected = torch.einsum("bm,dmn,bn->bd", features, matrices, features)
    torch.testing.assert_close(covariance.spread(features).expand(4, D), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(covariance.total(), matrices.sum(0).double(), rtol=1e-5, atol=1e-6)
    prior = MultivariateNormal(torch.zeros(M), torch.eye(M))
    kl = sum(kl_divergence(MultivariateNormal(torch.zeros(M), matrix), prior) for matrix in matrices)
    assert covariance.divergence().item() == pytest.approx(kl.item(), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimum_beats_its_neighbours_and_natural_steps_find_it(kind):
    covariance, _ = make(kind)
    half = random(M, M, seed=3).double()
    precision = torch.eye(M, dtype=torch.float64) + half @ half.T

    def bound():  # Σ_d KL(N(0, S_d) ‖ N(0, P⁻¹)) up to a constant
        added = ((precision - torch.eye(M, dtype=torch.float64)) * covariance.total()).sum()
        return covariance.divergence() + 0.5 * added

    for _ in range(200):
        covariance.zero_grad()
        (bound() / D).backward()  # gradients come per dimension
        covariance.natural_step(covariance.root.grad, 0.3)
    found = covariance.total()
    covariance.set_optimal(precision)
    best = bound().item()
    torch.testing.assert_close(found, covariance.total(), rtol=1e-3, atol=1e-4)
    for seed in range(3):
        kept = covariance.root.detach().clone()
        with torch.no_grad():
            covariance.root.add_(0.05 * random(*kept.shape, seed=seed))
        assert bound().item() > best
        with torch.no_grad():
            covariance.root.copy_(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_marginal_variance_equals_the_dense_formula(kind):
    gp = SparseGP(M, 2, D, "image", covariance=kind)
    covariance, matrices = make(kind)
    with torch.no_grad():
        gp.inducing.copy_(random(M, 2, seed=4))
        gp.covariance.root.copy_(covariance.root)
    x = random(6, 2, seed=5)
    factor = gp.factor()
    projection = gp.kernel(x, gp.inducing) @ torch.linalg.inv(factor @ factor.T)
    middle = factor @ matrices.double() @ factor.T - factor @ factor.T
    expected = gp.kernel(x, x).diagonal()[:, None] + torch.einsum("bm,dmn,bn->bd", projection, middle, projection)
    variance = gp.marginal(gp.features(x, factor))[1].expand(6, D)
    torch.testing.assert_close(variance, expected, rtol=1e-4, atol=1e-5)
    features = gp.features(x, factor)
    total = D * gp.kernel.scale - ((features @ gp.variance_loss()) * features).sum(1)
    torch.testing.assert_close(variance.sum(1), total, rtol=1e-4, atol=1e-5)


def test_more_inducing_inputs_than_the_rank_of_a_cosine_lean_on_the_jitter():
    gp = SparseGP(20, 2, D, "image", kernel="cosine")
    with torch.no_grad():
        gp.inducing.copy_(random(20, 2))
    mean, variance = gp.marginal(gp.features(random(4, 2, seed=1), gp.factor()))
    assert bool(torch.isfinite(mean).all())
    assert bool((variance > 0).all())
    assert gp.jitter >= 1e-6


@pytest.mark.parametrize("kind", ["shared", "per_dim"])
def test_a_factor_stays_lower_triangular(kind):
    covariance, _ = make(kind)
    for seed in range(3):
        covariance.natural_step(random(*covariance.root.shape, seed=seed), 0.1)
        assert torch.equal(covariance.root, covariance.root.tril())
    covariance.set_optimal(2 * torch.eye(M, dtype=torch.float64) + 0.1)
    assert torch.equal(covariance.root, covariance.root.tril())
