"""From arrays that people have to a store."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grove_adapters import _checks
from grove_adapters.embeddings import Embeddings, Modality, Projection, Source
from grove_adapters.errors import InputError, StoreError
from grove_adapters.extract.records import assign_splits
from grove_adapters.store.files import copy_rows, write_projection
from grove_adapters.store.finishing import Contents, finish, occupied, order_by_split, put_in_place
from grove_adapters.store.importing import load
from grove_adapters.store.lock import locked
from grove_adapters.store.manifest import Manifest, partial_folder


@dataclass
class Given:
    """The arguments of `EmbeddingStore.from_arrays` that hold data; files are read when the object is made."""

    images: Any = None
    texts: Any = None
    image_ids: Any = None
    text_ids: Any = None
    links: Any = None
    positives: Any = None
    labels: Any = None
    splits: Any = None
    image_views: Any = None
    text_views: Any = None
    image_features: Any = None
    text_features: Any = None
    image_projection: Projection | None = None
    text_projection: Projection | None = None
    image_columns: dict[str, Any] = field(default_factory=dict)
    text_columns: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, Mapping):
                setattr(self, item.name, load(value, role=item.name))
        if self.images is None and self.texts is None:
            raise InputError("expected images=, texts= or both, got neither; give at least one array of embeddings")
        if self.labels is not None:
            self.image_columns = {"label": self.labels, **self.image_columns}


def write(path: Path, given: Given, *, source: Source | None, normalise: bool, dtype: str | None, seed: int) -> bool:
    """Write arrays as a store; see `EmbeddingStore.from_arrays`.

    Returns:
        True where a store of the very same content was there already.
    """
    images, texts = _embeddings("image", given), _embeddings("text", given)
    source = _described(source, [part for part in (images, texts) if part is not None], normalise, path)
    if images is not None and texts is not None:
        _checks.same_dim(images.dim, texts.dim, what="texts beside images")
    links = _match_rows(given.links, images, texts, "links")
    if given.links is None and images is not None and texts is not None and len(images) == len(texts):
        links = np.stack([np.arange(len(images))] * 2, 1)
    positives = _match_rows(given.positives, images, texts, "positives")
    splits = _split_names(given.splits, images, seed)

    order = {"image": order_by_split(splits), "text": _text_order(splits, links, 0 if texts is None else len(texts))}
    links, positives = _renumbered(links, order), _renumbered(positives, order)
    parts: dict[str, Embeddings] = {part.modality: part for part in (images, texts) if part is not None}
    target = np.dtype(dtype or _kept_dtype(parts))
    columns = {
        "image": _ordered(given.image_columns, order["image"], "image"),
        "text": _ordered(given.text_columns, order["text"], "text"),
    }
    contents = Contents(
        source=source,
        recipe={"arrays": "given"},
        dim=next(iter(parts.values())).dim,
        dtype=str(target),
        ids={modality: np.asarray(part.ids)[order[modality]] for modality, part in parts.items()},
        splits=splits[order["image"]],
        links=links,
        positives=positives,
        columns=columns,
        views=_views(parts),
    )
    with locked(path):
        folder = _fresh_folder(path)
        try:
            for modality, part in parts.items():
                rows = None if np.array_equal(order[modality], np.arange(len(part))) else order[modality]
                for name, values in ((f"{modality}.npy", part.values), (f"{modality}.views.npy", part.views)):
                    if values is not None:
                        copy_rows(folder / name, _Unit(values) if normalise else values, rows, target)
                if part.projection is not None:
                    copy_rows(folder / f"{modality}.features.npy", part.features, rows, target)
                    write_projection(folder, modality, part.projection)
            manifest = finish(folder, contents)
            if occupied(path):
                if Manifest.read(path).digest != manifest.digest:
                    raise StoreError(
                        f"expected nothing or the same content at {path}, got another store; choose another path, or "
                        "delete it"
                    )
                return True
            put_in_place(folder, path)
            return False
        finally:
            shutil.rmtree(partial_folder(path), ignore_errors=True)


class _Unit:
    """An array whose rows are L2-normalised as they are read."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self.shape = values.shape

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: Any) -> np.ndarray:
        block = np.asarray(self._values[rows], dtype=np.float64)
        return block / np.linalg.norm(block, axis=-1, keepdims=True)


