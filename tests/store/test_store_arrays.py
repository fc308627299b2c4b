import errno
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from grove_adapters import EmbeddingStore
from grove_adapters.embeddings import Source
from grove_adapters.errors import (
    InputError,
    InputTypeError,
    MissingExtraError,
    StoreError,
    UnknownNameError,
    UnreadableError,
)
from grove_adapters.store.finishing import order_by_split

DATA = Path(os.environ.get("GROVE_ADAPTERS_DATA", Path(__file__).parents[3] / "shared" / "data"))


def test_one_to_one_by_row_when_nothing_else_is_said(arrays, tmp_path):
    store = EmbeddingStore.from_arrays(tmp_path / "store", images=arrays[0], texts=arrays[1])
    pairs = store.pairs()
    np.testing.assert_array_equal(pairs.images.values, arrays[0])
    np.testing.assert_array_equal(pairs.texts.values, arrays[1])
    assert pairs.links.tolist() == [[n, n] for n in range(10)]
    assert pairs.images.ids.tolist() == [str(n) for n in range(10)]
    assert store.source.model == "unknown:store"
    assert store.source.normalised
    assert store.splits == {}
    store.verify()


def test_everything_given_comes_back_joined_by_id(arrays, tmp_path):
    splits = np.array(["test", "train"] * 5)
    links = np.array([[n, 9 - n] for n in range(10)])
    store = EmbeddingStore.from_arrays(
        tmp_path / "store",
        images=arrays[0],
        texts=torch.from_numpy(arrays[1]),
        image_ids=[f"i{n}" for n in range(10)],
        text_ids=[f"t{n}" for n in range(10)],
        links=links,
        positives=[[0, 0], [0, 7], [3, 1]],
        labels=[f"class {n % 3}" for n in range(10)],
        splits=splits,
        image_views=arrays[0][:, None].repeat(2, 1),
        text_views=arrays[1][:, None].repeat(2, 1),
        image_columns={"size": list(range(10))},
        text_columns={"text": [f"caption {n}" for n in range(10)]},
        source=Source(model="mine", logit_scale=100.0),
    )
    assert store.splits == {"test": 5, "train": 5}
    assert store.source.logit_scale == 100
    for split in (None, "test", "train"):
        pairs = store.pairs(split)
        images = [int(id[1:]) for id in pairs.images.ids]
        texts = [int(id[1:]) for id in pairs.texts.ids]
        if split:
            assert images == [n for n in range(10) if splits[n] == split]
        np.testing.assert_array_equal(pairs.images.values, arrays[0][images])
        np.testing.assert_array_equal(pairs.texts.values, arrays[1][texts])
        np.testing.assert_array_equal(pairs.images.views[:, 1], arrays[0][images])
        assert pairs.classes.tolist() == [f"class {n % 3}" for n in images]
        assert store.column("image", "size", split).tolist() == images
        assert store.column("text", "text", split).tolist() == [f"caption {n}" for n in texts]
        assert all(images[i] == 9 - texts[t] for i, t in pairs.links)
        positives = {(images[i], texts[t]) for i, t in pairs.positives}
        assert positives == {(0, 0), (0, 7), (3, 1)} & {(i, t) for i in images for t in texts}


def test_texts_shared_by_splits_belong_to_each(tmp_path):
    """Class texts: every split needs the texts of its images' classes, which don't lie together."""
    images = np.eye(6, dtype=np.float32)
    texts = np.eye(6, dtype=np.float32)[:4]
    classes = np.array([0, 3, 1, 0, 2, 3])
    store = EmbeddingStore.from_arrays(
        tmp_path / "store",
        images=images,
        texts=texts,
        links=np.stack([np.arange(6), classes], 1),
        positives=[[0, 3], [0, 1], [3, 1], [3, 3]],
        splits=["a", "a", "b", "b", "b", "a"],
        text_columns={"name": ["c0", "c1", "c2", "c3"]},
    )
    a, b = store.pairs("a"), store.pairs("b")
    for pairs, split in ((a, "a"), (b, "b")):
        names = store.column("text", "name", split)
        assert [names[t] for _, t in pairs.links] == [f"c{classes[int(pairs.images.ids[i])]}" for i, _ in pairs.links]
        assert set(names) == {"c0", "c3"} if split == "a" else {"c0", "c1", "c2"}
    assert [(str(a.images.ids[i]), str(a.texts.ids[t])) for i, t in a.positives] == [("0", "3")]
    assert [(str(b.images.ids[i]), str(b.texts.ids[t])) for i, t in b.positives] == [("3", "1")]
    with pytest.raises(UnknownNameError, match="no split 'c'"):
        store.pairs("c")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(["", "train", "test", "val"]), min_size=1, max_size=30))
