"""GroVE whose noise varies over latent space."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch.distributions import Normal, kl_divergence

from grove_adapters import seeding, testing
from grove_adapters.adapters import load_adapter
from grove_adapters.adapters.grove import GroVE, GroVEConfig
from grove_adapters.adapters.grove.alignments import ALIGNMENTS
from grove_adapters.adapters.grove.gp import Noise
from grove_adapters.adapters.grove.inference import LatentInference
from grove_adapters.adapters.grove.model import Decoders, Objective, expected_log_likelihood
from grove_adapters.adapters.grove.natural import NaturalGradient
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.embeddings import Embeddings, Pairs
from grove_adapters.errors import ConfigError

N, M, L, D, H = 30, 8, 2, 5, 6
SMALL = {"latent_dim": 4, "n_inducing": 30, "epochs": 12, "batch_size": 64, "noise": "heteroscedastic"}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=seeding.generator(seed), dtype=dtype)


class Rows:
    """Stands in for `LinkedRows`."""

    dim = D

    def __len__(self):
        return N

    def fetch(self, rows):
        return {modality: random(N, D, seed=seed)[rows] for modality, seed in (("image", 20), ("text", 21))}


def make(rate=0.5, weight=0.3):
    """Two GPs with every number away from its default."""
    decoders = Decoders(M, L, D, 4, n_noise=H)
    latents = torch.nn.Embedding.from_pretrained(random(N, L, seed=30), freeze=False, sparse=True)
    with torch.no_grad():
        decoders.anchors.copy_(random(4, L, seed=31))
        for seed, process in enumerate(decoders.processes.values()):
            count, width = process.mean.shape
            process.inducing.copy_(random(count, L, seed=seed))
            process.mean.copy_(0.3 * random(count, width, seed=seed + 2))
            process.covariance.root.copy_((0.1 * random(count, count, seed=seed + 4)).tril() + 0.6 * torch.eye(count))
            process.kernel.log_lengthscale.fill_(0.3)
        for seed, gp in enumerate(decoders.gps.values()):
            gp.constant.copy_(random(D, seed=seed + 6))
            gp.log_noise.fill_(-1.0)
    natural = NaturalGradient(decoders.processes, N, D, rate)
    objective = Objective(
        decoders,
        latents,
        Rows(),
        alignment=ALIGNMENTS["kl"](),
        weight=weight,
        align_constants=False,
        prior=True,
        natural=natural,
    )
    return decoders, latents, objective, natural


def test_log_normal_moments_equal_monte_carlo():
    mean, variance = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([[0.5]], dtype=torch.float64)
    noise = Noise.log_normal(mean, variance)
    draws = torch.exp(mean + variance.sqrt() * random(400_000, seed=1, dtype=torch.float64))
    for moment, sampled in ((noise.log, draws.log()), (noise.precision, 1 / draws), (noise.variance, draws)):
        assert moment.item() == pytest.approx(sampled.mean().item(), rel=1e-2)


def test_expected_log_likelihood_equals_monte_carlo_over_outputs_and_noise():
    z, mean, variance = random(2, D, seed=1), random(2, D, seed=2), torch.tensor([[0.2], [0.7]], dtype=torch.float64)
    level, spread = torch.tensor([[-0.5], [0.4]], dtype=torch.float64), torch.tensor([[0.1], [0.3]]).double()
    outputs = mean + variance.sqrt() * random(400_000, 2, D, seed=3, dtype=torch.float64)
    std = torch.exp(0.5 * (level + spread.sqrt() * random(400_000, 2, 1, seed=4, dtype=torch.float64)))
    sampled = Normal(outputs, std).log_prob(z).sum(2).mean(0)
    reached = expected_log_likelihood(z, mean, variance, Noise.log_normal(level, spread))
    torch.testing.assert_close(reached, sampled, rtol=1e-2, atol=0)


def test_the_objective_is_the_documented_sum_and_minibatches_are_unbiased():
    decoders, latents, objective, _ = make(weight=0.0)
    loss = objective(torch.arange(N))["loss"].item()
    batch, total = Rows().fetch(torch.arange(N)), 0.5 * latents.weight.double().square().sum(1).mean()
    for modality, gp in decoders.gps.items():
        mean, variance = gp.marginal(gp.features(latents.weight, gp.factor()))
        process = gp.noise_process
        level, spread = process.marginal(process.features(latents.weight, process.factor()))
        precision = torch.exp(-gp.log_noise.double() - level + spread / 2)[:, 0]
        square = (batch[modality] - mean - gp.constant).square().sum(1) + D * variance[:, 0]
        total = total + 0.5 * (D * (np.log(2 * np.pi) + gp.log_noise + level[:, 0]) + precision * square).mean()
        for owner in (gp, process):
            root, means = owner.covariance.root.tril().double(), owner.mean.double()
            q = torch.distributions.MultivariateNormal(means.T, (root @ root.T).expand(owner.dim, -1, -1))
            prior = torch.distributions.MultivariateNormal(torch.zeros_like(means.T), torch.eye(len(means)).double())
            total = total + kl_divergence(q, prior).sum() / N
    assert loss == pytest.approx(total.item() / D, rel=1e-5)
    parts = [objective(rows)["loss"].item() for rows in torch.randperm(N, generator=seeding.generator(0)).split(5)]
    assert sum(parts) / len(parts) == pytest.approx(loss, rel=1e-6)


def test_gradients_equal_finite_differences():
    decoders, latents, objective, _ = make()
    rows = torch.arange(N)
    objective(rows)["loss"].backward()
    process = decoders.text.noise_process
    places = {
        "latents": (latents.weight, (3, 1)),
        "inducing": (process.inducing, (2, 0)),
        "lengthscale": (process.kernel.log_lengthscale, ()),
        "scale": (process.kernel.log_scale, ()),
        "level": (decoders.text.log_noise, ()),
        "mean": (process.mean, (4, 0)),
        "root": (process.covariance.root, (5, 2)),
    }
    for name, (parameter, place) in places.items():
        gradient, values = parameter.grad.to_dense()[place].item(), []
        for sign in (1, -1):
            with torch.no_grad():
                parameter[place] += sign * 1e-2
                values.append(objective(rows)["loss"].item())
                parameter[place] -= sign * 1e-2
        assert (values[0] - values[1]) / 2e-2 == pytest.approx(gradient, rel=2e-2, abs=2e-4), name


def test_natural_steps_descend_to_where_the_gradient_vanishes():
    decoders, _, objective, natural = make(rate=0.5)
    losses = []
    for _ in range(80):
        natural.zero_grad()
        terms = objective(torch.arange(N))
        terms["loss"].backward()
        natural.step()
        losses.append(terms["loss"].item())
    assert all(later <= earlier + 1e-6 * abs(earlier) for earlier, later in itertools.pairwise(losses[5:]))
    for process in decoders.processes.values():
        assert float(process.mean.grad.norm()) < 1e-3


def test_latent_inference_sees_the_noise():
    decoders = make()[0].requires_grad_(False)
    find = LatentInference(decoders.gps, decoders.anchors)
    values = {"image": random(1, D, seed=8), "text": random(1, D, seed=9)}
    targets = {modality: find._reduced[modality].target(rows) for modality, rows in values.items()}

    def energy(at):
        total = 0.5 * at.square().sum()
        for modality, gp in decoders.gps.items():
            features = gp.features(at[None], gp.factor())
            _, variance = gp.marginal(features)
            process = gp.noise_process
            seen = process.features(at[None], process.factor())
            level = gp.log_noise.double() + seen @ process.mean.double()
            noise = Noise.log_normal(level, process.marginal(seen)[1])
            deviation = (values[modality] - gp.constant).double()
            mean = features @ gp.mean.double()
            total = total - expected_log_likelihood(deviation, mean, variance, noise)[0]
        return total

    x, other = random(1, L, seed=7).double(), random(1, L, seed=6).double()
    gradient, hessian = find._energy(x, targets)[1], find._hessian(x, targets)
    torch.testing.assert_close(gradient[0], torch.autograd.functional.jacobian(energy, x[0]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hessian[0], torch.autograd.functional.hessian(energy, x[0]), rtol=1e-4, atol=1e-3)
    difference = find._energy(x, targets)[0] - find._energy(other, targets)[0]
    torch.testing.assert_close(difference[0], energy(x[0]) - energy(other[0]), rtol=1e-5, atol=1e-5)
    for modality, reduced in find._reduced.items():
        start, slope = reduced.linear(x)
        expected = reduced.energy(x, targets[modality])[0]
        torch.testing.assert_close(start + (slope * targets[modality]).sum(1), expected)
        own = reduced.target((decoders.gps[modality].constant + reduced.alpha.T @ reduced.form.local(x).value[0])[None])
        torch.testing.assert_close(reduced.decoded(x), own, rtol=1e-5, atol=1e-6)
    found = find(values)
    exact = torch.autograd.functional.hessian(energy, found.mode[0])
    torch.testing.assert_close(found.covariance[0], exact.inverse(), rtol=1e-3, atol=1e-5)
    assert bool(found.converged.all())


@pytest.fixture(scope="module")
def surface():
    """Pairs on a curved surface whose noise depends on where on it they are, with the noise's variance."""
    numbers = np.random.default_rng(0)
    place = numbers.normal(size=(500, 2))
    std = 0.2 * np.exp(0.5 * place[:, 0])
    sides = []
    for modality in ("image", "text"):
        clean = np.sin(0.3 * place @ numbers.normal(size=(2, 24)) + numbers.uniform(0, 6, 24))
        values = (clean + std[:, None] * numbers.normal(size=clean.shape)).astype(np.float32)
        sides.append(Embeddings(values, modality=modality))
    return Pairs(*sides, np.repeat(np.arange(len(place))[:, None], 2, 1)), std**2


