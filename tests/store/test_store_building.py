import errno
import hashlib
import logging
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from grove_adapters import EmbeddingStore
from grove_adapters.errors import (
    InputError,
    InputTypeError,
    NumericalError,
    SourceMismatchError,
    StoreError,
    StoreLockedError,
    UnreadableError,
)
from grove_adapters.extract import Record, Records
from grove_adapters.store import building, files


def build(extractor, records, path, **settings):
    given = {"batch_size": 3, "num_workers": 0, "progress": False, **settings}
    return EmbeddingStore.build(extractor, records, path, **given)


def checksums(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_a_store_holds_what_the_extractor_gives_joined_by_id(extractor, records, tmp_path):
    store = build(extractor, records, tmp_path / "store")
    assert not store.reused
    pairs = store.pairs()
    assert (len(pairs.images), len(pairs.texts), len(pairs.links)) == (12, 24, 24)
    for record in records:
        row = pairs.images.rows([record.id])[0]
        expected = extractor.embed_images(extractor.preprocess(record.loader())[None])[0]
        np.testing.assert_allclose(pairs.images.values[row], expected, rtol=1e-5)
        for caption in record.captions:
            text_row = pairs.texts.rows([caption.id])[0]
            assert [row, text_row] in pairs.links.tolist()
            np.testing.assert_allclose(
                pairs.texts.values[text_row], extractor.embed_texts([caption.text])[0], rtol=1e-5
            )
            assert store.column("text", "text")[text_row] == caption.text
    store.verify()


def test_splits_are_slices_with_aligned_columns_and_positives(extractor, records, tmp_path):
    store = build(extractor, records, tmp_path / "store")
    assert store.splits == {"train": 6, "test": 3, "val": 3}
    everything = {tuple(row) for row in _ids(store.pairs(), store.pairs().positives)}
    assert everything == {("i0", "i1#1"), ("i2", "i0#0"), ("i1", "i10#0"), ("i4", "i0#0")}
    found = set()
    for split in store.splits:
        pairs = store.pairs(split)
        assert isinstance(pairs.images.values, np.memmap)
        assert isinstance(pairs.texts.values, np.memmap)
        assert all(image == text.split("#")[0] for image, text in _ids(pairs, pairs.links))
        assert {records[int(id[1:])].split for id in pairs.images.ids} == {split}
        assert pairs.classes.tolist() == [int(id[1:]) % 2 for id in pairs.images.ids]
        np.testing.assert_allclose(
            store.column("image", "ambiguity", split), [int(id[1:]) / 10 for id in pairs.images.ids]
        )
        assert store.column("text", "text", split)[0].split()[1].rstrip(",") == pairs.texts.ids[0].split("#")[0][1:]
        found |= set(_ids(pairs, pairs.positives))
    assert found == {("i2", "i0#0"), ("i4", "i0#0")}  # the others join two splits


def _ids(pairs, rows):
    return [(str(pairs.images.ids[image]), str(pairs.texts.ids[text])) for image, text in rows]


def test_columns_that_a_build_adds(extractor, records, tmp_path):
    store = build(extractor, records, tmp_path / "store")
    assert store.columns("image") == ("ambiguity", "label", "path")
    assert store.columns("text") == ("text", "truncated", "level")
    texts = store.column("text", "text")
    assert (store.column("text", "truncated") == [len(text) > 40 for text in texts]).all()
    assert store.info()["truncated"] == sum(len(text) > 40 for text in texts) == 4
    levels = store.column("text", "level")
    assert levels[0] == 1
    assert np.isnan(levels[1])


@pytest.mark.parametrize("views", [0, 2])
def test_workers_and_restarts_do_not_change_a_byte(make_extractor, records, tmp_path, views):
    one = build(make_extractor(), records, tmp_path / "one", views=views)
    two = build(make_extractor(), records, tmp_path / "two", views=views, num_workers=2)
    assert checksums(one.path) == checksums(two.path)
    assert one.n_views == views
    if views:
        images = one.embeddings("image")
        assert images.views.shape == (12, 2, 6)
        assert (np.asarray(images.views[:, 0]) != np.asarray(images.values)).any()
        other = build(make_extractor(), records, tmp_path / "three", views=views, seed=1)
        assert (np.asarray(other.embeddings("image").views) != np.asarray(images.views)).any()


def test_half_precision_is_half_the_space(extractor, records, tmp_path):
    store = build(extractor, records, tmp_path / "store", dtype="float16")
    assert store.dtype == str(store.embeddings("image").values.dtype) == "float16"
    full = build(extractor, records, tmp_path / "full").embeddings("image").values
    np.testing.assert_allclose(store.embeddings("image").values, full, rtol=2e-3, atol=1e-3)


class Interrupted(Exception):
    """Stands for whatever may happen between two batches."""


def interrupted_after(extractor, calls, error=Interrupted):
    """The same extractor, that stops with an error after some batches."""
    whole = extractor.embed_images, extractor.embed_texts
    count = [0]

    def counted(embed):
        def call(batch):
            if not isinstance(batch, list):  # a list is the look at the width, not a batch
                count[0] += 1
                if count[0] > calls:
                    raise error
            return embed(batch)

        return call

    extractor.embed_images, extractor.embed_texts = map(counted, whole)
    return extractor


@pytest.mark.parametrize("commit", [0.0, 1e9])
@pytest.mark.parametrize("calls", [0, 1, 3, 5, 8])
def test_an_interrupted_build_continues_to_the_same_bytes(
    make_extractor, records, tmp_path, monkeypatch, calls, commit
):
    monkeypatch.setattr(building, "COMMIT_SECONDS", commit)
    whole = build(make_extractor(), records, tmp_path / "whole", views=1, batch_size=4)
    path = tmp_path / "store"
    for error in (Interrupted, KeyboardInterrupt):
        with pytest.raises(error):
            build(interrupted_after(make_extractor(), calls, error), records, path, views=1, batch_size=4)
        assert not path.exists()
    with pytest.raises(StoreError, match=r"unfinished build.*run the same build again"):
        EmbeddingStore.open(path)
    extractor = make_extractor()
    store = build(extractor, records, path, views=1, batch_size=4)
    assert checksums(store.path) == checksums(whole.path)
    assert len(extractor.calls) - 1 == 6 + 12 - 2 * calls  # nothing kept was embedded again
    assert sorted(item.name for item in tmp_path.iterdir()) == ["pictures", "store", "whole"]


def test_rows_without_a_journal_entry_are_written_again(make_extractor, records, tmp_path):
    """As after kill -9: more rows in the arrays than in the journal, and a torn last line."""
    whole = build(make_extractor(), records, tmp_path / "whole")
    path = tmp_path / "store"
    with pytest.raises(Interrupted):
        build(interrupted_after(make_extractor(), 2), records, path)
    partial = tmp_path / "store.partial"
    (partial / "store" / "links.npy.77.partial").write_bytes(b"\x93NUM")
    with (partial / "store" / "image.npy").open("ab") as handle:
        handle.write(b"\x07" * 1000)
    with (partial / "journal.jsonl").open("ab") as handle:
        handle.write(b'{"modality": "image", "rows": 11, "fai')
    assert checksums(build(make_extractor(), records, path).path) == checksums(whole.path)


def test_the_batch_size_may_change_on_the_way(make_extractor, records, tmp_path):
    whole = build(make_extractor(), records, tmp_path / "whole")
    path = tmp_path / "store"
    with pytest.raises(Interrupted):
        build(interrupted_after(make_extractor(), 2), records, path, batch_size=5)
    store = build(make_extractor(), records, path, batch_size=4)
    np.testing.assert_allclose(store.embeddings("image").values, whole.embeddings("image").values, rtol=1e-5)
    np.testing.assert_allclose(store.embeddings("text").values, whole.embeddings("text").values, rtol=1e-5)


def test_lost_or_damaged_unfinished_work_is_noticed(make_extractor, records, tmp_path):
    path = tmp_path / "store"
    with pytest.raises(Interrupted):
        build(interrupted_after(make_extractor(), 2), records, path)
    array = tmp_path / "store.partial" / "store" / "image.npy"
    array.write_bytes(array.read_bytes()[:150])
    with pytest.raises(StoreError, match="expected 6 rows in the unfinished"):
        build(make_extractor(), records, path)
    journal = tmp_path / "store.partial" / "journal.jsonl"
    journal.write_text("{}garbage\n")
    with pytest.raises(StoreError, match="damaged one; delete"):
        build(make_extractor(), records, path)
    journal.write_text('{"sour')  # killed while the plan was written
    build(make_extractor(), records, path).verify()


def test_the_same_build_again_reuses_the_store_and_says_so(make_extractor, records, tmp_path, caplog):
    first = build(make_extractor(), records, tmp_path / "store", views=1)
    extractor = make_extractor()
    with caplog.at_level(logging.INFO):
        again = build(extractor, records, tmp_path / "store", views=1, batch_size=5)
    assert again.reused
    assert again.fingerprint == first.fingerprint
    assert extractor.calls == []
    assert "reusing the store" in caplog.text
    (tmp_path / "store.partial").mkdir()  # a kill between the rename and the end
    assert build(make_extractor(), records, tmp_path / "store", views=1).reused
    assert not (tmp_path / "store.partial").exists()


@pytest.mark.parametrize("finished", [True, False])
def test_another_model_records_or_settings_are_refused_by_name(make_extractor, records, tmp_path, finished):
    path = tmp_path / "store"
    if finished:
        build(make_extractor(), records, path)
    else:
        with pytest.raises(Interrupted):
            build(interrupted_after(make_extractor(), 2), records, path)
    before = checksums(path) if finished else None
    for change, message in (
        ({"model": "large"}, "model 'tiny' ≠ 'large'"),
        ({"pretrained": "w2"}, "pretrained 'w1' ≠ 'w2'"),
        ({"precision": "amp_bf16"}, "precision 'fp32' ≠ 'amp_bf16'"),
        ({"preprocess": "5x5"}, "preprocess '4x4' ≠ '5x5'"),
    ):
        with pytest.raises(SourceMismatchError, match=message):
            build(make_extractor(**change), records, path)
    with pytest.raises(StoreError, match="views 0 ≠ 2, view seed None ≠ 0"):
        build(make_extractor(), records, path, views=2)
    with pytest.raises(StoreError, match="dtype 'float32' ≠ 'float16'"):
        build(make_extractor(), records, path, dtype="float16")
    with pytest.raises(StoreError, match=r"records .* images 12 ≠ 5"):
        build(make_extractor(), records[:5], path)
    assert before == (checksums(path) if finished else None)


def test_whatever_else_is_in_the_way_stays(extractor, records, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match="folder without manifest"):
        build(extractor, records, tmp_path / "folder")
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    build(extractor, records, tmp_path / "empty").verify()


@pytest.fixture
def damaged(records):
    for n, content in ((2, b""), (5, None), (7, b"nonsense")):
        path = Path(records[n].loader.path)
        path.unlink() if content is None else path.write_bytes(content)
    return records


def test_unreadable_images_are_skipped_with_their_captions_and_listed(make_extractor, damaged, tmp_path, caplog):
    store = build(make_extractor(), damaged, tmp_path / "store", on_error="skip", views=1)
    assert (store.n_images, store.n_texts, store.splits) == (9, 18, {"train": 5, "test": 2, "val": 2})
    skipped = {(item["modality"], item["id"]): item["reason"] for item in store.info()["skipped"]}
    assert {key for key in skipped if key[0] == "image"} == {("image", "i2"), ("image", "i5"), ("image", "i7")}
    assert "5.png" in skipped["image", "i5"]
    assert skipped["text", "i5#1"] == "image 'i5' was skipped"
    assert len(skipped) == 9
    assert "left out 3 unreadable images" in caplog.text
    kept = Records([record for record in damaged if record.id not in ("i2", "i5", "i7")])
    alone = build(make_extractor(), kept, tmp_path / "alone", views=1)
    for modality in ("image", "text"):
        both = store.embeddings(modality), alone.embeddings(modality)
        assert both[0].ids.tolist() == both[1].ids.tolist()
        np.testing.assert_allclose(both[0].values, both[1].values, rtol=1e-5)
        np.testing.assert_allclose(both[0].views, both[1].views, rtol=1e-5)
    assert all(image == text.split("#")[0] for image, text in _ids(store.pairs(), store.pairs().links))
    assert set(_ids(store.pairs(), store.pairs().positives)) == {("i0", "i1#1"), ("i1", "i10#0"), ("i4", "i0#0")}
    store.verify()
    assert build(make_extractor(), damaged, tmp_path / "store", on_error="skip", views=1).reused
    with pytest.raises(StoreError, match="left out 9 rows that could not be read"):
        build(make_extractor(), damaged, tmp_path / "store", views=1)


def test_skipping_survives_interruptions(make_extractor, damaged, tmp_path, monkeypatch):
    whole = build(make_extractor(), damaged, tmp_path / "whole", on_error="skip", views=1)
    path = tmp_path / "store"
    for calls in (1, 2, 5, 3):
        with pytest.raises(Interrupted):
            build(interrupted_after(make_extractor(), calls), damaged, path, on_error="skip", views=1)
    with monkeypatch.context() as patch:  # in the middle of leaving rows out
        patch.setattr(building, "finish", lambda *_: (_ for _ in ()).throw(Interrupted))
        with pytest.raises(Interrupted):
            build(make_extractor(), damaged, path, on_error="skip", views=1)
    assert checksums(build(make_extractor(), damaged, path, on_error="skip", views=1).path) == checksums(whole.path)


def test_an_unreadable_image_raises_by_name_and_keeps_what_is_done(make_extractor, damaged, tmp_path):
    path = tmp_path / "store"
    with pytest.raises(UnreadableError, match=r"image 'i2' cannot be read \(.*2\.png.*on_error='skip'"):
        build(make_extractor(), damaged, path, batch_size=1)
    extractor = make_extractor()
    store = build(extractor, damaged, path, batch_size=1, on_error="skip")
    assert extractor.calls.count(("image", 1)) == 8  # i0 was kept
    assert store.n_images == 9


def test_a_skipped_image_of_an_unfinished_build_is_not_forgotten(make_extractor, damaged, tmp_path):
    path = tmp_path / "store"
    with pytest.raises(Interrupted):
        build(interrupted_after(make_extractor(), 3), damaged, path, on_error="skip")
    with pytest.raises(UnreadableError, match="was skipped by the unfinished build"):
        build(make_extractor(), damaged, path)


def test_no_readable_image_at_all(extractor, tmp_path):
    records = [Record(str(n), tmp_path / f"{n}.png", ["x"]) for n in range(3)]
    with pytest.raises(UnreadableError, match=r"none among 3 .*No such file"):
        build(extractor, records, tmp_path / "store", on_error="skip")
    assert list(tmp_path.iterdir()) == []


def test_images_without_captions_make_a_store_of_images(extractor, records, tmp_path):
    store = build(extractor, [Record(record.id, record.image) for record in records], tmp_path / "store")
    assert (store.n_images, store.n_texts, store.columns("text")) == (12, 0, ())
    assert len(store.embeddings("image")) == 12
    with pytest.raises(InputError, match="expected texts, got none"):
        store.pairs()


@pytest.mark.parametrize("when", ["rows", "journal", "manifest"])
def test_a_full_disk_is_one_sentence_and_loses_nothing(make_extractor, records, tmp_path, monkeypatch, when):
    whole = build(make_extractor(), records, tmp_path / "whole")
    path = tmp_path / "store"
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_):
        raise full

    with monkeypatch.context() as patch:
        if when == "rows":
            write, left = os.write, [400]

            def limited(file, content):
                if left[0] <= 0:
                    raise full
                left[0] -= len(content[:90])
                return write(file, content[:90])

            patch.setattr(files.os, "write", limited)
        elif when == "journal":
            patch.setattr(building.Journal, "append", fail)
        else:
            patch.setattr("grove_adapters._io.os.replace", fail)
        with pytest.raises(StoreError, match=r"No space left.*run the same"):
            build(make_extractor(), records, path)
    assert not path.exists()
    assert checksums(build(make_extractor(), records, path).path) == checksums(whole.path)


