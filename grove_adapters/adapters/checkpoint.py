"""Where an interrupted fit is taken up again: its whole state after each epoch, in one file a loop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grove_adapters import _io
from grove_adapters.errors import StoreError

FILE = "fit_state.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A folder that keeps the state of one fit while it runs.

    Attributes:
        folder: Made when first written; removed, with nothing else in it, when the fit has ended.
        facts: What fit this is, as JSON types; a state of another fit is refused.
    """

    folder: Path
    facts: dict[str, Any]

    def part(self, name: str) -> Checkpoint:
        """The checkpoint of one of several loops inside the fit."""
        return dataclasses.replace(self, folder=self.folder / name)

    def read(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Tensors and JSON facts of the last state written, or None where there is none yet.

        Raises:
            StoreError: The state belongs to a fit with other settings, seed or data.
            UnreadableError: The file is damaged.
        """
        path = self.folder / FILE
        if not path.exists():
            return None
        tensors, metadata = _io.read_tensors(path)
        content = json.loads(metadata["state"])
        expected = _io.jsonable(self.facts)
        differing = [name for name in expected if content["facts"].get(name) != expected[name]]
        if differing:
            raise StoreError(
                f"expected the checkpoint of this fit in {self.folder}, got one with another "
                f"{' and '.join(differing)}; repeat the interrupted call exactly, or choose another folder"
            )
        return tensors, content["progress"]

    def write(self, tensors: dict[str, torch.Tensor], progress: dict[str, Any]) -> None:
        """Replace the state, whole or not at all.

        Raises:
            StoreError: The folder cannot be written.
        """
        content = {"facts": _io.jsonable(self.facts), "progress": progress}
        _io.write_tensors(self.folder / FILE, tensors, {"state": json.dumps(content)})

    def remove(self) -> None:
        """Delete every state of the fit and the folders that this leaves empty."""
        for path in sorted(self.folder.rglob(FILE), reverse=True):
            path.unlink()
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        with contextlib.suppress(OSError):
            self.folder.rmdir()
