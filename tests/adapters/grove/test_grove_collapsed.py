import numpy as np
import pytest
import torch

from grove_adapters import seeding
from grove_adapters.adapters.grove import GroVE
from grove_adapters.adapters.grove.alignments import ALIGNMENTS
from grove_adapters.adapters.grove.collapsed import CollapsedObjective, Statistics, evidence_bound
from grove_adapters.adapters.grove.data import LinkedRows
from grove_adapters.adapters.grove.gp import SparseGP
from grove_adapters.adapters.grove.model import Decoders, Objective, expected_log_likelihood
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.embeddings import Embeddings, Pairs
from grove_adapters.errors import ConfigError, InputError

SMALL = {"latent_dim": 4, "n_inducing": 30, "epochs": 12}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeding.generator(seed), dtype=torch.float64)


def make_gp(inducing, dim=3, kernel="rbf"):
    gp = SparseGP(len(inducing), inducing.shape[1], dim, "image", kernel=kernel).double()
    with torch.no_grad():
        gp.inducing.copy_(inducing)
        gp.log_noise.fill_(0.3)
        gp.kernel.log_scale.fill_(-0.2)
        gp.constant.copy_(random(dim, seed=9))
    return gp


def statistics(gp, x, z):
    sums = Statistics.empty(gp)
    for part in torch.arange(len(x)).split(5):
        sums.add(gp, gp.factor(), x[part], z[part])
    return sums


@pytest.mark.parametrize("kernel", ["rbf", "matern15", "matern25"])
def test_with_every_row_inducing_the_bound_is_the_exact_log_marginal_likelihood_and_predicts_alike(kernel, monkeypatch):
    monkeypatch.setattr("grove_adapters.adapters.grove.gp.JITTERS", (1e-9,))  # else the two differ by the jitter, 1e-6
    x, z = random(12, 2), random(12, 3, seed=4)
    gp = make_gp(x, kernel=kernel)
    bound, mean, root = evidence_bound(gp, statistics(gp, x, z))
    noisy = gp.kernel(x, x) + gp.noise * torch.eye(12)
    exact = torch.distributions.MultivariateNormal(torch.zeros(12, dtype=torch.float64), noisy)
    deviation = z - gp.constant
    assert bound.item() == pytest.approx(exact.log_prob(deviation.T).sum().item(), rel=1e-6)
    new = random(5, 2, seed=8)
    features, cross = gp.features(new, gp.factor()), gp.kernel(new, x)
    torch.testing.assert_close(features @ mean, cross @ torch.linalg.solve(noisy, deviation), rtol=0, atol=1e-6)
    spread = torch.linalg.solve_triangular(root, features.T, upper=False).square().sum(0)
    expected = gp.kernel.scale - (cross * torch.linalg.solve(noisy, cross.T).T).sum(1)
    variance = gp.kernel.scale - features.square().sum(1) + spread
    torch.testing.assert_close(variance, expected, rtol=0, atol=1e-6)


def test_the_bound_is_what_the_optimal_q_reaches_and_below_the_exact_value():
    x, z = random(30, 2), random(30, 3, seed=4)
    gp = make_gp(x[:6])
    sums = statistics(gp, x, z)
    bound = evidence_bound(gp, sums)[0].item()
    gp.set_optimal(sums.gram.detach(), sums.cross.detach())
    features = gp.features(x, gp.factor())
    mean, spread = features @ gp.mean, (features @ gp.covariance.root).square().sum(1)
    variance = (gp.kernel.scale - features.square().sum(1) + spread)[:, None]
    reached = expected_log_likelihood(z - gp.constant, mean, variance, gp.noise_at(z)).sum() - gp.divergence()
    assert bound == pytest.approx(reached.item(), rel=1e-9)
    noisy = gp.kernel(x, x) + gp.noise * torch.eye(30)
    exact = torch.distributions.MultivariateNormal(torch.zeros(30, dtype=torch.float64), noisy)
    assert bound < exact.log_prob((z - gp.constant).T).sum().item()


