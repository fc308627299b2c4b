import math
import warnings

import pytest
import torch

from grove_adapters import seeding
from grove_adapters.adapters.grove.gp import SparseGP, cholesky
from grove_adapters.errors import NumericalError


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeding.generator(seed), dtype=torch.float64)


def make_gp(n_inducing=7, latent_dim=2, dim=4, seed=0, **kinds):
    """A GP with every number away from its default."""
    gp = SparseGP(n_inducing, latent_dim, dim, "image", **kinds)
    with torch.no_grad():
        gp.kernel.log_lengthscale.fill_(0.3)
        gp.kernel.log_scale.fill_(0.7)
        gp.log_noise.fill_(-1.5)
        gp.inducing.copy_(random(n_inducing, latent_dim, seed=seed) * 1.5)
        gp.mean.copy_(random(n_inducing, dim, seed=seed + 1))
        root = gp.covariance.root
        root.copy_(0.3 * random(*root.shape, seed=seed + 2))
        if root.shape[-2] == root.shape[-1]:
            root.copy_(root.tril() + 0.5 * torch.eye(n_inducing))
        gp.constant.copy_(random(dim, seed=seed + 3))
    return gp


def test_marginal_equals_the_dense_formula_with_the_plus_sign():
    gp = make_gp()
    x = random(6, 2, seed=9)
    mean, variance = gp.marginal(gp.features(x, gp.factor()))
    cross, prior = gp.kernel(x, gp.inducing), gp.kernel(gp.inducing, gp.inducing)
    factor = gp.factor()
    projection = cross @ torch.linalg.inv(factor @ factor.T)
    root = factor @ gp.covariance.root.tril().double()
    covariance = gp.kernel(x, x) + projection @ (root @ root.T - prior) @ projection.T
    torch.testing.assert_close(variance[:, 0], covariance.diagonal(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mean.double(), projection @ factor @ gp.mean.double(), rtol=1e-4, atol=1e-5)


def test_marginal_variance_equals_monte_carlo_over_u():
    gp = make_gp()
    x = random(3, 2, seed=9)
    factor = gp.factor()
    draws = gp.covariance.root.tril().double() @ random(7, 200_000, seed=5)
    features = gp.features(x, factor)
    conditional = gp.kernel.scale - features.square().sum(1)
    sampled = (features @ draws).var(1) + conditional
    torch.testing.assert_close(gp.marginal(features)[1][:, 0], sampled, rtol=2e-2, atol=0)


def test_marginal_and_divergence_equal_gpytorch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # gpytorch scripts a function when it is imported
        import gpytorch

    gp = make_gp()

    class Reference(gpytorch.models.ApproximateGP):
        def __init__(self):
            batch = torch.Size([gp.dim])
            q = gpytorch.variational.CholeskyVariationalDistribution(7, batch_shape=batch)
            strategy = gpytorch.variational.VariationalStrategy(
                self, gp.inducing.detach().double(), q, learn_inducing_locations=True, jitter_val=1e-8
            )
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    reference = Reference().double()
    reference.variational_strategy.variational_params_initialized.fill_(1)
    q = reference.variational_strategy._variational_distribution
    with torch.no_grad():
        q.variational_mean.copy_(gp.mean.T)
        q.chol_variational_covar.copy_(gp.covariance.root.tril().expand(gp.dim, 7, 7))
        reference.mean_module.constant.copy_(gp.constant)
        reference.covar_module.outputscale = gp.kernel.scale.item()
        reference.covar_module.base_kernel.lengthscale = gp.kernel.lengthscale.item()
    reference.eval()
    x = random(5, 2, seed=9)
    expected = reference(x)
    mean, variance = gp.marginal(gp.features(x, gp.factor()))
    torch.testing.assert_close((mean + gp.constant).T.double(), expected.mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(variance[:, 0].expand(gp.dim, -1), expected.variance, rtol=1e-3, atol=1e-4)
    kl = reference.variational_strategy.kl_divergence().sum()
    assert gp.divergence().item() == pytest.approx(kl.item(), rel=1e-5)


def test_with_every_point_inducing_and_the_optimal_q_it_is_the_exact_gp():
    x = random(12, 2)
    gp = make_gp(12)
    with torch.no_grad():
        gp.inducing.copy_(x)
    x = gp.inducing.detach().double()
    z = random(12, gp.dim, seed=4).float()
    features = gp.features(x, gp.factor())
    gp.set_optimal(features.T @ features, features.T @ (z - gp.constant).double())
    new = random(5, 2, seed=8)
    noisy = gp.kernel(x, x) + gp.noise * torch.eye(12)
    cross = gp.kernel(new, x)
    mean, variance = gp.marginal(gp.features(new, gp.factor()))
    exact = cross @ torch.linalg.solve(noisy, (z - gp.constant).double())
    torch.testing.assert_close(mean.double(), exact, rtol=1e-3, atol=1e-4)
    exact_variance = gp.kernel.scale - (cross * torch.linalg.solve(noisy, cross.T).T).sum(1)
    torch.testing.assert_close(variance[:, 0], exact_variance, rtol=1e-3, atol=1e-5)


def test_evidence_bound_of_the_optimal_q_is_the_exact_log_marginal_likelihood():
    from grove_adapters.adapters.grove.model import expected_log_likelihood

    gp = make_gp(12)
    x = gp.inducing.detach().double()
    z = random(12, gp.dim, seed=4).float()
    features = gp.features(x, gp.factor())
    gp.set_optimal(features.T @ features, features.T @ (z - gp.constant).double())
    bound = expected_log_likelihood(z - gp.constant, *gp.marginal(features), gp.noise_at(x)).sum() - gp.divergence()
    noisy = gp.kernel(x, x) + gp.noise * torch.eye(12)
    exact = torch.distributions.MultivariateNormal(torch.zeros(12, dtype=torch.float64), noisy)
    log_marginal = exact.log_prob((z - gp.constant).double().T).sum()
    assert bound.item() == pytest.approx(log_marginal.item(), rel=1e-4)


def test_the_optimal_q_beats_its_neighbours():
    from grove_adapters.adapters.grove.model import expected_log_likelihood

    gp = make_gp(6)
    x, z = random(40, 2, seed=3), random(40, gp.dim, seed=4).float()
    features = gp.features(x, gp.factor())
    gp.set_optimal(features.T @ features, features.T @ (z - gp.constant).double())

    def bound():
        likelihood = expected_log_likelihood(z - gp.constant, *gp.marginal(features), gp.noise_at(x)).sum()
        return (likelihood - gp.divergence()).item()

    best = bound()
    for parameter in (gp.mean, gp.covariance.root):
        kept = parameter.detach().clone()
        for seed in range(3):
            with torch.no_grad():
                parameter.copy_(kept + 0.05 * random(*kept.shape, seed=seed).float())
            assert bound() < best
        with torch.no_grad():
            parameter.copy_(kept)


def test_duplicate_inducing_inputs_are_handled_by_jitter():
    gp = make_gp()
    with torch.no_grad():
        gp.inducing.copy_(gp.inducing[:1].expand(7, 2))
    mean, variance = gp.marginal(gp.features(random(3, 2), gp.factor()))
    assert bool(torch.isfinite(mean).all())
    assert bool((variance > 0).all())
    assert gp.jitter >= 1e-6


def test_an_impossible_matrix_is_refused_by_name_and_condition():
    indefinite = torch.diag(torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64))
    with pytest.raises(NumericalError, match=r"text kernel matrix.*from -1 to 2 \(condition 2\)"):
        cholesky(indefinite, what="text kernel matrix")
    with pytest.raises(NumericalError, match=r"text kernel matrix.*NaN"):
        cholesky(indefinite * math.nan, what="text kernel matrix")


def test_jitter_escalates_only_as_far_as_needed():
    nearly = torch.diag(torch.tensor([1.0, 1.0, -3e-5], dtype=torch.float64))
    factor, jitter = cholesky(nearly, what="matrix")
    assert jitter == 1e-4
    assert bool(torch.isfinite(factor).all())


def test_closed_form_gradient_of_features_is_that_of_autograd():
    torch.manual_seed(0)
    gp = SparseGP(20, 3, 5)
    with torch.no_grad():
        gp.inducing.normal_()
    x = torch.randn(7, 3, requires_grad=True)
    weights = torch.randn(7, 20, dtype=torch.float64)
    learned = (x, gp.inducing, *gp.kernel.parameters())

    def gradients(features):
        return torch.autograd.grad((features * weights).sum(), learned)

    expected = gradients(gp.features(x, gp.factor()))
    for one, other in zip(gradients(gp.differentiable_features(x)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6 * float(other.abs().max()))
