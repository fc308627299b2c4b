"""Reading a store, and the entrances to making one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from grove_adapters import _checks, _io
from grove_adapters.config import nearest
from grove_adapters.embeddings import MODALITIES, Embeddings, Modality, Pairs, Projection, Source
from grove_adapters.errors import InputError, SourceMismatchError, StoreError, UnknownNameError
from grove_adapters.extract.base import Extractor
from grove_adapters.extract.records import Record, Records
from grove_adapters.store import arrays, building, importing
from grove_adapters.store.files import checksum, read_column
from grove_adapters.store.manifest import NAME, Manifest


class EmbeddingStore:
    """Frozen embeddings of images and texts on disk, with everything that must travel with them.

    Arrays are memory maps and opening reads only the manifest, so it takes as long for a hundred million rows as for a
    hundred. A store is never changed once it is made; `verify` proves it.

    Attributes:
        path: The store's folder.
        reused: Whether `build`, `from_arrays` or `from_folder` found the store there instead of making it.
    """

    def __init__(self, path: Path, manifest: Manifest, *, reused: bool = False) -> None:
        self.path = path
        self.reused = reused
        self._manifest = manifest
        self._arrays: dict[str, np.ndarray] = {}

    @classmethod
    def open(cls, path: str | Path, *, source: Source | None = None) -> Self:
        """Open a store.

        Args:
            path: The store's folder.
            source: The source it must be of, where that matters.

        Raises:
            StoreError: There is no store, it is half-built, its manifest was edited, or a file is missing or of
                another size.
            SourceMismatchError: It is of another model, precision or preprocessing.
        """
        path = Path(path)
        manifest = Manifest.read(path)
        for name, facts in manifest.files.items():
            file = path / name
            size = file.stat().st_size if file.is_file() else None
            if size != facts["bytes"]:
                got = "no such file" if size is None else f"{size} bytes"
                raise StoreError(
                    f"expected {file} with {facts['bytes']} bytes, got {got}; restore it or build the store again"
                )
        if source is not None and source != manifest.source:
            raise SourceMismatchError(
                f"the store at {path} is of another source: {manifest.source.difference(source)}; open the right one, "
                "or build one of this source elsewhere"
            )
        return cls(path, manifest)

    @classmethod
    def build(
        cls,
        extractor: Extractor,
        records: Records | Sequence[Record],
        path: str | Path,
        *,
        views: int = 0,
        seed: int = 0,
        batch_size: int = 32,
        num_workers: int | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        dtype: Literal["float32", "float16"] = "float32",
        features: bool = False,
        progress: bool = True,
    ) -> Self:
        """Embed images and captions into a new store.

        Interrupted in whatever way, it leaves ``<path>.partial`` behind, and the same call continues there: no row is
        lost or doubled, and with the same `batch_size` the store's bytes are those of an undisturbed run. Where the
        same model already embedded the same records with the same settings into `path`, that store is opened instead
        and `reused` is True.

        Args:
            extractor: The frozen model.
            records: What to embed. Rows are sorted by split, so that a split is a slice.
            path: The store's folder, which must not hold anything else.
            views: K seeded augmentations of every item (for test-time data augmentation); see `extract.views`.
            seed: Address of the views.
            batch_size: Items the encoder sees at once; views count.
            num_workers: Loading processes; None for one a core, leaving one to the encoder. The result does not depend
                on it.
            on_error: ``"raise"`` on an unreadable image, or ``"skip"`` it with its captions and list it in `info`.
            dtype: ``"float32"``, or ``"float16"`` for half the space.
            features: Whether to keep, for every item itself but not for its views, what the encoder's last linear
                layer reads, and that layer's weights; the adapter `laplace` needs them. The embeddings are then the
                layer's output for these features, equal to those without up to rounding.
            progress: Whether to show a progress bar with rate and remaining time.

        Raises:
            SourceMismatchError: A store or unfinished build of another model is in the way.
            StoreError: One of other records or settings, or something else, is in the way; or the disk is full.
            StoreLockedError: Another process is building it.
            UnreadableError: An image cannot be read (policy ``"raise"``), or none of them can.
            NumericalError: The model gives NaN, infinity or zeros.
            InputTypeError: The extractor is none, or cannot give features.
            InputError: Features are asked for and an encoder does not end in a linear layer.
        """
        path = Path(path)
        reused = building.build(
            extractor,
            records,
            path,
            views=views,
            seed=seed,
            batch_size=batch_size,
            num_workers=num_workers,
            on_error=on_error,
            dtype=dtype,
            features=features,
            progress=progress,
        )
        return cls._made(path, reused)

    @classmethod
    def from_arrays(
        cls,
        path: str | Path,
        *,
        images: Any = None,
        texts: Any = None,
        image_ids: Any = None,
        text_ids: Any = None,
        links: Any = None,
        positives: Any = None,
        labels: Any = None,
        splits: Any = None,
        image_views: Any = None,
        text_views: Any = None,
        image_features: Any = None,
        text_features: Any = None,
        image_projection: Projection | None = None,
        text_projection: Projection | None = None,
        image_columns: Mapping[str, Any] | None = None,
        text_columns: Mapping[str, Any] | None = None,
        source: Source | None = None,
        normalise: bool = False,
        dtype: Literal["float32", "float16"] | None = None,
        seed: int = 0,
    ) -> Self:
        """Make a store of embeddings that exist already.

        Every array may be an array, a tensor, or the path of a ``.npy``, ``.npz``, ``.safetensors`` or ``.parquet``
        file, with the name of the array inside after a colon where there are several: ``"clip.npz:image"``.

        Args:
            path: The store's folder, which must not hold anything else.
            images: (N, D) image embeddings, or None for a store of texts.
            texts: (T, D) text embeddings, or None for a store of images.
            image_ids: (N,) unique ids; row numbers where left out.
            text_ids: (T,) unique ids; row numbers where left out.
            links: (P, 2) rows (image row, text row) that belong together. Left out, row i with row i where there are
                as many images as texts.
            positives: (R, 2) further true matches.
            labels: (N,) classes of the images.
            splits: (N,) split names of the images, or shares such as ``{"train": .8, "test": .2}`` drawn with `seed`.
            image_views: (N, K, D) embeddings of K augmentations of each image.
            text_views: (T, K, D) embeddings of K augmentations of each text.
            image_features: (N, F) inputs of the image encoder's last linear layer; see `Embeddings.features`.
            text_features: (T, F) inputs of the text encoder's last linear layer.
            image_projection: The image encoder's last linear layer; goes with `image_features`.
            text_projection: The text encoder's last linear layer; goes with `text_features`.
            image_columns: Further facts by name, one value an image.
            text_columns: Further facts by name, one value a text, e.g. ``{"text": captions}``.
            source: The model that made them. Left out, an unknown one named after the store (so that imports of
                different models are not mixed up), whose normalisation is measured.
            normalise: Whether to L2-normalise them now.
            dtype: ``"float32"`` or ``"float16"``; left out, float16 stays and the rest becomes float32.
            seed: Address of drawn splits.

        Raises:
            InputError: Wrong shapes, NaN, infinite or zero rows, duplicate ids, links out of range, features that the
                projection does not map to the embeddings, or a `source` that says normalised of vectors that are not.
            InputTypeError: An array of the wrong type.
            UnreadableError: A file is missing, damaged or lacks the named array.
            StoreError: Something else is in the way, or the disk is full.
            StoreLockedError: Another process is writing it.
        """
        given = arrays.Given(
            images=images,
            texts=texts,
            image_ids=image_ids,
            text_ids=text_ids,
            links=links,
            positives=positives,
            labels=labels,
            splits=splits,
            image_views=image_views,
            text_views=text_views,
            image_features=image_features,
            text_features=text_features,
            image_projection=image_projection,
            text_projection=text_projection,
            image_columns=dict(image_columns or {}),
            text_columns=dict(text_columns or {}),
        )
        path = Path(path)
        reused = arrays.write(path, given, source=source, normalise=normalise, dtype=dtype, seed=seed)
        return cls._made(path, reused)

    @classmethod
    def from_folder(cls, path: str | Path, folder: str | Path, **settings: Any) -> Self:
        """Make a store of a folder of embeddings.

        Known are the folder that clip-retrieval writes (``img_emb/``, ``text_emb/``, ``metadata/``, in any number of
        shards) and one with ``image.npy`` and ``text.npy`` (or ``images``, ``texts``; any of the array formats), next
        to which ``links``, ``labels``, ``image_ids``, ``text_ids``, ``positives`` and a table ``metadata`` or
        ``pairs`` (CSV, JSON, JSONL or parquet, one row an image) are taken along; the table's ``image_id``, where
        unique, becomes the images' ids.

        Args:
            path: The store's folder.
            folder: Where the arrays are.
            settings: Arguments of `from_arrays`, which win over what the folder says.

        Raises:
            UnreadableError: The folder is missing or of no known layout.
            InputError: As in `from_arrays`.
        """
        return cls.from_arrays(path, **{**importing.find_arrays(Path(folder)), **settings})

    @classmethod
    def _made(cls, path: Path, reused: bool) -> Self:
        store = cls.open(path)
        store.reused = reused
        if reused:
            building.logger.info("reusing the store at %s: same source, content and settings", path)
        return store

    @property
    def source(self) -> Source:
        """The frozen model underneath."""
        return self._manifest.source

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that stand for every byte of the store."""
        return self._manifest.digest[:16]

    @property
    def dim(self) -> int:
        """D, the width of the embeddings."""
        return self._manifest.dim

    @property
    def dtype(self) -> str:
        """``"float32"`` or ``"float16"``."""
        return self._manifest.dtype

    @property
    def n_images(self) -> int:
        """N, the number of images."""
        return self._manifest.rows["image"]

    @property
    def n_texts(self) -> int:
        """T, the number of texts."""
        return self._manifest.rows["text"]

    @property
    def n_views(self) -> int:
        """K, the number of stored views of each item; 0 where there are none."""
        return 0 if self._manifest.views is None else self._manifest.views["count"]

    @property
    def splits(self) -> dict[str, int]:
        """Images in each split; empty where the store has none."""
        return {name: ranges["image"][1] - ranges["image"][0] for name, ranges in self._manifest.splits.items()}  # type: ignore[index]

    def embeddings(self, modality: Modality, split: str | None = None) -> Embeddings:
        """The embeddings of one modality, still on disk.

        Args:
            modality: ``"image"`` or ``"text"``.
            split: Name of a split, or None for all rows.

        Raises:
            InputError: The store has none of that modality.
            UnknownNameError: There is no such split.
        """
        self._require(modality)
        whole = Embeddings(
            self._array(f"{modality}.npy"),
            self._array(f"{modality}.ids.npy"),
            modality=modality,
            source=self.source,
            views=self._optional(f"{modality}.views.npy"),
            features=self._optional(f"{modality}.features.npy"),
            projection=self._projection(modality),
            trusted=True,
        )
        rows = self._rows(modality, split)
        if isinstance(rows, np.ndarray):
            return whole.take(rows)
        parts = {name: getattr(whole, name) for name in ("values", "ids", "views", "features")}
        cut: dict[str, Any] = {name: None if array is None else array[rows] for name, array in parts.items()}
        return dataclasses.replace(whole, **cut, trusted=True)

    def pairs(self, split: str | None = None) -> Pairs:
        """Images, their texts and the links between them.

        Args:
            split: Name of a split, or None for everything.

        Raises:
            UnknownNameError: There is no such split; the message lists the splits.
            InputError: The store lacks images, texts or links.
        """
        for modality in MODALITIES:
            self._require(modality)
        if not self._manifest.rows["link"]:
            raise InputError(
                f"the store at {self.path} has no links between images and texts; make it again with links"
            )
        images, texts = self._rows("image", split), self._rows("text", split)
        return Pairs(
            self.embeddings("image", split),
            self.embeddings("text", split),
            self._matches("link", split, images, texts),
            classes=self.column("image", "label", split) if "label" in self.columns("image") else None,
            positives=self._matches("positive", split, images, texts) if self._manifest.rows["positive"] else None,
        )

    def columns(self, modality: Modality) -> tuple[str, ...]:
        """Names of the columns of one modality."""
        return tuple(self._manifest.columns[_checks.choice(modality, MODALITIES, what="modality")])

    def column(self, modality: Modality, name: str, split: str | None = None) -> np.ndarray:
        """One value a row, aligned with the rows of `pairs` and `embeddings` of the same split.

        Args:
            modality: ``"image"`` or ``"text"``.
            name: Name of the column.
            split: Name of a split, or None for all rows.

        Returns:
            (N,) numbers or booleans, or an object array of str.

        Raises:
            UnknownNameError: There is no such column or split.
        """
        if name not in self.columns(modality):
            raise UnknownNameError(
                f"the store at {self.path} has no {modality} column {name!r};{nearest(name, self.columns(modality))}"
            )
        files = [self._array(file) for file in self._manifest.columns[modality][name]]
        return read_column(files, self._rows(modality, split))

    def verify(self) -> None:
        """Read every byte and compare it with the checksums.

        Raises:
            StoreError: A file is damaged, edited or missing; all of them are named.
        """
        manifest = Manifest.read(self.path)
        damaged = []
        for name, facts in manifest.files.items():
            file = self.path / name
            if not file.is_file():
                damaged.append(f"{name} (missing)")
            elif checksum(file) != facts["sha256"]:
                damaged.append(name)
        if damaged:
            raise StoreError(
                f"expected the files of {self.path} as they were written, got damaged ones: {', '.join(damaged)}; "
                "restore them or build the store again"
            )

    def info(self) -> dict[str, Any]:
        """What is in the store, as JSON types."""
        manifest = self._manifest
        return {
            "path": str(self.path),
            "schema": manifest.schema,
            "source": self.source.to_dict(),
            "dim": self.dim,
            "dtype": self.dtype,
            "n_images": self.n_images,
            "n_texts": self.n_texts,
            "n_links": manifest.rows["link"],
            "n_positives": manifest.rows["positive"],
            "n_views": self.n_views,
            "views": _io.jsonable(manifest.views),
            "features": {modality: self._n_features(modality) for modality in MODALITIES},
            "splits": self.splits,
            "columns": {modality: list(self.columns(modality)) for modality in MODALITIES},
            "skipped": list(manifest.skipped),
            "truncated": manifest.truncated,
            "files": len(manifest.files) + 1,
            "bytes": sum(facts["bytes"] for facts in manifest.files.values()) + (self.path / NAME).stat().st_size,
            "fingerprint": self.fingerprint,
        }

    def report(self) -> str:
        """What is in the store, as lines of text."""
        facts = self.info()
        source = self.source
        vectors = f"{self.dim}-d {self.dtype}, {'L2-normalised' if source.normalised else 'not normalised'}"
        scale = "unknown" if source.logit_scale is None else f"{source.logit_scale:.4g}"
        lines = {
            "path": facts["path"],
            "model": f"{source} ({source.library}, {source.precision})",
            "preprocess": source.preprocess or "unknown",
            "vectors": f"{vectors}; logit scale {scale}",
            "images": f"{self.n_images:,}",
            "texts": f"{self.n_texts:,}",
            "links": f"{facts['n_links']:,} and {facts['n_positives']:,} further positives",
            "views": f"{self.n_views} of each item" if self.n_views else "none",
            "features": ", ".join(f"{count} of each {name}" for name, count in facts["features"].items() if count)
            or "none",
            "splits": ", ".join(f"{name} {count:,}" for name, count in self.splits.items()) or "none",
            "columns": "; ".join(f"{name}: {', '.join(facts['columns'][name]) or 'none'}" for name in MODALITIES),
            "skipped": f"{len(facts['skipped']):,} rows",
            "truncated": f"{facts['truncated']:,} captions",
            "size": f"{facts['bytes'] / 1e6:,.1f} MB in {facts['files']} files",
            "fingerprint": facts["fingerprint"],
        }
        return "\n".join(f"{name:<12}{text}" for name, text in lines.items())

    def __repr__(self) -> str:
        return f"EmbeddingStore({str(self.path)!r}: {self.n_images} images, {self.n_texts} texts, {self.source})"

    def _array(self, name: str) -> np.ndarray:
        if name in self._arrays:
            return self._arrays[name]
        array = _io.read_array(self.path / name, memmap=True)
        facts = self._manifest.files[name]
        if list(array.shape) != facts["shape"] or str(array.dtype) != facts["dtype"]:
            raise StoreError(
                f"expected {self.path / name} with shape {facts['shape']} of {facts['dtype']}, got "
                f"{list(array.shape)} of {array.dtype}; restore it or build the store again"
            )
        self._arrays[name] = array
        return array

    def _optional(self, name: str) -> np.ndarray | None:
        return self._array(name) if name in self._manifest.files else None

    def _n_features(self, modality: Modality) -> int:
        """Columns of the stored features; 0 where there are none."""
        facts = self._manifest.files.get(f"{modality}.features.npy")
        return 0 if facts is None else facts["shape"][1]

    def _projection(self, modality: Modality) -> Projection | None:
        weight = self._optional(f"{modality}.projection.weight.npy")
        return None if weight is None else Projection(weight, self._optional(f"{modality}.projection.bias.npy"))

    def _require(self, modality: Modality) -> None:
        _checks.choice(modality, MODALITIES, what="modality")
        if not self._manifest.rows[modality]:
            raise InputError(f"the store at {self.path} expected {modality}s, got none; build it with {modality}s")

    def _range(self, kind: str, split: str) -> list[int] | None:
        if split not in self._manifest.splits:
            known = ", ".join(f"{name} ({count} images)" for name, count in self.splits.items()) or "none"
            raise UnknownNameError(f"the store at {self.path} has no split {split!r}; its splits: {known}")
        return self._manifest.splits[split][kind]

    def _rows(self, modality: str, split: str | None) -> slice | np.ndarray:
        """The rows of a split: a slice, or numbers where its texts don't lie together."""
        if split is None:
            return slice(0, self._manifest.rows[modality])
        rows = self._range(modality, split)
        if rows is None:
            start, stop = self._range("link", split) or (0, 0)
            return np.unique(self._array("links.npy")[start:stop, 1])
        return slice(*rows)

    def _matches(self, kind: str, split: str | None, images: Any, texts: Any) -> np.ndarray:
        """Links or positives of a split, counted from its own first rows."""
        matches = self._array(f"{kind}s.npy")
        if split is None:
            return matches
        start, stop = self._range(kind, split) or (0, 0)
        matches = matches[start:stop]
        if isinstance(texts, slice):
            inside = (matches[:, 1] >= texts.start) & (matches[:, 1] < texts.stop)
            text = matches[:, 1] - texts.start
        else:
            text = np.searchsorted(texts, matches[:, 1]).clip(max=len(texts) - 1)
            inside = texts[text] == matches[:, 1]
        return np.stack([matches[:, 0] - images.start, text], 1)[inside]
