"""Files written whole or not at all, and read without ever unpickling."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grove_adapters.errors import StoreError, UnreadableError


@contextlib.contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yield a partial path beside `path`; on success it is flushed and renamed over `path`, on failure removed.

    Raises:
        StoreError: The file cannot be written (full disk, missing right); what stood at `path` is untouched.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(partial, path)
    except OSError as error:
        if isinstance(error, StoreError | UnreadableError):
            raise
        raise StoreError(
            f"expected to write {path}, got {error.strerror or error}; what was there before is untouched: "
            "free some space or choose another folder, then run the same command again"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text whole or not at all."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON whole or not at all; NaN becomes null, because NaN is no JSON."""
    write_text(path, json.dumps(jsonable(content), indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        UnreadableError: The file is missing, is not JSON or holds something other than an object.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnreadableError(f"expected a file at {path}, got none; check the path") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UnreadableError(
            f"expected JSON in {path}, got something unreadable ({error}); restore or rebuild the file"
        ) from error
    if not isinstance(content, dict):
        raise UnreadableError(f"expected a JSON object in {path}, got a {type(content).__name__}")
    return content


def write_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors as safetensors, whole or not at all."""
    from safetensors.torch import save_file

    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    seen: set[int] = set()
    for name, tensor in contiguous.items():
        if tensor.data_ptr() in seen:  # the format refuses tensors that share memory
            contiguous[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    with written_whole(path) as partial:
        save_file(contiguous, str(partial), metadata=dict(metadata))


def read_tensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a safetensors file and its metadata.

    Raises:
        UnreadableError: The file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise UnreadableError(f"expected a safetensors file at {path}, got none; check the path")
    try:
        with safe_open(str(path), framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}, handle.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UnreadableError(
            f"expected a whole safetensors file at {path}, got something unreadable ({error}); write it again"
        ) from error


def write_array(path: str | Path, array: np.ndarray) -> None:
    """Write one `.npy` array whole or not at all."""
    with written_whole(path) as partial, partial.open("wb") as handle:
        np.save(handle, array, allow_pickle=False)


def read_array(path: str | Path, *, memmap: bool = False) -> np.ndarray:
    """Read one `.npy` array, optionally as a read-only memory map.

    Raises:
        UnreadableError: The file is missing, truncated, holds Python objects or is no `.npy` file.
    """
    path = Path(path)
    try:
        return np.load(path, mmap_mode="r" if memmap else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise UnreadableError(f"expected an array at {path}, got none; check the path") from error
    except (OSError, ValueError, EOFError) as error:
        raise UnreadableError(
            f"expected a plain .npy array in {path}, got something unreadable ({error}); write it again"
        ) from error


def jsonable(value: Any) -> Any:
    """`value` in plain JSON types: NumPy and torch values unwrapped, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, torch.Tensor):
        return jsonable(value.detach().cpu().numpy())
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, np.generic):
        return jsonable(value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return value


def sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def replace_folder(new: Path, target: Path) -> None:
    """Put the finished folder `new` in the place of `target`, so that one of the two always stands there whole."""
    old = target.with_name(f"{target.name}.{os.getpid()}.old")
    if target.exists():
        os.replace(target, old)
    os.replace(new, target)
    shutil.rmtree(old, ignore_errors=True)
