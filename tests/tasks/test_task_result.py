import numpy as np
import pytest
import torch

from grove_adapters.errors import InputError, UnreadableError
from grove_adapters.tasks import TaskResult


def result(**changes):
    fields = {
        "task": "retrieval",
        "direction": "t2i",
        "ids": ["a", "b", "c"],
        "correct": [True, False, True],
        "uncertainty": torch.tensor([0.1, 0.9, 0.3]),
        "confidence": np.array([0.9, 0.2, 1.0], dtype=np.float32),
        "recall_at": {5: [1, 1, 1], 1: [1, 0, 1]},
        "groups": [4, 4, 9],
        "detail": {
            "top": np.array([[1, 2], [3, 4], [5, 6]]),
            "n_matches": np.array([1, 2, 3]),
            "gallery_ids": np.array(["x", "ÿ"]),
            "unmatched": 2,
            "unmatched_ids": ["q"],
        },
        "provenance": {"similarity": "csd", "logit_scale": None},
    }
    return TaskResult(**{**fields, **changes})


def test_columns_are_float64_and_recall_is_in_order():
    row = result()
    assert len(row) == 3
    for column in (row.correct, row.uncertainty, row.confidence, *row.recall_at.values()):
        assert column.dtype == np.float64
    assert list(row.recall_at) == [1, 5]
    assert row.groups.dtype == np.int64


def test_round_trip_keeps_everything(tmp_path):
    before = result()
    after = TaskResult.load(before.save(tmp_path / "result.safetensors"))
    for name in ("correct", "uncertainty", "confidence", "groups", "ids"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    for k in (1, 5):
        np.testing.assert_array_equal(after.recall_at[k], before.recall_at[k])
    for name in ("top", "n_matches", "gallery_ids"):
        np.testing.assert_array_equal(after.detail[name], before.detail[name])
        assert after.detail[name].dtype.kind == before.detail[name].dtype.kind
    assert (after.detail["unmatched"], after.detail["unmatched_ids"]) == (2, ["q"])
    assert (after.task, after.direction, after.provenance) == (before.task, before.direction, before.provenance)
    bare = result(confidence=None, groups=None, recall_at={}, detail={})
    again = TaskResult.load(bare.save(tmp_path / "bare.safetensors"))
    assert again.confidence is None
    assert again.groups is None
    assert (dict(again.recall_at), dict(again.detail)) == ({}, {})


def test_frame_has_one_row_a_query():
    frame = result().to_frame()
    assert list(frame.columns) == [
        "id", "correct", "uncertainty", "confidence", "recall@1", "recall@5", "group", "n_matches"
    ]  # fmt: skip
    assert frame["id"].tolist() == ["a", "b", "c"]
    assert "confidence" not in result(confidence=None).to_frame()
    as_large = result(detail={"gallery_ids": np.array(["x", "y", "z"]), "n_matches": np.array([1, 2, 3])})
    assert {"n_matches"} == set(as_large.to_frame()) - set(result(detail={}).to_frame())


def test_callers_arrays_stay_theirs():
    correct = np.array([1.0, 0.0, 1.0])
    row = result(correct=correct)
    correct[:] = 0
    assert row.correct.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correct": []}, "at least one query"),
        ({"uncertainty": [1.0, 2.0]}, "expected 3 rows, got 2"),
        ({"uncertainty": [1.0, np.nan, 2.0]}, "NaN or infinity in row 1"),
        ({"confidence": [0.5, 1.5, 0.5]}, "from 0 to 1, got 1.5"),
        ({"correct": [0, -1, 0]}, "from 0 to 1, got -1"),
        ({"recall_at": {1: [1, 0]}}, "recall@1"),
        ({"recall_at": {0: [1, 0, 1]}}, "k of recall_at"),
        ({"ids": ["a", "b", "a"]}, "unique ids"),
        ({"groups": ["a", "b", "c"]}, "whole numbers"),
        ({"groups": [1, 2]}, "whole numbers"),
        ({"correct": np.ones((3, 1))}, "one number a query"),
    ],
)
def test_bad_columns_are_one_sentence(changes, message):
    with pytest.raises(InputError, match=message):
        result(**changes)


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"correct": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(UnreadableError, match="saved task result"):
        TaskResult.load(tmp_path / "other.safetensors")
    with pytest.raises(UnreadableError, match="got none"):
        TaskResult.load(tmp_path / "absent.safetensors")


def test_take_cuts_what_belongs_to_queries_and_leaves_the_gallery():
    before = result(detail={"top": np.arange(6).reshape(3, 2), "gallery_ids": np.array(["x", "y", "z"]), "note": "n"})
    after = before.take([2, 0])
    assert after.ids.tolist() == ["c", "a"]
    assert after.correct.tolist() == [1, 1]
    assert after.uncertainty.tolist() == pytest.approx([0.3, 0.1])
    assert after.groups.tolist() == [9, 4]
    assert after.recall_at[1].tolist() == [1, 1]
    assert after.detail["top"].tolist() == [[4, 5], [0, 1]]
    assert after.detail["gallery_ids"].tolist() == ["x", "y", "z"]
    assert after.detail["note"] == "n"
    assert set(before.query_detail) == {"top"}
    with pytest.raises(InputError, match="rows from 0 to 2"):
        before.take([3])
    with pytest.raises(InputError, match="at least one query"):
        before.take([])
