"""Features of the last linear layer, from the extractor through the store to `Embeddings`."""

import hashlib

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from grove_adapters import EmbeddingStore
from grove_adapters.embeddings import Projection, Source
from grove_adapters.errors import InputError, InputTypeError, NumericalError, StoreError
from grove_adapters.store import building


def build(extractor, records, path, **settings):
    given = {"batch_size": 3, "num_workers": 0, "progress": False, "features": True, **settings}
    return EmbeddingStore.build(extractor, records, path, **given)


def checksums(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("views", [0, 2])
def test_a_store_holds_features_that_its_projection_maps_to_its_embeddings(extractor, records, tmp_path, views):
    store = build(extractor, records, tmp_path / "store", views=views)
    for modality, n, width in (("image", 12, 48), ("text", 24, 128)):
        part = store.embeddings(modality)
        assert part.features.shape == (n, width)
        assert part.n_features == store.info()["features"][modality] == width
        assert isinstance(part.features, np.memmap)
        made = part.projection.apply(torch.tensor(part.features))
        torch.testing.assert_close(made, torch.tensor(part.values), rtol=1e-4, atol=1e-4)
    record = records[4]
    row = store.embeddings("image").rows([record.id])
    expected = extractor.preprocess(record.loader()).flatten()
    np.testing.assert_array_equal(store.embeddings("image").features[row][0], expected)
    assert "48 of each image, 128 of each text" in store.report()
    store.verify()


def test_features_follow_their_rows(extractor, records, tmp_path):
    store = build(extractor, records, tmp_path / "store")

    def fits(pairs):
        for part in (pairs.images, pairs.texts):
            made = part.projection.apply(torch.tensor(np.asarray(part.features)))
            torch.testing.assert_close(made, torch.tensor(np.asarray(part.values)), rtol=1e-4, atol=1e-4)
        return True

    for split in store.splits:
        pairs = store.pairs(split)
        assert isinstance(pairs.images.features, np.memmap)
        assert len(pairs.images.features) == len(pairs.images)
    pairs = store.pairs()
    assert all(fits(part) for part in (*pairs.split(0.5, seed=1), *next(pairs.folds(3)), pairs.take_images([7, 2, 3])))


def test_without_features_nothing_changes(extractor, records, tmp_path):
    plain, featured = (
        build(extractor, records, tmp_path / "plain", features=False),
        build(extractor, records, tmp_path / "f"),
    )
    for modality in ("image", "text"):
        assert plain.embeddings(modality).features is None
        assert plain.embeddings(modality).projection is None
        np.testing.assert_array_equal(plain.embeddings(modality).values, featured.embeddings(modality).values)
    assert plain.info()["features"] == {"image": 0, "text": 0}
    assert "features" not in plain._manifest.recipe  # as in stores that were made before there were any
    assert build(extractor, records, tmp_path / "f").reused
    with pytest.raises(StoreError, match="features True ≠ None"):
        build(extractor, records, tmp_path / "f", features=False)
    with pytest.raises(StoreError, match="features None ≠ True"):
        build(extractor, records, tmp_path / "plain")


def interrupted(embed, left):
    """The same call, that stops where no batches are left; the look at the width before the build is none."""

    def call(batch):
        rows = batch if isinstance(batch, list | torch.Tensor) else batch.inputs["letters"]
        if len(rows) > 1:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        return embed(batch)

    return call


def test_an_interrupted_build_ends_in_the_same_bytes(make_extractor, records, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "COMMIT_SECONDS", 0.0)
    whole = build(make_extractor(), records, tmp_path / "whole", views=1)
    for calls in (1, 4, 7):
        extractor, left = make_extractor(), [calls]
        for name in ("featured_images", "featured_texts"):
            setattr(extractor, name, interrupted(getattr(extractor, name), left))
        with pytest.raises(KeyboardInterrupt):
            build(extractor, records, tmp_path / "store", views=1)
    assert checksums(build(make_extractor(), records, tmp_path / "store", views=1).path) == checksums(whole.path)


def test_unreadable_images_leave_no_features(extractor, records, tmp_path):
    (tmp_path / "pictures" / "3.png").write_bytes(b"broken")
    store = build(extractor, records, tmp_path / "store", on_error="skip")
    images = store.embeddings("image")
    assert images.features.shape == (11, 48)
    assert np.asarray(images.features).any(1).all()
    made = images.projection.apply(torch.tensor(images.features))
    torch.testing.assert_close(made, torch.tensor(images.values), rtol=1e-4, atol=1e-4)


def test_what_gives_no_features_is_refused(extractor, make_extractor, records, tmp_path):
    class Plain:
        source, device, preprocess, tokenize = (
            extractor.source, extractor.device, extractor.preprocess, extractor.tokenize
        )  # fmt: skip
        embed_images, embed_texts = extractor.embed_images, extractor.embed_texts

    with pytest.raises(InputTypeError, match=r"featured_images and featured_texts, got Plain.*without features"):
        build(Plain(), records, tmp_path / "store")
    broken = make_extractor()
    broken.featured_texts = lambda texts: extractor.featured_texts(texts)._replace(
        features=torch.full((1 if isinstance(texts, list) else len(texts.inputs["letters"]), 128), torch.nan)
    )
    with pytest.raises(NumericalError, match="text 'i0#0'"):
        build(broken, records, tmp_path / "store")


def from_arrays(path, arrays, **changes):
    images, texts = arrays
    random = np.random.default_rng(1)
    given = {}
    for name, values in (("image", images), ("text", texts)):
        weight = random.standard_normal((5, 7))
        given[f"{name}_features"] = values @ np.linalg.pinv(weight).T
        given[f"{name}_projection"] = Projection(weight)
    splits = np.array(["a", "b"] * 5)
    given |= {"source": Source(model="m"), "splits": splits, **changes}
    return EmbeddingStore.from_arrays(path, images=images, texts=texts, **given)


def test_bare_arrays_with_features_make_a_store(arrays, tmp_path):
    store = from_arrays(tmp_path / "store", arrays)
    for modality in ("image", "text"):
        for split in (None, "a", "b"):
            part = store.embeddings(modality, split)
            made = normalize(part.projection.apply(torch.tensor(np.asarray(part.features))), dim=1)
            torch.testing.assert_close(made, torch.tensor(np.asarray(part.values)))
            assert part.projection.bias is None
    store.verify()
    assert from_arrays(tmp_path / "store", arrays).reused


def test_a_bias_and_a_file_of_features(arrays, tmp_path):
    bias = np.arange(5.0)
    np.savez(tmp_path / "given.npz", image_features=arrays[0] - bias, other=np.zeros(3))
    store = from_arrays(
        tmp_path / "store",
        arrays,
        image_features=tmp_path / "given.npz",
        image_projection=Projection(np.eye(5), bias),
    )
    np.testing.assert_array_equal(store.embeddings("image").projection.bias, bias)


def test_features_of_another_layer_are_refused(arrays, tmp_path):
    other = Projection(np.random.default_rng(5).standard_normal((5, 7)))
    with pytest.raises(InputError, match="directions that differ"):
        from_arrays(tmp_path / "store", arrays, image_projection=other)
    with pytest.raises(InputError, match="features= and projection= together"):
        from_arrays(tmp_path / "store", arrays, image_projection=None)
    with pytest.raises(InputError, match="image features expected image embeddings beside them"):
        EmbeddingStore.from_arrays(tmp_path / "store", texts=arrays[1], image_features=arrays[0])
    assert not (tmp_path / "store").exists()
