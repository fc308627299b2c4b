"""A folder of pictures beside a table of captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grove_adapters.errors import InputError, InputTypeError, UnreadableError
from grove_adapters.extract.records.base import Caption, Record, Records, Scalar
from grove_adapters.extract.records.tables import SUFFIXES, read_rows

IMAGE_COLUMNS = ("file_name", "filename", "image", "image_path", "image_name", "filepath", "path", "file")
CAPTION_COLUMNS = ("caption", "text", "description", "title")
TABLE_NAMES = ("captions", "metadata")


def read_folder(path: str | Path, images: str | Path | None = None, *, split: str = "") -> Records:
    """Pictures with a CSV, TSV or JSONL table: one row a caption, or one row an image with a list of captions.

    The table needs a column with the picture's file name (`IMAGE_COLUMNS`) and one with its caption
    (`CAPTION_COLUMNS`; in JSONL it may hold a list). ``split``, ``label``, ``image_id`` and ``caption_id`` mean what
    they say, and every other column is kept with the captions under its name. Rows of the same image are gathered.
    The ``metadata.csv`` of Hugging Face's image folders is such a table.

    Args:
        path: The table, or a folder that holds ``captions`` or ``metadata`` with one of the suffixes.
        images: The folder that file names start from; the table's own folder where left out.
        split: Name of the split for rows that state none.

    Raises:
        UnreadableError: There is no table, or it lacks a column.
        InputTypeError: A caption is not text.
        InputError: Rows of one image disagree about its split, label or file.
    """
    table = find_table(path)
    root = table.parent if images is None else Path(images)
    facts: dict[str, tuple[str, str, Any]] = {}
    captions: dict[str, list[Caption]] = {}
    image_column = caption_column = ""
    for line, row in read_rows(table, whole=CAPTION_COLUMNS):
        if not image_column:
            image_column = _column(table, row, IMAGE_COLUMNS, "the picture's file name")
            caption_column = _column(table, row, CAPTION_COLUMNS, "the caption")
        where = f"{table} line {line}"
        try:
            file, text = row[image_column], row[caption_column]
        except KeyError as error:
            raise UnreadableError(f"{where}: expected a field {error}, got none; give every row one") from error
        texts = text if isinstance(text, list) else [text]
        for item in texts:
            if not isinstance(item, str):
                raise InputTypeError(f"{where} (image {file!r}): expected a caption as text, got {item!r}; correct it")
        image_id = str(row.get("image_id") or file)
        fact = (str(file), str(row.get("split") or split), row.get("label"))
        if facts.setdefault(image_id, fact) != fact:
            raise InputError(
                f"{where}: expected one file, split and label for image {image_id!r}, got {fact} after "
                f"{facts[image_id]}; make its rows agree"
            )
        known = {image_column, caption_column, "image_id", "caption_id", "split", "label"}
        columns: dict[str, Scalar] = {name: value for name, value in row.items() if name not in known}
        gathered = captions.setdefault(image_id, [])
        caption_id = str(row.get("caption_id") or "")
        for place, item in enumerate(texts):
            id = f"{caption_id}#{place}" if caption_id and len(texts) > 1 else caption_id
            gathered.append(Caption(item, id, columns))
    return Records([Record(id, root / file, captions[id], part, label) for id, (file, part, label) in facts.items()])


def find_table(path: str | Path) -> Path:
    """The table of captions at `path`, or in the folder `path`.

    Raises:
        UnreadableError: There is none.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    for name in TABLE_NAMES:
        for suffix in SUFFIXES:
            if (path / f"{name}{suffix}").is_file():
                return path / f"{name}{suffix}"
    raise UnreadableError(
        f"expected captions.csv, captions.jsonl or metadata.csv in {path}, got none; add one with the columns "
        f"{IMAGE_COLUMNS[0]} and {CAPTION_COLUMNS[0]}"
    )


def _column(table: Path, row: dict[str, Any], names: tuple[str, ...], meaning: str) -> str:
    found = {name.lower(): name for name in reversed(row)}
    for name in names:
        if name in found:
            return found[name]
    raise UnreadableError(
        f"expected a column for {meaning} in {table} ({', '.join(names)}), got {', '.join(row) or 'an empty table'}"
    )
