import pytest
import torch

from grove_adapters import seeding
from grove_adapters.adapters.grove.inference import LatentInference
from grove_adapters.adapters.grove.model import Decoders, expected_log_likelihood

M, L, D = 20, 2, 12


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeding.generator(seed))


@pytest.fixture(scope="module")
def decoders():
    """Two GPs fitted to a smooth curved surface over known latents, which are the anchors."""
    decoders = Decoders(M, L, D, 60)
    latents = random(60, L, seed=1)
    with torch.no_grad():
        decoders.anchors.copy_(latents)
        for seed, gp in enumerate(decoders.gps.values()):
            gp.inducing.copy_(latents[:M])
            gp.log_noise.fill_(-4.0)
            gp.constant.copy_(random(D, seed=seed + 2))
            features = gp.features(latents, gp.factor())
            surface = torch.sin(latents @ random(L, D, seed=seed + 4))
            gp.set_optimal(features.T @ features, features.T @ surface.double())
    return decoders.requires_grad_(False)


def decoded(gp, x):
    mean, variance = gp.marginal(gp.features(x, gp.factor()))
    return mean + gp.constant, variance


def log_posterior(gps, x, values):
    """What inference maximises, written with D-dim vectors."""
    total = -0.5 * x.double().square().sum(1)
    for modality, z in values.items():
        gp = gps[modality]
        mean, variance = gp.marginal(gp.features(x, gp.factor()))
        # float64 throughout, so that derivatives can be compared
        mean = gp.features(x, gp.factor()) @ gp.mean.double()
        total = total + expected_log_likelihood((z - gp.constant).double(), mean, variance, gp.noise_at(x))
    return total


