"""The last step of every store: ids, links, columns and manifest beside the arrays, then the rename to its place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grove_adapters import _io
from grove_adapters.embeddings import MODALITIES, Source
from grove_adapters.store.files import describe_file, write_column
from grove_adapters.store.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What goes into a store besides the arrays of embeddings, which are already in its folder.

    Attributes:
        ids: By modality, the ids in row order.
        splits: (N,) split of every image, equal ones side by side, ``""`` for none.
        links: (P, 2) rows (image row, text row).
        positives: (R, 2) further true matches.
        columns: By modality and name, one value a row.
    """

    source: Source
    recipe: Mapping[str, Any]
    dim: int
    dtype: str
    ids: Mapping[str, Sequence[str] | np.ndarray]
    splits: np.ndarray
    links: np.ndarray
    positives: np.ndarray
    columns: Mapping[str, Mapping[str, Any]]
    views: Mapping[str, Any] | None = None
    skipped: list[dict[str, str]] = field(default_factory=list)
    truncated: int = 0


def finish(folder: Path, contents: Contents) -> Manifest:
    """Write everything but the embeddings into `folder`, and the manifest last."""
    links, positives = _by_image(contents.links), _by_image(contents.positives)
    for name, rows in (("links", links), ("positives", positives)):
        if len(rows):
            _io.write_array(folder / f"{name}.npy", rows)
    columns: dict[str, dict[str, list[str]]] = {modality: {} for modality in MODALITIES}
    for modality in MODALITIES:
        if modality not in contents.ids:
            continue
        _io.write_array(folder / f"{modality}.ids.npy", np.asarray(contents.ids[modality], dtype=str))
        for place, (name, values) in enumerate(contents.columns.get(modality, {}).items()):
            what = f"{modality} column {name!r}"
            columns[modality][name] = write_column(folder, f"{modality}.column.{place}", values, what=what)
    rows_of: dict[str, int] = {modality: len(contents.ids.get(modality, ())) for modality in MODALITIES}
    manifest = Manifest(
        source=contents.source,
        recipe=contents.recipe,
        dim=contents.dim,
        dtype=contents.dtype,
        rows={**rows_of, "link": len(links), "positive": len(positives)},
        views=contents.views,
        splits=_split_ranges(contents.splits, links, positives),
        columns=columns,
        skipped=contents.skipped,
        truncated=contents.truncated,
        files={file.name: describe_file(file) for file in sorted(folder.glob("*.npy"))},
    )
    manifest.write(folder)
    return manifest


def occupied(path: Path) -> bool:
    """Whether something stands where a store is to go; an empty folder does not count."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def put_in_place(folder: Path, path: Path) -> None:
    """Rename a finished folder to the store's path, and make sure that this survives a crash."""
    sync_folder(folder)
    os.rename(folder, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def order_by_split(splits: np.ndarray) -> np.ndarray:
    """(N,) rows sorted by split in order of first appearance, unsplit ones last, otherwise as they were."""
    names, first, which = np.unique(splits, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(np.where(names == "", len(splits), first)))
    return np.argsort(rank[which], kind="stable")


def _by_image(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.int64).reshape(-1, 2)
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


def _split_ranges(splits: np.ndarray, links: np.ndarray, positives: np.ndarray) -> dict[str, dict[str, Any]]:
    """Row ranges of every split; texts have one where each of them belongs to a single split and they lie together."""
    ranges: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(splits.tolist()):
        if name:
            rows = np.flatnonzero(splits == name)
            image = [int(rows[0]), int(rows[-1]) + 1]
            link = np.searchsorted(links[:, 0], image).tolist()
            texts = np.unique(links[link[0] : link[1], 1])
            together = len(texts) == 0 or texts[-1] - texts[0] + 1 == len(texts)
            text = [int(texts[0]), int(texts[-1]) + 1] if len(texts) else [0, 0]
            positive = np.searchsorted(positives[:, 0], image).tolist()
            ranges[name] = {"image": image, "text": text if together else None, "link": link, "positive": positive}
    return ranges
