"""From an extractor and records to a store, in a way that a kill at any moment only interrupts."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from grove_adapters import _checks, _io
from grove_adapters.embeddings import MODALITIES, Modality, Source
from grove_adapters.errors import (
    GroveAdaptersError,
    InputTypeError,
    NumericalError,
    StoreError,
    UnreadableError,
)
from grove_adapters.extract.base import Extractor, FeatureExtractor
from grove_adapters.extract.loop import Embedded, ImageStage, Stage, TextStage, default_workers, embed_from
from grove_adapters.extract.records import Record, Records
from grove_adapters.extract.views import RECIPE
from grove_adapters.store.files import RowFile, copy_rows, write_projection
from grove_adapters.store.finishing import Contents, finish, occupied, put_in_place, sync_folder
from grove_adapters.store.journal import Journal
from grove_adapters.store.lock import StoreLock, locked
from grove_adapters.store.manifest import Manifest, partial_folder
from grove_adapters.store.plan import Plan, Unfinished, caption_columns, image_columns, refuse_other

logger = logging.getLogger(__name__)

COMMIT_SECONDS = 2.0
"""How much work a kill may cost."""


def build(
    extractor: Extractor,
    records: Records | Sequence[Record],
    path: Path,
    *,
    views: int,
    seed: int,
    batch_size: int,
    num_workers: int | None,
    on_error: Literal["raise", "skip"],
    dtype: Literal["float32", "float16"],
    features: bool,
    progress: bool,
) -> bool:
    """Embed `records` into the store at `path`; see `EmbeddingStore.build`.

    Returns:
        True where the store was there already, made by the same model from the same records with the same settings.
    """
    if not isinstance(extractor, Extractor):
        raise InputTypeError(
            f"build expected an extractor with source, device, preprocess, tokenize, embed_images and embed_texts, got "
            f"{type(extractor).__name__}; use OpenCLIPExtractor or HFExtractor"
        )
    if features and not isinstance(extractor, FeatureExtractor):
        raise InputTypeError(
            "features=True expected an extractor with projection, featured_images and featured_texts, got "
            f"{type(extractor).__name__}; use OpenCLIPExtractor or HFExtractor, or build without features"
        )
    _checks.choice(on_error, ("raise", "skip"), what="on_error")
    _checks.choice(dtype, ("float32", "float16"), what="dtype")
    _checks.count(batch_size, what="batch_size")
    workers = default_workers() if num_workers is None else _checks.count(num_workers, what="num_workers", at_least=0)
    _checks.count(views, what="views", at_least=0)
    plan = Plan(records, extractor.source, views=views, seed=seed, dtype=dtype, features=features)
    partial = partial_folder(path)
    if _is_there(path, plan, on_error) and not partial.exists():
        return True  # without a lock, so that a read-only store can be reused
    with locked(path) as lock:
        if _is_there(path, plan, on_error):
            shutil.rmtree(partial, ignore_errors=True)  # a kill between the rename and the end of the build
            return True
        run = _Run(plan, extractor, partial, lock, batch_size, workers, on_error, progress)
        put_in_place(run.to_end(), path)
        shutil.rmtree(partial, ignore_errors=True)
    return False


def _is_there(path: Path, plan: Plan, on_error: str) -> bool:
    """Whether the planned store stands at `path`; anything else in the way is refused."""
    if not occupied(path):
        return False
    manifest = Manifest.read(path)
    refuse_other(manifest, plan, path)
    if on_error == "raise" and manifest.skipped:
        raise StoreError(
            f"the store at {path} left out {len(manifest.skipped)} rows that could not be read; accept that with "
            "on_error='skip', or delete it to read them again"
        )
    return True


@dataclass
class _Done:
    """What the journal knows about one modality."""

    rows: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    truncated: list[int] = field(default_factory=list)


class _Run:
    """One attempt to bring an unfinished build to its end."""

    def __init__(
        self,
        plan: Plan,
        extractor: Extractor,
        partial: Path,
        lock: StoreLock,
        batch_size: int,
        num_workers: int,
        on_error: str,
        progress: bool,
    ) -> None:
        self.plan = plan
        self.extractor = extractor
        self.partial = partial
        self.folder = partial / "store"
        self.lock = lock
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.on_error = on_error
        self.progress = progress
        self.journal = Journal(partial / "journal.jsonl")
        self.done: dict[str, _Done] = {"image": _Done(), "text": _Done()}
        self.dim = int(extractor.embed_texts(["a"]).shape[1])
        self.widths = _feature_widths(extractor) if plan.features else {}

    def to_end(self) -> Path:
        """Embed what is missing and return the folder of the finished store."""
        with _full_disk_is_a_sentence(self.partial):
            self._continue_or_begin()
            plan = self.plan
            self._embed("image", ImageStage(plan.images, self.extractor.preprocess, plan.views, plan.seed))
            if len(self.done["image"].failed) == len(plan.images):
                shutil.rmtree(self.partial)
                reason = self.done["image"].failed[0]
                raise UnreadableError(f"expected readable images, got none among {len(plan.images)} ({reason})")
            if plan.captions:
                self._embed("text", TextStage(plan.captions, self.extractor.tokenize, plan.views, plan.seed))
            return self._finish()

    def _continue_or_begin(self) -> None:
        plan = {"source": self.plan.source.to_dict(), "recipe": self.plan.recipe}
        entries = self.journal.read()
        if not entries:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self.journal.append(plan)
            sync_folder(self.partial)
            sync_folder(self.partial.parent)
            return
        refuse_other(Unfinished(Source.from_dict(entries[0]["source"]), entries[0]["recipe"]), self.plan, self.partial)
        for entry in entries[1:]:
            done = self.done[entry["modality"]]
            done.rows = entry["rows"]
            done.failed.update({int(row): reason for row, reason in entry["failed"].items()})
            done.truncated.extend(entry["truncated"])
        for leftover in self.folder.glob("*.partial"):  # a kill while a small file was written
            leftover.unlink()
        logger.info(
            "continuing %s after %d images and %d captions",
            self.partial,
            self.done["image"].rows,
            self.done["text"].rows,
        )

    def _embed(self, modality: Modality, stage: Stage) -> None:
        """Append the embeddings of every row that is not there yet, and note them in the journal."""
        done = self.done[modality]
        if self.on_error == "raise" and done.failed:
            raise UnreadableError(
                f"{next(iter(done.failed.values()))} was skipped by the unfinished build in {self.partial}; continue "
                "with on_error='skip', or delete that folder to try the image again"
            )
        if done.rows == len(stage):
            return
        bar = tqdm(
            total=len(stage),
            initial=done.rows,
            desc=f"{modality}s → {self.plan.source}",
            unit={"image": "img", "text": "txt"}[modality],
            disable=not self.progress,
            dynamic_ncols=True,
        )
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context(RowFile(self.folder / name, (len(stage), *shape), self.plan.dtype, rows=done.rows))
                for name, shape in self._arrays(modality).items()
            ]
            stack.enter_context(bar)
            pending = _Done(rows=done.rows)
            committed = time.monotonic()
            try:
                for batch in embed_from(
                    done.rows,
                    stage,
                    self.extractor,
                    batch_size=self.batch_size,
                    views=self.plan.views,
                    num_workers=self.num_workers,
                    features=self.plan.features,
                ):
                    self._refuse_unreadable(batch)
                    for file, block in zip(files, self._blocks(modality, batch, pending.rows), strict=True):
                        file.append(block)
                    bar.update(batch.stop - pending.rows)
                    pending = _Done(  # in one piece: Ctrl-C may come between any two lines
                        batch.stop, {**pending.failed, **batch.failed}, [*pending.truncated, *batch.truncated]
                    )
                    if time.monotonic() - committed > COMMIT_SECONDS:
                        pending = self._commit(modality, files, pending)
                        committed = time.monotonic()
            finally:  # an error or Ctrl-C keeps what is done
                self._commit(modality, files, pending)

    def _arrays(self, modality: Modality) -> dict[str, tuple[int, ...]]:
        """The arrays of one modality by file name, with the shape of a row."""
        arrays: dict[str, tuple[int, ...]] = {f"{modality}.npy": (self.dim,)}
        if self.plan.views:
            arrays[f"{modality}.views.npy"] = (self.plan.views, self.dim)
        if self.plan.features:
            arrays[f"{modality}.features.npy"] = (self.widths[modality],)
        return arrays

    def _blocks(self, modality: Modality, batch: Embedded, start: int) -> Iterator[np.ndarray]:
        """The rows from `start` to the end of the batch for each of the arrays; unreadable ones are zeros."""
        shapes, found = self._arrays(modality).values(), self._checked(modality, batch)
        for shape, values in zip(shapes, found, strict=True):
            block = np.zeros((batch.stop - start, *shape), dtype=self.plan.dtype)
            if len(batch.rows):
                block[batch.rows - start] = values
            yield block

    def _commit(self, modality: Modality, files: list[RowFile], pending: _Done) -> _Done:
        """Data first, then the journal's word for it."""
        done = self.done[modality]
        if pending.rows > done.rows:
            for file in files:
                file.sync()
            facts = {"rows": pending.rows, "failed": pending.failed, "truncated": pending.truncated}
            self.journal.append({"modality": modality, **facts})
            done.rows = pending.rows
            done.failed.update(pending.failed)
            done.truncated.extend(pending.truncated)
            self.lock.touch()
        return _Done(rows=done.rows)

    def _refuse_unreadable(self, batch: Embedded) -> None:
        if self.on_error == "raise" and batch.failed:
            row, reason = next(iter(batch.failed.items()))
            raise UnreadableError(
                f"image {self.plan.images[row].id!r} cannot be read ({reason}); repair it, or leave such images "
                "out with on_error='skip'"
            )

    def _checked(self, modality: Modality, batch: Embedded) -> list[np.ndarray | None]:
        """What the batch holds for each of the arrays, unless it is something that no reader should meet."""
        with np.errstate(over="ignore"):
            values = batch.values.astype(self.plan.dtype)
            features = None if batch.features is None else batch.features.astype(self.plan.dtype)
        usable = np.all(np.isfinite(values).all(axis=2) & values.any(axis=2), axis=1)
        if features is not None:
            usable &= np.isfinite(features).all(axis=1)
        if not usable.all():
            items: Any = self.plan.images if modality == "image" else self.plan.captions
            raise NumericalError(
                f"{self.plan.source} expected finite embeddings with a direction, got NaN, infinity or zeros for "
                f"{modality} {items[batch.rows[usable.argmin()]].id!r}; try precision='fp32' and dtype='float32'"
            )
        found: list[np.ndarray | None] = [values[:, 0]]
        if self.plan.views:
            found.append(values[:, 1:])
        return [*found, features] if self.plan.features else found

    def _finish(self) -> Path:
        """Leave out the skipped rows and write the rest of the store."""
        plan, failed = self.plan, self.done["image"].failed
        keep = np.ones(len(plan.images), dtype=bool)
        keep[list(failed)] = False
        keep_text = keep[plan.owners]
        self._leave_out("image", keep)
        self._leave_out("text", keep_text)
        images = [image for image, kept in zip(plan.images, keep, strict=True) if kept]
        captions = [caption for caption, kept in zip(plan.captions, keep_text, strict=True) if kept]
        text_ids = [caption.id for caption in captions]
        new_image, new_text = np.cumsum(keep) - 1, np.cumsum(keep_text) - 1
        positives = plan.positives[keep[plan.positives[:, 0]] & keep_text[plan.positives[:, 1]]]
        truncated = np.isin(np.arange(len(plan.captions)), self.done["text"].truncated)[keep_text]
        skipped = [{"modality": "image", "id": plan.images[row].id, "reason": failed[row]} for row in sorted(failed)]
        skipped += [
            {"modality": "text", "id": caption.id, "reason": f"image {plan.images[owner].id!r} was skipped"}
            for caption, owner, kept in zip(plan.captions, plan.owners, keep_text, strict=True)
            if not kept
        ]
        if failed:
            logger.warning("left out %d unreadable images and their captions; info() lists them", len(failed))
        if truncated.any():
            logger.warning("%d captions were longer than the context of %s and cut", truncated.sum(), plan.source)
        if plan.features:
            assert isinstance(self.extractor, FeatureExtractor)
            for modality in MODALITIES if text_ids else MODALITIES[:1]:
                write_projection(self.folder, modality, self.extractor.projection(modality))
        finish(
            self.folder,
            Contents(
                source=plan.source,
                recipe=plan.recipe,
                dim=self.dim,
                dtype=plan.dtype,
                ids={"image": [image.id for image in images]} | ({"text": text_ids} if text_ids else {}),
                splits=np.array([image.split for image in images]),
                links=np.stack([new_image[plan.owners[keep_text]], np.arange(len(captions))], 1),
                positives=np.stack([new_image[positives[:, 0]], new_text[positives[:, 1]]], 1),
                columns={
                    "image": image_columns(images),
                    "text": caption_columns(captions, truncated),
                },
                views={"count": plan.views, "seed": plan.seed, "recipe": RECIPE} if plan.views else None,
                skipped=skipped,
                truncated=int(truncated.sum()),
            ),
        )
        return self.folder

    def _leave_out(self, modality: Modality, keep: np.ndarray) -> None:
        """Rewrite the arrays without the rows that are not kept; does nothing the second time."""
        if keep.all():
            return
        for name in self._arrays(modality):
            path = self.folder / name
            if path.exists() and len(array := _io.read_array(path, memmap=True)) == len(keep):
                copy_rows(path, array, np.flatnonzero(keep), self.plan.dtype)


def _feature_widths(extractor: Extractor) -> dict[str, int]:
    """The number of features of each modality, from a grey picture and a word; refuses encoders without any."""
    assert isinstance(extractor, FeatureExtractor)
    picture = extractor.preprocess(Image.new("RGB", (64, 64), (128, 128, 128)))
    featured = {"image": extractor.featured_images(picture[None]), "text": extractor.featured_texts(["a"])}
    return {modality: int(part.features.shape[1]) for modality, part in featured.items()}


@contextlib.contextmanager
def _full_disk_is_a_sentence(partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, GroveAdaptersError):
            raise
        raise StoreError(
            f"expected to write {partial}, got {error.strerror or error}; what is there stays: free some space and run "
            "the same build again to continue"
        ) from error
