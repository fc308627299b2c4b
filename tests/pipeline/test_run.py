import numpy as np
import pytest
import torch

from grove_adapters.adapters import create_adapter
from grove_adapters.calibration import calibrate, rank_correlation
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.errors import InputError, UnknownNameError
from grove_adapters.pipeline import (
    evaluate,
    evaluate_store,
    fit_folds,
    gallery,
    judge,
    pool,
    retrieve_both,
    retrieve_folds,
)
from grove_adapters.pipeline.tables import short
from grove_adapters.store import EmbeddingStore


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def world():
    return make_pairs(120, dim=16, views=3, seed=1)


@pytest.fixture(scope="module")
def adapter(world):
    return create_adapter("ttda").fit(world.pairs)


@pytest.fixture(scope="module")
def store(world, tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("store")
    pairs = world.pairs
    Image.new("RGB", (400, 200), "red").save(folder / "red.png")
    paths = [str(folder / "red.png")] + [str(folder / "missing.png")] * (len(pairs.images) - 1)
    return EmbeddingStore.from_arrays(
        folder / "store",
        images=pairs.images.values,
        texts=pairs.texts.values,
        image_ids=pairs.images.ids,
        text_ids=pairs.texts.ids,
        image_views=pairs.images.views,
        text_views=pairs.texts.views,
        image_columns={"path": paths},
        text_columns={"text": [f"caption {row}" for row in range(len(pairs.texts))], "noise": world.text_noise},
        splits=["train"] * 60 + ["test"] * 60,
        source=pairs.source,
    )


def test_evaluate_is_retrieve_and_judge(world, adapter):
    evaluation = evaluate(adapter, world.pairs, resamples=10, seed=3, known={"t2i": ("noise", world.text_noise)})
    results = retrieve_both(adapter, world.pairs, seed=3)
    assert [report.direction for report in evaluation.reports] == ["i2t", "t2i"]
    for report, result in zip(evaluation.reports, results, strict=True):
        assert report.to_json() == calibrate(result, resamples=10, seed=3).to_json()
    (known,) = evaluation.known
    expected = rank_correlation(
        results[1].uncertainty, world.text_noise, groups=results[1].groups, resamples=10, seed=3
    )
    assert known.score == expected
    assert (known.adapter, known.direction) == ("ttda", "t2i")


def test_known_truth_follows_the_ids_of_the_queries_that_are_left(world, adapter):
    pairs = world.pairs
    kept = pairs.links[::3]
    fewer = type(pairs)(pairs.images, pairs.texts, kept)
    evaluation = evaluate(
        adapter, fewer, resamples=5, directions=["t2i"], known={"t2i": ("noise", world.text_noise)}, unmatched="drop"
    )
    np.testing.assert_array_equal(evaluation.known[0].truth, world.text_noise[kept[:, 1]])


def test_folds_ask_every_query_once_and_keep_groups_apart(world):
    fits = fit_folds(lambda: create_adapter("deterministic"), world.pairs, folds=4, seed=2)
    for result, side in zip(retrieve_folds(fits), (world.pairs.images, world.pairs.texts), strict=True):
        assert sorted(result.ids) == sorted(side.ids)
        assert np.bincount(result.detail["fold"]).tolist() == [30] * 4
        assert result.provenance["n_gallery"] == 30
        assert result.provenance["n_queries"] == 120
        assert result.provenance["folds"] == 4
        assert result.groups is None or len(np.unique(result.groups)) == 120


def test_folds_are_fitted_on_the_other_folds(world):
    class Spy:
        def fit(self, pairs, **settings):
            self.seen = set(pairs.images.ids)
            self.seed = settings["seed"]
            return self

    fits = fit_folds(Spy, world.pairs, folds=3)
    everything = set(world.pairs.images.ids)
    for spy, test in fits:
        assert spy.seen == everything - set(test.images.ids)
    assert len({spy.seed for spy, _ in fits}) == 3


def test_pool_drops_what_not_all_have(make_result):
    with_confidence, without = make_result(prefix="a"), make_result(prefix="b", confidence=False)
    assert pool([with_confidence, without]).confidence is None
    pooled = pool([with_confidence, make_result(prefix="b")])
    assert len(pooled) == 400
    assert len(np.unique(pooled.groups)) == 200
    np.testing.assert_array_equal(pooled.recall_at[5][:200], with_confidence.recall_at[5])


def test_pool_refuses_mixed_results(make_result):
    with pytest.raises(InputError, match="one task and direction"):
        pool([make_result(direction="i2t"), make_result(direction="t2i")])
    with pytest.raises(InputError, match="none"):
        pool([])


def test_a_gallery_goes_from_most_to_least_certain(world, adapter):
    captions = [f"caption {row}" for row in range(len(world.pairs.texts))]
    for result in retrieve_both(adapter, world.pairs):
        shown = gallery(
            result,
            world.pairs,
            captions,
            lambda name: name.encode(),
            title="t",
            count=7,
            known=("noise", world.text_noise),
        )
        uncertainties = [example.uncertainty for example in shown.examples]
        assert uncertainties == sorted(uncertainties)
        assert uncertainties[0] == result.uncertainty.min()
        assert uncertainties[-1] == result.uncertainty.max()
        assert [example.place for example in shown.examples] == pytest.approx(np.linspace(0, 1, 7), abs=0.01)
        for example in shown.examples:
            row = int(example.query.split()[1])
            query = world.pairs.images.ids[row] if result.direction == "i2t" else world.pairs.texts.ids[row]
            place = list(result.ids).index(query)
            assert example.correct == bool(result.correct[place])
            top = int(result.detail["top"][place, 0])
            if result.direction == "i2t":
                assert example.answer == captions[top]
                assert example.image == str(query).encode()
            else:
                assert example.image == str(world.pairs.images.ids[top]).encode()
            assert example.note == f"noise {short(world.text_noise[row], 2)}"


def test_a_store_lends_its_columns(store, adapter):
    evaluation = evaluate_store(adapter, store, "test", known="noise", examples=3, resamples=5)
    assert [(item.direction, item.name) for item in evaluation.known] == [("t2i", "noise of the text")]
    np.testing.assert_array_equal(evaluation.known[0].truth, store.column("text", "noise", "test"))
    assert evaluation.facts["split"] == "test"
    images, captions = evaluation.galleries
    assert images.title == "Images from most to least certain (ttda)"
    assert captions.examples[0].query.startswith("caption ")
    assert all(example.image is None for example in images.examples)  # the files are gone


def test_pictures_of_a_store_are_thumbnails(store, adapter):
    evaluation = evaluate_store(adapter, store, None, directions=["i2t"], examples=120, resamples=5)
    pictures = [example.image for example in evaluation.galleries[0].examples if example.image]
    assert len(pictures) == 1
    assert pictures[0].startswith(b"\xff\xd8")


def test_an_unknown_column_is_refused_with_the_nearest(store, adapter):
    with pytest.raises(UnknownNameError, match="did you mean 'noise'"):
        evaluate_store(adapter, store, "test", known="nois")


def test_judge_takes_a_label(world, adapter):
    results = retrieve_both(adapter, world.pairs, directions=["i2t"])
    evaluation = judge(results, world.pairs, label="mine", resamples=5)
    assert evaluation.labels == ("mine",)
