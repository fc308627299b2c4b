"""What `calibrate` returns: every number a table, a plot or a page needs, and where it came from."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from grove_adapters import _io
from grove_adapters.errors import InputError, UnreadableError

SCHEMA = 2


@dataclass(frozen=True)
class Score:
    """One number with its bootstrap interval; NaN wherever something is undefined.

    Attributes:
        value: The score of the queries as they are.
        low: Lower end of the interval.
        high: Upper end of the interval.
        p_value: Share of permutations (uncertainty against correctness) that do at least as well, one-sided; NaN for
            scores that have no such null.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    p_value: float = math.nan

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "undefined"
        interval = "" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.value:.3f}{interval}"


@dataclass(frozen=True, eq=False)
class Levels:
    """The queries in levels of rising uncertainty: n parallel arrays. A level without queries has NaN but for `count`.

    Attributes:
        count: Number of queries.
        uncertainty: Mean uncertainty.
        uncertainty_low: Smallest uncertainty.
        uncertainty_high: Largest uncertainty.
        recall: Mean correctness.
        recall_low: Lower Clopper–Pearson bound of `recall`.
        recall_high: Upper Clopper–Pearson bound of `recall`.
    """

    count: np.ndarray
    uncertainty: np.ndarray
    uncertainty_low: np.ndarray
    uncertainty_high: np.ndarray
    recall: np.ndarray
    recall_low: np.ndarray
    recall_high: np.ndarray

    def __len__(self) -> int:
        return len(self.count)


