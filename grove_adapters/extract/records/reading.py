"""One entrance to every reader, with the format recognised where it is not named."""

from __future__ import annotations

from pathlib import Path

from grove_adapters import _checks, _io
from grove_adapters.errors import InputError, UnreadableError
from grove_adapters.extract.records.base import Records
from grove_adapters.extract.records.coco import read_coco, read_karpathy
from grove_adapters.extract.records.folder import CAPTION_COLUMNS, read_folder
from grove_adapters.extract.records.hierarcaps import ARROW, read_hierarcaps
from grove_adapters.extract.records.tables import SUFFIXES, read_rows
from grove_adapters.extract.records.webdataset import read_webdataset

FORMATS = ("auto", "folder", "coco", "karpathy", "hierarcaps", "webdataset")


def read_records(
    path: str | Path, *, images: str | Path | None = None, format: str = "auto", split: str = ""
) -> Records:
    """Read a data set in any of the known formats.

    Args:
        path: A folder or table of captions (``folder``), a COCO captions JSON (``coco``), a Karpathy JSON
            (``karpathy``), the HierarCaps CSV (``hierarcaps``), or a tar or folder of tars (``webdataset``).
        images: The folder that holds the pictures. Left out, the folder of the captions; webdataset needs none.
        format: One of `FORMATS`; ``"auto"`` looks at the file.
        split: Name of the split of every image whose file states none.

    Raises:
        UnreadableError: The path is missing or not in that format.
        InputError: The format is unknown, or pictures were given for a format that holds them itself.
    """
    path = Path(path)
    _checks.choice(format, FORMATS, what="records format")
    if not path.exists():
        raise UnreadableError(f"expected captions or a folder at {path}, got nothing; check the path")
    kind = recognise(path) if format == "auto" else format
    if kind == "webdataset":
        if images is not None:
            raise InputError(f"webdataset shards hold their pictures, got images={str(images)!r}; leave it out")
        return read_webdataset(path, split=split)
    if kind == "folder":
        return read_folder(path, images, split=split)
    root = path.parent if images is None else images
    if kind == "coco":
        return read_coco(path, root, split=split)
    if kind == "hierarcaps":
        return read_hierarcaps(path, root, split=split or "test")
    if split:
        raise InputError(f"a Karpathy file brings its own splits, got split={split!r}; leave it out")
    return read_karpathy(path, root)


def recognise(path: Path) -> str:
    """The format of the data set at `path`.

    Raises:
        UnreadableError: It is none of the known ones.
    """
    if path.suffix == ".tar" or (path.is_dir() and any(path.glob("*.tar"))):
        return "webdataset"
    if path.is_dir():
        return "folder"
    if path.suffix == ".json":
        content = _io.read_json(path)
        if "annotations" in content:
            return "coco"
        if content.get("images"):
            return "karpathy"
    if path.name.endswith(SUFFIXES):
        _, row = next(read_rows(path, whole=CAPTION_COLUMNS), (0, {}))
        levels = row.get("captions", row.get("positive"))
        return "hierarcaps" if "image_url" in row and isinstance(levels, str) and ARROW in levels else "folder"
    raise UnreadableError(
        f"expected a captions file of a known format ({', '.join(FORMATS[1:])}) at {path}, got something else; "
        "name the format"
    )
