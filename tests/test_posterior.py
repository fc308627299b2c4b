import dataclasses

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from grove_adapters import _io
from grove_adapters.embeddings import Source
from grove_adapters.errors import InputError, UnreadableError
from grove_adapters.posterior import (
    GaussianEmbedding,
    GeneralizedGaussianEmbedding,
    PowerSphericalEmbedding,
    ProbabilisticEmbedding,
    SampledEmbedding,
    VonMisesFisherEmbedding,
)
from grove_adapters.testing import posterior_checks

RANDOM = np.random.default_rng(0)
MEAN = torch.tensor(RANDOM.normal(size=(5, 4)))
SPREAD = torch.tensor(RANDOM.uniform(0.2, 2, size=(5, 4)))


def gaussian(**change):
    return GaussianEmbedding(**{"mean": MEAN, "variance": SPREAD, "modality": "image", **change})


def generalized(**change):
    shape = torch.tensor(RANDOM.uniform(0.7, 4, size=(5, 4)))
    return GeneralizedGaussianEmbedding(
        **{"location": MEAN, "scale": SPREAD, "shape": shape, "modality": "text", **change}
    )


def sampled():
    return SampledEmbedding(samples=torch.tensor(RANDOM.normal(size=(5, 9, 4))), modality="image")


def directional(kind=VonMisesFisherEmbedding, **change):
    concentration = torch.tensor([0.1, 1.0, 10.0, 100.0, 1e5], dtype=torch.float64)
    direction = torch.nn.functional.normalize(MEAN, dim=1)
    return kind(**{"direction": direction, "concentration": concentration, "modality": "text", **change})


@pytest.mark.parametrize(
    "posterior",
    [
        gaussian(backbone=np.ones((5, 4), dtype=np.float16), source=Source(model="m"), maker={"adapter": "x"}),
        gaussian(variance=SPREAD[:, :1]),
        gaussian(variance=None, aleatoric=SPREAD, epistemic=SPREAD[:, :1]),
        generalized(),
        generalized(epistemic=SPREAD),
        sampled(),
        directional(),
        directional(PowerSphericalEmbedding, maker={"adapter": "x"}),
    ],
    ids=["gaussian", "isotropic", "two-parts", "generalized", "generalized-epistemic", "sampled", "vmf", "power"],
)
def test_contract(posterior):
    posterior_checks(posterior)


def test_everything_is_saved(tmp_path):
    before = gaussian(
        backbone=np.ones((5, 4)),
        source=Source(model="m", logit_scale=3.0),
        maker={"adapter": "x"},
        gallery_aware=True,
        uncertainty=torch.arange(5.0),
        ids=list("abcdé"),
    )
    after = ProbabilisticEmbedding.load(before.save(tmp_path / "p.safetensors"))
    assert (after.source, after.maker, after.gallery_aware) == (before.source, before.maker, True)
    assert after.ids.tolist() == list("abcdé")
    assert after.uncertainty.tolist() == [0, 1, 2, 3, 4]
    assert after.backbone.shape == (5, 4)


def test_a_foreign_file_is_refused(tmp_path):
    _io.write_tensors(tmp_path / "p.safetensors", {"mean": MEAN}, {})
    with pytest.raises(UnreadableError, match=r"posterior\.save"):
        ProbabilisticEmbedding.load(tmp_path / "p.safetensors")


def test_gaussian_density_against_scipy():
    points = torch.tensor(RANDOM.normal(size=(7, 4)))
    expected = [stats.norm(m, v.sqrt()).logpdf(points.numpy()).sum(1) for m, v in zip(MEAN, SPREAD, strict=True)]
    np.testing.assert_allclose(gaussian().log_prob(points), expected, rtol=1e-10)


def test_generalized_gaussian_density_and_variance_against_scipy_and_quadrature():
    posterior = generalized()
    points = torch.tensor(RANDOM.normal(size=(7, 4)))
    laws = [
        stats.gennorm(beta, location, scale)
        for beta, location, scale in zip(posterior.shape, posterior.location, posterior.scale, strict=True)
    ]
    np.testing.assert_allclose(
        posterior.log_prob(points), [law.logpdf(points.numpy()).sum(1) for law in laws], rtol=1e-9
    )
    np.testing.assert_allclose(posterior.variance, [law.var() for law in laws], rtol=1e-9)
    one = GeneralizedGaussianEmbedding(
        location=torch.zeros(1, 1).double(),
        scale=torch.full((1, 1), 1.3).double(),
        shape=torch.full((1, 1), 0.7).double(),
        modality="image",
    )
    mass, _ = integrate.quad(lambda z: float(one.log_prob(torch.tensor([[z]])).exp()), -200, 200, points=[0])
    assert mass == pytest.approx(1, abs=1e-6)


