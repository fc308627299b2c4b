"""Webdataset shards: tars in which neighbouring members with one key belong together."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

from grove_adapters.errors import UnreadableError
from grove_adapters.extract.records.base import Record, Records
from grove_adapters.extract.records.images import TarImage

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "ppm", "gif", "bmp")


def read_webdataset(path: str | Path, *, split: str = "") -> Records:
    """Tar shards of ``key.jpg`` with ``key.txt`` (the caption) or ``key.json`` (its ``caption`` or ``captions``).

    ``key.cls`` is the label. The shards are walked once for their tables of contents; pictures are read later at their
    offsets. The image's id is the key, so keys must be unique over all shards.

    Args:
        path: One uncompressed ``.tar``, or a folder of them, taken in the order of their names.
        split: Name of the split that all of them belong to.

    Raises:
        UnreadableError: There are no shards, or one is compressed or damaged.
        InputTypeError: A caption is not text.
    """
    path = Path(path)
    shards = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    if not shards:
        raise UnreadableError(f"expected .tar shards in {path}, got none; check the path")
    samples: dict[str, dict[str, Any]] = {}
    for shard in shards:
        _read_shard(shard, samples)
    return Records(
        [
            Record(key, sample["image"], _captions(key, sample), split, sample.get("cls"))
            for key, sample in samples.items()
            if "image" in sample
        ]
    )


def _read_shard(shard: Path, samples: dict[str, dict[str, Any]]) -> None:
    try:
        with tarfile.open(shard, "r:") as archive:  # "r:" refuses compression, which would make offsets useless
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                if not member.isfile() or not stem or not extension:
                    continue
                sample = samples.setdefault(f"{folder}/{stem}" if folder else stem, {})
                extension = extension.lower()
                if extension in IMAGE_EXTENSIONS:
                    kind, content = "image", TarImage(str(shard), member.name, member.offset_data, member.size)
                elif extension in ("txt", "json", "cls"):
                    stream = archive.extractfile(member)
                    kind, content = extension, stream.read().decode("utf-8") if stream else ""  # type: ignore[assignment]
                else:
                    continue
                if kind in sample:
                    raise UnreadableError(
                        f"{shard}: expected one {kind} for the key {stem!r}, got a second one in {member.name}; keys "
                        "must be unique over all shards"
                    )
                sample[kind] = content
    except FileNotFoundError as error:
        raise UnreadableError(f"expected a shard at {shard}, got none; check the path") from error
    except (tarfile.TarError, UnicodeDecodeError) as error:
        raise UnreadableError(
            f"expected a whole, uncompressed tar of UTF-8 captions in {shard}, got something else ({error}); unpack "
            "compressed shards first"
        ) from error


def _captions(key: str, sample: dict[str, Any]) -> list[Any]:
    if "txt" in sample:
        return [sample["txt"].strip()]
    if "json" not in sample:
        return []
    try:
        content = json.loads(sample["json"])
        found = content["captions"] if "captions" in content else content.get("caption", [])
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise UnreadableError(
            f"expected a JSON object in {key}.json of the shards, got {sample['json'][:60]!r}; correct it"
        ) from error
    return list(found) if isinstance(found, list) else [found]
