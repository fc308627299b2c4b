"""What is to be embedded: images with their captions, in one shape whatever file format they came from."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from grove_adapters import _checks, seeding
from grove_adapters.errors import InputError, InputTypeError
from grove_adapters.extract.records.images import ImageLoader, as_loader

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Caption:
    """One caption of one image.

    Attributes:
        text: The caption, whole; commas and line breaks are part of it.
        id: Unique among all captions; left out, the record's id and the caption's place in it, e.g. ``"cat.jpg#0"``.
        columns: Further facts such as ``{"level": 2}``, kept with the embedding under these names.
    """

    text: str
    id: str = ""
    columns: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """One image and its captions.

    Attributes:
        id: Unique among all images.
        image: A file path, encoded bytes, PIL image, (H, W, 3) uint8 array, or a function without arguments that
            returns a PIL image. Opened only when embedded, in the loading process.
        captions: `Caption`s, or plain strings; may be empty.
        split: Name of the split, ``""`` for none.
        label: Class of the image, or None.
        columns: Further facts, kept with the embedding under these names.

    Raises:
        InputTypeError: A caption is not text, or the image is nothing that can be opened.
        InputError: A caption is blank.
    """

    id: str
    image: Any
    captions: Sequence[Caption | str] = ()
    split: str = ""
    label: str | int | None = None
    columns: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", str(self.id))  # NumPy strings print, and therefore hash, differently
        if isinstance(self.captions, str | Caption):
            raise InputTypeError(
                f"captions of image {self.id!r}: expected a list of captions, got one bare caption; write [caption]"
            )
        captions = []
        for place, caption in enumerate(self.captions):
            caption = caption if isinstance(caption, Caption) else Caption(caption)
            name = caption.id or f"{self.id}#{place}"
            if not isinstance(caption.text, str):
                raise InputTypeError(
                    f"caption {name!r} of image {self.id!r}: expected text, got {type(caption.text).__name__} "
                    f"{caption.text!r}; correct it or leave it out"
                )
            if not caption.text.strip():
                raise InputError(
                    f"caption {name!r} of image {self.id!r}: expected some text, got a blank; leave it out"
                )
            captions.append(replace(caption, id=name))
        object.__setattr__(self, "captions", tuple(captions))
        object.__setattr__(self, "image", as_loader(self.image, name=self.id))

    @property
    def loader(self) -> ImageLoader:
        """Opens the picture."""
        return self.image


class Records(Sequence[Record]):
    """All the images and captions of a data set, checked once.

    Args:
        records: The records in order.
        positives: (R, 2) further true matches beyond an image and its own captions, as (image number, caption number)
            counted from 0 in the order of `records` and of their captions.

    Raises:
        InputError: No records, duplicate image or caption ids, or positives out of range.
    """

    def __init__(self, records: Sequence[Record], *, positives: Any = None) -> None:
        self._records = tuple(records)
        if not self._records:
            raise InputError("records expected at least one image, got none; check the path and the format")
        _checks.as_ids([record.id for record in self._records], len(self), what="image ids of records")
        ids = [caption.id for caption in self.captions]
        _checks.as_ids(ids, len(ids), what="caption ids of records")
        rows = np.zeros((0, 2), np.int64) if positives is None else np.asarray(positives, dtype=np.int64)
        if rows.ndim != 2 or rows.shape[1] != 2:
            raise InputError(f"positives of records expected shape (R, 2), got {rows.shape}")
        _checks.rows_in_range(rows[:, 0], len(self), what="image column of positives")
        _checks.rows_in_range(rows[:, 1], len(ids), what="caption column of positives")
        self.positives = rows

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, row: Any) -> Any:
        return self._records[row]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    @functools.cached_property
    def captions(self) -> tuple[Caption, ...]:
        """Every caption, in the order of the records."""
        return tuple(caption for record in self._records for caption in record.captions)  # type: ignore[misc]

    @functools.cached_property
    def links(self) -> np.ndarray:
        """(P, 2) rows (image number, caption number) of every image and its own captions."""
        owners = np.repeat(np.arange(len(self)), [len(record.captions) for record in self._records])
        return np.stack([owners, np.arange(len(owners))], 1)

    @property
    def splits(self) -> np.ndarray:
        """(N,) split name of every image, ``""`` for none."""
        return np.array([record.split for record in self._records])

    def with_splits(self, fractions: Mapping[str, float], *, seed: int = 0) -> Records:
        """The same records with splits drawn at random by image; see `assign_splits`.

        Raises:
            InputError: The records bring splits of their own, or the fractions don't add up to 1.
        """
        if self.splits.any():
            raise InputError(
                f"expected records without splits, got the splits {sorted(set(self.splits) - {''})}; use these, "
                "or leave them out when reading"
            )
        names = assign_splits([record.id for record in self._records], fractions, seed=seed)
        drawn = [replace(record, split=str(name)) for record, name in zip(self._records, names, strict=True)]
        return Records(drawn, positives=self.positives)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 over ids, captions, splits, labels, columns and the keys of the images, as 16 hexadecimal digits.

        The key of an image file is its name and size, so that a moved folder keeps its fingerprint and no picture
        has to be read.
        """
        digest = hashlib.sha256()
        for record in self._records:
            facts = (record.id, record.loader.key, record.split, record.label, dict(record.columns))
            captions = [(caption.id, caption.text, dict(caption.columns)) for caption in record.captions]  # type: ignore[union-attr]
            digest.update(json.dumps([facts, captions], sort_keys=True, default=_plain).encode())
        digest.update(self.positives.tobytes())
        return digest.hexdigest()[:16]

    def __repr__(self) -> str:
        return f"Records({len(self)} images, {len(self.captions)} captions)"


def assign_splits(ids: Sequence[str] | np.ndarray, fractions: Mapping[str, float], *, seed: int = 0) -> np.ndarray:
    """(N,) split names drawn at random, the same for the same ids in any order.

    Args:
        ids: (N,) unique ids.
        fractions: Share of each split, e.g. ``{"train": .8, "test": .2}``, adding up to 1.
        seed: Address of the shuffle.

    Raises:
        InputError: The shares are not positive, don't add up to 1, or leave a split empty.
    """
    shares = np.array(list(fractions.values()), dtype=float)
    if not len(shares) or (shares <= 0).any() or abs(shares.sum() - 1) > 1e-6:
        raise InputError(f"split fractions expected positive shares that add up to 1, got {dict(fractions)}")
    bounds = np.round(np.cumsum(shares) * len(ids)).astype(int)
    sizes = np.diff(bounds, prepend=0)
    if (sizes == 0).any():
        name = list(fractions)[int(sizes.argmin())]
        raise InputError(f"split {name!r} of {len(ids)} images came out empty; give it a larger share or more images")
    shuffled = np.random.default_rng(seeding.derive(seed, "splits")).permutation(np.argsort(np.asarray(ids)))
    names = np.empty(len(ids), dtype=np.asarray(list(fractions)).dtype)
    names[shuffled] = np.repeat(list(fractions), sizes)
    return names


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)