def make(alignment="kl", exact=False, n=40):
    pairs = make_pairs(n, dim=6, views=0, seed=1).pairs
    data = LinkedRows(pairs, torch.device("cpu"))
    latents = torch.nn.Embedding.from_pretrained(random(n, 2, seed=30).float(), freeze=False, sparse=True)
    decoders = Decoders(n if exact else 8, 2, 6, 4)
    with torch.no_grad():
        for seed, gp in enumerate(decoders.gps.values()):
            gp.inducing.copy_(random(len(gp.inducing), 2, seed=seed))
            gp.log_noise.fill_(-3.0)
    settings = {"alignment": ALIGNMENTS[alignment](), "weight": 0.2, "align_constants": False, "prior": True}
    return decoders, latents, data, settings, CollapsedObjective(decoders, latents, data, exact=exact, **settings)


@pytest.mark.parametrize("alignment", ["kl", "harmonization", "none"])
def test_it_is_the_minibatch_objective_of_all_links_at_the_optimal_q(alignment):
    decoders, latents, data, settings, collapsed = make(alignment)
    terms = collapsed(torch.arange(40))
    plain = Objective(decoders, latents, data, natural=None, **settings)(torch.arange(40))
    for name in ("loss", "log_likelihood", "alignment", "divergence"):
        assert terms[name].item() == pytest.approx(plain[name].item(), rel=1e-4), name


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_equal_finite_differences(exact):
    decoders, latents, _, _, objective = make(exact=exact)
    objective(torch.arange(40))["loss"].backward()
    gp = decoders.image
    places = {"latents": (latents.weight, (3, 1)), "noise": (gp.log_noise, ()), "scale": (gp.kernel.log_scale, ())}
    if not exact:
        places["inducing"] = (gp.inducing, (2, 0))
    for name, (parameter, place) in places.items():
        gradient = parameter.grad.to_dense()[place].item()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter[place] += sign * 1e-3
                values.append(objective(torch.arange(40))["loss"].item())
                parameter[place] -= sign * 1e-3
        assert (values[0] - values[1]) / 2e-3 == pytest.approx(gradient, rel=2e-2, abs=1e-4), name


def test_chunks_of_the_stream_change_nothing(monkeypatch):
    whole = make()[-1](torch.arange(40))["loss"].item()
    monkeypatch.setattr("grove_adapters.adapters.grove.data.CHUNK", 7)
    assert make()[-1](torch.arange(40))["loss"].item() == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("settings", [{"training": "collapsed"}, {"exact": True}], ids=str)
def test_collapsed_training_improves_the_bound_and_moves_latents(settings):
    world = make_pairs(60, views=0, seed=3)
    adapter = GroVE(**SMALL, **settings).fit(world.pairs, seed=0)
    report = adapter.fit_report_
    assert report.steps == report.epochs
    assert report.history[-1]["loss"] < report.history[0]["loss"]
    assert report.facts["latent_displacement_rms"] > 0.05
    assert report.facts["n_inducing"] == (54 if "exact" in settings else 30)
    assert bool(torch.isfinite(adapter.predict(world.pairs.texts).uncertainty).all())


def test_an_exact_gp_of_three_pairs_works_and_of_too_many_links_is_refused(monkeypatch):
    numbers = np.random.default_rng(0)
    images, texts = (
        Embeddings(numbers.normal(size=(3, 8)).astype(np.float32), modality=name) for name in ("image", "text")
    )
    pairs = Pairs(images, texts, np.repeat(np.arange(3)[:, None], 2, 1))
    adapter = GroVE(exact=True, epochs=3).fit(pairs)
    assert bool(torch.isfinite(adapter.predict(images).variance).all())
    monkeypatch.setattr("grove_adapters.adapters.grove.adapter.MOST_EXACT", 2)
    with pytest.raises(InputError, match="exact=True expected at most 2 links to fit, got 3"):
        GroVE(exact=True).fit(pairs)


def test_collapsed_training_needs_a_shared_covariance():
    with pytest.raises(ConfigError, match="covariance expected 'shared', for collapsed training"):
        GroVE(training="collapsed", covariance="diagonal")
