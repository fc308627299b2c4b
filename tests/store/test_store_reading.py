import json
import shutil

import numpy as np
import pytest

from grove_adapters import EmbeddingStore
from grove_adapters.embeddings import Source
from grove_adapters.errors import InputError, InputTypeError, SourceMismatchError, StoreError, UnknownNameError
from grove_adapters.store.files import column_array, read_column, write_column


@pytest.fixture
def store(extractor, records, tmp_path):
    return EmbeddingStore.build(extractor, records, tmp_path / "store", views=1, num_workers=0, progress=False)


def damaged_files(path):
    """What opening and verifying say is damaged, or None."""
    try:
        EmbeddingStore.open(path).verify()
    except StoreError as error:
        return str(error)
    return None


def test_200_flipped_bytes_are_found_200_times(store):
    random = np.random.default_rng(0)
    paths = sorted(store.path.iterdir())
    sizes = np.array([path.stat().st_size for path in paths])
    for _ in range(200):
        path = paths[random.choice(len(paths), p=sizes / sizes.sum())]
        content = bytearray(path.read_bytes())
        place = random.integers(len(content))
        whole = content[place]
        content[place] ^= int(random.integers(1, 256))
        path.write_bytes(content)
        found = damaged_files(store.path)
        assert found is not None
        assert path.name in found
        assert sum(other.name in found for other in paths) == 1
        content[place] = whole
        path.write_bytes(content)
    assert damaged_files(store.path) is None


def test_every_byte_of_the_manifest_counts(store):
    path = store.path / "manifest.json"
    content = path.read_bytes()
    for place in range(0, len(content), 43):
        for change in (b" ", b"\n", b"0"):
            edited = content[:place] + change + content[place + 1 :]
            if edited != content:
                path.write_bytes(edited)
                with pytest.raises(StoreError, match=r"manifest\.json as it was written"):
                    EmbeddingStore.open(store.path)
    path.write_bytes(content + b"\n")
    with pytest.raises(StoreError, match=r"manifest\.json as it was written"):
        store.verify()


def test_missing_and_cut_files_are_named_on_opening(store):
    (store.path / "text.npy").rename(store.path / "moved")
    with pytest.raises(StoreError, match=r"text\.npy with \d+ bytes, got no such file"):
        EmbeddingStore.open(store.path)
    with pytest.raises(StoreError, match=r"text\.npy \(missing\)"):
        store.verify()
    (store.path / "moved").rename(store.path / "text.npy")
    with (store.path / "links.npy").open("ab") as handle:
        handle.write(b"\0")
    with pytest.raises(StoreError, match=r"links\.npy with \d+ bytes, got \d+ bytes"):
        EmbeddingStore.open(store.path)


def test_a_header_of_another_shape_is_not_believed(store):
    path = store.path / "image.npy"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"(12, 6)", b"(6, 12)"))
    with pytest.raises(StoreError, match=r"image\.npy with shape \[12, 6\]"):
        EmbeddingStore.open(store.path).embeddings("image")


def test_a_newer_schema_is_refused(store):
    from grove_adapters.store import manifest

    path = store.path / "manifest.json"
    content = json.loads(path.read_text())
    content["schema"] = 99
    del content["digest"]
    digest = manifest.hashlib.sha256(manifest._canonical(content)).hexdigest()
    path.write_bytes(manifest._canonical({**content, "digest": digest}))
    with pytest.raises(StoreError, match=r"schema 1 .* got schema 99"):
        EmbeddingStore.open(store.path)


def test_opening_reads_no_array(store, monkeypatch):
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("an array was opened"))
    opened = EmbeddingStore.open(store.path)
    assert (opened.n_images, opened.n_texts, opened.n_views, opened.dim) == (12, 24, 1, 6)
    assert opened.splits == {"train": 6, "test": 3, "val": 3}
    assert "12 images" in repr(opened)


def test_a_store_can_be_moved_and_keeps_its_fingerprint(store, tmp_path):
    moved = shutil.move(store.path, tmp_path / "elsewhere")
    assert EmbeddingStore.open(moved).fingerprint == store.fingerprint


def test_the_source_can_be_demanded(store):
    assert EmbeddingStore.open(store.path, source=store.source).source == store.source
    with pytest.raises(SourceMismatchError, match="model 'tiny' ≠ 'other'"):
        EmbeddingStore.open(store.path, source=Source(model="other"))


def test_names_that_do_not_exist_offer_those_that_do(store, tmp_path):
    with pytest.raises(UnknownNameError, match=r"no split 'dev'; its splits: train \(6 images\), test"):
        store.pairs("dev")
    with pytest.raises(UnknownNameError, match="no text column 'levl'; did you mean 'level'"):
        store.column("text", "levl")
    with pytest.raises(InputError, match="modality has no option 'audio'"):
        store.embeddings("audio")
    with pytest.raises(StoreError, match="got nothing; check the path"):
        EmbeddingStore.open(tmp_path / "nowhere")


def test_info_is_json_and_the_report_tells_the_same(store):
    facts = json.loads(json.dumps(store.info()))
    assert (facts["n_images"], facts["n_texts"], facts["n_links"], facts["n_positives"]) == (12, 24, 24, 4)
    assert facts["views"]["count"] == 1
    assert "words dropped" in facts["views"]["recipe"]
    assert facts["bytes"] == sum(path.stat().st_size for path in store.path.iterdir())
    assert facts["files"] == len(list(store.path.iterdir()))
    report = store.report()
    for part in ("tiny/w1", "train 6, test 3, val 3", "text, truncated, level", "4 captions", store.fingerprint):
        assert part in report


def test_memory_maps_are_read_only(store):
    values = store.pairs("train").images.values
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 0


COLUMNS = [
    (["", "ä\n", "x" * 500], ["", "ä\n", "x" * 500]),
    (["a", None], ["a", ""]),
    ([], []),
    ([None, None], ["", ""]),
    ([1, 2], [1, 2]),
    ([True, False], [True, False]),
    ([1, 2.5], [1.0, 2.5]),
    (np.array(["a", "bc"]), ["a", "bc"]),
    (np.array([1, 2], dtype=np.int8), [1, 2]),
    ([np.float32(1.5), 2], [1.5, 2.0]),
]


@pytest.mark.parametrize(("values", "expected"), COLUMNS)
def test_columns_come_back_as_they_were(tmp_path, values, expected):
    names = write_column(tmp_path, "column", values, what="column")
    arrays = [np.load(tmp_path / name) for name in names]
    assert read_column(arrays, slice(None)).tolist() == expected
    assert read_column(arrays, np.arange(len(expected))[::-1]).tolist() == expected[::-1]


def test_columns_of_missing_numbers_hold_nan():
    assert np.isnan(column_array([1, None], what="column")[1])


@pytest.mark.parametrize("values", [[1, "a"], [True, 2], [[1], [2]], [{}], np.zeros((2, 2))])
def test_columns_of_mixed_things_are_refused(values):
    with pytest.raises(InputTypeError, match="column 'k' expected"):
        column_array(values, what="column 'k'")