def test_ordering_by_split_is_stable_and_puts_the_unsplit_last(splits):
    order = order_by_split(np.array(splits))
    assert sorted(order) == list(range(len(splits)))
    names = [splits[row] for row in order]
    expected = list(dict.fromkeys(name for name in splits if name)) + [""] * ("" in splits)
    assert list(dict.fromkeys(names)) == expected
    for name in set(names):
        rows = [row for row in order if splits[row] == name]
        assert rows == sorted(rows)


def test_drawn_splits_have_their_shares_and_a_seed(arrays, tmp_path):
    make = lambda name, seed: EmbeddingStore.from_arrays(  # noqa: E731
        tmp_path / name, images=arrays[0], texts=arrays[1], splits={"train": 0.8, "test": 0.2}, seed=seed
    )
    one, again, other = make("one", 0), make("again", 0), make("other", 1)
    ids = [set(store.pairs("test").images.ids) for store in (one, again, other)]
    assert one.splits["train"] == 8
    assert one.splits["test"] == 2
    assert ids[0] == ids[1] != ids[2]


def test_one_modality_alone(arrays, tmp_path):
    images = EmbeddingStore.from_arrays(tmp_path / "i", images=arrays[0], labels=np.arange(10), splits=["a", "b"] * 5)
    assert images.column("image", "label", "b").tolist() == [1, 3, 5, 7, 9]
    assert len(images.embeddings("image", "a")) == 5
    with pytest.raises(InputError, match="expected texts, got none"):
        images.pairs()
    texts = EmbeddingStore.from_arrays(tmp_path / "t", texts=arrays[1], text_columns={"text": ["x"] * 10})
    assert len(texts.embeddings("text")) == 10
    unlinked = EmbeddingStore.from_arrays(tmp_path / "u", images=arrays[0], texts=arrays[1][:4])
    with pytest.raises(InputError, match="no links between images and texts"):
        unlinked.pairs()


def test_precision_and_normalisation(arrays, tmp_path):
    half = EmbeddingStore.from_arrays(
        tmp_path / "h", images=arrays[0].astype(np.float16), texts=arrays[1].astype(np.float16)
    )
    assert half.dtype == "float16"
    double = EmbeddingStore.from_arrays(tmp_path / "d", images=arrays[0].astype(float) * 3, texts=arrays[1])
    assert double.dtype == "float32"
    assert not double.source.normalised
    unit = EmbeddingStore.from_arrays(
        tmp_path / "n", images=arrays[0] * 3, texts=arrays[1], normalise=True, dtype="float16", source=Source(model="m")
    )
    assert unit.source.normalised
    np.testing.assert_allclose(unit.embeddings("image").values, arrays[0], atol=1e-3)
    with pytest.raises(InputError, match="unit length, as source= says"):
        EmbeddingStore.from_arrays(tmp_path / "x", images=arrays[0] * 3, source=Source(model="m"))
    with pytest.raises(InputError, match="NaN or infinity in row 0"):
        EmbeddingStore.from_arrays(tmp_path / "x", images=arrays[0] * 1e7, dtype="float16")


def test_the_same_content_again_is_reused_and_another_refused(arrays, tmp_path):
    first = EmbeddingStore.from_arrays(tmp_path / "store", images=arrays[0], texts=arrays[1])
    again = EmbeddingStore.from_arrays(tmp_path / "store", images=arrays[0], texts=arrays[1])
    assert not first.reused
    assert again.reused
    assert again.fingerprint == first.fingerprint
    with pytest.raises(StoreError, match="another store; choose another path"):
        EmbeddingStore.from_arrays(tmp_path / "store", images=arrays[0], texts=arrays[0])
    first.verify()
    assert [item.name for item in tmp_path.iterdir()] == ["store"]


