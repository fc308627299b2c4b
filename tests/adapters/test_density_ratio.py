import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from grove_adapters.adapters.density_ratio import DensityRatio, entropies, reverse_divergences
from grove_adapters.datasets import synthetic
from grove_adapters.embeddings import Embeddings, Pairs, Source
from grove_adapters.errors import ConfigError, InputError
from grove_adapters.tasks import retrieve

PAIRS = synthetic.make_pairs(120, dim=16).pairs
RANDOM = np.random.default_rng(0)


def uncertainty(part, **settings):
    return DensityRatio(**settings).fit(PAIRS).predict(part).uncertainty.numpy()


def pairs_of(images, texts, **source):
    source = Source(model="m", **{"logit_scale": 100.0, **source})
    sides = [Embeddings(x, modality=m, source=source) for x, m in ((images, "image"), (texts, "text"))]
    return Pairs(*sides, np.repeat(np.arange(len(images))[:, None], 2, 1))


@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0, 100.0])
def test_both_divergences_against_scipy(scale):
    logits = scale * RANDOM.uniform(-1, 1, (30, 50))
    q, uniform = special.softmax(logits, axis=1), np.full(50, 1 / 50)
    forward = math.log(50) - entropies(torch.tensor(logits)).numpy()
    np.testing.assert_allclose(forward, stats.entropy(q, uniform[None], axis=1), rtol=1e-8, atol=1e-13)
    reverse = np.array([stats.entropy(uniform, row) for row in q])
    np.testing.assert_allclose(reverse_divergences(torch.tensor(logits)), reverse, rtol=1e-8, atol=1e-13)


def test_entropy_keeps_its_digits_where_the_divergence_has_saturated():
    gap = torch.tensor([[40.0, 0.0], [41.0, 0.0]])
    small = torch.exp(-gap[:, 0])
    torch.testing.assert_close(entropies(gap), small * (1 + gap[:, 0]), rtol=1e-5, atol=0)


def test_divergences_gradcheck():
    logits = torch.tensor(RANDOM.normal(size=(3, 6)), requires_grad=True)
    assert torch.autograd.gradcheck(entropies, logits)
    assert torch.autograd.gradcheck(reverse_divergences, logits)


def test_measures_are_those_of_the_paper_over_the_other_modality():
    images, texts = PAIRS.images.values.astype(float), PAIRS.texts.values.astype(float)
    logits = 20 * images @ texts.T
    q = special.softmax(logits, axis=1)
    np.testing.assert_allclose(uncertainty(PAIRS.images), stats.entropy(q, axis=1), rtol=1e-4)
    reverse = special.logsumexp(logits, axis=1) - math.log(120) - logits.mean(1)
    np.testing.assert_allclose(uncertainty(PAIRS.images, measure="reverse_kl"), -reverse, rtol=1e-4)
    moved = images - images.mean(0)
    whitened = 400 * np.einsum("nd,de,ne->n", moved, np.cov(texts.T, ddof=0), moved)
    np.testing.assert_allclose(uncertainty(PAIRS.images, measure="whitened"), -whitened, rtol=1e-4)
    centred = 400 * (moved**2).sum(1)
    np.testing.assert_allclose(uncertainty(PAIRS.images, measure="centred"), -centred, rtol=1e-4)


def test_whitened_norm_is_twice_the_divergence_for_small_scales():
    narrow = {"logit_scale": 0.05}
    # the divergence of the distribution at an item from the one at the mean item is what the norm expands
    images, texts = PAIRS.images.values.astype(float), PAIRS.texts.values.astype(float)
    q = special.softmax(0.05 * images @ texts.T, axis=1)
    at_mean = special.softmax(0.05 * images.mean(0) @ texts.T)
    divergence = np.array([stats.entropy(row, at_mean) for row in q])
    np.testing.assert_allclose(-uncertainty(PAIRS.images, measure="whitened", **narrow), 2 * divergence, rtol=0.05)


@pytest.mark.parametrize("measure", ["kl", "reverse_kl", "whitened", "centred"])
def test_noisier_items_are_less_certain(measure):
    world = synthetic.make_pairs(400)
    adapter = DensityRatio(measure=measure).fit(world.pairs)
    for part, noise in ((world.pairs.images, world.image_noise), (world.pairs.texts, world.text_noise)):
        assert stats.spearmanr(adapter.predict(part).uncertainty, noise).statistic > 0.5


