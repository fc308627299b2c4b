import itertools
import math

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from grove_adapters import seeding
from grove_adapters.adapters.grove.alignments import ALIGNMENTS
from grove_adapters.adapters.grove.gp import Noise
from grove_adapters.adapters.grove.model import Decoders, Objective, expected_log_likelihood
from grove_adapters.adapters.grove.natural import NaturalGradient

N, M, L, D = 30, 8, 2, 5


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=seeding.generator(seed), dtype=dtype)


class Rows:
    """Stands in for `LinkedRows`."""

    dim = D

    def __init__(self, n=N):
        self.values = {"image": random(n, D, seed=20), "text": random(n, D, seed=21)}

    def __len__(self):
        return len(self.values["image"])

    def fetch(self, rows):
        return {modality: values[rows] for modality, values in self.values.items()}


def make(weight=0.3, *, alignment="kl", rate=0.5, prior=True, align_constants=False, **kinds):
    decoders = Decoders(M, L, D, 4, **kinds)
    latents = torch.nn.Embedding.from_pretrained(random(N, L, seed=30), freeze=False, sparse=True)
    with torch.no_grad():
        for seed, gp in enumerate(decoders.gps.values()):
            gp.inducing.copy_(random(M, L, seed=seed))
            gp.mean.copy_(0.3 * random(M, D, seed=seed + 2))
            root = gp.covariance.root
            diagonal = torch.eye(M) if root.shape[-2:] == (M, M) else 1
            root.copy_(0.1 * random(*root.shape, seed=seed + 4) + 0.6 * diagonal)
            if root.shape[-2:] == (M, M):
                root.tril_()
            gp.constant.copy_(random(D, seed=seed + 6))
            gp.log_noise.fill_(-1.0)
    natural = NaturalGradient(decoders.processes, N, D, rate)
    objective = Objective(
        decoders,
        latents,
        Rows(),
        alignment=ALIGNMENTS[alignment](),
        weight=weight,
        align_constants=align_constants,
        prior=prior,
        natural=natural,
    )
    return decoders, latents, objective, natural


def test_expected_log_likelihood_equals_monte_carlo():
    z, mean, variance = random(2, D, seed=1), random(2, D, seed=2), torch.tensor([[0.2], [0.7]], dtype=torch.float64)
    noise = torch.tensor(0.5, dtype=torch.float64)
    draws = mean + variance.sqrt() * random(200_000, 2, D, seed=3, dtype=torch.float64)
    sampled = Normal(draws, noise.sqrt()).log_prob(z).sum(2).mean(0)
    torch.testing.assert_close(
        expected_log_likelihood(z, mean, variance, Noise.known(noise)), sampled, rtol=5e-3, atol=0
    )


def test_divergence_equals_torch_distributions():
    gp = make()[0].image
    root = gp.covariance.root.tril().double()
    q = MultivariateNormal(gp.mean.T.double(), scale_tril=root.abs() * torch.eye(M) + root.tril(-1))
    prior = MultivariateNormal(torch.zeros(M, dtype=torch.float64), torch.eye(M, dtype=torch.float64))
    assert gp.divergence().item() == pytest.approx(kl_divergence(q, prior).sum().item())


def test_the_objective_is_the_documented_sum():
    decoders, latents, objective, _ = make(weight=0.3, align_constants=True)
    rows = torch.arange(N)
    terms = objective(rows)
    batch, total = Rows().fetch(rows), torch.zeros((), dtype=torch.float64)
    means, variances = {}, {}
    for modality, gp in decoders.gps.items():
        mean, variance = gp.marginal(gp.features(latents.weight, gp.factor()))
        means[modality], variances[modality] = mean + gp.constant, variance
        square = (batch[modality] - means[modality]).square() + variance
        total = total - (-0.5 * torch.log(2 * math.pi * gp.noise) - square / (2 * gp.noise)).sum(1).mean()
        total = total + gp.divergence() / N
    total = total + 0.5 * latents.weight.double().square().sum(1).mean()
    alignment = torch.zeros((), dtype=torch.float64)
    for a, b in (("image", "text"), ("text", "image")):
        first, second = (Normal(means[name].double(), variances[name].sqrt()) for name in (a, b))
        alignment = alignment + 0.5 * kl_divergence(first, second).sum(1).mean()
    total = total + 0.3 * alignment
    assert terms["loss"].item() == pytest.approx(total.item() / D, rel=1e-6)
    assert terms["alignment"].item() == pytest.approx(alignment.item(), rel=1e-6)