def test_an_unfinished_extraction_is_not_thrown_away(arrays, tmp_path):
    (tmp_path / "store.partial").mkdir()
    (tmp_path / "store.partial" / "journal.jsonl").write_text("{}\n")
    with pytest.raises(StoreError, match="no unfinished build"):
        EmbeddingStore.from_arrays(tmp_path / "store", images=arrays[0])
    assert (tmp_path / "store.partial" / "journal.jsonl").exists()


def test_a_full_disk_leaves_nothing_behind(arrays, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("grove_adapters.store.files.os.write", full)
        with pytest.raises(StoreError, match="No space left on device"):
            EmbeddingStore.from_arrays(tmp_path / "store", images=arrays[0])
    assert list(tmp_path.iterdir()) == []


def bad(arrays):
    nan, zero = arrays[0].copy(), arrays[0].copy()
    nan[3, 1], zero[4] = np.nan, 0
    ten = np.arange(10)
    return [
        (
            {"images": nan, "image_ids": [f"i{n}" for n in range(10)]},
            InputError,
            r"NaN or infinity in row 3 \(id 'i3'\)",
        ),
        ({"images": zero}, InputError, "zeros in row 4"),
        ({"images": arrays[0], "image_ids": ["a"] * 10}, InputError, "expected unique ids, got 'a' 10 times"),
        ({"images": arrays[0], "image_ids": ["a"]}, InputError, "expected 10 ids"),
        ({"images": arrays[0], "texts": arrays[1][:, :3]}, InputError, "expected 5-d embeddings, got 3-d"),
        ({"images": arrays[0], "texts": arrays[1], "links": [[0, 10]]}, InputError, "text column of links"),
        ({"images": arrays[0], "texts": arrays[1], "links": ten}, InputError, r"links expected \(P, 2\)"),
        ({"images": arrays[0], "texts": arrays[1], "positives": [[-1, 0]]}, InputError, "image column of positives"),
        ({"images": arrays[0], "links": [[0, 0]]}, InputError, "got only one of them"),
        ({"images": arrays[0], "labels": ten[:3]}, InputError, "image column 'label': expected 10 rows, got 3"),
        ({"images": arrays[0], "splits": ["a"] * 9}, InputError, "splits of images: expected 10"),
        ({"texts": arrays[0], "splits": ["a"] * 10}, InputError, "expected images to split"),
        ({"texts": arrays[0], "image_ids": ten}, InputError, "image ids expected image embeddings"),
        ({"images": arrays[0], "splits": {"a": 0.5}}, InputError, "add up to 1"),
        ({"images": arrays[0].astype(int)}, InputTypeError, "floating-point"),
        ({"images": arrays[0][0]}, InputError, r"shape \(N, D\)"),
        ({"images": arrays[0], "image_views": arrays[0]}, InputError, r"shape \(N, K, D\)"),
        ({"images": arrays[0], "texts": arrays[1], "image_views": arrays[0][:, None]}, InputError, "as many views"),
        ({}, InputError, "images=, texts= or both"),
    ]


@pytest.mark.parametrize("case", range(19))
def test_input_that_cannot_be_used_says_why_and_leaves_nothing(arrays, tmp_path, case):
    given_arrays, error, message = bad(arrays)[case]
    with pytest.raises(error, match=message):
        EmbeddingStore.from_arrays(tmp_path / "store", **given_arrays)
    assert list(tmp_path.iterdir()) == []


# files --------------------------------------------------------------------------------------------------------------


def parquet(path, columns):
    pyarrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.table(columns), path)


