"""From the rows of a task to numbers with intervals."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grove_adapters import _checks
from grove_adapters.calibration import bins, bootstrap
from grove_adapters.calibration.blocks import Blocks
from grove_adapters.calibration.confidences import confidence_bin
from grove_adapters.calibration.report import CalibrationReport, Levels, Reliability, RiskCoverage, Score
from grove_adapters.calibration.scores import RANKINGS, SCORES, Null, Queries, rank_correlations
from grove_adapters.errors import InputError, InputTypeError
from grove_adapters.tasks.base import TaskResult

FEWEST = 8
"""Independent right, and wrong, queries below which the scores that contrast them get no interval. A bootstrap of one
right query is as narrow as that of many: simulated coverage of a 95 % interval of AUROC is .11 with one, .57 with two
and .83 to .93 with eight. Their p-values stay, since permutations need no such thing."""


COVERAGES = (0.5, 0.8, 0.9)
RISKS = (0.01, 0.05, 0.1)


def calibrate(
    result: TaskResult,
    *,
    levels: int = 10,
    protocol: str = "equal_count",
    confidence_bins: int = 15,
    coverages: Sequence[float] = COVERAGES,
    risks: Sequence[float] = RISKS,
    resamples: int = 1000,
    seed: int = 0,
    interval: float = 0.95,
) -> CalibrationReport:
    """Measure how well a result's uncertainty and confidence foretell its errors.

    The report does not depend on the order of the queries. Every score carries a bootstrap interval (whole groups are
    resampled where the result has groups), and those of the uncertainty a one-sided p-value of the null that it says
    nothing: correctness is handed round among the queries, whole groups at a time. What is undefined is NaN: S and R²
    where all levels have the same recall, AUROC where all or no queries are right, the scores of the confidence where
    there is none, every interval where there is a single group, and those of S, R², −S·R², AUROC and excess AURC with
    fewer than eight independent right or wrong queries, which no resampling can judge. Where a recall is 0 or 1,
    resamples all agree, and its interval is Clopper–Pearson's over groups.

    Args:
        result: What a task returned.
        levels: Number of uncertainty levels behind S, R² and −S·R², at least 2 (they need 3 that are not empty).
        protocol: How levels are made: ``"equal_count"`` (default), ``"equal_width"``, or ``"cumulative_width"`` to
            reproduce published numbers; see `calibration.bins`.
        confidence_bins: Bins over [0, 1] behind the ECE, the MCE and the parts of the Brier score.
        coverages: Shares of the queries, most certain first, whose accuracy is wanted.
        risks: Mean errors for which the share of queries that can be answered is wanted.
        resamples: Bootstrap resamples, and permutations; 0 leaves intervals and p-values NaN.
        seed: Address of the resampling.
        interval: Nominal coverage of intervals and bounds, between 0 and 1.

    Raises:
        InputError: A setting out of range, or an unknown protocol.
        InputTypeError: `result` is no `TaskResult`.

    Source: GroVE sec. 4 for S, R² and −S·R² (with disjoint levels instead of its code's nested ones); Geifman et al.
    2019 for excess AURC and coverage at a risk; Guo et al. 2017 for ECE; see `calibration.scores.SCORES` for the rest.
    """
    settings = Settings(levels, protocol, confidence_bins, tuple(coverages), tuple(risks), resamples, seed, interval)
    rows = Rows.of(result, settings)
    observed = {name: values[0] for name, values in rows.queries.scored(np.ones((1, len(result)))).items()}
    draws, null = _resampled(rows, settings)
    if "aurc" in null:  # the optimal AURC does not change when errors are handed round
        null["excess_aurc"] = null["aurc"] - (observed["aurc"] - observed["excess_aurc"])

    scores = {}
    for name, kind in SCORES.items():
        value = float(observed.get(name, np.nan))
        low = high = p = np.nan
        if name in draws and not (kind.contrasts and rows.few):
            low, high = bootstrap.interval(draws[name], value, interval, kind.bounds)
        if name in null and kind.larger_is_better is not None:
            p = bootstrap.p_value(null[name], value, larger_is_better=kind.larger_is_better)
        scores[name] = Score(value, low, high, p)

    def shares(name: str, keys: Sequence[Any]) -> dict[Any, Score]:
        columns = draws[name].T if name in draws else np.empty((len(keys), 0))
        return {
            key: _share_score(float(value), column, rows.n_groups, interval)
            for key, value, column in zip(keys, observed[name], columns, strict=True)
        }

    ranking = {}
    for column, name in enumerate(rows.queries.ranking):
        value = float(observed["ranking"][column])
        sample = draws["ranking"][:, column] if draws else np.empty(0)
        ranking[name] = Score(value, *bootstrap.interval(sample, value, interval, RANKINGS[name].kind.bounds))
    recall_draws = draws.get("recall", np.empty(0))
    scores["recall"] = _share_score(scores["recall"].value, recall_draws, rows.n_groups, interval)
    risk_draws = draws.get("risk", np.empty((0, len(rows.queries.curve_coverages))))
    bands = [
        bootstrap.interval(column, value, interval, (0, 1))
        for column, value in zip(risk_draws.T, observed["risk"], strict=True)
    ]
    return CalibrationReport(
        task=result.task,
        direction=result.direction,
        protocol=protocol,
        n_queries=len(result),
        n_groups=rows.n_groups,
        scores=scores,
        recall_at=shares("recall_at", tuple(result.recall_at)),
        accuracy_at_coverage=shares("accuracy_at_coverage", settings.coverages),
        coverage_at_risk=shares("coverage_at_risk", settings.risks),
        ranking=ranking,
        levels=_levels(rows.correct, rows.uncertainty, rows.queries.members(), interval),
        reliability=None
        if rows.confidence is None
        else _reliability(rows.correct, rows.confidence, confidence_bins, interval),
        risk_coverage=RiskCoverage(
            coverage=rows.queries.curve_coverages,
            risk=observed["risk"],
            risk_low=np.array([low for low, _ in bands]),
            risk_high=np.array([high for _, high in bands]),
            optimal=rows.queries.optimal_risk(),
        ),
        interval=interval,
        resamples=resamples,
        seed=seed,
        queries=rows.digest,
        provenance={**result.provenance, "versions": versions()},
    )


@dataclass(frozen=True)
class Settings:
    """Settings of `calibrate` and `compare`, checked; see there.

    Raises:
        InputError: A setting out of range, or an unknown protocol.
    """

    levels: int
    protocol: str
    confidence_bins: int
    coverages: tuple[float, ...]
    risks: tuple[float, ...]
    resamples: int
    seed: int
    interval: float

    def __post_init__(self) -> None:
        _checks.choice(self.protocol, tuple(bins.PROTOCOLS), what="protocol")
        _checks.count(self.levels, what="levels", at_least=2)
        _checks.count(self.confidence_bins, what="confidence_bins")
        for name, shares in (("coverages", self.coverages), ("risks", self.risks)):
            for share in shares:
                if not 0 < share <= 1:
                    raise InputError(f"{name} expected shares above 0 and up to 1, got {share}; 0.5 is a half")
        _check_resampling(self.resamples, self.interval)


@dataclass(frozen=True, eq=False)
class Rows:
    """A result's queries in an order of our own, so that the caller's changes nothing.

    Attributes:
        correct: (Q,) as in the result.
        uncertainty: (Q,) as in the result.
        confidence: (Q,) as in the result, or None.
        groups: (Q,) codes from 0.
        queries: The same, ready for scoring.
        digest: Of the ids.
    """

    correct: np.ndarray
    uncertainty: np.ndarray
    confidence: np.ndarray | None
    groups: np.ndarray
    queries: Queries
    digest: str

    @classmethod
    def of(cls, result: TaskResult, settings: Settings, order: np.ndarray | None = None) -> Rows:
        """The rows of a result.

        Args:
            result: What a task returned.
            settings: How it is scored.
            order: (Q,) rows of the result; by default rising in uncertainty, which saves sorting every resample.

        Raises:
            InputTypeError: `result` is no `TaskResult`.
        """
        if not isinstance(result, TaskResult):
            raise InputTypeError(f"calibrate expected a TaskResult, got {type(result).__name__}; run a task first")
        if order is None:
            order = np.lexsort((result.ids, result.uncertainty))
        correct, uncertainty = result.correct[order], result.uncertainty[order]
        confidence = None if result.confidence is None else result.confidence[order]
        return cls(
            correct,
            uncertainty,
            confidence,
            _in_order(result.groups, order),
            Queries.of(
                correct,
                uncertainty,
                confidence,
                {k: hits[order] for k, hits in result.recall_at.items()},
                ranking={
                    name: result.detail[kind.column][order]
                    for name, kind in RANKINGS.items()
                    if kind.column in result.query_detail
                },
                levels=settings.levels,
                protocol=settings.protocol,
                confidence_bins=settings.confidence_bins,
                coverages=settings.coverages,
                risks=settings.risks,
            ),
            hashlib.sha256("\n".join(sorted(result.ids.tolist())).encode()).hexdigest()[:16],
        )

    @property
    def n_groups(self) -> int:
        """Number of independent groups."""
        return int(self.groups.max()) + 1

    @property
    def few(self) -> bool:
        """Whether too few independent queries are right, or wrong, for an interval of what contrasts them."""
        sides = (self.groups[self.correct > 0], self.groups[self.correct < 1])
        return min(len(np.unique(side)) for side in sides) < FEWEST


def rank_correlation(
    uncertainty: Any,
    truth: Any,
    *,
    groups: np.ndarray | None = None,
    resamples: int = 1000,
    seed: int = 0,
    interval: float = 0.95,
) -> Score:
    """Spearman correlation of an uncertainty with a known truth, such as the ambiguity of a rendered scene's caption.

    Args:
        uncertainty: (Q,) finite numbers, larger = less certain.
        truth: (Q,) finite numbers, larger = should be less certain.
        groups: (Q,) whole numbers, equal where items are no independent draws, or None.
        resamples: Bootstrap resamples, and permutations; 0 leaves interval and p-value NaN.
        seed: Address of the resampling.
        interval: Nominal coverage, between 0 and 1.

    Returns:
        The correlation, its interval, and the one-sided p-value of "no positive relation"; NaN where either column is
        constant.

    Raises:
        InputError: Columns of different length, NaN or infinite entries, or a setting out of range.
    """
    _check_resampling(resamples, interval)
    columns = []
    for what, values in (("uncertainty", uncertainty), ("truth", truth)):
        column = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        if column.ndim != 1 or not len(column):
            raise InputError(f"{what} expected one number an item, got shape {column.shape}")
        _checks.finite(column, what=what)
        columns.append(column.astype(np.float64))
    _checks.same_rows(len(columns[0]), len(columns[1]), what="truth")
    if groups is not None:
        _checks.same_rows(len(columns[0]), len(groups), what="groups")
    codes = bootstrap.group_codes(groups, len(columns[0]))
    x, y = (Blocks.of(column) for column in columns)

    value = float(rank_correlations(x, y, np.ones((1, len(codes))))[0])
    draws = null = np.empty(0)
    if resamples and codes.max():
        draws = np.concatenate(
            [rank_correlations(x, y, counts) for counts in bootstrap.resampled_counts(codes, resamples, seed=seed)]
        )
        x_rank, y_rank = (blocks.mid_ranks(np.ones((1, len(codes))))[0] for blocks in (x, y))
        y_rank -= y_rank.mean()
        scale = np.sqrt(np.square(x_rank - x_rank.mean()).sum() * np.square(y_rank).sum())
        null = np.concatenate([y_rank[rows] @ x_rank for rows in bootstrap.permutations(codes, resamples, seed=seed)])
        null = np.divide(null, scale, out=np.full(len(null), np.nan), where=scale > 0)
    low, high = bootstrap.interval(draws, value, interval, (-1, 1))
    return Score(value, low, high, bootstrap.p_value(null, value, larger_is_better=True))


def clopper_pearson(successes: np.ndarray, trials: np.ndarray, coverage: float) -> tuple[np.ndarray, np.ndarray]:
    """Exact binomial bounds of a share; NaN without trials. Soft successes are taken as they are.

    Source: Clopper & Pearson 1934, by quantiles of the Beta distribution.
    """
    from scipy.special import betaincinv

    tail = (1 - coverage) / 2
    failures = trials - successes
    with np.errstate(invalid="ignore"):
        low = np.where(successes > 0, betaincinv(successes, failures + 1, tail), 0.0)
        high = np.where(failures > 0, betaincinv(successes + 1, failures, 1 - tail), 1.0)
    return np.where(trials > 0, low, np.nan), np.where(trials > 0, high, np.nan)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that could change a number."""
    packages = ("grove-adapters", "numpy", "torch", "scipy")
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
            found[package] = "unknown"
    return found


def _check_resampling(resamples: int, interval: float) -> None:
    _checks.count(resamples, what="resamples", at_least=0)
    if not 0 < interval < 1:
        raise InputError(f"interval expected a coverage between 0 and 1, got {interval}; 0.95 is usual")


def _in_order(groups: np.ndarray | None, order: np.ndarray) -> np.ndarray:
    """Group codes of the sorted queries, numbered by first appearance so that the caller's numbers do not matter."""
    if groups is None:
        return np.arange(len(order))
    _, first, codes = np.unique(groups[order], return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[codes]


def _resampled(rows: Rows, settings: Settings) -> tuple[Mapping[str, np.ndarray], dict[str, np.ndarray]]:
    """Bootstrap draws and permutation null of every score; both empty where nothing can be resampled."""
    if not settings.resamples or rows.n_groups == 1:
        return {}, {}
    how = {"resamples": settings.resamples, "seed": settings.seed}

    def draw() -> dict[str, np.ndarray]:
        return _joined([rows.queries.scored(counts) for counts in bootstrap.resampled_counts(rows.groups, **how)])

    def shuffle() -> dict[str, np.ndarray]:
        null = Null(rows.queries)
        return _joined([null.scored(given) for given in bootstrap.permutations(rows.groups, **how)])

    with ThreadPoolExecutor(1) as other:  # both spend their time inside NumPy, which lets the other run
        shuffled = other.submit(shuffle)
        return draw(), shuffled.result()


def _joined(blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _share_score(value: float, draws: np.ndarray, n_groups: int, interval: float) -> Score:
    """A recall with its interval, which resampling cannot give where every query agrees."""
    if len(draws) and value in (0.0, 1.0):
        low, high = clopper_pearson(np.array(value * n_groups), np.array(n_groups), interval)
        return Score(value, float(low), float(high))
    return Score(value, *bootstrap.interval(draws, value, interval, (0, 1)))


def _levels(correct: np.ndarray, uncertainty: np.ndarray, members: list[np.ndarray], interval: float) -> Levels:
    count = np.array([len(rows) for rows in members])
    right = np.array([correct[rows].sum() for rows in members])
    held = [uncertainty[rows] if len(rows) else np.array([np.nan]) for rows in members]
    recall_low, recall_high = clopper_pearson(right, count, interval)
    return Levels(
        count=count,
        uncertainty=np.array([level.mean() for level in held]),
        uncertainty_low=np.array([level.min() for level in held]),
        uncertainty_high=np.array([level.max() for level in held]),
        recall=_share(right, count),
        recall_low=recall_low,
        recall_high=recall_high,
    )


def _reliability(correct: np.ndarray, confidence: np.ndarray, n: int, interval: float) -> Reliability:
    bin_of = confidence_bin(confidence, n)
    count = np.bincount(bin_of, minlength=n)
    right = np.bincount(bin_of, correct, minlength=n)
    accuracy_low, accuracy_high = clopper_pearson(right, count, interval)
    return Reliability(
        low=np.arange(n) / n,
        high=np.arange(1, n + 1) / n,
        count=count,
        confidence=_share(np.bincount(bin_of, confidence, minlength=n), count),
        accuracy=_share(right, count),
        accuracy_low=accuracy_low,
        accuracy_high=accuracy_high,
    )


def _share(sums: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.divide(sums, count, out=np.full(len(sums), np.nan), where=count > 0)