def test_variance_is_that_of_the_other_modality_given_the_item():
    texts = PAIRS.texts.values.astype(float)
    q = special.softmax(20 * PAIRS.images.values @ texts.T, axis=1)
    expected = q @ texts**2 - (q @ texts) ** 2
    posterior = DensityRatio().fit(PAIRS).predict(PAIRS.images)
    np.testing.assert_allclose(posterior.variance, np.maximum(expected, 1e-6 / 16) / 20, rtol=1e-3, atol=1e-7)


def test_ranking_by_the_posterior_is_about_as_good_as_by_the_backbone():
    pairs = synthetic.make_pairs(400, dim=16).pairs
    adapter = DensityRatio().fit(pairs)
    images, texts = adapter.predict(pairs.images), adapter.predict(pairs.texts)
    for direction in ("i2t", "t2i"):
        posterior, backbone = (
            retrieve(images, texts, links=pairs.links, direction=direction, rank_by=by).correct.mean()
            for by in ("posterior", "backbone")
        )
        assert posterior == pytest.approx(backbone, abs=0.02)


def test_the_logit_scale_comes_from_the_source_or_the_setting():
    unknown = pairs_of(PAIRS.images.values, PAIRS.texts.values, logit_scale=None)
    with pytest.raises(InputError, match="logit_scale=100"):
        DensityRatio().fit(unknown)
    given = DensityRatio(logit_scale=20.0).fit(unknown).predict(unknown.images).uncertainty
    np.testing.assert_allclose(given, uncertainty(PAIRS.images))
    with pytest.raises(ConfigError, match="logit_scale"):
        DensityRatio(logit_scale=0.0)
    with pytest.raises(ConfigError, match="reference_size"):
        DensityRatio(reference_size=1)


def test_saturation_is_reported():
    calm = DensityRatio().fit(PAIRS).fit_report_
    assert not calm.warnings
    assert calm.facts["image"]["ceiling"] == pytest.approx(math.log(120))
    assert 0 < calm.facts["image"]["mean_divergence"] < math.log(120)
    loud = DensityRatio(logit_scale=200.0).fit(PAIRS)
    assert len(loud.fit_report_.warnings) == 2
    assert "log 120" in loud.fit_report_.warnings[0]
    assert loud.fit_report_.facts["text"]["saturated_share"] > 0.1
    entropy = loud.predict(PAIRS.texts).uncertainty
    assert len((math.log(120) - entropy).unique()) < len(entropy.unique()) == 120  # the divergence itself ties


def test_only_a_sample_is_kept():
    adapter = DensityRatio(reference_size=30).fit(PAIRS)
    assert adapter.module_.get_buffer("image").shape == (30, 16)


def test_no_more_logits_than_a_block_are_held(monkeypatch):
    monkeypatch.setattr("grove_adapters.adapters.density_ratio.BLOCK", 250)
    blocks = uncertainty(PAIRS.texts)
    monkeypatch.undo()
    np.testing.assert_allclose(blocks, uncertainty(PAIRS.texts), rtol=1e-5)


def test_constant_embeddings_and_one_pair_say_nothing():
    same = np.ones((5, 3), dtype=np.float32) / math.sqrt(3)
    posterior = DensityRatio().fit(pairs_of(same, same)).predict(pairs_of(same, same).images)
    np.testing.assert_allclose(posterior.uncertainty, math.log(5), rtol=1e-5)
    one = pairs_of(same[:1], same[:1])
    assert DensityRatio().fit(one).predict(one.texts).uncertainty.tolist() == [0.0]


@pytest.mark.parametrize("dim", [1, 4096])
def test_widths(dim):
    values = RANDOM.normal(size=(6, dim)).astype(np.float16)
    pairs = pairs_of(values, values[::-1])
    assert DensityRatio().fit(pairs).predict(pairs.images).variance.shape == (6, dim)


def test_vectors_that_are_not_normalised_are_read_by_their_direction():
    longer = dataclasses.replace(PAIRS.images, values=3 * PAIRS.images.values)
    adapter = DensityRatio().fit(PAIRS)
    np.testing.assert_allclose(
        adapter.predict(longer).uncertainty, adapter.predict(PAIRS.images).uncertainty, rtol=1e-4
    )