def test_nonsense_from_the_model_is_refused_by_id(make_extractor, records, tmp_path):
    for poison, modality in ((np.nan, "image"), (0.0, "text"), (1e9, "image")):
        extractor = make_extractor()
        name = f"embed_{modality}s"
        embed = getattr(extractor, name)

        def poisoned(batch, embed=embed, poison=poison):
            values = embed(batch)
            if not isinstance(batch, list):
                values[-1] = poison
            return values

        setattr(extractor, name, poisoned)
        with pytest.raises(NumericalError, match=f"zeros for {modality} 'i"):
            build(extractor, records, tmp_path / f"store{poison}", dtype="float16")


def test_arguments_that_cannot_be_used_say_why(extractor, records, tmp_path):
    for settings, message in (
        ({"on_error": "ignore"}, "on_error has no option 'ignore'"),
        ({"dtype": "int8"}, "dtype has no option 'int8'"),
        ({"batch_size": 0}, "batch_size expected a whole number ≥ 1"),
        ({"views": -1}, "views expected a whole number ≥ 0"),
        ({"num_workers": -1}, "num_workers expected"),
    ):
        with pytest.raises(InputError, match=message):
            build(extractor, records, tmp_path / "store", **settings)
    with pytest.raises(InputTypeError, match="expected an extractor with source"):
        build(object(), records, tmp_path / "store")
    mixed = [Record("a", records[0].image, columns={"k": 1}), Record("b", records[1].image, columns={"k": "x"})]
    with pytest.raises(InputTypeError, match="image column 'k' expected all texts or all numbers, got int, str"):
        build(extractor, mixed, tmp_path / "store")
    with pytest.raises(InputError, match="image column 'label' is one that every store writes"):
        build(extractor, [Record("a", records[0].image, columns={"label": 1})], tmp_path / "store")
    assert not (tmp_path / "store.partial").exists()


def test_two_builders_of_one_store_do_not_meet(make_extractor, records, tmp_path):
    slow, started = make_extractor(), threading.Event()
    embed = slow.embed_images

    def wait(batch):
        started.set()
        time.sleep(0.1)
        return embed(batch)

    slow.embed_images = wait
    first = threading.Thread(target=build, args=(slow, records, tmp_path / "store"))
    first.start()
    started.wait()
    with pytest.raises(StoreLockedError, match=rf"lock of process {os.getpid()} on .*store\.lock"):
        build(make_extractor(), records, tmp_path / "store")
    first.join()
    assert checksums(tmp_path / "store") == checksums(build(make_extractor(), records, tmp_path / "other").path)
    assert not (tmp_path / "store.lock").exists()
