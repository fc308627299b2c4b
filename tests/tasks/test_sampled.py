import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from grove_adapters import seeding
from grove_adapters.embeddings import Source
from grove_adapters.errors import InputError
from grove_adapters.posterior import GaussianEmbedding, SampledEmbedding
from grove_adapters.tasks import retrieve, sampled
from grove_adapters.tasks.sampled import search_sampled


def posterior(n, modality, seed, *, variance=0.02, dim=8):
    random = torch.Generator().manual_seed(seed)
    mean = normalize(torch.randn(n, dim, generator=random, dtype=torch.float64), dim=1)
    return GaussianEmbedding(mean=mean, variance=torch.full((n, 1), variance, dtype=torch.float64), modality=modality)


def dense(queries, gallery, temperature, samples, seed):
    """The definition, from the same draws."""
    q, g = (
        normalize(side.sample(samples, seed=seeding.derive(seeding.derive(seed, name), 0)), dim=2).transpose(0, 1)
        for side, name in ((queries, "queries"), (gallery, "gallery"))
    )
    return (temperature * q @ g.mT).softmax(2).mean(0)


def test_equals_the_mean_softmax_over_draws():
    queries, gallery = posterior(20, "image", 0), posterior(50, "text", 1)
    p = dense(queries, gallery, 30.0, 6, seed=4)
    found = search_sampled(queries, gallery, k=5, temperature=30.0, samples=6, seed=4)
    best = p.topk(5, dim=1)
    np.testing.assert_array_equal(found.rows, best.indices)
    np.testing.assert_allclose(found.probabilities, best.values, rtol=1e-10)
    np.testing.assert_allclose(found.entropy, torch.special.entr(p).sum(1), rtol=1e-10)


def test_tiles_join_to_the_whole_gallery(monkeypatch):
    queries, gallery = posterior(7, "image", 2), posterior(40, "text", 3)
    monkeypatch.setattr(sampled, "GALLERY_BLOCK", 11)
    monkeypatch.setattr(sampled, "QUERY_BLOCK", 3)
    found = search_sampled(queries, gallery, k=40, temperature=20.0)
    np.testing.assert_allclose(found.probabilities.sum(1), 1, rtol=1e-10)
    np.testing.assert_allclose(found.entropy, -(found.probabilities * found.scores).sum(1), rtol=1e-9)
    assert sorted(found.rows[3]) == list(range(40))
    assert (np.diff(found.scores) <= 0).all()


def test_points_give_the_softmax_of_the_cosine():
    queries, gallery = (posterior(9, m, s, variance=1e-16) for m, s in (("image", 4), ("text", 5)))
    found = search_sampled(queries, gallery, k=9, temperature=10.0, samples=2)
    expected = (10 * normalize(queries.mean, dim=1) @ normalize(gallery.mean, dim=1).T).softmax(1)
    np.testing.assert_allclose(found.probabilities, np.take_along_axis(expected.numpy(), found.rows, 1), rtol=1e-5)


def test_uncertain_queries_have_flatter_matches():
    gallery = posterior(60, "text", 6, variance=1e-6)
    entropies = [
        search_sampled(posterior(50, "image", 7, variance=v), gallery, k=1, temperature=30.0, samples=32).entropy.mean()
        for v in (1e-6, 0.01, 0.1, 1.0)
    ]
    assert entropies == sorted(entropies)


def test_draws_have_an_address_and_any_posterior_has_draws():
    samples = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))
    queries, gallery = SampledEmbedding(samples=samples, modality="image"), posterior(10, "text", 8, dim=4)
    state = torch.random.get_rng_state()
    first, same, other = (search_sampled(queries, gallery, k=3, temperature=5.0, seed=s).scores for s in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_bad_input_is_one_sentence(capsys):
    queries = posterior(4, "image", 9)
    with pytest.raises(InputError, match="8-d embeddings, got 5-d"):
        search_sampled(queries, posterior(4, "text", 9, dim=5), k=1, temperature=1.0)
    with pytest.raises(InputError, match="samples expected a whole number ≥ 1"):
        search_sampled(queries, queries, k=1, temperature=1.0, samples=0)
    search_sampled(queries, queries, k=1, temperature=1.0, progress=True)
    assert "sampling" in capsys.readouterr().err


def test_retrieve_ranks_and_judges_by_it():
    source = Source(model="toy", logit_scale=30.0)
    queries, gallery = (
        dataclasses.replace(posterior(n, modality, s), source=source)
        for n, modality, s in ((20, "image", 10), (40, "text", 11))
    )
    links = np.stack([np.arange(40) % 15, np.arange(40)], 1)
    settings = {"links": links, "similarity": "sampled", "samples": 5, "seed": 3, "unmatched": "drop"}
    result = retrieve(queries, gallery, uncertainty="match_entropy", **settings)
    alone = search_sampled(queries.take(np.arange(15)), gallery, k=10, temperature=30.0, samples=5, seed=3)
    np.testing.assert_array_equal(result.detail["top"], alone.rows)
    np.testing.assert_array_equal(result.uncertainty, alone.entropy)
    np.testing.assert_allclose(result.confidence, alone.probabilities[:, 0])
    assert (result.provenance["temperature"], result.provenance["samples"], result.provenance["seed"]) == (30.0, 5, 3)
    with pytest.raises(InputError, match="'sampled' expected ranking=False and marginal='uniform'"):
        retrieve(queries, gallery, marginal="empirical", **settings)
    bare = [dataclasses.replace(side, source=Source(model="toy")) for side in (queries, gallery)]
    with pytest.raises(InputError, match="similarity='sampled' expected a temperature"):
        retrieve(*bare, **settings)
    with pytest.raises(InputError, match="rank_by='backbone' expected"):
        retrieve(queries, gallery, rank_by="backbone", **settings)