@dataclass(frozen=True, eq=False)
class Reliability:
    """The queries in bins of equal width over confidence: parallel arrays. An empty bin has NaN but for its edges.

    Attributes:
        low: Lower edge, included.
        high: Upper edge, excluded but for the last bin.
        count: Number of queries.
        confidence: Mean confidence.
        accuracy: Mean correctness.
        accuracy_low: Lower Clopper–Pearson bound of `accuracy`.
        accuracy_high: Upper Clopper–Pearson bound of `accuracy`.
    """

    low: np.ndarray
    high: np.ndarray
    count: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray
    accuracy_low: np.ndarray
    accuracy_high: np.ndarray

    def __len__(self) -> int:
        return len(self.count)


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Error among the most certain queries, by the share of them that is answered: parallel arrays.

    Attributes:
        coverage: Share of the queries answered, rising to 1.
        risk: Mean error (1 − correctness) of those; queries of equal uncertainty enter together, in proportion.
        risk_low: Lower bootstrap bound of `risk`.
        risk_high: Upper bootstrap bound of `risk`.
        optimal: The risk if uncertainty ranked every wrong answer last.
    """

    coverage: np.ndarray
    risk: np.ndarray
    risk_low: np.ndarray
    risk_high: np.ndarray
    optimal: np.ndarray

    def __len__(self) -> int:
        return len(self.coverage)


@dataclass(frozen=True, eq=False, kw_only=True)
class CalibrationReport:
    """How far the uncertainty of a result can be trusted. Made by `calibrate`; plots draw it and compute nothing.

    Attributes:
        task: Task of the result, e.g. ``"retrieval"``.
        direction: ``"i2t"``, ``"t2i"`` or ``""``.
        protocol: Name of the rule that made the levels, e.g. ``"equal_count"``.
        n_queries: Q.
        n_groups: Number of independent groups that were resampled; Q where queries stand alone.
        scores: By name, such as ``neg_s_r2`` or ``ece``; `calibration.scores.SCORES` says what each is.
        recall_at: k → recall@k.
        accuracy_at_coverage: Share of the queries → mean correctness of that many of the most certain ones.
        coverage_at_risk: Mean error → largest share of most certain queries that keep it.
        ranking: mAP@R, R-Precision and the median rank of the first true match, as ``map_at_r``, ``r_precision`` and
            ``median_rank``, where the task was asked for them.
        levels: The levels behind S, R² and −S·R².
        reliability: The bins behind the ECE, or None where the result has no confidence.
        risk_coverage: The curve behind the AURC, at no more than 100 coverages.
        interval: Nominal coverage of every interval, e.g. 0.95.
        resamples: Number of bootstrap resamples, and of permutations behind p-values.
        seed: Address of the resampling.
        queries: Digest of the query ids; equal for two reports on the same queries.
        provenance: The result's provenance, and the package versions.
    """

    task: str
    direction: str
    protocol: str
    n_queries: int
    n_groups: int
    scores: Mapping[str, Score]
    recall_at: Mapping[int, Score]
    accuracy_at_coverage: Mapping[float, Score] = field(default_factory=dict)
    coverage_at_risk: Mapping[float, Score] = field(default_factory=dict)
    ranking: Mapping[str, Score] = field(default_factory=dict)
    levels: Levels
    reliability: Reliability | None
    risk_coverage: RiskCoverage
    interval: float
    resamples: int
    seed: int
    queries: str
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def adapter(self) -> str:
        """Name of the adapter that made the queries' posterior; ``""`` where unknown."""
        return str(self.provenance.get("query_maker", {}).get("adapter", ""))

    @property
    def levels_in_words(self) -> str:
        """How the levels were made, such as ``"10 levels (equal count) of 50 queries"``."""
        low, high = int(self.levels.count.min()), int(self.levels.count.max())
        size = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return f"{len(self.levels)} levels ({self.protocol.replace('_', ' ')}) of {size} queries"

    def row(self) -> dict[str, Any]:
        """The report as one flat table row: each score as ``name``, ``name_low``, ``name_high`` (and ``name_p``).

        Beside the names of `scores` stand ``recall@5``, ``accuracy@0.8`` (at that coverage) and ``coverage@0.05`` (at
        that risk).
        """
        row: dict[str, Any] = {
            "adapter": self.adapter,
            "task": self.task,
            "direction": self.direction,
            "protocol": self.protocol,
            "levels": len(self.levels),
            "queries": self.n_queries,
            "queries_per_level": int(self.levels.count.min()),
        }
        for name, score in self.named().items():
            row |= {name: score.value, f"{name}_low": score.low, f"{name}_high": score.high}
            if not math.isnan(score.p_value):
                row[f"{name}_p"] = score.p_value
        return row

    def named(self) -> dict[str, Score]:
        """All scores under the names that `row` gives them."""
        return {
            **{f"recall@{k}": score for k, score in self.recall_at.items()},
            **self.ranking,
            **self.scores,
            **{f"accuracy@{coverage:g}": score for coverage, score in self.accuracy_at_coverage.items()},
            **{f"coverage@{risk:g}": score for risk, score in self.coverage_at_risk.items()},
        }

    def compare(self, other: CalibrationReport) -> dict[str, float]:
        """Score by score, this report's value minus the other's; NaN where either is undefined.

        Reports no longer hold the queries: `calibration.compare` takes the results, and gives each difference an
        interval.

        Raises:
            InputError: The reports are about different queries, or levels made in another way.
        """
        for name, mine, theirs in (
            ("queries", self.queries, other.queries),
            ("direction", self.direction, other.direction),
            ("protocol", self.protocol, other.protocol),
            ("number of levels", len(self.levels), len(other.levels)),
        ):
            if mine != theirs:
                raise InputError(
                    f"compare expected two reports with the same {name}, got {mine!r} and {theirs!r}; "
                    "calibrate both results on the same queries with the same settings"
                )
        return {
            name: score.value - other.scores[name].value for name, score in self.scores.items() if name in other.scores
        }

    def to_json(self) -> str:
        """The report as JSON text; NaN is written as null and read back as NaN."""
        content = {"schema": SCHEMA, **dataclasses.asdict(self)}
        return json.dumps(_io.jsonable(content), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> CalibrationReport:
        """Rebuild what `to_json` wrote.

        Raises:
            UnreadableError: The text is no calibration report of this schema.
        """
        try:
            content = json.loads(text)
            if content.pop("schema") != SCHEMA:
                raise ValueError("another schema")
            content["scores"] = {name: _score(score) for name, score in content["scores"].items()}
            mappings = {"recall_at": int, "accuracy_at_coverage": float, "coverage_at_risk": float, "ranking": str}
            for name, key in mappings.items():
                content[name] = {key(at): _score(score) for at, score in content[name].items()}
            content["levels"] = Levels(**_columns(content["levels"]))
            if content["reliability"] is not None:
                content["reliability"] = Reliability(**_columns(content["reliability"]))
            content["risk_coverage"] = RiskCoverage(**_columns(content["risk_coverage"]))
            return cls(**content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnreadableError(
                f"expected a calibration report of schema {SCHEMA} as JSON, got something else ({error!r}); "
                "write it with CalibrationReport.save"
            ) from error

    def save(self, path: str | Path) -> Path:
        """Write `to_json` to a file, whole or not at all.

        Raises:
            StoreError: The file cannot be written.
        """
        _io.write_text(path, self.to_json() + "\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> CalibrationReport:
        """Read what `save` wrote.

        Raises:
            UnreadableError: The file is missing or no calibration report.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UnreadableError(
                f"expected a calibration report at {path}, got {error}; check the path or run calibrate again"
            ) from error
        return cls.from_json(text)


def _score(content: Mapping[str, float | None]) -> Score:
    return Score(**{name: math.nan if value is None else value for name, value in content.items()})


def _columns(content: Mapping[str, list[float | None]]) -> dict[str, np.ndarray]:
    columns = {name: np.array(values, dtype=np.float64) for name, values in content.items()}
    return columns | ({"count": columns["count"].astype(np.int64)} if "count" in columns else {})
