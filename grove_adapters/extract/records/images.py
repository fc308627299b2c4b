"""Where a picture comes from: a file, a place in a tar, memory, or a function that draws it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from grove_adapters.errors import InputTypeError, UnreadableError


class ImageLoader(Protocol):
    """Opens one picture, in whichever process loads it; must therefore be picklable."""

    @property
    def key(self) -> str:
        """Text that changes whenever the picture may have changed."""

    @property
    def path(self) -> str:
        """Where a reader of a report would find it, ``""`` for nowhere."""

    def __call__(self) -> Image.Image:
        """The decoded picture; any exception means that it is unreadable."""


@dataclass(frozen=True)
class ImageFile:
    """A picture in a file of its own."""

    path: str

    @property
    def key(self) -> str:
        """File name and size."""
        file = Path(self.path)
        return f"{file.name}:{file.stat().st_size if file.is_file() else 'missing'}"

    def __call__(self) -> Image.Image:
        with Image.open(self.path) as image:
            return _decoded(image)


@dataclass(frozen=True)
class TarImage:
    """A picture inside an uncompressed tar, read at its offset without walking through the archive."""

    tar: str
    member: str
    offset: int
    size: int

    @property
    def key(self) -> str:
        """Archive, member and size."""
        return f"{Path(self.tar).name}/{self.member}:{self.size}"

    @property
    def path(self) -> str:
        """Archive and member."""
        return f"{self.tar}/{self.member}"

    def __call__(self) -> Image.Image:
        with open(self.tar, "rb") as archive:
            archive.seek(self.offset)
            return _decoded(Image.open(io.BytesIO(archive.read(self.size))))


@dataclass(frozen=True, eq=False)
class MemoryImage:
    """A picture at hand: encoded bytes or a PIL image."""

    content: bytes | Image.Image
    path: str = ""

    @property
    def key(self) -> str:
        """Digest of the bytes or pixels."""
        if isinstance(self.content, bytes):
            return hashlib.sha256(self.content).hexdigest()
        facts = f"{self.content.mode}{self.content.size}".encode()
        return hashlib.sha256(facts + self.content.tobytes()).hexdigest()

    def __call__(self) -> Image.Image:
        return _decoded(Image.open(io.BytesIO(self.content)) if isinstance(self.content, bytes) else self.content)


@dataclass(frozen=True, eq=False)
class DrawnImage:
    """A picture that a function makes when asked; the function's `key`, where it has one, stands for its content."""

    draw: Callable[[], Image.Image]
    name: str

    @property
    def key(self) -> str:
        """The function's own key, or the record's id."""
        return str(getattr(self.draw, "key", self.name))

    @property
    def path(self) -> str:
        """The function's own path, if it has one."""
        return str(getattr(self.draw, "path", ""))

    def __call__(self) -> Image.Image:
        return _decoded(self.draw())


def as_loader(image: Any, *, name: str) -> ImageLoader:
    """The loader of whatever a record was given as its image.

    Raises:
        InputTypeError: Nothing that can be opened as a picture.
    """
    if isinstance(image, ImageFile | TarImage | MemoryImage | DrawnImage):
        return image
    if isinstance(image, str | Path):
        return ImageFile(str(image))
    if isinstance(image, bytes | Image.Image):
        return MemoryImage(image)
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        return MemoryImage(Image.fromarray(image))
    if callable(image):
        return DrawnImage(image, name)
    raise InputTypeError(
        f"image {name!r}: expected a path, bytes, PIL image, uint8 array or function, got {type(image).__name__}"
    )


def read_image(loader: ImageLoader) -> Image.Image:
    """The picture of a loader as RGB.

    Raises:
        UnreadableError: It is missing, truncated or no picture; decoders raise almost anything on damaged files.
    """
    try:
        return loader()
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise UnreadableError(f"{loader.path or loader.key}: {reason}") from error


def _decoded(image: Image.Image) -> Image.Image:
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # a palette's transparent colour is lost, with a warning, on the direct way
    return image.convert("RGB")  # decodes the whole picture, so that a truncated file fails here
