"""What a build sets out to make, and whether what it finds is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grove_adapters.embeddings import Modality, Source
from grove_adapters.errors import InputError, SourceMismatchError, StoreError
from grove_adapters.extract.records import Caption, Record, Records
from grove_adapters.extract.views import RECIPE
from grove_adapters.store.files import column_array
from grove_adapters.store.finishing import order_by_split
from grove_adapters.store.manifest import Manifest, difference

BUILT_COLUMNS = {"image": ("label", "path"), "text": ("text", "truncated")}
"""Columns that a build adds by itself."""


class Plan:
    """What will be embedded, in the order of the store's rows: images by split, captions by image."""

    def __init__(
        self,
        records: Records | Sequence[Record],
        source: Source,
        *,
        views: int,
        seed: int,
        dtype: str,
        features: bool,
    ) -> None:
        self.source = source
        self.views = views
        self.features = features
        self.seed = seed
        self.dtype = dtype
        records = records if isinstance(records, Records) else Records(records)
        order = order_by_split(records.splits)
        self.images: list[Record] = [records[row] for row in order]
        self.captions: list[Caption] = [caption for image in self.images for caption in image.captions]  # type: ignore[misc]
        self.owners = np.repeat(np.arange(len(order)), [len(image.captions) for image in self.images])
        self.positives = self._positives(records, order)
        uncut = np.zeros(len(self.captions), dtype=bool)
        columns = {"image": image_columns(self.images), "text": caption_columns(self.captions, uncut)}
        for modality, named in columns.items():
            for name, values in named.items():
                column_array(values, what=f"{modality} column {name!r}")  # refused now rather than hours later
        self.recipe = {
            "records": records.fingerprint,
            "images": len(self.images),
            "captions": len(self.captions),
            "views": views,
            "view seed": seed if views else None,
            "view recipe": RECIPE if views else None,
            "dtype": dtype,
            **({"features": True} if features else {}),  # a store without is as those that knew no features
        }

    def _positives(self, records: Records, order: np.ndarray) -> np.ndarray:
        """The records' positives in rows of the plan."""
        counts = np.array([len(record.captions) for record in records])
        starts = np.cumsum(counts) - counts
        captions = np.concatenate([np.arange(starts[row], starts[row] + counts[row]) for row in order])
        return np.stack([np.argsort(order)[records.positives[:, 0]], np.argsort(captions)[records.positives[:, 1]]], 1)


@dataclass(frozen=True)
class Unfinished:
    """What an unfinished build is of."""

    source: Source
    recipe: dict[str, Any]


def refuse_other(found: Manifest | Unfinished, plan: Plan, path: Path) -> None:
    """Refuse to reuse or continue what another model, other records or other settings made."""
    what = "the unfinished build" if isinstance(found, Unfinished) else "the store"
    advice = "choose another path, or delete it to build anew"
    if found.source != plan.source:
        raise SourceMismatchError(
            f"{what} at {path} is of another source: {found.source.difference(plan.source)}; {advice}"
        )
    if dict(found.recipe) != plan.recipe:
        raise StoreError(
            f"{what} at {path} was made from something else: {difference(found.recipe, plan.recipe)}; {advice}"
        )


def image_columns(images: Sequence[Record]) -> dict[str, Any]:
    """Columns of images: the records' own, and label and path where there are any."""
    columns = _own_columns(images, "image")
    if any(image.label is not None for image in images):
        columns["label"] = [image.label for image in images]
    paths = [image.loader.path for image in images]
    return {**columns, "path": paths} if any(paths) else columns


def caption_columns(captions: Sequence[Caption], truncated: np.ndarray) -> dict[str, Any]:
    """Columns of captions: the texts, whether they were cut, and the captions' own."""
    texts = [caption.text for caption in captions]
    return {"text": texts, "truncated": truncated, **_own_columns(captions, "text")}


def _own_columns(items: Sequence[Record] | Sequence[Caption], modality: Modality) -> dict[str, Any]:
    names = dict.fromkeys(name for item in items for name in item.columns)
    for name in names:
        if name in BUILT_COLUMNS[modality]:
            raise InputError(f"{modality} column {name!r} is one that every store writes itself; rename yours")
    return {name: [item.columns.get(name) for item in items] for name in names}