def test_a_known_noise_surface_is_recovered(surface):
    pairs, variance = surface
    adapter = GroVE(latent_dim=2, n_inducing=40, epochs=30, batch_size=128, noise="heteroscedastic").fit(pairs)
    for side in (pairs.images, pairs.texts):
        aleatoric = adapter.predict(side).aleatoric[:, 0].double().numpy()
        assert spearmanr(aleatoric, variance)[0] > 0.95
        assert np.exp(np.abs(np.log(aleatoric / variance)).mean()) < 1.3
    assert adapter.fit_report_.facts["image"]["log_noise_variance"] > 0


def test_the_variance_is_made_of_parts_that_vary_and_survives_saving(tmp_path):
    world = make_pairs(300, views=0, features=False, seed=3)
    adapter = GroVE(**{**SMALL, "epochs": 4}, uncertainty="variance").fit(world.pairs)
    posterior = adapter.predict(world.pairs.images)
    torch.testing.assert_close(posterior.aleatoric + posterior.epistemic, posterior.variance)
    assert float(posterior.aleatoric.std(0).min()) > 0
    loaded = load_adapter(adapter.save(tmp_path / "grove")).predict(world.pairs.images)
    assert torch.equal(loaded.variance, posterior.variance)
    few = world.pairs.images.take(np.arange(6))
    assert torch.equal(adapter.predict(few, batch_size=1).variance, adapter.predict(few).variance)
    again = GroVE(**{**SMALL, "epochs": 4}, uncertainty="variance").fit(world.pairs).predict(world.pairs.images)
    assert torch.equal(again.variance, posterior.variance)


