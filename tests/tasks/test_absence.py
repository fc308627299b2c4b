import numpy as np
import pytest
import torch

from grove_adapters.embeddings import Source
from grove_adapters.errors import InputError
from grove_adapters.posterior import GaussianEmbedding
from grove_adapters.tasks import TaskResult, retrieve, retrieve_absent

SOURCE = Source(model="toy", logit_scale=30.0)


def posterior(mean, modality):
    mean = torch.nn.functional.normalize(mean, dim=1)
    variance = torch.full((len(mean), 1), 1e-3, dtype=mean.dtype)
    ids = np.array([f"{modality}{row}" for row in range(len(mean))])
    return GaussianEmbedding(mean=mean, variance=variance, modality=modality, source=SOURCE, ids=ids)


@pytest.fixture(scope="module")
def world():
    """Forty images with two captions each that lie close to them."""
    random = torch.Generator().manual_seed(0)
    images = torch.randn(40, 16, generator=random, dtype=torch.float64)
    texts = images.repeat_interleave(2, 0) + 0.4 * torch.randn(80, 16, generator=random, dtype=torch.float64)
    links = np.stack([np.repeat(np.arange(40), 2), np.arange(80)], 1)
    return posterior(images, "image"), posterior(texts, "text"), links


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
@pytest.mark.parametrize("marginal", ["uniform", "empirical"])
def test_every_query_is_asked_once_with_and_once_without_its_matches(world, direction, marginal):
    images, texts, links = world
    result = retrieve_absent(images, texts, links=links, direction=direction, folds=5, marginal=marginal)
    queries = images if direction == "i2t" else texts
    names = np.array([name.split(" ") for name in result.ids])
    assert sorted(names[:, 0]) == sorted([*queries.ids, *queries.ids])
    np.testing.assert_array_equal(result.correct == 1, names[:, 1] == "present")
    np.testing.assert_array_equal(result.detail["n_matches"] > 0, result.correct == 1)
    pairs = {tuple(row) for row in (links if direction == "i2t" else links[:, ::-1]).tolist()}
    query_row = {name: row for row, name in enumerate(queries.ids)}
    asked = np.array([query_row[name] for name in names[:, 0]])
    for query, present, top, true in zip(
        asked, result.correct, result.detail["top"], result.detail["top_correct"], strict=True
    ):
        hits = [(query, row) in pairs for row in top.tolist()]
        assert hits == true.tolist()  # rows are those of the whole gallery
        assert present or not any(hits)
    assert ("answer_hubness" in result.detail) == (marginal == "empirical")
    one_group = {name: set(result.groups[names[:, 0] == name]) for name in queries.ids}
    assert all(len(groups) == 1 for groups in one_group.values())
    assert len(set(result.groups)) == 40  # captions of one image stay together


def test_signals_tell_the_two_apart(world):
    images, texts, links = world
    result = retrieve_absent(images, texts, links=links, uncertainty="match_entropy")
    absent, present = (result.detail["match_entropy"][result.correct == held] for held in (0, 1))
    assert absent.mean() > 1.5 * present.mean()
    np.testing.assert_array_equal(result.uncertainty, result.detail["match_entropy"])
    assert result.detail["answer_correct"][result.correct == 0].sum() == 0
    assert result.detail["answer_correct"][result.correct == 1].mean() > 0.8


def test_answers_are_those_of_the_smaller_gallery(world):
    images, texts, links = world
    result = retrieve_absent(images, texts, links=links, folds=40, seed=3, k=3)
    absent = result.take(np.flatnonzero(result.correct == 0))
    for name, top, entropy in zip(absent.ids, absent.detail["top"], absent.detail["match_entropy"], strict=True):
        row = int(name.removeprefix("image").removesuffix(" absent"))
        kept = np.delete(np.arange(80), [2 * row, 2 * row + 1])
        alone = retrieve(images.take([row]), texts.take(kept), links=links[:0], unmatched="keep")
        np.testing.assert_array_equal(kept[alone.detail["top"][0, :3]], top)
        assert entropy == pytest.approx(alone.detail["match_entropy"][0], abs=1e-10)


def test_further_positives_go_too_and_those_they_leave_nothing_to_are_asked_once():
    images, texts = posterior(torch.eye(4), "image"), posterior(torch.eye(4), "text")
    links = np.stack([np.arange(4)] * 2, 1)
    everything = np.array([[0, text] for text in range(4)])  # image 0 matches all: with it, nobody's match is left
    with pytest.raises(InputError, match="expected true matches to remain"):
        retrieve_absent(images, texts, links=links, positives=everything, folds=4)
    shared = retrieve_absent(images, texts, links=links, positives=np.array([[0, 1], [1, 0]]), folds=4)
    kinds = {
        name: [kind for row in shared.ids for kind in row.split(" ")[1:] if row.startswith(name)] for name in images.ids
    }
    assert all("absent" in kind for kind in kinds.values())
    assert set(shared.detail["n_matches"][shared.correct == 0]) == {0}


def test_queries_without_a_match_are_not_asked(world):
    images, texts, links = world
    result = retrieve_absent(images, texts, links=links[:60], folds=3)
    assert len(result) == 60
    assert not any(name.startswith("image35 ") for name in result.ids)


def test_seed_and_file(world, tmp_path):
    images, texts, links = world
    results = [retrieve_absent(images, texts, links=links, folds=4, seed=seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(results[0].ids, results[1].ids)
    assert not np.array_equal(results[0].ids, results[2].ids)
    again = TaskResult.load(results[0].save(tmp_path / "presence.safetensors"))
    np.testing.assert_array_equal(again.detail["top_correct"], results[0].detail["top_correct"])


def test_bad_input_is_one_sentence(world):
    images, texts, links = world
    with pytest.raises(InputError, match="folds expected a whole number ≥ 2"):
        retrieve_absent(images, texts, links=links, folds=1)
    with pytest.raises(InputError, match="at least 50 different true matches, one a fold, got 40"):
        retrieve_absent(images, texts, links=links, folds=50)
