import errno

import numpy as np
import pytest
import torch

from grove_adapters import _io
from grove_adapters.errors import StoreError, UnreadableError


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file.json"
    _io.write_json(path, {"a": 1})
    with pytest.raises(KeyError), _io.written_whole(path) as partial:
        partial.write_text("half")
        raise KeyError
    assert _io.read_json(path) == {"a": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["file.json"]


def test_a_full_disk_is_said_in_words_and_harms_nothing(tmp_path):
    path = tmp_path / "file.json"
    _io.write_json(path, {"a": 1})
    with pytest.raises(StoreError, match="No space left"), _io.written_whole(path) as partial:
        partial.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert _io.read_json(path) == {"a": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["file.json"]


def test_json_turns_nan_into_null_and_unwraps_arrays(tmp_path):
    path = tmp_path / "file.json"
    _io.write_json(path, {"nan": float("nan"), "a": np.arange(2), "t": torch.ones(1), "f": np.float32(1), 3: path})
    assert _io.read_json(path) == {"nan": None, "a": [0, 1], "t": [1.0], "f": 1.0, "3": str(path)}


@pytest.mark.parametrize("content", [None, b"{", b"[1]", b"\xff\xfe"])
def test_unreadable_json_is_refused(tmp_path, content):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnreadableError, match=r"file\.json"):
        _io.read_json(path)


def test_arrays_round_trip_and_python_objects_are_refused(tmp_path):
    path = tmp_path / "array.npy"
    _io.write_array(path, np.arange(6.0).reshape(2, 3))
    assert isinstance(_io.read_array(path, memmap=True), np.memmap)
    assert _io.read_array(path).sum() == 15
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name in ("objects.npy", "missing.npy"):
        with pytest.raises(UnreadableError, match=name):
            _io.read_array(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UnreadableError, match=r"array\.npy"):
        _io.read_array(path)


def test_tensors_round_trip_and_damage_is_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    _io.write_tensors(path, {"a": torch.arange(3.0).expand(2, 3)}, {"fact": "1"})
    tensors, facts = _io.read_tensors(path)
    assert tensors["a"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert facts == {"fact": "1"}
    path.write_bytes(path.read_bytes()[:-4])
    for broken in (path, tmp_path / "missing.safetensors"):
        with pytest.raises(UnreadableError, match=broken.name):
            _io.read_tensors(broken)


def test_replace_folder_swaps_whole_folders(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    _io.replace_folder(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "file").read_text() == "new"
    assert [item.name for item in tmp_path.iterdir()] == ["old"]
