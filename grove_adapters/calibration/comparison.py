"""Which of two results is better on the same queries, and how sure that is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from grove_adapters import _io
from grove_adapters.calibration import bootstrap
from grove_adapters.calibration.measure import COVERAGES, RISKS, Rows, Settings
from grove_adapters.calibration.report import Score
from grove_adapters.calibration.scores import RANKINGS, SCORES, Kind
from grove_adapters.errors import InputError
from grove_adapters.tasks.base import TaskResult

SHARE = Kind((0, 1), larger_is_better=True)  # recall@k, accuracy@coverage, coverage@risk


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """One result minus another, score by score. Made by `compare`.

    Attributes:
        differences: By name, as in `CalibrationReport.named`: the first result's score minus the second's, its
            interval, and the two-sided p-value of "no difference".
        task: Task of both results.
        direction: Direction of both results.
        protocol: Name of the rule that made the levels.
        levels: Number of levels.
        n_queries: Q.
        n_groups: Number of independent groups that were resampled.
        interval: Nominal coverage of the intervals.
        resamples: Number of bootstrap resamples.
        seed: Address of the resampling.
    """

    differences: Mapping[str, Score]
    task: str
    direction: str
    protocol: str
    levels: int
    n_queries: int
    n_groups: int
    interval: float
    resamples: int
    seed: int

    def better(self, name: str, *, level: float = 0.05) -> int:
        """1 where the first result is better at this score, −1 where the second is, 0 where the data does not say.

        Args:
            name: A name among `differences`.
            level: p-value up to which a difference counts.

        Raises:
            InputError: There is no such score, or neither of its directions is the better one.
        """
        if name not in self.differences:
            raise InputError(f"comparison has no score {name!r}; it has {', '.join(self.differences)}")
        larger_is_better = _kind(name).larger_is_better
        if larger_is_better is None:
            raise InputError(f"comparison expected a score with a better direction, got {name!r}; look at its interval")
        difference = self.differences[name]
        if not difference.p_value <= level:  # NaN says nothing either
            return 0
        return int(math.copysign(1, difference.value)) * (1 if larger_is_better else -1)

    def row(self) -> dict[str, Any]:
        """The comparison as one flat table row: differences as ``name``, ``name_low``, ``name_high`` and ``name_p``."""
        row = {name: value for name, value in asdict(self).items() if name != "differences"}
        for name, score in self.differences.items():
            row |= {name: score.value, f"{name}_low": score.low, f"{name}_high": score.high, f"{name}_p": score.p_value}
        return row

    def to_json(self) -> str:
        """The comparison as JSON text; NaN is written as null."""
        return json.dumps(_io.jsonable(asdict(self)), indent=2, allow_nan=False)


def compare(
    first: TaskResult,
    second: TaskResult,
    *,
    levels: int = 10,
    protocol: str = "equal_count",
    confidence_bins: int = 15,
    coverages: Sequence[float] = COVERAGES,
    risks: Sequence[float] = RISKS,
    resamples: int = 1000,
    seed: int = 0,
    interval: float = 0.95,
) -> Comparison:
    """Compare two adapters on the same queries.

    Both are scored on the same bootstrap resamples (whole groups where there are any), so what makes a query hard for
    both cancels, and differences far smaller than the two intervals of the reports can be told apart. A difference has
    no interval where one of its scores would have none in `calibrate`.

    Args:
        first: The result whose scores count positively.
        second: A result of the same task, direction and queries, in any order.
        levels: As in `calibrate`.
        protocol: As in `calibrate`.
        confidence_bins: As in `calibrate`.
        coverages: As in `calibrate`.
        risks: As in `calibrate`.
        resamples: Bootstrap resamples; 0 leaves intervals and p-values NaN.
        seed: Address of the resampling.
        interval: Nominal coverage of intervals, between 0 and 1.

    Raises:
        InputError: The results are about different tasks, queries or groups, or a setting is out of range.
        InputTypeError: One of them is no `TaskResult`.

    Source: paired percentile bootstrap (Efron & Tibshirani 1993), with the interval of `bootstrap.interval` and the
    p-value that goes with it.
    """
    settings = Settings(levels, protocol, confidence_bins, tuple(coverages), tuple(risks), resamples, seed, interval)
    pair = [Rows.of(result, settings, _by_id(result)) for result in (first, second)]
    for what, mine, theirs in (
        ("task", first.task, second.task),
        ("direction", first.direction, second.direction),
        ("queries", pair[0].digest, pair[1].digest),
        ("groups", pair[0].groups.tolist(), pair[1].groups.tolist()),
    ):
        if mine != theirs:
            got = "others" if what == "groups" else f"{mine!r} and {theirs!r}"
            raise InputError(f"compare expected two results with the same {what}, got {got}; run both on the same data")

    ones = np.ones((1, len(first)))
    observed = _difference(pair, ones, first, second)
    draws: dict[str, np.ndarray] = {}
    if resamples and pair[0].n_groups > 1:
        counts = bootstrap.resampled_counts(pair[0].groups, resamples, seed=seed)
        blocks = [_difference(pair, weights, first, second) for weights in counts]
        draws = {name: np.concatenate([block[name] for block in blocks]) for name in observed}
    few = any(rows.few for rows in pair)
    differences = {}
    for name, (value,) in observed.items():
        kind = _kind(name)
        width = kind.bounds[1] - kind.bounds[0]
        judged = name in draws and not (kind.contrasts and few)
        sample = draws[name] if judged else np.empty(0)
        low, high = bootstrap.interval(sample, float(value), interval, (-width, width))
        differences[name] = Score(float(value), low, high, bootstrap.difference_p_value(sample, float(value)))
    return Comparison(
        differences=differences,
        task=first.task,
        direction=first.direction,
        protocol=protocol,
        levels=levels,
        n_queries=len(first),
        n_groups=pair[0].n_groups,
        interval=interval,
        resamples=resamples,
        seed=seed,
    )


def _kind(name: str) -> Kind:
    return RANKINGS[name].kind if name in RANKINGS else SCORES.get(name, SHARE)


def _by_id(result: Any) -> np.ndarray | None:
    return np.argsort(result.ids) if isinstance(result, TaskResult) else None


def _difference(pair: list[Rows], weights: np.ndarray, first: TaskResult, second: TaskResult) -> dict[str, np.ndarray]:
    """(R,) differences by name under R weightings, of the scores that both results have."""
    mine, theirs = (dict(_named(rows, result, weights)) for rows, result in zip(pair, (first, second), strict=True))
    return {name: mine[name] - theirs[name] for name in mine if name in theirs}


def _named(rows: Rows, result: TaskResult, weights: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The (R,) scores of one result under the names a report's row gives them."""
    scored = rows.queries.scored(weights)
    for k, column in zip(result.recall_at, scored["recall_at"].T, strict=True):
        yield f"recall@{k}", column
    yield from zip(rows.queries.ranking, scored["ranking"].T, strict=True)
    for name in SCORES:
        if name in scored:
            yield name, scored[name]
    for coverage, column in zip(rows.queries.coverages, scored["accuracy_at_coverage"].T, strict=True):
        yield f"accuracy@{coverage:g}", column
    for risk, column in zip(rows.queries.risks, scored["coverage_at_risk"].T, strict=True):
        yield f"coverage@{risk:g}", column