def test_arrays_from_every_format(arrays, tmp_path):
    ids = [f"i{n}" for n in range(10)]
    folder = tmp_path / "files"
    folder.mkdir()
    np.save(folder / "image.npy", arrays[0])
    np.savez(folder / "both.npz", image=arrays[0], text_b=arrays[1], ids=np.array(ids), label=np.arange(10))
    save_file(
        {"images": torch.from_numpy(arrays[0]), "texts": torch.from_numpy(arrays[1]).bfloat16()},
        folder / "b.safetensors",
    )
    parquet(folder / "table.parquet", {"image_embedding": list(arrays[0]), "id": ids, "n": list(range(10))})
    for images, image_ids, labels in (
        (folder / "image.npy", None, None),
        (f"{folder}/both.npz", f"{folder}/both.npz", f"{folder}/both.npz:label"),
        (folder / "b.safetensors", None, None),
        (f"{folder}/table.parquet:image_embedding", f"{folder}/table.parquet:id", f"{folder}/table.parquet:n"),
    ):
        path = tmp_path / Path(str(images)).name.partition(".")[0]
        store = EmbeddingStore.from_arrays(path, images=images, image_ids=image_ids, labels=labels)
        np.testing.assert_array_equal(store.embeddings("image").values, arrays[0])
        assert store.embeddings("image").ids[3] == ("3" if image_ids is None else "i3")
        if labels is not None:
            assert store.column("image", "label").tolist() == list(range(10))
    both = EmbeddingStore.from_arrays(tmp_path / "bf16", texts=folder / "b.safetensors")
    np.testing.assert_allclose(both.embeddings("text").values, arrays[1], rtol=0.01)


def test_array_files_that_cannot_be_used_say_why(arrays, tmp_path, monkeypatch):
    np.savez(tmp_path / "two.npz", a=arrays[0], b=arrays[1])
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", image=np.array([{}], dtype=object))
    (tmp_path / "broken.npz").write_bytes(b"PK nonsense")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "broken.safetensors").write_bytes(b"1")
    (tmp_path / "notes.txt").write_text("1 2 3")
    for name, message in (
        ("two.npz", r"'images' in .*two\.npz, got a, b; name the one that is meant, as two\.npz:NAME"),
        ("two.npz:c", r"expected an array 'c' in .*got a, b"),
        ("objects.npy", "plain .npy array"),
        ("objects.npz", "plain arrays"),
        ("broken.npz", "plain arrays"),
        ("broken.parquet", "parquet table"),
        ("broken.safetensors", "safetensors"),
        ("notes.txt", "array file"),
        ("nowhere.npy", "got no file"),
    ):
        with pytest.raises(UnreadableError, match=message):
            EmbeddingStore.from_arrays(tmp_path / "store", images=tmp_path / name)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'grove-adapters\[parquet\]'"):
        EmbeddingStore.from_arrays(tmp_path / "store", images=tmp_path / "broken.parquet")


def test_lists_of_different_length_are_no_vectors(tmp_path):
    parquet(tmp_path / "ragged.parquet", {"images": [[1.0, 2.0], [1.0]]})
    with pytest.raises(InputTypeError, match="floating-point"):
        EmbeddingStore.from_arrays(tmp_path / "store", images=tmp_path / "ragged.parquet")


def test_clip_retrievals_folder_with_shards_in_the_order_of_their_numbers(arrays, tmp_path):
    folder = tmp_path / "out"
    for name in ("img_emb", "text_emb", "metadata"):
        (folder / name).mkdir(parents=True)
    bounds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 10]  # 11 shards, one of them empty, so that 10 comes after 9
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        np.save(folder / "img_emb" / f"img_emb_{number}.npy", arrays[0][start:stop].astype(np.float16))
        np.save(folder / "text_emb" / f"text_emb_{number}.npy", arrays[1][start:stop].astype(np.float16))
        rows = range(start, stop)
        parquet(
            folder / "metadata" / f"metadata_{number}.parquet",
            {"image_path": [f"p/{n}.jpg" for n in rows], "caption": [f"caption {n}, x" for n in rows], "n": list(rows)},
        )
    store = EmbeddingStore.from_folder(tmp_path / "store", folder)
    np.testing.assert_allclose(store.embeddings("image").values, arrays[0], atol=1e-3)
    np.testing.assert_allclose(store.embeddings("text").values, arrays[1], atol=1e-3)
    assert store.dtype == "float16"
    assert store.column("text", "text").tolist() == [f"caption {n}, x" for n in range(10)]
    assert store.column("image", "path")[9] == "p/9.jpg"
    assert store.column("image", "n").tolist() == list(range(10))
    assert store.pairs().links.tolist() == [[n, n] for n in range(10)]


