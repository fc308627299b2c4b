"""Tables of captions (CSV, TSV, JSONL, gzipped or not) as rows with line numbers."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

from grove_adapters.errors import UnreadableError

SUFFIXES = (".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.gz", ".jsonl.gz")


def read_rows(path: str | Path, *, whole: Collection[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row by column name).

    Args:
        path: A CSV or TSV file with a header, or a JSONL file of objects.
        whole: Lower-case names of columns that may hold unquoted separators. Where one of them is the last column, the
            surplus fields of a row are its continuation, so that ``a.jpg,A dog, a cat`` stays one caption.

    Raises:
        UnreadableError: The file is missing, is no such table, or a row has more or fewer fields than the header.
    """
    path = Path(path)
    if not path.is_file():
        raise UnreadableError(f"expected a table at {path}, got no file; check the path")
    try:
        opener: Any = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as handle:
            yield from _read_jsonl(path, handle) if ".jsonl" in path.suffixes else _read_csv(path, handle, whole)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        if isinstance(error, UnreadableError):
            raise
        raise UnreadableError(f"expected a UTF-8 table in {path}, got something unreadable ({error})") from error


def _read_jsonl(path: Path, handle: IO[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(handle, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise _no_object(path, line, text) from error
        if not isinstance(row, dict):
            raise _no_object(path, line, text)
        yield line, row


def _read_csv(path: Path, handle: IO[str], whole: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    separator = "\t" if ".tsv" in path.suffixes else ","
    reader = csv.reader(handle, delimiter=separator)
    header = [name.strip() for name in next(reader, [""])]
    for fields in reader:
        if not fields:
            continue
        if len(fields) > len(header) and header[-1].lower() in whole:
            fields = [*fields[: len(header) - 1], separator.join(fields[len(header) - 1 :])]
        if len(fields) != len(header):
            raise UnreadableError(
                f"{path} line {reader.line_num}: expected {len(header)} fields ({', '.join(header)}), got "
                f"{len(fields)}; put fields that contain {separator!r} in double quotes"
            )
        yield reader.line_num, dict(zip(header, fields, strict=True))


def _no_object(path: Path, line: int, text: str) -> UnreadableError:
    return UnreadableError(f"{path} line {line}: expected one JSON object, got {text[:60]!r}; correct that line")
