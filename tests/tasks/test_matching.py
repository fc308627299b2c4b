import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grove_adapters import similarity
from grove_adapters.embeddings import Source
from grove_adapters.errors import InputError
from grove_adapters.posterior import GaussianEmbedding
from grove_adapters.similarity import gaussians
from grove_adapters.tasks import TaskResult, retrieve, search
from grove_adapters.tasks.index import Softmax
from grove_adapters.tasks.matching import MATCH_UNCERTAINTIES, marginal_signals, match_signals

SCALES = {"cosine": 30.0, "csd": 15.0, "wasserstein2": 15.0, "expected_likelihood": 1.0, "kl": 0.01}


def distributions(n, dim, seed, distinct=None, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(distinct or n, dim, generator=random, dtype=dtype), dim=1)
    variance = torch.rand(distinct or n, dim, generator=random, dtype=dtype) * 0.02 + 1e-3
    if distinct:
        rows = torch.randint(distinct, (n,), generator=random)
        mean, variance = mean[rows], variance[rows]
    return mean, variance


def dense(name, q, g, temperature):
    """Every signal by its definition, from the whole matrix of probabilities."""
    log_p = (temperature * similarity.SIMILARITIES[name](q, g)).log_softmax(1)
    p = log_p.exp()
    ranked = p.sort(1, descending=True).values
    return {
        "confidence": ranked[:, 0],
        "match_entropy": torch.special.entr(p).sum(1),
        "match_kl": (p * (log_p + np.log(p.shape[1]))).sum(1),
        "match_margin": ranked[:, 0] - ranked[:, 1],
        "to_marginal": (p * (log_p - p.mean(0).log())).sum(1),
        "answer_hubness": (p.mean(0) * p.shape[1]).log()[p.argmax(1)],
    }


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("distinct", [None, 30, 1])
@pytest.mark.parametrize("blocks", [(4, 31), (512, 4096), (3, 8)])
def test_streamed_signals_equal_the_dense_softmax(name, distinct, blocks):
    q, g = distributions(9, 12, 0), distributions(70, 12, 1, distinct)
    settings = {"query_block": blocks[0], "gallery_block": blocks[1]}
    found = search(q, g, k=2, similarity=name, temperature=SCALES[name], **settings)
    streamed = match_signals(found, 70)
    against = marginal_signals(gaussians(q), gaussians(g), found, similarity=name, **settings)
    streamed |= {"to_marginal": against["match_kl"], "answer_hubness": against["answer_hubness"]}
    for signal, expected in dense(name, q, g, SCALES[name]).items():
        np.testing.assert_allclose(streamed[signal], expected, rtol=1e-10, atol=1e-10, err_msg=signal)


def test_memory_maps_give_the_signals_of_the_array(tmp_path):
    q, g = distributions(7, 8, 2), distributions(50, 8, 3, dtype=torch.float32)
    np.save(tmp_path / "gallery.npy", g[0].numpy())
    gallery = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    found = search(q[0], gallery, k=2, similarity="cosine", temperature=30.0, query_block=3, gallery_block=16)
    streamed = match_signals(found, 50)
    sides = [gaussians(side, need_variance=False) for side in (q[0], gallery)]
    against = marginal_signals(*sides, found, similarity="cosine", gallery_block=16)
    streamed |= {"to_marginal": against["match_kl"], "answer_hubness": against["answer_hubness"]}
    for signal, expected in dense("cosine", q[0], g[0].double(), 30.0).items():
        np.testing.assert_allclose(streamed[signal], expected, rtol=1e-10, atol=1e-10, err_msg=signal)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 9), st.floats(1e-3, 1e4), st.integers(0, 1000))