@pytest.mark.parametrize("kind", ["csv", "json", "jsonl", "parquet"])
def test_plain_folders_bring_their_table(arrays, tmp_path, kind):
    folder = tmp_path / "in"
    folder.mkdir()
    np.save(folder / "image.npy", arrays[0])
    np.save(folder / "text.npy", arrays[1])
    np.save(folder / "labels.npy", np.arange(10) % 3)
    rows = [{"image_id": 100 + n, "file_name": f"{n}.jpg", "description": f"a thing, {n}\n"} for n in range(10)]
    if kind == "csv":
        lines = [f'{row["image_id"]},{row["file_name"]},"{row["description"]}"' for row in rows]
        (folder / "metadata.csv").write_text("\n".join(["image_id,file_name,description", *lines]))
    elif kind == "parquet":
        parquet(folder / "metadata.parquet", {key: [row[key] for row in rows] for key in rows[0]})
    elif kind == "jsonl":
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    else:
        (folder / "pairs.json").write_text(json.dumps([{**row, "all": [1, 2]} for row in rows]))
    store = EmbeddingStore.from_folder(
        tmp_path / "store", folder, source=Source(model="m"), splits={"a": 0.5, "b": 0.5}
    )
    order = [int(id) - 100 for id in store.embeddings("image").ids]
    np.testing.assert_array_equal(store.embeddings("image").values, arrays[0][order])
    assert store.column("image", "path").tolist() == [f"{n}.jpg" for n in order]
    assert store.column("text", "text").tolist() == [f"a thing, {n}\n" for n in order]
    assert store.pairs().classes.tolist() == [n % 3 for n in order]
    assert store.source.model == "m"


def test_a_table_with_a_row_for_each_text_describes_the_texts(arrays, tmp_path):
    np.save(tmp_path / "images.npy", arrays[0][:5])
    np.save(tmp_path / "texts.npy", arrays[1])
    np.save(tmp_path / "links.npy", np.stack([np.arange(10) // 2, np.arange(10)], 1))
    (tmp_path / "metadata.csv").write_text("level,caption\n" + "".join(f'{n % 2},"caption {n}"\n' for n in range(10)))
    store = EmbeddingStore.from_folder(tmp_path / "store", tmp_path)
    assert store.columns("image") == ()
    assert store.column("text", "text")[7] == "caption 7"
    assert store.column("text", "level").tolist() == [0, 1] * 5


def test_folders_that_cannot_be_used_say_why(arrays, tmp_path):
    with pytest.raises(UnreadableError, match="got none; check the path"):
        EmbeddingStore.from_folder(tmp_path / "store", tmp_path / "nowhere")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "readme.md").write_text("x")
    with pytest.raises(UnreadableError, match=r"img_emb and text_emb, in .*got readme\.md"):
        EmbeddingStore.from_folder(tmp_path / "store", folder)
    np.save(folder / "image.npy", arrays[0])
    (folder / "metadata.csv").write_text("a\n1\n2\n")
    with pytest.raises(UnreadableError, match="as many rows as 10, one for each of the images, got 2"):
        EmbeddingStore.from_folder(tmp_path / "store", folder)
    (folder / "metadata.csv").unlink()
    (folder / "pairs.json").write_text("{")
    with pytest.raises(UnreadableError, match="expected a table in"):
        EmbeddingStore.from_folder(tmp_path / "store", folder)


@pytest.mark.skipif(not DATA.is_dir(), reason="no real data: set GROVE_ADAPTERS_DATA")
@pytest.mark.parametrize(("name", "n"), [("coco500", 500), ("products1126", 1126)])
def test_real_folders(tmp_path, name, n):
    store = EmbeddingStore.from_folder(tmp_path / name, DATA / name)
    assert (store.n_images, store.n_texts, store.dim, store.source.normalised) == (n, n, 512, True)
    assert store.pairs().links.tolist() == [[row, row] for row in range(n)]
    assert all(store.column("text", "text"))
    np.testing.assert_array_equal(store.embeddings("text").values, np.load(DATA / name / "text.npy"))