def test_energy_derivatives_are_those_of_the_log_posterior(decoders):
    find = LatentInference(decoders.gps, decoders.anchors)
    values = {"image": random(1, D, seed=8), "text": random(1, D, seed=9)}
    targets = {modality: find._reduced[modality].target(rows) for modality, rows in values.items()}
    x = random(1, L, seed=7).double()

    def energy(at):
        return -log_posterior(decoders.gps, at[None], values)[0]

    gradient, hessian = find._energy(x, targets)[1], find._hessian(x, targets)
    torch.testing.assert_close(gradient[0], torch.autograd.functional.jacobian(energy, x[0]), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(hessian[0], torch.autograd.functional.hessian(energy, x[0]), rtol=1e-4, atol=1e-2)
    other = random(1, L, seed=6).double()
    difference = find._energy(x, targets)[0] - find._energy(other, targets)[0]
    torch.testing.assert_close(difference[0], energy(x[0]) - energy(other[0]), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_known_latents_are_found_again(decoders, modality):
    x = 0.8 * random(40, L, seed=11)
    gp = decoders.gps[modality]
    z = decoded(gp, x)[0] + 0.02 * random(40, D, seed=12)
    found = LatentInference({modality: gp}, decoders.anchors)({modality: z})
    assert bool(found.converged.all())
    assert float((found.mode - x).norm(dim=1).median()) < 0.1


def test_the_mode_is_at_least_as_good_as_a_dense_grid(decoders):
    values = {"image": random(10, D, seed=13)}
    gps = {"image": decoders.image}
    mode = LatentInference(gps, decoders.anchors, restarts=10)(values).mode
    axis = torch.linspace(-4, 4, 81)
    grid = torch.cartesian_prod(axis, axis)
    reached = log_posterior(gps, mode, values)
    for row in range(10):
        best = log_posterior(gps, grid, {"image": values["image"][row : row + 1]}).max()
        assert float(reached[row]) >= float(best) - 1e-6


def test_restarts_never_end_worse(decoders):
    values = {"text": 2 * random(30, D, seed=14)}
    gps = {"text": decoders.text}
    reached = [
        log_posterior(gps, LatentInference(gps, decoders.anchors, restarts=restarts)(values).mode, values)
        for restarts in (1, 5)
    ]
    assert bool((reached[1] >= reached[0] - 1e-5).all())


def test_covariance_and_entropy_are_those_of_the_laplace_approximation(decoders):
    values = {"image": decoded(decoders.image, random(3, L, seed=15))[0]}
    gps = {"image": decoders.image}
    found = LatentInference(gps, decoders.anchors)(values)
    for row in range(3):
        one = {"image": values["image"][row : row + 1]}
        hessian = torch.autograd.functional.hessian(
            lambda at, one=one: -log_posterior(gps, at[None], one)[0], found.mode[row]
        )
        torch.testing.assert_close(found.covariance[row], hessian.inverse(), rtol=1e-3, atol=1e-6)
        normal = torch.distributions.MultivariateNormal(found.mode[row], precision_matrix=hessian)
        assert float(found.entropy[row]) == pytest.approx(float(normal.entropy()), abs=1e-3)


def test_propagated_variance_equals_monte_carlo_of_a_narrow_posterior(decoders):
    gps = {"image": decoders.image}
    find = LatentInference(gps, decoders.anchors)
    found = find({"image": decoded(decoders.image, random(3, L, seed=16))[0]})
    propagated = find.propagated("image", found)
    for row in range(3):
        root = torch.linalg.cholesky(found.covariance[row])
        draws = found.mode[row] + random(20_000, L, seed=17).double() @ root.T
        sampled = decoded(decoders.image, draws)[0].var(0).mean()
        assert float(propagated[row]) == pytest.approx(float(sampled), rel=0.1)


def test_the_laplace_approximation_agrees_with_metropolis_sampling(decoders):
    gps, find = {"image": decoders.image}, LatentInference({"image": decoders.image}, decoders.anchors)
    values = {"image": decoded(decoders.image, random(1, L, seed=21))[0] + 0.02 * random(1, D, seed=22)}
    found = find(values)
    root = 1.5 * torch.linalg.cholesky(found.covariance[0])
    chains, generator = 400, seeding.generator(23)
    x = found.mode.expand(chains, L)
    everyone = {"image": values["image"].expand(chains, D)}
    level, kept = log_posterior(gps, x, everyone), []
    for step in range(300):
        trial = x + torch.randn(chains, L, generator=generator, dtype=torch.float64) @ root.T
        reached = log_posterior(gps, trial, everyone)
        taken = torch.rand(chains, generator=generator).log() < reached - level
        x, level = torch.where(taken[:, None], trial, x), torch.where(taken, reached, level)
        if step >= 50:
            kept.append(x)
    draws = torch.cat(kept)
    std = found.covariance[0].diagonal().sqrt()
    assert bool(((draws.mean(0) - found.mode[0]).abs() < 0.25 * std).all())
    torch.testing.assert_close(draws.std(0), std, rtol=0.15, atol=0)
    sampled = decoded(decoders.image, draws)[0].var(0).mean()
    assert float(find.propagated("image", found)[0]) == pytest.approx(float(sampled), rel=0.3)


def test_both_modalities_together_are_surer_than_either(decoders):
    x = random(20, L, seed=18)
    values = {modality: decoded(gp, x)[0] for modality, gp in decoders.gps.items()}
    both = LatentInference(decoders.gps, decoders.anchors)(values).entropy
    for modality, gp in decoders.gps.items():
        one = LatentInference({modality: gp}, decoders.anchors)({modality: values[modality]}).entropy
        assert bool((both < one).all())


def test_results_depend_bitwise_neither_on_the_batch_nor_on_the_order(decoders):
    gps = {"image": decoders.image}
    find = LatentInference(gps, decoders.anchors)
    values = random(300, D, seed=19)
    whole = find({"image": values})
    order = torch.randperm(300, generator=seeding.generator(0))
    shuffled = find({"image": values[order]})
    single = [find({"image": values[row : row + 1]}) for row in range(5)]
    for name in ("mode", "covariance", "entropy"):
        assert torch.equal(getattr(shuffled, name), getattr(whole, name)[order])
        assert torch.equal(torch.cat([getattr(item, name) for item in single]), getattr(whole, name)[:5])
    moved = find.propagated("image", whole)
    assert torch.equal(find.propagated("image", shuffled), moved[order])


def test_a_guess_is_where_the_search_starts(decoders):
    gps = {"image": decoders.image}
    find = LatentInference(gps, decoders.anchors)
    values = {"image": decoded(decoders.image, random(10, L, seed=20))[0]}
    found = find(values)
    again = find(values, guess=found.mode)
    torch.testing.assert_close(again.mode, found.mode, rtol=0, atol=1e-5)
