"""One writer at a time: a lock file that says who is writing and since when."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grove_adapters.errors import StoreError, StoreLockedError

logger = logging.getLogger(__name__)

STALE_AFTER = 3600.0
"""Seconds without a sign of life after which another machine's lock counts as left behind."""


class StoreLock:
    """A held lock; `touch` it now and then as a sign of life for other machines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def touch(self) -> None:
        """Show that the writer is alive."""
        with contextlib.suppress(OSError):
            os.utime(self.path)


@contextlib.contextmanager
def locked(store: Path) -> Iterator[StoreLock]:
    """Hold `<store>.lock` inside the block.

    The file names its owner's process, host and start. A lock whose owner on this machine is gone is taken over at
    once; one of another machine, where nobody can look, after `STALE_AFTER` seconds without a sign of life. `flock` is
    held only while reading and writing the file: a loading process that outlives a killed owner would inherit it.

    Raises:
        StoreLockedError: Another process is writing the store.
        StoreError: The lock file cannot be written.
    """
    path = store.with_name(f"{store.name}.lock")
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid()), "since": time.time()}
    with _exclusive(path) as file:
        owner, age = _owner(file)
        if owner is not None:
            if _alive(owner, age):
                raise StoreLockedError(
                    f"expected to write {store} alone, got a lock of process {owner['pid']} on {owner['host']}, held "
                    f"for {time.time() - owner['since']:.0f} s; wait until it ends, or delete {path} if it is gone"
                )
            logger.info("taking over the lock that process %s on %s left behind", owner["pid"], owner["host"])
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(mine).encode(), 0)
    try:
        yield StoreLock(path)
    finally:
        with _exclusive(path) as file:
            if _owner(file)[0] == mine:  # unless somebody took it for left behind
                path.unlink()


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[int]:
    import fcntl  # POSIX only, like the rest of writing a store; reading one works everywhere

    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise StoreError(f"expected to write the lock {path}, got {error.strerror}; choose another path") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _still_at(path, file):  # else its owner removed it while this process waited
                yield file
                return
        finally:
            os.close(file)


def _still_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _owner(file: int) -> tuple[dict[str, Any] | None, float]:
    """Whom the lock file names, and the seconds since its last sign of life."""
    status = os.fstat(file)
    try:
        owner = json.loads(os.pread(file, 4096, 0))
        return {key: owner[key] for key in ("pid", "host", "started", "since")}, time.time() - status.st_mtime
    except (ValueError, KeyError, TypeError):  # new, or its owner died before it wrote
        return None, 0.0


def _alive(owner: dict[str, Any], age: float) -> bool:
    if owner["host"] != socket.gethostname():
        return age < STALE_AFTER
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's process
        return True
    return _started(owner["pid"]) == owner["started"]  # process numbers are used again


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; ``""`` where the system does not tell."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return ""
    return after_name.split()[19]