def _described(source: Source | None, parts: list[Embeddings], normalise: bool, path: Path) -> Source:
    """The source, given or unknown, that says of the vectors what is true."""
    normalised = normalise or all(_checks.normalised(part.values) for part in parts)
    if source is None:
        return Source(model=f"unknown:{path.name}", normalised=normalised)
    if source.normalised and not normalised:
        raise InputError(
            "expected vectors of unit length, as source= says, got others; say Source(normalised=False), or "
            "normalise=True"
        )
    return dataclasses.replace(source, normalised=True) if normalise else source


def _embeddings(modality: Modality, given: Given) -> Embeddings | None:
    """The embeddings of one modality, checked, or None where there are none."""
    values, ids = getattr(given, f"{modality}s"), getattr(given, f"{modality}_ids")
    beside = {name: getattr(given, f"{modality}_{name}") for name in ("views", "features", "projection")}
    if values is None:
        for what, array in {"ids": ids, **beside}.items():
            if array is not None:
                raise InputError(f"{modality} {what} expected {modality} embeddings beside them, got none; give both")
        return None
    return Embeddings(values, ids, modality=modality, **beside)


def _match_rows(rows: Any, images: Embeddings | None, texts: Embeddings | None, what: str) -> np.ndarray:
    if rows is None:
        return np.zeros((0, 2), dtype=np.int64)
    rows = np.asarray(rows)
    if rows.ndim != 2 or rows.shape[1] != 2 or rows.dtype.kind not in "iu":
        raise InputError(f"{what} expected (P, 2) whole numbers (image row, text row), got {rows.dtype} {rows.shape}")
    if images is None or texts is None:
        raise InputError(f"{what} expected images and texts to join, got only one of them; give both or leave it out")
    _checks.rows_in_range(rows[:, 0], len(images), what=f"image column of {what}")
    _checks.rows_in_range(rows[:, 1], len(texts), what=f"text column of {what}")
    return rows.astype(np.int64)


def _split_names(splits: Any, images: Embeddings | None, seed: int) -> np.ndarray:
    if images is None:
        if splits is not None:
            raise InputError("splits expected images to split, got only texts; leave splits out")
        return np.zeros(0, dtype="U1")
    if splits is None:
        return np.full(len(images), "")
    if isinstance(splits, Mapping):
        return assign_splits(images.ids, splits, seed=seed)
    return _checks.as_ids(splits, len(images), what="splits of images", unique=False)


def _text_order(splits: np.ndarray, links: np.ndarray, n: int) -> np.ndarray:
    """(T,) text rows sorted by the split of their first image, so that a split's texts lie together; else as given."""
    if not splits.any() or not len(links):
        return np.arange(n)
    split_rank = np.empty(len(splits), dtype=np.int64)
    split_rank[order_by_split(splits)] = np.cumsum(_changes(splits[order_by_split(splits)]))
    rank = np.full(n, len(splits))
    np.minimum.at(rank, links[:, 1], split_rank[links[:, 0]])
    return np.argsort(rank, kind="stable")


def _changes(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[False], values[1:] != values[:-1]])


def _renumbered(rows: np.ndarray, order: Mapping[str, np.ndarray]) -> np.ndarray:
    if not len(rows):
        return rows
    return np.stack([np.argsort(order["image"])[rows[:, 0]], np.argsort(order["text"])[rows[:, 1]]], 1)


def _ordered(columns: Mapping[str, Any], order: np.ndarray, modality: str) -> dict[str, Any]:
    ordered = {}
    for name, values in columns.items():
        _checks.same_rows(len(order), len(values), what=f"{modality} column {name!r}")
        ordered[name] = np.asarray(values, dtype=None if isinstance(values, np.ndarray) else object)[order]
    return ordered


def _kept_dtype(parts: Mapping[str, Embeddings]) -> str:
    return "float16" if all(part.values.dtype == np.float16 for part in parts.values()) else "float32"


def _views(parts: Mapping[str, Embeddings]) -> dict[str, Any] | None:
    counts = {part.n_views for part in parts.values()}
    if len(counts) > 1:
        raise InputError(f"expected as many views of images as of texts, got {sorted(counts)}; give both or neither")
    count = counts.pop()
    return {"count": count, "seed": None, "recipe": "given"} if count else None


def _fresh_folder(path: Path) -> Path:
    """An empty folder to put the store together in; an unfinished extraction is not thrown away."""
    partial = partial_folder(path)
    if (partial / "journal.jsonl").exists():
        raise StoreError(
            f"expected no unfinished build in {partial}, got one; continue it with the same build, choose another "
            "path, or delete it"
        )
    if occupied(path):
        Manifest.read(path)  # something else than a store is refused before any work
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "store").mkdir(parents=True)
    return partial / "store"
