"""Checks of what callers hand in: each raises one sentence with what was expected, what was got and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from grove_adapters.errors import InputError, InputTypeError

CHUNK = 16_384  # rows looked at together, so that a check never loads a memory map


def as_ids(ids: Any, n: int, *, what: str, unique: bool = True) -> np.ndarray:
    """`ids` as an (n,) array of unique strings; `None` numbers the rows."""
    if ids is None:
        return np.array([str(row) for row in range(n)])
    array = np.asarray(ids)
    if array.dtype.kind not in "US":
        array = np.array([str(item) for item in np.ravel(array)])
    if array.shape != (n,):
        raise InputError(f"{what}: expected {n} ids, one a row, got shape {array.shape}; give every row its own id")
    if unique:
        distinct, counts = np.unique(array, return_counts=True)
        if len(distinct) != n:
            raise InputError(
                f"{what}: expected unique ids, got {str(distinct[counts.argmax()])!r} {counts.max()} times; rows are "
                "joined by id, so give each its own"
            )
    return array


def same_dim(expected: int, got: int, *, what: str, got_from: str = "") -> None:
    """Refuse embeddings of another width."""
    if expected != got:
        raise InputError(
            f"{what} expected {expected}-d embeddings, got {got}-d ones{got_from}; use embeddings of the same model"
        )


def same_rows(expected: int, got: int, *, what: str) -> None:
    """Refuse arrays that should run in parallel and don't."""
    if expected != got:
        raise InputError(f"{what}: expected {expected} rows, got {got}; both must describe the same items in order")


def finite(values: Any, *, what: str, ids: Sequence[str] | np.ndarray | None = None) -> None:
    """Refuse NaN and infinite entries, naming the first row that holds one. Reads a memory map in chunks."""
    for start in range(0, len(values), CHUNK):
        block = _numpy(values[start : start + CHUNK])
        bad = ~np.isfinite(block.reshape(len(block), -1)).all(1)
        if bad.any():
            row = start + int(bad.argmax())
            name = "" if ids is None else f" (id {str(ids[row])!r})"
            raise InputError(
                f"{what}: expected finite numbers, got NaN or infinity in row {row}{name}; drop or recompute that row"
            )


def nonzero_rows(values: Any, *, what: str, ids: Sequence[str] | np.ndarray | None = None) -> None:
    """Refuse all-zero vectors, which have no direction. Reads a memory map in chunks."""
    for start in range(0, len(values), CHUNK):
        block = _numpy(values[start : start + CHUNK])
        bad = ~block.reshape(-1, block.shape[-1]).any(-1).reshape(len(block), -1)
        if bad.any():
            row = start + int(bad.any(1).argmax())
            name = "" if ids is None else f" (id {str(ids[row])!r})"
            raise InputError(
                f"{what}: expected vectors with a direction, got zeros in row {row}{name}; drop or recompute that row"
            )


def positive(values: torch.Tensor, *, what: str) -> None:
    """Refuse zero and negative entries."""
    if values.numel() and not bool((values > 0).all()):
        smallest = float(values.min())
        raise InputError(f"{what}: expected values > 0, got {smallest:g}; variances are σ², not log σ²")


def rows_in_range(rows: np.ndarray, n: int, *, what: str) -> None:
    """Refuse row numbers that point outside an array of `n` rows."""
    if rows.size and (rows.min() < 0 or rows.max() >= n):
        bad = int(rows.min()) if rows.min() < 0 else int(rows.max())
        raise InputError(f"{what}: expected rows from 0 to {n - 1}, got {bad}; links count rows from 0")


def normalised(values: Any, *, tolerance: float = 1e-2) -> bool:
    """Whether rows have unit length, judged on a first chunk; float16 stores round to about 1e-3."""
    block = _numpy(values[:CHUNK]).astype(np.float32)
    return bool(np.abs(np.linalg.norm(block, axis=-1) - 1).max(initial=0.0) < tolerance)


def choice(value: str, valid: Sequence[str], *, what: str) -> str:
    """`value` if it is one of `valid`; otherwise an error that offers the nearest."""
    from grove_adapters.config import nearest

    if value not in valid:
        raise InputError(f"{what} has no option {value!r};{nearest(value, valid)}")
    return value


def count(value: int, *, what: str, at_least: int = 1) -> int:
    """`value` if it is a whole number of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputTypeError(f"{what} expected a whole number, got {value!r}")
    if value < at_least:
        raise InputError(f"{what} expected a whole number ≥ {at_least}, got {value}")
    return int(value)


def _numpy(block: Any) -> np.ndarray:
    return block.detach().cpu().numpy() if isinstance(block, torch.Tensor) else np.asarray(block)
