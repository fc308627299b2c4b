"""The row every task returns for a query, so that one `calibrate` serves them all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grove_adapters import _checks, _io
from grove_adapters.errors import InputError, UnreadableError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskResult:
    """What a task found out about each of Q queries.

    Attributes:
        task: What was done, e.g. ``"retrieval"``.
        direction: ``"i2t"`` (images ask, texts answer), ``"t2i"``, or ``""`` where a task has none.
        ids: (Q,) unique ids of the queries.
        correct: (Q,) float64 in [0, 1]: 1 where the first answer is true; soft accuracies lie between.
        uncertainty: (Q,) float64, larger = less certain.
        confidence: (Q,) float64 in [0, 1], the probability the task itself gives its first answer, or None.
        recall_at: k → (Q,) float64, 1 where a true answer is among the first k.
        groups: (Q,) whole numbers, equal where queries are no independent draws (captions of one image) and are
            resampled together, or None where every query stands alone.
        detail: Further findings under names the task documents: arrays and JSON types.
        provenance: How the result was made (settings, source, makers of the posteriors), as JSON types.

    Raises:
        InputError: No query, arrays of different length, values that are not finite or out of range, duplicate ids.
    """

    task: str
    direction: str = ""
    ids: np.ndarray
    correct: np.ndarray
    uncertainty: np.ndarray
    confidence: np.ndarray | None = None
    recall_at: Mapping[int, np.ndarray] = field(default_factory=dict)
    groups: np.ndarray | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        what = f"{self.task} result"
        correct = self._column("correct", self.correct)
        if not len(correct):
            raise InputError(f"{what} expected at least one query, got none; check the split and its links")
        object.__setattr__(self, "correct", _share(correct, f"correct of {what}"))
        object.__setattr__(self, "ids", _checks.as_ids(self.ids, len(correct), what=what))
        object.__setattr__(self, "uncertainty", self._column("uncertainty", self.uncertainty))
        if self.confidence is not None:
            confidence = _share(self._column("confidence", self.confidence), f"confidence of {what}")
            object.__setattr__(self, "confidence", confidence)
        recall_at = {
            _checks.count(k, what="k of recall_at"): _share(self._column(f"recall@{k}", hits), f"recall@{k} of {what}")
            for k, hits in sorted(self.recall_at.items())
        }
        object.__setattr__(self, "recall_at", recall_at)
        if self.groups is not None:
            groups = np.asarray(self.groups)
            if groups.shape != correct.shape or groups.dtype.kind not in "iu":
                raise InputError(
                    f"groups of {what} expected {len(correct)} whole numbers, one a query, got shape {groups.shape} "
                    f"of {groups.dtype}"
                )
            object.__setattr__(self, "groups", groups.astype(np.int64))

    def _column(self, name: str, values: Any) -> np.ndarray:
        column = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        column = column.astype(np.float64)  # a copy: the caller's array stays his own
        what = f"{name} of {self.task} result"
        if column.ndim != 1:
            raise InputError(f"{what} expected one number a query, got shape {column.shape}")
        if name != "correct":
            _checks.same_rows(len(self.correct), len(column), what=what)
        _checks.finite(column, what=what)
        return column

    def __len__(self) -> int:
        return len(self.correct)

    @property
    def query_detail(self) -> dict[str, np.ndarray]:
        """The arrays of `detail` that have one row a query.

        Those are the ones of length Q, but for names that begin with ``gallery_``: a gallery may be as large.
        """
        return {
            name: value
            for name, value in self.detail.items()
            if isinstance(value, np.ndarray)
            and value.shape[:1] == self.correct.shape
            and not name.startswith("gallery_")
        }

    def take(self, rows: Sequence[int] | np.ndarray) -> TaskResult:
        """The given queries as a result of their own; the gallery stays as it was.

        Raises:
            InputError: Rows out of range, or none.
        """
        index = np.asarray(rows, dtype=np.int64)
        _checks.rows_in_range(index, len(self), what=f"{self.task} result")
        return dataclasses.replace(
            self,
            ids=self.ids[index],
            correct=self.correct[index],
            uncertainty=self.uncertainty[index],
            confidence=None if self.confidence is None else self.confidence[index],
            recall_at={k: hits[index] for k, hits in self.recall_at.items()},
            groups=None if self.groups is None else self.groups[index],
            detail={**self.detail, **{name: value[index] for name, value in self.query_detail.items()}},
            provenance={**self.provenance, "n_queries": len(index)},
        )

    def to_frame(self) -> pd.DataFrame:
        """One row a query: id, correct, uncertainty, confidence, recall@k, group, and `query_detail` if (Q,)."""
        import pandas as pd

        columns: dict[str, Any] = {"id": self.ids, "correct": self.correct, "uncertainty": self.uncertainty}
        if self.confidence is not None:
            columns["confidence"] = self.confidence
        columns |= {f"recall@{k}": hits for k, hits in self.recall_at.items()}
        if self.groups is not None:
            columns["group"] = self.groups
        one_a_query = {
            name: value for name, value in self.query_detail.items() if value.ndim == 1 and name not in columns
        }
        return pd.DataFrame(columns | one_a_query)

    def save(self, path: str | Path) -> Path:
        """Write one `.safetensors` file that `load` reads back.

        Raises:
            StoreError: The file cannot be written.
        """
        path = Path(path)
        arrays: dict[str, np.ndarray] = {"correct": self.correct, "uncertainty": self.uncertainty}
        optional = {"confidence": self.confidence, "groups": self.groups}
        arrays |= {name: value for name, value in optional.items() if value is not None}
        arrays |= {f"recall_at.{k}": hits for k, hits in self.recall_at.items()}
        facts: dict[str, Any] = {
            "task": self.task,
            "direction": self.direction,
            "provenance": self.provenance,
            "ids": self.ids,
            "detail": {},
            "text_arrays": [],
        }
        for name, value in self.detail.items():
            if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
                arrays[f"detail.{name}"] = value
            else:
                facts["detail"][name] = value
                if isinstance(value, np.ndarray):
                    facts["text_arrays"].append(name)
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
        _io.write_tensors(path, tensors, {"grove_adapters.task_result": json.dumps(_io.jsonable(facts))})
        return path

    @classmethod
    def load(cls, path: str | Path) -> TaskResult:
        """Read what `save` wrote.

        Raises:
            UnreadableError: The file is missing, damaged or no task result.
        """
        tensors, metadata = _io.read_tensors(path)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        try:
            facts = json.loads(metadata["grove_adapters.task_result"])
            detail = {
                name: np.array(value, dtype=np.str_) if name in facts["text_arrays"] else value
                for name, value in facts["detail"].items()
            }
            return cls(
                task=facts["task"],
                direction=facts["direction"],
                ids=np.array(facts["ids"]),
                correct=arrays["correct"],
                uncertainty=arrays["uncertainty"],
                confidence=arrays.get("confidence"),
                groups=arrays.get("groups"),
                recall_at={int(k): hits for k, hits in _under("recall_at.", arrays).items()},
                detail=detail | _under("detail.", arrays),
                provenance=facts["provenance"],
            )
        except (KeyError, ValueError, TypeError) as error:
            raise UnreadableError(
                f"expected a saved task result in {path}, got a safetensors file without its facts ({error!r}); "
                "write it with TaskResult.save"
            ) from error


def _share(values: np.ndarray, what: str) -> np.ndarray:
    if values.min(initial=0.0) < 0 or values.max(initial=0.0) > 1:
        worst = values.min() if values.min() < 0 else values.max()
        raise InputError(f"{what} expected numbers from 0 to 1, got {worst:g}")
    return values


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
