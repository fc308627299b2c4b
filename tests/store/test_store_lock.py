import json
import logging
import multiprocessing
import os
import socket
import time

import pytest

from grove_adapters.errors import StoreError, StoreLockedError
from grove_adapters.store.lock import STALE_AFTER, _started, locked

HERE = socket.gethostname()


def leave(path, **changes):
    owner = {"pid": os.getpid(), "host": HERE, "started": _started(os.getpid()), "since": time.time() - 60, **changes}
    path.write_text(json.dumps(owner))


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "store.lock"


def dead_process():
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    return process.pid


def test_a_lock_names_its_owner_and_goes_away(tmp_path, lock):
    with locked(tmp_path / "store") as held:
        owner = json.loads(lock.read_text())
        assert (owner["pid"], owner["host"]) == (os.getpid(), HERE)
        os.utime(lock, (0, 0))
        held.touch()
        assert time.time() - lock.stat().st_mtime < 60
    assert not lock.exists()
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "store"):
        raise ZeroDivisionError
    assert not lock.exists()


def test_a_living_owner_is_respected_with_process_host_and_age(tmp_path, lock):
    leave(lock)
    with pytest.raises(StoreLockedError, match=rf"process {os.getpid()} on {HERE}, held for 6\d s; .*delete"):
        locked(tmp_path / "store").__enter__()
    assert lock.exists()


@pytest.mark.parametrize("left", ["dead", "reused", "torn", "empty"])
def test_what_a_dead_owner_left_is_taken_over(tmp_path, lock, left, caplog):
    if left == "dead":
        leave(lock, pid=dead_process())
    elif left == "reused":
        leave(lock, started="12345")  # the process number lives, but is another process
    else:
        lock.write_text('{"pid": 1, "ho' if left == "torn" else "")
    with caplog.at_level(logging.INFO), locked(tmp_path / "store"):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert ("left behind" in caplog.text) == (left in ("dead", "reused"))
    assert not lock.exists()


def test_another_machines_lock_counts_until_it_shows_no_life(tmp_path, lock):
    leave(lock, host="elsewhere", pid=1)
    with pytest.raises(StoreLockedError, match="process 1 on elsewhere"):
        locked(tmp_path / "store").__enter__()
    os.utime(lock, (time.time() - STALE_AFTER - 5,) * 2)
    with locked(tmp_path / "store"):
        pass


def test_a_lock_that_was_taken_over_is_not_removed_by_its_former_owner(tmp_path, lock):
    with locked(tmp_path / "store"):
        leave(lock, host="elsewhere")
    assert json.loads(lock.read_text())["host"] == "elsewhere"


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="expected to write the lock"), locked(tmp_path / "file" / "store"):
        pass


def _count(folder, turns):
    """Add 1 to a number in a file, many times, under the lock."""
    number = folder / "number"
    while turns:
        try:
            with locked(folder / "store"):
                seen = int(number.read_text())
                time.sleep(0.001)
                number.write_text(str(seen + 1))
                turns -= 1
        except StoreLockedError:
            time.sleep(0.001)


def test_many_processes_never_hold_it_together(tmp_path):
    (tmp_path / "number").write_text("0")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count, args=(tmp_path, 15)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (tmp_path / "number").read_text() == "60"
