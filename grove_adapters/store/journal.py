"""How far an unfinished build got: JSON lines, each written after the rows it vouches for are on the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from grove_adapters import _io
from grove_adapters.errors import StoreError


class Journal:
    """An append-only file whose first line is the plan.

    A line that a crash left unfinished is dropped when the journal is opened again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """Every whole line, or nothing where there is no journal yet; cuts off an unfinished last line."""
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(self.path, len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise StoreError(
                f"expected the journal of an unfinished build in {self.path}, got a damaged one; delete "
                f"{self.path.parent} and build again"
            ) from error

    def append(self, entry: dict[str, Any]) -> None:
        """Write one line; returns when it is on the disk."""
        with self.path.open("ab") as handle:
            handle.write(json.dumps(_io.jsonable(entry)).encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())
