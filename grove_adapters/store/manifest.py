"""`manifest.json`: what a store says about itself, and how it proves that nobody changed it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grove_adapters import _io
from grove_adapters.embeddings import Source
from grove_adapters.errors import StoreError

SCHEMA = 1
NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`; it holds no date, host or path of the store, so equal stores have equal ones.

    Attributes:
        source: The model.
        recipe: What the store was made from; a build that finds the same recipe reuses the store.
        dim: D.
        dtype: ``"float32"`` or ``"float16"``.
        rows: Number of rows of ``image``, ``text``, ``link`` and ``positive``.
        views: ``count``, ``seed`` and ``recipe`` of the views, or None.
        splits: By name, the half-open row ranges of each of `rows`; None where a split's rows are not consecutive.
        columns: By modality and name, the files that hold the column.
        skipped: ``modality``, ``id`` and ``reason`` of every row left out.
        truncated: Number of captions that were longer than the model's context.
        files: By file name, ``bytes``, ``sha256``, ``shape`` and ``dtype``.
        schema: Version of this layout.
    """

    source: Source
    recipe: Mapping[str, Any]
    dim: int
    dtype: str
    rows: Mapping[str, int]
    views: Mapping[str, Any] | None
    splits: Mapping[str, Mapping[str, list[int] | None]]
    columns: Mapping[str, Mapping[str, list[str]]]
    skipped: list[dict[str, str]] = field(default_factory=list)
    truncated: int = 0
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def digest(self) -> str:
        """SHA-256 over everything above, and through the files' digests over every byte of the store."""
        return hashlib.sha256(_canonical(self._content())).hexdigest()

    def write(self, folder: Path) -> None:
        """Write `manifest.json` into `folder`."""
        _io.write_text(folder / NAME, _canonical({**self._content(), "digest": self.digest}).decode())

    def _content(self) -> dict[str, Any]:
        content = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return _io.jsonable({**content, "source": self.source.to_dict()})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and prove `manifest.json`: any changed byte, even a blank, is noticed.

        Raises:
            StoreError: There is no store, it is half-built, edited or damaged, or of a newer schema.
        """
        path = folder / NAME
        if not path.is_file():
            raise StoreError(_nothing_at(folder))
        try:
            text = path.read_bytes()
            content = json.loads(text)
            digest = content.pop("digest")
            whole = text == _canonical({**content, "digest": digest})
            whole = whole and digest == hashlib.sha256(_canonical(content)).hexdigest()
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise StoreError(_damaged(path)) from error
        if not whole:
            raise StoreError(_damaged(path))
        if content["schema"] != SCHEMA:
            raise StoreError(
                f"expected a store of schema {SCHEMA} at {folder}, got schema {content['schema']}; use the version of "
                "grove_adapters that wrote it, or build it again"
            )
        return cls(**{**content, "source": Source.from_dict(content["source"])})


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The entries in which two recipes differ, for error messages."""
    names = [*mine, *(name for name in theirs if name not in mine)]
    return ", ".join(
        f"{name} {mine.get(name)!r} ≠ {theirs.get(name)!r}" for name in names if mine.get(name) != theirs.get(name)
    )


def _canonical(content: Any) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()


def _damaged(path: Path) -> str:
    return f"expected {path} as it was written, got an edited or damaged one; restore it or build the store again"


def _nothing_at(folder: Path) -> str:
    if partial_folder(folder).exists():
        return (
            f"expected a whole store at {folder}, got an unfinished build in {partial_folder(folder)}; run the same "
            "build again to continue it"
        )
    what = "a folder without manifest.json" if folder.exists() else "nothing"
    return f"expected an embedding store at {folder}, got {what}; check the path, or build it with EmbeddingStore.build"


def partial_folder(path: Path) -> Path:
    """Where a store is put together before it is renamed to `path`."""
    return path.with_name(f"{path.name}.partial")
