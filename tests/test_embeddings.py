import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grove_adapters.embeddings import Embeddings, Pairs, Projection, Rows, Source, match_matrix
from grove_adapters.errors import InputError, InputTypeError


def make(n=6, dim=3, modality="image", seed=0, **more):
    values = np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)
    return Embeddings(values, [f"{modality}{row}" for row in range(n)], modality=modality, **more)


def make_pairs(n=6, captions=2, **more):
    links = np.array([(image, image * captions + caption) for image in range(n) for caption in range(captions)])
    return Pairs(make(n), make(n * captions, modality="text"), links, **more)


def test_source_fingerprint_changes_with_every_attribute():
    base = Source(model="m")
    changes = {
        "model": "n", "pretrained": "p", "library": "open_clip", "preprocess": "x", "precision": "fp16",
        "normalised": False, "logit_scale": 2.0, "logit_bias": 1.0,
    }  # fmt: skip
    assert set(changes) == {item.name for item in dataclasses.fields(Source)}
    prints = {dataclasses.replace(base, **{name: value}).fingerprint for name, value in changes.items()}
    assert len(prints | {base.fingerprint}) == len(changes) + 1
    assert Source.from_dict(base.to_dict()) == base
    assert base.difference(dataclasses.replace(base, precision="fp16")) == "precision 'fp32' ≠ 'fp16'"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": np.zeros((0, 3))}, ["non-empty", "(0, 3)"]),
        ({"values": np.ones(3)}, ["(N, D)"]),
        ({"values": np.array([[1.0, np.nan, 0]])}, ["NaN", "row 0", "'a'"]),
        ({"values": np.array([[1.0, np.inf, 0]])}, ["infinity"]),
        ({"values": np.zeros((1, 3))}, ["direction", "row 0"]),
        ({"ids": ["a", "b"]}, ["1 ids", "(2,)"]),
        ({"modality": "sound"}, ["modality", "'sound'"]),
        ({"views": np.ones((2, 2, 3))}, ["1 rows", "got 2"]),
        ({"views": np.ones((1, 2, 4))}, ["3-d", "4-d"]),
        ({"views": np.full((1, 2, 3), np.nan)}, ["views", "NaN"]),
    ],
)
def test_bad_embeddings_are_refused(change, words):
    with pytest.raises(InputError) as caught:
        Embeddings(**{"values": np.ones((1, 3)), "ids": ["a"], "modality": "image", **change})
    assert all(word in str(caught.value) for word in words), caught.value


def featured(n=6, dim=3, width=5, residual=False, seed=0):
    """Embeddings of a projection with a bias, unnormalised."""
    random = np.random.default_rng(seed)
    projection = Projection(random.normal(size=(dim, width)), random.normal(size=dim))
    features = random.normal(size=(n, width + dim * residual)).astype(np.float32)
    values = projection.apply(torch.tensor(features)).numpy()
    return Embeddings(values, modality="text", features=features, projection=projection)


@pytest.mark.parametrize("residual", [False, True])
def test_features_stay_with_their_rows(residual):
    whole = featured(residual=residual)
    assert whole.n_features == (8 if residual else 5)
    part = whole.take([4, 0])
    np.testing.assert_array_equal(part.features, whole.features[[4, 0]])
    assert part.projection is whole.projection
    torch.testing.assert_close(part.projection.apply(torch.tensor(part.features)), torch.tensor(part.values))
    by_hand = whole.features[:, :5] @ whole.projection.weight.T + whole.projection.bias
    np.testing.assert_allclose(whole.values, by_hand + (whole.features[:, 5:] if residual else 0), rtol=1e-5)
    views = dataclasses.replace(whole, views=np.ones((6, 2, 3), np.float32))
    assert views.mean_over_views().features is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"projection": None}, ["together"]),
        ({"features": None}, ["together"]),
        ({"features": np.ones((5, 5))}, ["6 rows", "got 5"]),
        ({"features": np.ones((6, 4))}, ["5 columns", "3 more", "got 4"]),
        ({"features": np.full((6, 5), np.nan)}, ["features", "NaN"]),
        ({"features": -featured().features}, ["directions that differ"]),
        ({"projection": Projection(np.ones((4, 5)))}, ["3-d", "4-d"]),
    ],
)
def test_features_that_do_not_fit_are_refused(change, words):
    whole = featured()
    given = {"features": whole.features, "projection": whole.projection, **change}
    with pytest.raises(InputError) as caught:
        Embeddings(whole.values, modality="text", **given)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("weight", "bias", "words"),
    [
        (np.ones(3), None, "shape (D, F)"),
        (np.ones((3, 5)), np.ones(5), "shape (3,)"),
        (np.full((3, 5), np.inf), None, "infinity"),
        (np.ones((3, 5)), np.full(3, np.nan), "NaN"),
    ],
)
def test_bad_projections_are_refused(weight, bias, words):
    with pytest.raises(InputError) as caught:
        Projection(weight, bias)
    assert words in str(caught.value)


def test_half_precision_features_fit():
    whole = featured()
    halved = Embeddings(
        whole.values.astype(np.float16),
        modality="text",
        features=whole.features.astype(np.float16),
        projection=whole.projection,
    )
    assert halved.features.dtype == np.float16


def test_whole_numbers_are_no_embeddings():
    with pytest.raises(InputTypeError, match="int"):
        Embeddings(np.ones((2, 2), dtype=int), modality="text")