def test_minibatches_are_unbiased():
    _, _, objective, _ = make()
    whole = objective(torch.arange(N))["loss"].item()
    parts = [objective(rows)["loss"].item() for rows in torch.randperm(N, generator=seeding.generator(0)).split(5)]
    assert sum(parts) / len(parts) == pytest.approx(whole, rel=1e-6)


def test_gradients_equal_finite_differences():
    decoders, latents, objective, _ = make(weight=0.5)
    rows = torch.arange(N)
    objective(rows)["loss"].backward()
    places = {"latents": (latents.weight, (3, 1))}
    for modality, gp in decoders.gps.items():
        places |= {
            f"{modality} inducing": (gp.inducing, (2, 0)),
            f"{modality} lengthscale": (gp.kernel.log_lengthscale, ()),
            f"{modality} scale": (gp.kernel.log_scale, ()),
            f"{modality} noise": (gp.log_noise, ()),
            f"{modality} mean": (gp.mean, (4, 3)),
            f"{modality} root": (gp.covariance.root, (5, 2)),
            f"{modality} diagonal": (gp.covariance.root, (5, 5)),
        }
    for name, (parameter, place) in places.items():
        gradient = parameter.grad.to_dense()[place].item()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter[place] += sign * 1e-2
                values.append(objective(rows)["loss"].item())
                parameter[place] -= sign * 1e-2
        assert (values[0] - values[1]) / 2e-2 == pytest.approx(gradient, rel=2e-2, abs=2e-4), name


def test_a_full_natural_step_without_alignment_is_the_closed_form():
    decoders, latents, objective, natural = make(weight=0.0, rate=1.0)
    rows = torch.arange(N)
    for _ in range(60):
        natural.zero_grad()
        objective(rows)["loss"].backward()
        natural.step()
    for modality, gp in decoders.gps.items():
        mean, covariance = gp.mean.detach().clone(), gp.covariance.root.tril() @ gp.covariance.root.tril().T
        features = gp.features(latents.weight, gp.factor()).detach()
        deviation = (Rows().values[modality] - gp.constant).double()
        gp.set_optimal(features.T @ features, features.T @ deviation)
        torch.testing.assert_close(mean, gp.mean.detach(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(covariance, gp.covariance.root @ gp.covariance.root.T, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("alignment", [0.1, 1.0, 100.0, 40_000.0])
def test_natural_steps_descend_even_where_the_alignment_dominates(alignment):
    _, _, objective, natural = make(weight=alignment, rate=0.1)
    rows = torch.arange(N)
    losses = []
    for _ in range(200):
        natural.zero_grad()
        terms = objective(rows)
        terms["loss"].backward()
        natural.step()
        losses.append(terms["loss"].item())
    assert all(later <= earlier + 1e-3 * abs(earlier) for earlier, later in itertools.pairwise(losses[5:]))
    assert losses[-1] < losses[0]


def test_the_covariance_stays_positive_definite_from_a_hopeless_start():
    decoders, _, objective, natural = make(weight=1.0, rate=1.0)
    with torch.no_grad():
        decoders.image.covariance.root.copy_(100 * torch.eye(M))
    for _ in range(50):
        natural.zero_grad()
        objective(torch.arange(N))["loss"].backward()
        natural.step()
    diagonal = decoders.image.covariance.root.detach().diagonal()
    assert bool((diagonal > 0).all())
    assert float(diagonal.max()) < 2


def test_a_step_moves_only_the_latents_of_its_minibatch():
    _, latents, objective, _ = make()
    before = latents.weight.detach().clone()
    optimiser = torch.optim.SparseAdam(latents.parameters(), lr=0.1)
    objective(torch.tensor([4, 17]))["loss"].backward()
    assert latents.weight.grad.is_sparse
    optimiser.step()
    moved = (latents.weight != before).any(1).nonzero()[:, 0]
    assert moved.tolist() == [4, 17]


def test_the_alignment_sees_constants_only_where_asked():
    plain, published = (make(align_constants=asked)[2](torch.arange(N))["alignment"] for asked in (False, True))
    assert published.item() > plain.item() + 1
