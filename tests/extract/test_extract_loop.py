import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from grove_adapters.embeddings import Source
from grove_adapters.errors import UnreadableError
from grove_adapters.extract import Caption, Featured, Record, Tokens
from grove_adapters.extract.loop import ImageStage, TextStage, _begin_worker, default_workers, embed_from


class Summing:
    """An extractor that makes of each picture its mean colour and of each caption its length."""

    source = Source(model="summing")
    device = torch.device("cpu")

    def __init__(self):
        self.batches = []

    @staticmethod
    def preprocess(image):
        return torch.from_numpy(np.array(image.resize((4, 4)), dtype=np.float32)).permute(2, 0, 1)

    @staticmethod
    def tokenize(texts):
        lengths = torch.tensor([[len(text)] for text in texts])
        return Tokens({"length": lengths}, (lengths[:, 0] > 12).numpy())

    def embed_images(self, images):
        self.batches.append(len(images))
        return images.mean((2, 3))

    def embed_texts(self, texts):
        self.batches.append(len(texts.inputs["length"]))
        return texts.inputs["length"].float().expand(-1, 3)

    def projection(self, modality):
        raise AssertionError("not the loop's business")

    def featured_images(self, images):
        return Featured(self.embed_images(images), images.mean((2, 3))[:, :2])

    def featured_texts(self, texts):
        return Featured(self.embed_texts(texts), texts.inputs["length"].float())


@pytest.fixture
def records(tmp_path):
    rows = []
    for n in range(11):
        Image.new("RGB", (9, 7), (n, 2 * n, 255 - n)).save(tmp_path / f"{n}.png")
        rows.append(Record(f"i{n}", tmp_path / f"{n}.png"))
    (tmp_path / "4.png").write_bytes(b"broken")
    return rows


def run(stage, start=0, extractor=None, **settings):
    given = {"batch_size": 4, "views": stage.views, "num_workers": 0, **settings}
    return list(embed_from(start, stage, extractor or Summing(), **given))


def test_batches_end_at_fixed_rows_whatever_row_they_start_from(records):
    stage = ImageStage(records, Summing.preprocess, 0, 0)
    assert [batch.stop for batch in run(stage)] == [4, 8, 11]
    assert [batch.stop for batch in run(stage, start=4)] == [8, 11]
    assert [batch.stop for batch in run(stage, start=5)] == [8, 11]
    assert [batch.stop for batch in run(stage, batch_size=100)] == [11]


def test_unreadable_rows_are_reported_and_left_out(records):
    batches = run(ImageStage(records, Summing.preprocess, 0, 0))
    rows = np.concatenate([batch.rows for batch in batches])
    assert rows.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    values = np.concatenate([batch.values[:, 0] for batch in batches])
    np.testing.assert_allclose(values, [[n, 2 * n, 255 - n] for n in rows])
    assert [list(batch.failed) for batch in batches] == [[], [4], []]
    assert "4.png" in batches[1].failed[4]
    alone = run(ImageStage(records[4:5], Summing.preprocess, 0, 0))
    assert (len(alone[0].rows), list(alone[0].failed)) == (0, [0])


@pytest.mark.parametrize("views", [0, 2])
def test_results_do_not_depend_on_workers(records, views):
    stage = ImageStage(records, Summing.preprocess, views, seed=3)
    alone, shared = run(stage), run(stage, num_workers=2)
    assert [batch.stop for batch in alone] == [batch.stop for batch in shared]
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(one.values, other.values)
        assert one.failed == other.failed


def test_views_count_towards_the_batch_and_do_not_depend_on_it(records):
    extractor = Summing()
    stage = ImageStage(records, Summing.preprocess, views=3, seed=0)
    small = run(stage, extractor=extractor, batch_size=8)
    assert max(extractor.batches) == 8
    assert small[0].values.shape == (2, 4, 3)
    large = run(stage, batch_size=100)
    np.testing.assert_array_equal(np.concatenate([batch.values for batch in small]), large[0].values)


def test_features_are_those_of_the_items_not_of_their_views(records):
    plain = run(ImageStage(records, Summing.preprocess, 2, 0))
    assert all(batch.features is None for batch in plain)
    batches = run(ImageStage(records, Summing.preprocess, 2, 0), features=True, batch_size=3)
    for batch in batches:
        if len(batch.rows):
            np.testing.assert_array_equal(batch.features, batch.values[:, 0, :2])
    np.testing.assert_array_equal(
        np.concatenate([batch.values for batch in batches if len(batch.rows)]),
        np.concatenate([batch.values for batch in plain if len(batch.rows)]),
    )
    captions = [Caption("a b c " * n, f"t{n}") for n in range(1, 4)]
    batch = run(TextStage(captions, Summing.tokenize, 3, 0), features=True, batch_size=100)[0]
    assert batch.features.tolist() == [[len(caption.text)] for caption in captions]


def test_texts_report_what_was_cut(records):
    captions = [Caption("x" * n, f"t{n}") for n in range(8, 16)]
    batches = run(TextStage(captions, Summing.tokenize, 0, 0))
    assert np.concatenate([batch.values[:, 0, 0] for batch in batches]).tolist() == list(range(8, 16))
    assert [row for batch in batches for row in batch.truncated] == [5, 6, 7]


def test_views_of_texts_are_shorter_and_never_counted_as_cut():
    captions = [Caption("aaaa bbbb cccc", "t0"), Caption("a b", "t1")]
    batch = run(TextStage(captions, Summing.tokenize, 5, 0), batch_size=100)[0]
    assert batch.values.shape == (2, 6, 3)
    assert (batch.values[:, 1:] <= batch.values[:, :1]).all()
    assert batch.truncated == [0]


def test_the_global_random_stream_is_left_alone(records):
    state = torch.get_rng_state()
    run(ImageStage(records, Summing.preprocess, 1, 0))
    assert torch.equal(state, torch.get_rng_state())


class Deadly:
    views = 0

    def __len__(self):
        return 4

    def load(self, start, stop):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_loading_process_is_one_sentence():
    with pytest.raises(UnreadableError, match=r"loading processes to live, got .*num_workers"):
        run(Deadly(), num_workers=1)


def test_a_loading_process_does_not_outlive_a_parent_that_was_killed_at_once():
    process = multiprocessing.get_context("fork").Process(target=_begin_worker, args=(os.getpid() + 10**7, 0))
    process.start()
    process.join()
    assert process.exitcode == 1
    process = multiprocessing.get_context("fork").Process(target=_begin_worker, args=(os.getpid(), 0))
    process.start()
    process.join()
    assert process.exitcode == 0


class Faulty:
    views = 0

    def __len__(self):
        return 4

    def load(self, start, stop):
        raise RuntimeError("a defect")


@pytest.mark.parametrize("workers", [0, 1])
def test_other_failures_are_not_dressed_up(workers):
    with pytest.raises(RuntimeError, match="a defect"):
        run(Faulty(), num_workers=workers)


def test_default_workers_leave_a_core_to_the_encoder(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert default_workers() == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert default_workers() == 0
