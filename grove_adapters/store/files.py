"""The files inside a store: arrays that grow row by row, columns of text, and their checksums."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from grove_adapters import _checks, _io
from grove_adapters.embeddings import Projection
from grove_adapters.errors import InputTypeError, StoreError

CHUNK_BYTES = 1 << 24


class RowFile:
    """A `.npy` file of known shape, written from the first row to the last and cut back to any row.

    Plain appends instead of a writable memory map: on a full disk they fail with an error, not with a bus error.

    Args:
        path: The file.
        shape: The final shape, (N, …).
        dtype: Element type.
        rows: Rows that are already there; what lies behind them is cut off.

    Raises:
        StoreError: The file holds fewer rows than that.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any, *, rows: int = 0) -> None:
        self.path = path
        self._dtype = np.dtype(dtype)
        header = _npy_header(shape, self._dtype)
        whole = len(header) + rows * int(np.prod(shape[1:])) * self._dtype.itemsize
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if rows == 0:
            os.ftruncate(self._file, 0)
            _write_all(self._file, header)
        elif os.fstat(self._file).st_size < whole or os.pread(self._file, len(header), 0) != header:
            os.close(self._file)
            raise StoreError(
                f"expected {rows} rows in the unfinished {path}, got fewer or another array; delete "
                f"{path.parent.parent} and build again"
            )
        else:
            os.ftruncate(self._file, whole)
            os.lseek(self._file, 0, os.SEEK_END)

    def append(self, block: np.ndarray) -> None:
        """Write the next rows."""
        _write_all(self._file, np.ascontiguousarray(block, dtype=self._dtype).data.cast("B"))

    def sync(self) -> None:
        """Return when every row is on the disk."""
        os.fsync(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def copy_rows(path: Path, source: Any, rows: np.ndarray | None, dtype: Any) -> None:
    """Write chosen rows of an array as a `.npy` file, a chunk at a time, whole or not at all."""
    n = len(source) if rows is None else len(rows)
    shape = (n, *source.shape[1:])
    step = max(1, CHUNK_BYTES // max(1, int(np.prod(shape[1:])) * np.dtype(dtype).itemsize))
    with _io.written_whole(path) as partial, RowFile(partial, shape, dtype) as file:
        for start in range(0, n, step):
            chosen = slice(start, start + step) if rows is None else rows[start : start + step]
            with np.errstate(over="ignore"):
                block = np.asarray(source[chosen]).astype(dtype)
            _checks.finite(block, what=f"{path.name} as {np.dtype(dtype)}")
            file.append(block)


def write_column(folder: Path, stem: str, values: Sequence[Any] | np.ndarray, *, what: str) -> list[str]:
    """Write one column and return the names of its files.

    Numbers and booleans make one array (a missing number is NaN), texts make their UTF-8 bytes and where each begins,
    because one long text would widen every row of a fixed-width array.

    Raises:
        InputTypeError: The values are neither all numbers nor all texts.
    """
    array = column_array(values, what=what)
    if array.dtype != object:
        _io.write_array(folder / f"{stem}.npy", array)
        return [f"{stem}.npy"]
    encoded = [text.encode() for text in array]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    _io.write_array(folder / f"{stem}.utf8.npy", np.frombuffer(b"".join(encoded), dtype=np.uint8))
    _io.write_array(folder / f"{stem}.offsets.npy", offsets)
    return [f"{stem}.utf8.npy", f"{stem}.offsets.npy"]


def read_column(arrays: Sequence[np.ndarray], rows: slice | np.ndarray) -> np.ndarray:
    """Chosen rows of a column: a view of numbers, or an object array of str."""
    if len(arrays) == 1:
        return arrays[0][rows]
    content, offsets = arrays
    starts, stops = offsets[:-1][rows], offsets[1:][rows]
    texts = np.empty(len(starts), dtype=object)
    texts[:] = [bytes(content[start:stop]).decode() for start, stop in zip(starts, stops, strict=True)]
    return texts


def column_array(values: Sequence[Any] | np.ndarray, *, what: str) -> np.ndarray:
    """(N,) numbers, booleans, or str objects; None becomes NaN or ``""``.

    Raises:
        InputTypeError: The values are of mixed or other types.
    """
    array = values if isinstance(values, np.ndarray) else np.array(values, dtype=object)
    if array.ndim != 1:
        raise InputTypeError(f"{what} expected one value a row, got shape {array.shape}; split it up")
    if array.dtype.kind in "biuf":
        return array
    items = [item.item() if isinstance(item, np.generic) else item for item in array.tolist()]
    present = [item for item in items if item is not None and item == item]
    if all(isinstance(item, str) for item in present):
        texts = np.empty(len(items), dtype=object)
        texts[:] = [item if isinstance(item, str) else "" for item in items]
        return texts
    if all(isinstance(item, bool) for item in items):
        return np.array(items, dtype=bool)
    if all(isinstance(item, int | float) and not isinstance(item, bool) for item in present):
        whole = len(present) == len(items) and not any(isinstance(item, float) for item in items)
        return np.array([np.nan if item is None else item for item in items], dtype=np.int64 if whole else np.float64)
    kinds = sorted({type(item).__name__ for item in present})
    raise InputTypeError(f"{what} expected all texts or all numbers, got {', '.join(kinds)}; make them one kind")


def write_projection(folder: Path, modality: str, projection: Projection) -> None:
    """Write the last linear layer of one modality's encoder."""
    _io.write_array(folder / f"{modality}.projection.weight.npy", projection.weight)
    if projection.bias is not None:
        _io.write_array(folder / f"{modality}.projection.bias.npy", projection.bias)


def describe_file(path: Path) -> dict[str, Any]:
    """Size, SHA-256, shape and type of a `.npy` file."""
    array = _io.read_array(path, memmap=True)
    return {
        "bytes": path.stat().st_size,
        "sha256": checksum(path),
        "shape": list(array.shape),
        "dtype": str(array.dtype),
    }


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _npy_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    header = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, facts)
    return header.getvalue()


def _write_all(file: int, content: Any) -> None:
    content = memoryview(content)
    while content:
        content = content[os.write(file, content) :]
