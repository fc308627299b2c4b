"""HierarCaps: photographs with captions at four levels of detail."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from grove_adapters.errors import UnreadableError
from grove_adapters.extract.records.base import Caption, Record, Records
from grove_adapters.extract.records.tables import read_rows

ARROW = " => "


def read_hierarcaps(path: str | Path, images: str | Path, *, split: str = "test") -> Records:
    """The test table (``id, captions, image_url``) or the expanded one (``positive, negative, image_url``).

    A hierarchy is one text with its levels joined by ``=>``, from the vaguest to the fullest. Each level becomes a
    caption with the column ``level`` (1 = vaguest) and the id ``"{row id}#{level}"``; the image's id is the stem of its
    file name. Hierarchies of one image are gathered.

    Args:
        path: The CSV file, gzipped or not.
        images: The folder that holds the pictures.
        split: Name of the split that all of them belong to.

    Raises:
        UnreadableError: The file has another structure.

    Source: Alper and Averbuch-Elor, "Emergent Visual-Semantic Hierarchies in Image-Text Representations" (2024).
    """
    files: dict[str, Path] = {}
    captions: dict[str, list[Caption]] = {}
    for line, row in read_rows(path):
        text = row.get("captions", row.get("positive"))
        if text is None or "image_url" not in row:
            raise UnreadableError(
                f"{path} line {line}: expected the columns captions (or positive) and image_url, got {', '.join(row)}"
            )
        file = Path(images, PurePosixPath(row["image_url"]).name)
        files[file.stem] = file
        hierarchy = row.get("id", str(line))
        captions.setdefault(file.stem, []).extend(
            Caption(caption, f"{hierarchy}#{level}", {"level": level})
            for level, caption in enumerate(text.split(ARROW), 1)
        )
    return Records([Record(id, file, captions[id], split) for id, file in files.items()])