@pytest.fixture
def varying_noise_by_default(monkeypatch):
    """What the contract checks make when they make a small GroVE."""
    small = GroVE.small_settings()
    monkeypatch.setattr(
        GroVE, "small_settings", lambda: {**small, "n_inducing": 30, "epochs": 8, "noise": "heteroscedastic"}
    )
    testing._fitted.cache_clear()
    yield
    testing._fitted.cache_clear()


def test_the_contract_of_adapters_is_kept(varying_noise_by_default):
    for check in testing.adapter_checks("grove"):
        check()


@pytest.mark.parametrize("settings", [{"exact": True}, {"training": "collapsed"}], ids=str)
def test_collapsed_training_refuses_noise_that_varies(settings):
    with pytest.raises(ConfigError, match=r"noise.*homoscedastic.*collapsed"):
        GroVEConfig(noise="heteroscedastic", **settings)


@pytest.mark.parametrize(
    "settings", [{"kernel": "cosine"}, {"kernel": "matern25", "ard": True}, {"covariance": "per_dim"}]
)
def test_every_kernel_and_covariance_goes_with_it(settings):
    world = make_pairs(200, views=0, features=False, seed=3)
    adapter = GroVE(**{**SMALL, "epochs": 3, "n_inducing": 15}, **settings).fit(world.pairs)
    history = adapter.fit_report_.history
    assert history[-1]["loss"] < history[0]["loss"]
    assert bool(torch.isfinite(adapter.predict(world.pairs.texts).variance).all())