def test_generalized_gaussian_with_shape_two_is_gaussian():
    as_gaussian = GaussianEmbedding(mean=MEAN, variance=SPREAD.square() / 2, modality="text")
    posterior = generalized(shape=torch.full((5, 4), 2.0, dtype=torch.float64))
    points = torch.tensor(RANDOM.normal(size=(3, 4)))
    torch.testing.assert_close(posterior.variance, as_gaussian.variance)
    torch.testing.assert_close(posterior.log_prob(points), as_gaussian.log_prob(points))


def test_sampled_variance_is_unbiased_and_agreeing_samples_keep_a_floor():
    posterior = sampled()
    np.testing.assert_allclose(posterior.variance, posterior.samples.numpy().var(1, ddof=1))
    same = SampledEmbedding(samples=torch.ones(2, 3, 4), modality="image")
    assert bool((same.variance > 0).all())


@pytest.mark.parametrize("kind", [VonMisesFisherEmbedding, PowerSphericalEmbedding])
def test_directional_moments_are_those_of_the_draws(kind):
    posterior = directional(kind)
    draws = posterior.sample(20_000, seed=1)
    torch.testing.assert_close(draws.var(1), posterior.variance, rtol=0.06, atol=0)
    assert posterior.uncertainty.tolist() == sorted(posterior.uncertainty.tolist(), reverse=True)
    torch.testing.assert_close(posterior.uncertainty, posterior.summarise("mean"))
    total = posterior.variance.sum(1) + posterior.mean.square().sum(1)  # E‖x‖²
    torch.testing.assert_close(total, torch.ones(5, dtype=torch.float64))


def test_directional_density_against_scipy_and_in_the_direction_of_its_points():
    posterior, points = directional(), torch.tensor(RANDOM.normal(size=(7, 4)))
    unit = torch.nn.functional.normalize(points, dim=1)
    parameters = zip(posterior.direction[:4].numpy(), posterior.concentration[:4].tolist(), strict=True)
    laws = [stats.vonmises_fisher(direction, concentration) for direction, concentration in parameters]
    expected = [law.logpdf(unit.numpy()) for law in laws]
    np.testing.assert_allclose(posterior.log_prob(points)[:4], expected, rtol=1e-9)
    with pytest.raises(InputError, match="zeros"):
        posterior.log_prob(torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"direction": MEAN}, "unit length"),
        ({"direction": torch.ones(5, 1)}, "at least 2 dimensions"),
        ({"concentration": torch.ones(5, 1)}, r"shape \(5,\)"),
        ({"concentration": torch.zeros(5)}, "> 0"),
    ],
)
def test_impossible_directional_posteriors_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        directional(**change)


def test_summaries():
    posterior = gaussian()
    assert torch.equal(posterior.uncertainty, posterior.summarise("mean"))
    torch.testing.assert_close(posterior.summarise("sum"), SPREAD.sum(1))
    torch.testing.assert_close(posterior.summarise("max"), SPREAD.amax(1))
    torch.testing.assert_close(posterior.summarise("log_det"), SPREAD.log().sum(1))
    np.testing.assert_allclose(posterior.summarise("geometric_mean"), stats.gmean(SPREAD.numpy(), axis=1))
    with pytest.raises(InputError, match="did you mean 'mean'"):
        posterior.summarise("meen")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"variance": torch.zeros(5, 4)}, "> 0"),
        ({"variance": torch.ones(5, 3)}, r"\(5, 3\)"),
        ({"variance": None}, "variance="),
        ({"mean": torch.full((5, 4), torch.nan)}, "NaN"),
        ({"mean": torch.ones(5)}, r"\(N, D\)"),
        ({"aleatoric": SPREAD, "epistemic": SPREAD}, "add up"),
        ({"uncertainty": torch.ones(4)}, "5 rows, got 4"),
        ({"uncertainty": torch.tensor([1, 2, 3, 4, torch.inf])}, "infinity"),
        ({"ids": ["a"] * 5}, "unique"),
        ({"backbone": np.ones((4, 4))}, "backbone"),
    ],
)
def test_impossible_posteriors_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        gaussian(**change)


def test_a_single_sample_is_no_distribution():
    with pytest.raises(InputError, match="S ≥ 2"):
        SampledEmbedding(samples=torch.ones(3, 1, 4), modality="text")


def test_points_of_another_width_are_refused():
    with pytest.raises(InputError, match="4-d"):
        gaussian().log_prob(torch.ones(2, 3))
    with pytest.raises(InputError, match=r"\(G, D\)"):
        gaussian().log_prob(torch.ones(4))


def test_posteriors_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        gaussian().mean = MEAN


def test_one_variance_over_all_dimensions_is_stored_once(tmp_path):
    posterior = gaussian(variance=SPREAD[:, :1])
    tensors, _ = _io.read_tensors(posterior.save(tmp_path / "p.safetensors"))
    assert tensors["variance"].shape == (5, 1)
    assert posterior.take([3]).variance.stride(1) == 0
    assert torch.equal(posterior.take([3]).variance, posterior.variance[3:4])