def test_duplicate_ids_are_named():
    with pytest.raises(InputError, match="'b' 2 times"):
        Embeddings(np.ones((3, 2)), ["a", "b", "b"], modality="text")


def test_rows_join_by_id():
    part = make()
    assert part.rows(["image4", "image0"]).tolist() == [4, 0]
    for missing in ("image9", "zzz", ""):
        with pytest.raises(InputError, match="no id"):
            part.rows([missing])


def test_batches_are_float32_copies_in_order():
    part = Embeddings(np.arange(1, 11, dtype=np.float16).reshape(5, 2), modality="image")
    batches = list(part.batches(2))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    joined = torch.cat(batches)
    assert joined.dtype == torch.float32
    joined.zero_()
    assert part.values[0, 0] == 1


def test_memmap_rows_stay_on_disk_until_read(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(1, 21, dtype=np.float32).reshape(10, 2))
    part = Embeddings(np.load(tmp_path / "a.npy", mmap_mode="r"), modality="image")
    scattered, consecutive = part.take([7, 1, 3]), part.take(np.arange(2, 5))
    assert isinstance(scattered.values, Rows)
    assert isinstance(consecutive.values, np.memmap)
    assert scattered.take([2, 0]).values[:].tolist() == [[7, 8], [15, 16]]
    assert np.asarray(scattered.values).shape == scattered.values.shape == (3, 2)
    assert scattered.ids.tolist() == ["7", "1", "3"]
    with pytest.raises(InputError, match="0 to 9"):
        part.take([10])


def test_mean_over_views_is_normalised_where_the_source_is():
    views = np.random.default_rng(0).normal(size=(4, 3, 5))
    part = Embeddings(np.ones((4, 5)), modality="image", views=views)
    means = part.mean_over_views().values
    np.testing.assert_allclose(np.linalg.norm(means, axis=1), 1, rtol=1e-6)
    raw = dataclasses.replace(part, source=Source(model="m", normalised=False)).mean_over_views().values
    np.testing.assert_allclose(raw, views.mean(1), rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="views=K"):
        make().mean_over_views()


@pytest.mark.parametrize(
    ("links", "words"),
    [
        (np.zeros((0, 2), dtype=int), "at least one link"),
        ([[0, 12]], "0 to 11, got 12"),
        ([[-1, 0]], "got -1"),
        ([[0.0, 1.0]], "whole numbers"),
        ([0, 1], r"\(P, 2\)"),
    ],
)
def test_bad_links_are_refused(links, words):
    with pytest.raises(InputError, match=words):
        Pairs(make(), make(12, modality="text"), links)


def test_swapped_modalities_and_widths_are_refused():
    with pytest.raises(InputError, match="swap"):
        Pairs(make(modality="text"), make(), [[0, 0]])
    with pytest.raises(InputError, match="3-d"):
        Pairs(make(), make(dim=4, modality="text"), [[0, 0]])
    with pytest.raises(InputError, match="classes"):
        make_pairs(classes=np.zeros(3))


def test_truth_is_links_and_positives_together():
    pairs = make_pairs(2, 1, positives=np.array([[0, 1], [0, 0]]))
    assert pairs.truth().toarray().tolist() == [[True, True], [False, True]]
    assert match_matrix(2, 2, pairs.links).nnz == 2


@given(st.integers(4, 20), st.integers(1, 4), st.floats(0.2, 0.8), st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_split_keeps_captions_with_their_image(n, captions, fraction, seed):
    positives = np.array([(0, n * captions - 1), (n - 1, 0)])
    pairs = make_pairs(n, captions, positives=positives)
    one, two = pairs.split(fraction, seed=seed)
    assert set(one.images.ids).isdisjoint(two.images.ids)
    assert set(one.texts.ids).isdisjoint(two.texts.ids)
    assert len(one.images) + len(two.images) == n
    for part in (one, two):
        for image, text in part.links:
            i, t = int(part.images.ids[image][5:]), int(part.texts.ids[text][4:])
            assert t // captions == i
            np.testing.assert_array_equal(part.images.values[image], pairs.images.values[i])
        for image, text in part.positives:
            found = [int(part.images.ids[image][5:]), int(part.texts.ids[text][4:])]
            assert found in positives.tolist()


def test_split_by_class_keeps_classes_together_and_needs_them():
    pairs = make_pairs(6, classes=np.array(list("aabbcc")))
    one, two = pairs.split(0.34, by="class")
    assert set(one.classes).isdisjoint(two.classes)
    with pytest.raises(InputError, match="classes"):
        make_pairs().split(0.5, by="class")


@pytest.mark.parametrize("fraction", [0, 1, 1.5, 0.01])
def test_impossible_splits_are_refused(fraction):
    with pytest.raises(InputError, match="expected"):
        make_pairs().split(fraction)


def test_folds_hold_every_image_out_once():
    pairs = make_pairs(7)
    held_out = [test.images.ids.tolist() for _, test in pairs.folds(3, seed=1)]
    assert sorted(np.concatenate(held_out)) == sorted(pairs.images.ids)
    for train, test in pairs.folds(3, seed=1):
        assert set(train.images.ids).isdisjoint(test.images.ids)
    with pytest.raises(InputError, match="fewer folds"):
        list(pairs.folds(8))


def test_read_follows_links():
    pairs = make_pairs()
    image, text = pairs.read([3, 0])
    np.testing.assert_array_equal(image, pairs.images.values[[1, 0]])
    np.testing.assert_array_equal(text, pairs.texts.values[[3, 0]])
