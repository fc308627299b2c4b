"""COCO captions, as the organisers publish them and as Karpathy re-split them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from grove_adapters import _io
from grove_adapters.errors import UnreadableError
from grove_adapters.extract.records.base import Caption, Record, Records


def read_coco(path: str | Path, images: str | Path, *, split: str = "") -> Records:
    """The official captions file (``captions_val2017.json``): image and caption ids are COCO's own.

    Args:
        path: The JSON file with ``images`` and ``annotations``.
        images: The folder that holds the pictures.
        split: Name of the split that all of them belong to.

    Raises:
        UnreadableError: The file has another structure.
        InputTypeError: A caption is not text.
    """
    content = _io.read_json(path)
    captions: dict[Any, list[Caption]] = defaultdict(list)
    try:
        for annotation in content["annotations"]:
            captions[annotation["image_id"]].append(Caption(annotation["caption"], str(annotation["id"])))
        listed = [(image["id"], image["file_name"]) for image in content["images"]]
    except (KeyError, TypeError) as error:
        raise _other_structure(path, "images[id, file_name] and annotations[id, image_id, caption]", error) from error
    orphans = captions.keys() - {image for image, _ in listed}
    if orphans:
        raise UnreadableError(
            f"expected every caption of {path} to belong to a listed image, got captions of image {min(orphans)!r}, "
            "which is not listed; restore the file"
        )
    return Records([Record(str(image), Path(images, name), captions[image], split) for image, name in listed])


def read_karpathy(path: str | Path, images: str | Path, *, restval_as: str = "train") -> Records:
    """Karpathy's ``dataset_coco.json``, ``dataset_flickr30k.json`` or ``dataset_flickr8k.json``, with their splits.

    Image ids are ``cocoid`` where there is one (so that they join with COCO and ECCV Caption), else ``imgid``; caption
    ids are ``sentid``.

    Args:
        path: The JSON file.
        images: The folder that holds the pictures, or their ``filepath`` folders.
        restval_as: Split that COCO's ``restval`` images join; it is common to train on them.

    Raises:
        UnreadableError: The file has another structure.
        InputTypeError: A caption is not text.
    """
    content = _io.read_json(path)
    root = Path(images)
    try:
        listed = [
            (
                str(image["cocoid"] if "cocoid" in image else image["imgid"]),
                Path(image.get("filepath", ""), image["filename"]),
                [Caption(sentence["raw"], str(sentence["sentid"])) for sentence in image["sentences"]],
                restval_as if image["split"] == "restval" else image["split"],
            )
            for image in content["images"]
        ]
    except (KeyError, TypeError) as error:
        raise _other_structure(path, "images[imgid, filename, split, sentences[raw, sentid]]", error) from error
    return Records(
        [
            Record(id, nested if (nested := root / file).is_file() else root / file.name, captions, split)
            for id, file, captions, split in listed
        ]
    )


def _other_structure(path: str | Path, expected: str, error: Exception) -> UnreadableError:
    return UnreadableError(f"expected {expected} in {path}, got another structure ({error!r}); check the format")
