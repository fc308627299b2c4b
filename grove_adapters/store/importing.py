"""Arrays as people have them: single files, several in one file, and the folders that other programs write."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grove_adapters import _io
from grove_adapters.errors import InputTypeError, MissingExtraError, UnreadableError
from grove_adapters.extract.records.folder import CAPTION_COLUMNS
from grove_adapters.store.files import column_array

SUFFIXES = (".npy", ".npz", ".safetensors", ".parquet")

ARRAY_NAMES = {
    "images": ("images", "image", "image_embeddings", "image_embeds", "img_emb", "image_features"),
    "texts": ("texts", "text", "text_embeddings", "text_embeds", "text_emb", "text_features"),
    "image_ids": ("image_ids", "ids"),
    "text_ids": ("text_ids", "caption_ids"),
    "links": ("links",),
    "positives": ("positives",),
    "labels": ("labels", "label"),
    "splits": ("splits", "split"),
    "image_views": ("image_views",),
    "text_views": ("text_views",),
}
"""Names under which arguments of `EmbeddingStore.from_arrays` are looked for, in files and in folders. The others are
looked for under their own name in files and not at all in folders."""

TABLE_NAMES = ("metadata", "pairs")
PATH_NAMES = dict.fromkeys(("image_path", "file_name", "filename"), "path")
"""What clip-retrieval and many tables call the column that a store calls path."""


def load(value: Any, *, role: str) -> Any:
    """An argument of `from_arrays` as an array: read where it is a path or ``FILE:KEY``, else as it is.

    Args:
        value: Array, path, or None.
        role: The argument's name; where a file holds several arrays, the one of such a name is taken.

    Raises:
        UnreadableError: The file is missing, damaged, of another format, or holds no such array.
        MissingExtraError: A parquet file without pyarrow.
    """
    if isinstance(value, torch.Tensor):
        return _plain(value)
    if not isinstance(value, str | Path):
        return value
    path, key = Path(value), ""
    if not path.exists() and ":" in str(value):
        file, _, key = str(value).rpartition(":")
        path = Path(file)
    found = _read(path)
    names = ARRAY_NAMES.get(role, (role,))
    for name in (key,) if key else names:
        if name in found:
            return found[name]
    if not key and len(found) == 1:
        return next(iter(found.values()))
    raise UnreadableError(
        f"expected an array {key or names[0]!r} in {path}, got {', '.join(found) or 'none'}; name the one "
        f"that is meant, as {path.name}:NAME"
    )


def find_arrays(folder: Path) -> dict[str, Any]:
    """The arguments of `EmbeddingStore.from_arrays` that a folder holds.

    Raises:
        UnreadableError: The folder is missing, of no known layout, or incomplete.
    """
    if not folder.is_dir():
        raise UnreadableError(f"expected a folder of embeddings at {folder}, got none; check the path")
    if (folder / "img_emb").is_dir() or (folder / "text_emb").is_dir():
        return _clip_retrieval(folder)
    found: dict[str, Any] = {}
    for role, names in ARRAY_NAMES.items():
        files = [folder / f"{name}{suffix}" for name in names for suffix in SUFFIXES]
        file = next((file for file in files if file.is_file()), None)
        if file is not None:
            found[role] = load(file, role=role)
    if "images" not in found and "texts" not in found:
        raise UnreadableError(
            f"expected image.npy and text.npy, or clip-retrieval's img_emb and text_emb, in {folder}, got "
            f"{', '.join(sorted(item.name for item in folder.iterdir())[:8]) or 'nothing'}; name the files instead"
        )
    return {**found, **_columns(_read_table(folder), found)}


def _clip_retrieval(folder: Path) -> dict[str, Any]:
    """``img_emb/img_emb_0.npy …``, ``text_emb/text_emb_0.npy …`` and ``metadata/metadata_0.parquet …``, row by row."""
    found: dict[str, Any] = {}
    for role, name in (("images", "img_emb"), ("texts", "text_emb")):
        shards = _shards(folder / name, ".npy")
        if shards:
            found[role] = np.concatenate([_io.read_array(shard, memmap=True) for shard in shards])
    tables = [_scalars(_read(shard)) for shard in _shards(folder / "metadata", ".parquet")]
    columns = {name: np.concatenate([table[name] for table in tables]) for name in (tables[0] if tables else ())}
    return {**found, **_columns(columns, found)}


def _shards(folder: Path, suffix: str) -> list[Path]:
    """Files named ``…_<number><suffix>`` in the order of their numbers."""
    shards = [file for file in folder.glob(f"*{suffix}") if file.stem.rpartition("_")[2].isdigit()]
    return sorted(shards, key=lambda file: int(file.stem.rpartition("_")[2]))


def _columns(table: Mapping[str, np.ndarray], found: Mapping[str, Any]) -> dict[str, Any]:
    """A table as columns: of the images (its caption: of the texts) where it has a row for each, else of the texts."""
    if not table:
        return {}
    rows = len(next(iter(table.values())))
    of = {role: len(found[role]) for role in ("images", "texts") if role in found}
    if rows not in of.values():
        expected = " or ".join(f"{n}, one for each of the {role}" for role, n in of.items())
        raise UnreadableError(f"expected a metadata table of as many rows as {expected}, got {rows}; correct the table")
    columns = {PATH_NAMES.get(name, name) if "path" not in table else name: table[name] for name in table}
    caption = next((columns.pop(name) for name in CAPTION_COLUMNS if name in columns), None)
    texts = {} if caption is None or of.get("texts") != rows else {"text": caption}
    if of.get("images") != rows:
        return {"text_columns": {**texts, **columns}}
    ids = columns.get("image_id", np.zeros(0))
    given_ids = {"image_ids": ids} if "image_ids" not in found and len(set(map(str, ids))) == rows else {}
    return {**given_ids, "image_columns": columns, "text_columns": texts}


def _read_table(folder: Path) -> dict[str, np.ndarray]:
    """The table beside the arrays as columns of texts or numbers; columns of lists and the like are left out."""
    import pandas as pd

    readers: dict[str, Callable[[Path], Any]] = {
        ".csv": pd.read_csv,
        ".json": lambda path: pd.DataFrame(json.loads(path.read_text(encoding="utf-8"))),
        ".jsonl": lambda path: pd.read_json(path, lines=True),
        ".parquet": lambda path: pd.DataFrame(_scalars(_read(path))),
    }
    for name in TABLE_NAMES:
        for suffix, reader in readers.items():
            path = folder / f"{name}{suffix}"
            if path.is_file():
                try:
                    table = reader(path)
                except (ValueError, OSError) as error:
                    raise UnreadableError(f"expected a table in {path}, got something unreadable ({error})") from error
                return _scalars({str(column): table[column].to_numpy() for column in table.columns})
    return {}


def _read(path: Path) -> dict[str, Any]:
    """Every array of a file by name; the only one of a `.npy` file has none."""
    readers = {".npy": _read_npy, ".npz": _read_npz, ".safetensors": _read_safetensors, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise UnreadableError(f"expected an array file ({', '.join(SUFFIXES)}), got {path}; convert it first")
    if not path.is_file():
        raise UnreadableError(f"expected an array at {path}, got no file; check the path")
    return readers[path.suffix](path)


def _read_npy(path: Path) -> dict[str, Any]:
    return {"": _io.read_array(path, memmap=True)}


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UnreadableError(f"expected plain arrays in {path}, got something unreadable ({error})") from error


def _read_safetensors(path: Path) -> dict[str, Any]:
    return {name: _plain(tensor) for name, tensor in _io.read_tensors(path)[0].items()}


def _read_parquet(path: Path) -> dict[str, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(
            f"reading {path} needs pyarrow, which is not installed; run pip install 'grove-adapters[parquet]'"
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UnreadableError(f"expected a parquet table in {path}, got something unreadable ({error})") from error
    return {name: _parquet_column(table.column(name), f"{path}:{name}") for name in table.column_names}


def _parquet_column(column: Any, what: str) -> np.ndarray:
    """Numbers or texts as (N,), lists of equal length as (N, D)."""
    import pyarrow.types as kinds

    is_list = kinds.is_list(column.type) or kinds.is_large_list(column.type) or kinds.is_fixed_size_list(column.type)
    if not is_list or column.null_count:
        return column.to_numpy()
    flat = column.combine_chunks().flatten()
    if kinds.is_nested(flat.type) or not len(column) or set(map(len, column.to_numpy())) != {len(flat) // len(column)}:
        return column.to_numpy()  # not vectors: left for whoever asks for them to refuse
    return flat.to_numpy(zero_copy_only=False).reshape(len(column), -1)


def _plain(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16


def _scalars(table: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns of texts or numbers."""
    kept = {}
    for name, values in table.items():
        with contextlib.suppress(InputTypeError):
            kept[name] = column_array(values, what=name)
    return kept