def test_parts_of_a_softmax_join_to_the_whole(n, block, scale, seed):
    logits = torch.randn(3, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    joined, *others = (Softmax.of(part) for part in logits.split(block, 1))
    for other in others:
        joined = joined.joined(other)
    np.testing.assert_allclose(joined.log_partition, logits.logsumexp(1), rtol=1e-12)
    log_p = logits.log_softmax(1)
    np.testing.assert_allclose(joined.entropy, -(log_p.exp() * log_p).sum(1), rtol=1e-9, atol=1e-11)
    assert bool((joined.entropy <= np.log(n) + 1e-12).all())


def test_small_entropies_survive_huge_logits():
    """log Z − Σ p l would lose these: the logits are near 10⁶ and the entropies near 10⁻⁶."""
    logits = torch.tensor([[1e6, 1e6 - 16.0]], dtype=torch.float64)
    q = np.exp(-16.0)
    expected = np.log1p(q) + 16 * q / (1 + q)
    np.testing.assert_allclose(Softmax.of(logits).entropy, expected, rtol=1e-9)


def test_the_mean_kl_to_the_empirical_marginal_is_the_mutual_information():
    q, g = distributions(25, 6, 4), distributions(40, 6, 5)
    found = search(q, g, k=2, temperature=20.0)
    p = (20 * similarity.csd(q, g)).softmax(1)
    information = torch.special.entr(p.mean(0)).sum() - torch.special.entr(p).sum(1).mean()
    kl = marginal_signals(gaussians(q), gaussians(g), found, similarity="csd")["match_kl"]
    assert kl.mean() == pytest.approx(float(information), abs=1e-10)


def test_a_gallery_of_one_and_a_gallery_of_copies():
    q, one = distributions(3, 4, 6), distributions(1, 4, 7)
    alone = match_signals(search(q, one, k=2, temperature=10.0), 1)
    for signal, expected in {"confidence": 1, "match_entropy": 0, "match_kl": 0, "match_margin": 1}.items():
        np.testing.assert_allclose(alone[signal], expected, atol=1e-12)
    copies = match_signals(search(q, distributions(50, 4, 7, distinct=1), k=2, temperature=10.0), 50)
    expected = {"confidence": 1 / 50, "match_entropy": np.log(50), "match_kl": 0, "match_margin": 0}
    for signal, value in expected.items():
        np.testing.assert_allclose(copies[signal], value, atol=1e-12)


SOURCE = Source(model="toy", logit_scale=30.0)


def posterior(n, modality, seed, **changes):
    mean, variance = distributions(n, 8, seed)
    return GaussianEmbedding(**{"mean": mean, "variance": variance, "modality": modality, "source": SOURCE} | changes)


@pytest.fixture(scope="module")
def world():
    images, texts = posterior(20, "image", 8), posterior(40, "text", 9)
    return images, texts, np.stack([np.arange(40) % 20, np.arange(40)], 1)


@pytest.mark.parametrize("name", ["cosine", "csd", "wasserstein2", "expected_likelihood"])
@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_retrieve_reports_the_signals_of_every_query(world, name, direction):
    images, texts, links = world
    result = retrieve(images, texts, links=links, direction=direction, similarity=name, k=1)
    queries, gallery = (images, texts) if direction == "i2t" else (texts, images)
    expected = dense(name, queries, gallery, SCALES[name])
    np.testing.assert_allclose(result.confidence, expected["confidence"], rtol=1e-10)
    for signal in ("match_entropy", "match_kl", "match_margin"):
        np.testing.assert_allclose(result.detail[signal], expected[signal], rtol=1e-10, atol=1e-10)
    assert result.detail["top"].shape == (len(queries), 1)
    np.testing.assert_array_equal(result.detail["query_uncertainty"], queries.uncertainty)
    best = result.detail["top"][:, 0]
    np.testing.assert_array_equal(result.detail["answer_uncertainty"], gallery.uncertainty[best])
    assert result.provenance["temperature"] == SCALES[name]
    assert {"match_entropy", "match_kl", "match_margin", "answer_uncertainty"} <= set(result.to_frame().columns)


def test_any_of_them_can_be_the_uncertainty(world, tmp_path):
    images, texts, links = world
    expected = {
        "one_minus_confidence": lambda r: 1 - r.confidence,
        "match_entropy": lambda r: r.detail["match_entropy"],
        "one_minus_match_margin": lambda r: 1 - r.detail["match_margin"],
        "minus_match_kl": lambda r: -r.detail["match_kl"],
    }
    assert set(expected) == set(MATCH_UNCERTAINTIES)
    for name, formula in expected.items():
        result = retrieve(images, texts, links=links, uncertainty=name)
        np.testing.assert_array_equal(result.uncertainty, formula(result))
        assert result.provenance["uncertainty"] == name
    again = TaskResult.load(result.save(tmp_path / "result.safetensors"))
    np.testing.assert_array_equal(again.detail["match_entropy"], result.detail["match_entropy"])


def test_the_marginal_is_uniform_or_that_of_the_queries(world):
    images, texts, links = world
    result = retrieve(images, texts, links=links, marginal="empirical", uncertainty="minus_match_kl")
    expected = dense("csd", images, texts, 15.0)
    np.testing.assert_allclose(result.detail["match_kl"], expected["to_marginal"], rtol=1e-10)
    np.testing.assert_allclose(result.uncertainty, -expected["to_marginal"], rtol=1e-10)
    np.testing.assert_allclose(result.detail["answer_hubness"], expected["answer_hubness"], rtol=1e-10)
    uniform = retrieve(images, texts, links=links)
    assert "answer_hubness" not in uniform.detail
    np.testing.assert_allclose(uniform.detail["match_kl"] + uniform.detail["match_entropy"], np.log(40), rtol=1e-12)


def test_a_temperature_makes_a_distribution_where_the_source_has_no_scale(world):
    images, texts, links = world
    bare = [dataclasses.replace(side, source=Source(model="toy")) for side in (images, texts)]
    silent = retrieve(*bare, links=links)
    assert silent.confidence is None
    assert "match_entropy" not in silent.detail
    np.testing.assert_array_equal(silent.detail["query_uncertainty"], images.uncertainty)
    given = retrieve(*bare, links=links, temperature=15.0, uncertainty="match_entropy")
    np.testing.assert_array_equal(given.confidence, retrieve(images, texts, links=links).confidence)
    by_kl = retrieve(*bare, links=links, similarity="kl", temperature=0.01)
    np.testing.assert_allclose(by_kl.confidence, dense("kl", images, texts, 0.01)["confidence"], rtol=1e-10)
    with pytest.raises(InputError, match="uncertainty='match_entropy' expected a temperature, got similarity='csd'"):
        retrieve(*bare, links=links, uncertainty="match_entropy")
    with pytest.raises(InputError, match="marginal='empirical' expected a temperature"):
        retrieve(images, texts, links=links, similarity="js", marginal="empirical")


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.inf, np.nan])
def test_a_temperature_is_a_positive_number(world, temperature):
    images, texts, links = world
    with pytest.raises(InputError, match="temperature expected a finite number > 0"):
        retrieve(images, texts, links=links, temperature=temperature)
