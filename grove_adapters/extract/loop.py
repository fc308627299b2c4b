"""From records to embeddings, batch by batch, from any row on.

Batches end at fixed row numbers, and no picture, token or view depends on its batch or on the process that loads it. So
a run that starts again at any row continues with the very numbers an undisturbed run would have had.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from grove_adapters import seeding
from grove_adapters.errors import UnreadableError
from grove_adapters.extract.base import Extractor, Featured, FeatureExtractor, Tokens
from grove_adapters.extract.records import Caption, Record, read_image
from grove_adapters.extract.views import image_view, text_view


@dataclass
class Loaded:
    """One batch, ready for the encoder.

    Attributes:
        rows: The rows it holds, without the unreadable ones.
        inputs: Pixels or tokens, 1 + K a row: the item itself and its views.
        failed: Why a row could not be read, by row.
        truncated: Rows whose caption was cut.
        stop: First row of the next batch.
    """

    rows: list[int]
    inputs: Any
    stop: int
    failed: dict[int, str] = field(default_factory=dict)
    truncated: list[int] = field(default_factory=list)

    def pin_memory(self) -> Loaded:
        """Pin the pixels, so that the copy to the GPU does not wait."""
        if isinstance(self.inputs, torch.Tensor):
            self.inputs = self.inputs.pin_memory()
        return self


@dataclass(frozen=True)
class Embedded:
    """One batch of embeddings.

    Attributes:
        rows: (b,) row numbers.
        values: (b, 1 + K, D) float32: each item and its views.
        features: (b, F) float32 features of each item itself, or None where they are not asked for.
        failed: Why a row could not be read, by row.
        truncated: Rows whose caption was cut.
        stop: First row of the next batch.
    """

    rows: np.ndarray
    values: np.ndarray
    features: np.ndarray | None
    failed: dict[int, str]
    truncated: list[int]
    stop: int


class Stage(Protocol):
    """All items of one modality, and how one batch of them is loaded and embedded."""

    def __len__(self) -> int:
        """Number of items."""

    def load(self, start: int, stop: int) -> Loaded:
        """Prepare rows `start` to `stop`; runs in worker processes."""

    def embed(self, extractor: Extractor, inputs: Any) -> torch.Tensor:
        """((1 + K) b, D) embeddings of loaded inputs."""

    def embed_featured(self, extractor: FeatureExtractor, inputs: Any) -> Featured:
        """The same, with ((1 + K) b, F) features."""


@dataclass(frozen=True)
class ImageStage:
    """Images: decoded, augmented and preprocessed."""

    records: Sequence[Record]
    preprocess: Any
    views: int
    seed: int

    def __len__(self) -> int:
        return len(self.records)

    def load(self, start: int, stop: int) -> Loaded:
        """Decode and preprocess each picture and its views."""
        loaded = Loaded([], None, stop)
        pixels = []
        for row in range(start, stop):
            try:
                image = read_image(self.records[row].loader)
            except UnreadableError as error:
                loaded.failed[row] = str(error)
                continue
            loaded.rows.append(row)
            pixels.append(self.preprocess(image))
            pixels.extend(self._views(image, self.records[row].id, tuple(pixels[-1].shape[-2:])))
        loaded.inputs = torch.stack(pixels) if pixels else None
        return loaded

    def _views(self, image: Image.Image, id: str, size: tuple[int, int]) -> Iterator[torch.Tensor]:
        for view in range(self.views):
            yield self.preprocess(image_view(image, size, id=id, view=view, seed=self.seed))

    def embed(self, extractor: Extractor, inputs: torch.Tensor) -> torch.Tensor:
        """Embeddings of pixels."""
        return extractor.embed_images(inputs)

    def embed_featured(self, extractor: FeatureExtractor, inputs: torch.Tensor) -> Featured:
        """Embeddings and features of pixels."""
        return extractor.featured_images(inputs)


@dataclass(frozen=True)
class TextStage:
    """Captions: augmented and tokenized."""

    captions: Sequence[Caption]
    tokenize: Any
    views: int
    seed: int

    def __len__(self) -> int:
        return len(self.captions)

    def load(self, start: int, stop: int) -> Loaded:
        """Tokenize each caption and its views; a cut view is not counted."""
        texts = []
        for caption in self.captions[start:stop]:
            texts.append(caption.text)
            texts.extend(text_view(caption.text, id=caption.id, view=k, seed=self.seed) for k in range(self.views))
        tokens: Tokens = self.tokenize(texts)
        truncated = start + np.flatnonzero(tokens.truncated[:: 1 + self.views])
        return Loaded(list(range(start, stop)), tokens, stop, truncated=truncated.tolist())

    def embed(self, extractor: Extractor, inputs: Tokens) -> torch.Tensor:
        """Embeddings of tokens."""
        return extractor.embed_texts(inputs)

    def embed_featured(self, extractor: FeatureExtractor, inputs: Tokens) -> Featured:
        """Embeddings and features of tokens."""
        return extractor.featured_texts(inputs)


def embed_from(
    start: int,
    stage: Stage,
    extractor: Extractor,
    *,
    batch_size: int,
    views: int,
    num_workers: int,
    features: bool = False,
) -> Iterator[Embedded]:
    """Yield the embeddings of all rows from `start` on, in order.

    Args:
        start: First row.
        stage: The items.
        extractor: The model.
        batch_size: Items the encoder sees at once; views count.
        views: K, the number of views a row.
        num_workers: Loading processes; 0 loads in this one.
        features: Whether to give the features of each item too; the extractor must be a `FeatureExtractor`.

    Raises:
        UnreadableError: A loading process died, as they do when memory runs out.
    """
    rows = max(1, batch_size // (1 + views))
    edges = [start, *range((start // rows + 1) * rows, len(stage), rows), len(stage)]
    loader = torch.utils.data.DataLoader(
        _Batches(stage, list(itertools.pairwise(edges))),
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=functools.partial(_begin_worker, os.getpid()),
        pin_memory=extractor.device.type == "cuda",
        generator=seeding.generator(0),  # left alone, the loader would draw a seed from the caller's global stream
    )
    for batch in _alive(loader):
        values, found = np.zeros((0, 1 + views, 0), np.float32), None
        if batch.rows:
            if features:
                assert isinstance(extractor, FeatureExtractor)
                output, read = stage.embed_featured(extractor, batch.inputs)
                found = read.numpy()[:: 1 + views]
            else:
                output = stage.embed(extractor, batch.inputs)
            values = output.numpy().reshape(len(batch.rows), 1 + views, -1)
        yield Embedded(np.array(batch.rows, dtype=np.int64), values, found, batch.failed, batch.truncated, batch.stop)


def default_workers() -> int:
    """Loading processes for this machine: one a core, leaving one to the encoder, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(8, cores - 1))


def _alive(loader: Iterable[Loaded]) -> Iterator[Loaded]:
    try:
        yield from loader
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):  # torch's words for a death, not for an error inside
            raise
        raise UnreadableError(
            f"expected the loading processes to live, got {str(error).split('.')[0]!r}, perhaps for want of memory; "
            "run the same again with fewer num_workers or a smaller batch_size"
        ) from error


class _Batches(torch.utils.data.Dataset):
    """One item is one whole batch, so that workers hand over stacked pixels."""

    def __init__(self, stage: Stage, bounds: list[tuple[int, int]]) -> None:
        self._stage = stage
        self._bounds = bounds

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, batch: int) -> Loaded:
        return self._stage.load(*self._bounds[batch])


def _begin_worker(parent: int, worker: int) -> None:
    """Leave Ctrl-C, which reaches the whole process group, to the parent, and don't outlive it.

    torch's workers end with their parent only if it still lived when they began; one that was forked just before the
    parent was killed would wait for work forever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if multiprocessing.get_start_method() == "fork" and os.getppid() != parent:
        os._exit(1)
