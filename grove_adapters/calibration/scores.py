"""The scores themselves, each for many weightings of the same queries at once.

A weighting says how often every query counts: all ones for the score itself, a bootstrap resample's counts for its
interval. Queries are sorted once by uncertainty, into one block for each distinct value; every score then needs only
running sums over blocks, and none depends on the order of queries that are equally uncertain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grove_adapters.calibration.bins import PROTOCOLS
from grove_adapters.calibration.blocks import Blocks
from grove_adapters.calibration.confidences import Confidences


class Kind(NamedTuple):
    """What is known of a score beforehand.

    Attributes:
        bounds: Smallest and largest possible value.
        larger_is_better: Its direction, or None where neither is better.
        contrasts: Whether it sets wrong queries against right ones, so that few of either leave nothing to resample.
        has_null: Whether handing correctness round among the queries is its null hypothesis.
    """

    bounds: tuple[float, float]
    larger_is_better: bool | None
    contrasts: bool = False
    has_null: bool = False


SCORES: dict[str, Kind] = {
    "recall": Kind((0, 1), larger_is_better=True),
    "spearman": Kind((-1, 1), larger_is_better=False, contrasts=True, has_null=True),
    "pearson": Kind((-1, 1), larger_is_better=False, contrasts=True, has_null=True),
    "r2": Kind((0, 1), larger_is_better=True, contrasts=True, has_null=True),
    "r2_identity": Kind((-np.inf, 1), larger_is_better=True, contrasts=True, has_null=True),
    "neg_s_r2": Kind((-1, 1), larger_is_better=True, contrasts=True, has_null=True),
    "auroc": Kind((0, 1), larger_is_better=True, contrasts=True, has_null=True),
    "aurc": Kind((0, 1), larger_is_better=False, has_null=True),
    "excess_aurc": Kind((0, 1), larger_is_better=False, contrasts=True, has_null=True),
    "ece": Kind((0, 1), larger_is_better=False),
    "ece_equal_mass": Kind((0, 1), larger_is_better=False),
    "ece_debiased": Kind((0, 1), larger_is_better=False),
    "mce": Kind((0, 1), larger_is_better=False),
    "brier": Kind((0, 1), larger_is_better=False),
    "brier_reliability": Kind((0, 1), larger_is_better=False),
    "brier_resolution": Kind((-1, 1), larger_is_better=True),
    "brier_uncertainty": Kind((0, 0.25), larger_is_better=None),
    "nll": Kind((0, np.inf), larger_is_better=False),
}
"""The scores of a report, in its order.

Of correctness alone:

* ``recall``: mean correctness: recall@1 of retrieval, accuracy of classification, and where an answer can be partly
  right (soft labels) the soft accuracy.

Of the uncertainty, in levels:

* ``spearman``: S, rank correlation of a level's number with its recall; −1 is ideal.
* ``pearson``: their linear correlation; −1 is ideal. Source: PCME++'s code.
* ``r2``: R² of the straight line fitted to recall over the level's number, the square of ``pearson``.
* ``r2_identity``: R² of a line that nobody fitted, from recall 1 in the first level to 0 in the last: how much of the
  recalls' spread is left once the ideal is taken off, negative where the mean recall would do better.
* ``neg_s_r2``: −S·R²; 1 is ideal, 0 is no relation. Source: GroVE's headline, with disjoint levels.

Of the uncertainty, query by query:

* ``auroc``: probability that a wrong query is more uncertain than a right one, ties counting half (R-AUROC where
  queries retrieve). Soft correctness c is c of a right and 1 − c of a wrong query.
* ``aurc``: mean over n of the error among the n most certain queries; 0 is ideal. Queries of equal uncertainty
  contribute their mean over all orders.
* ``excess_aurc``: AURC minus that of an uncertainty that ranks every error last.

Of the confidence:

* ``ece``: expected calibration error over bins of equal width: mean over queries of |mean confidence − mean
  correctness| of their bin.
* ``ece_equal_mass``: the same over bins that hold equally many queries.
* ``ece_debiased``: root of the mean squared gap over the same bins, each square less the variance that noise gives to
  its mean. Where few queries meet many bins the plain ones call a confidence wrong that is right, this one does not; 0
  where noise explains all. A bin of one query counts nothing. Source: Kumar et al. 2019, ℓ2, with the variance of the
  bin's gaps.
* ``mce``: the largest such gap of any bin of equal width that is not empty.
* ``brier``: mean (confidence − correctness)².
* ``brier_reliability``, ``brier_resolution``, ``brier_uncertainty``: its parts over bins of equal width, Brier =
  reliability − resolution + uncertainty. Source: Murphy 1973; the resolution is Stephenson et al.'s (2008), which
  includes what varies inside a bin and so makes the sum exact.
* ``nll``: mean −log probability of what happened, in nats; confidences are kept 2⁻⁵² away from 0 and 1.
"""


class Ranking(NamedTuple):
    """A score of whole rankings.

    Attributes:
        column: The entry of `TaskResult.detail` with one number a query.
        kind: What is known of it.
        median: Whether it is the median of that entry instead of its mean.
    """

    column: str
    kind: Kind
    median: bool = False


RANKINGS: dict[str, Ranking] = {
    "map_at_r": Ranking("average_precision_at_r", Kind((0, 1), larger_is_better=True)),
    "r_precision": Ranking("r_precision", Kind((0, 1), larger_is_better=True)),
    "median_rank": Ranking("first_rank", Kind((1, np.inf), larger_is_better=False), median=True),
}
"""The scores of rankings, where a task was asked for them; see `tasks.ranking`."""

ROUNDING = 1e-9  # of sums of errors, far below one query
LEVEL_SCORES_NEED = 3  # non-empty levels: a line through two points always fits
CURVE_POINTS = 100  # of a risk-coverage curve


@dataclass(frozen=True, eq=False)
class Queries:
    """Q queries made ready for scoring.

    Attributes:
        error: (Q,) 1 − correctness, in [0, 1].
        by_uncertainty: The queries in blocks of equal uncertainty.
        by_error: The queries in blocks of equal error.
        confidences: Their confidences, or None.
        hits: (Q, number of k) columns of recall@k.
        ranking: Names in `RANKINGS` → their columns: (Q,) where the mean is wanted, in blocks where the median is.
        levels: Number of levels.
        protocol: Name of the rule that makes them.
        coverages: Shares of the queries at which the accuracy is wanted.
        risks: Errors at which the coverage is wanted.
    """

    error: np.ndarray
    by_uncertainty: Blocks
    by_error: Blocks
    confidences: Confidences | None
    hits: np.ndarray
    ranking: Mapping[str, np.ndarray | Blocks]
    levels: int
    protocol: str
    coverages: tuple[float, ...]
    risks: tuple[float, ...]

    @classmethod
    def of(
        cls,
        correct: np.ndarray,
        uncertainty: np.ndarray,
        confidence: np.ndarray | None = None,
        recall_at: Mapping[int, np.ndarray] | None = None,
        *,
        ranking: Mapping[str, np.ndarray] | None = None,
        levels: int = 10,
        protocol: str = "equal_count",
        confidence_bins: int = 15,
        coverages: Sequence[float] = (),
        risks: Sequence[float] = (),
    ) -> Queries:
        """Sort once what every weighting needs."""
        hits = list((recall_at or {}).values())
        return cls(
            error=1 - correct,
            by_uncertainty=Blocks.of(uncertainty),
            by_error=Blocks.of(1 - correct),
            confidences=None if confidence is None else Confidences(confidence, correct, confidence_bins),
            hits=np.stack(hits, 1) if hits else np.empty((len(correct), 0)),
            ranking={
                name: Blocks.of(column) if RANKINGS[name].median else column for name, column in (ranking or {}).items()
            },
            levels=levels,
            protocol=protocol,
            coverages=tuple(coverages),
            risks=tuple(risks),
        )

    @property
    def curve_coverages(self) -> np.ndarray:
        """(P,) rising shares of the queries at which the risk-coverage curve is kept."""
        points = min(CURVE_POINTS, len(self.error))
        return np.arange(1, points + 1) / points

    def members(self) -> list[np.ndarray]:
        """The rows of the queries of each level."""
        blocks = self.by_uncertainty
        edges = np.append(blocks.starts, len(self.error))
        starts, stops = PROTOCOLS[self.protocol](blocks.values, edges[None].astype(np.float64), self.levels)
        return [blocks.order[edges[start] : edges[stop]] for start, stop in zip(starts[0], stops[0], strict=True)]

    def scored(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Every score under R weightings of whole numbers.

        Args:
            weights: (R, Q) how often each query counts.

        Returns:
            The names of `SCORES` as (R,), those of the confidence only where there is one; ``recall_at`` (R, number
            of k), ``ranking`` (R, number of `ranking`), ``accuracy_at_coverage`` (R, number of `coverages`),
            ``coverage_at_risk`` (R, number of `risks`) and ``risk`` (R, P) at `curve_coverages`.
        """
        blocks = self.by_uncertainty
        in_order = blocks.arranged(weights)
        counts, errors = blocks.sums(in_order), blocks.sums(in_order * self.error[blocks.order])
        running_counts, running_errors = _running(counts), _running(errors)
        total, wrong = running_counts[:, -1], running_errors[:, -1]

        starts, stops = PROTOCOLS[self.protocol](blocks.values, running_counts, self.levels)
        fall = trend(_between(running_counts, starts, stops), _between(running_errors, starts, stops))
        aurc = _aurc(counts, errors, running_counts, running_errors)
        mid_ranks = running_counts[:, 1:] - counts / 2
        wanted = np.append(self.curve_coverages, self.coverages)
        risk = _risk(running_counts, running_errors, wanted)
        curve, at_coverages = np.split(risk, [len(wanted) - len(self.coverages)], axis=1)
        scores = {
            "recall": (total - wrong) / total,
            **fall,
            "auroc": _auroc(np.einsum("rb,rb->r", errors, mid_ranks), total, wrong),
            "aurc": aurc,
            "excess_aurc": np.maximum(aurc - self._optimal_aurc(weights), 0),
            "recall_at": weights @ self.hits / total[:, None],
            "ranking": self._ranking(weights, total),
            "accuracy_at_coverage": 1 - at_coverages,
            "coverage_at_risk": coverage_at_risk(counts, errors, running_counts, running_errors, self.risks),
            "risk": curve,
        }
        if self.confidences is not None:
            scores |= self.confidences.scored(weights, total)
        return scores

    def _ranking(self, weights: np.ndarray, total: np.ndarray) -> np.ndarray:
        columns = [
            column.medians(weights) if isinstance(column, Blocks) else weights @ column / total
            for column in self.ranking.values()
        ]
        return np.stack(columns, 1) if columns else np.empty((len(weights), 0))

    def optimal_risk(self) -> np.ndarray:
        """(P,) risk at `curve_coverages` of an uncertainty that ranks every error last."""
        counts = self.by_error.sums(np.ones((1, len(self.error))))
        return _risk(_running(counts), _running(counts * self.by_error.values), self.curve_coverages)[0]

    def _optimal_aurc(self, weights: np.ndarray) -> np.ndarray:
        counts = self.by_error.sums(self.by_error.arranged(weights))
        errors = counts * self.by_error.values
        return _aurc(counts, errors, _running(counts), _running(errors))


class Null:
    """Scores of the same queries with correctness handed round, all of them linear in the errors.

    Uncertainties stay where they are, so levels, ranks and the weight of a place in the AURC are found once, and a
    permutation costs one matrix product.
    """

    def __init__(self, queries: Queries) -> None:
        blocks = queries.by_uncertainty
        counts = blocks.sums(np.ones((1, len(queries.error))))
        running = _running(counts)
        starts, stops = PROTOCOLS[queries.protocol](blocks.values, running, queries.levels)
        position = np.arange(len(blocks.values))[:, None]
        in_level = (starts <= position) & (position < stops)
        harmonic = _harmonic(running)
        growth = np.diff(harmonic, axis=1)[0]
        later = harmonic[0, -1] - harmonic[0, 1:]
        place = 1 - running[0, :-1] / counts[0] * growth + later
        columns = np.column_stack([in_level, running[0, 1:] - counts[0] / 2, place / running[0, -1]])
        self._columns = blocks.spread(columns.T).T.copy()
        self._level_counts = _between(running, starts, stops)
        self._error = queries.error

    def scored(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """(P,) scores for (P, Q) rows that say whose error each query receives."""
        sums = self._error[rows] @ self._columns
        total, wrong = np.full(len(rows), float(len(self._error))), np.full(len(rows), self._error.sum())
        return {
            **trend(np.broadcast_to(self._level_counts, sums[:, :-2].shape), sums[:, :-2]),
            "auroc": _auroc(sums[:, -2], total, wrong),
            "aurc": sums[:, -1],
        }


def trend(counts: np.ndarray, errors: np.ndarray) -> dict[str, np.ndarray]:
    """How recall falls over the level's number, for R weightings.

    Args:
        counts: (R, L) queries in each level; empty levels are left out.
        errors: (R, L) sums of their errors.

    Returns:
        The (R,) scores of levels; NaN with fewer than three levels or the same recall in all.
    """
    present = counts > 0
    recall = np.divide(counts - errors, counts, out=np.zeros(counts.shape), where=present).round(12)
    both = present[:, :, None] & present[:, None, :]
    below = (both & (recall[:, None, :] < recall[:, :, None])).sum(2)
    equal = (both & (recall[:, None, :] == recall[:, :, None])).sum(2)
    ranks = below + (equal + 1) / 2
    number = np.broadcast_to(np.arange(counts.shape[1], dtype=np.float64), counts.shape)
    constant = (equal == present.sum(1, keepdims=True)).any(1)
    undefined = (present.sum(1) < LEVEL_SCORES_NEED) | constant
    spearman = np.where(undefined, np.nan, _correlation(np.cumsum(present, 1), ranks, present))
    pearson = np.where(undefined, np.nan, _correlation(number, recall, present))
    ideal = 1 - number / (counts.shape[1] - 1)
    mean = (recall * present).sum(1, keepdims=True) / np.maximum(present.sum(1, keepdims=True), 1)
    spread = (np.square(recall - mean) * present).sum(1)
    missed = (np.square(recall - ideal) * present).sum(1)
    return {
        "spearman": spearman,
        "pearson": pearson,
        "r2": pearson**2,
        "r2_identity": 1 - np.divide(missed, spread, out=np.full(len(spread), np.nan), where=~undefined),
        "neg_s_r2": -spearman * pearson**2,
    }


def coverage_at_risk(
    counts: np.ndarray,
    errors: np.ndarray,
    running_counts: np.ndarray,
    running_errors: np.ndarray,
    risks: Sequence[float],
) -> np.ndarray:
    """(R, number of risks) largest share of most certain queries whose mean error is no more than each risk.

    Of a block of equally uncertain queries as many are answered as keep the expected error there.

    Args:
        counts: (R, B) queries in each block.
        errors: (R, B) sums of their errors.
        running_counts: (R, B + 1) running sums of `counts` that begin with 0.
        running_errors: (R, B + 1) running sums of `errors` that begin with 0.
        risks: Mean errors to keep to.
    """
    rows, last_block = np.arange(len(counts)), counts.shape[1] - 1
    total = running_counts[:, -1]
    columns = []
    for risk in risks:
        kept = running_errors <= risk * running_counts + ROUNDING
        whole = last_block + 1 - kept[:, ::-1].argmax(1)  # blocks up to the last after which the risk is kept
        answered, wrong = running_counts[rows, whole], running_errors[rows, whole]
        block = np.minimum(whole, last_block)
        size = np.maximum(counts[rows, block], 1)
        excess = np.maximum(errors[rows, block] / size - risk, ROUNDING)  # of the next block, which breaks the risk
        more = np.where(whole <= last_block, np.floor((risk * answered - wrong) / excess + ROUNDING), 0)
        columns.append((answered + np.clip(more, 0, size)) / total)
    return np.stack(columns, 1) if columns else np.empty((len(counts), 0))


def rank_correlations(x: Blocks, y: Blocks, weights: np.ndarray) -> np.ndarray:
    """(R,) Spearman correlations of two columns under R weightings; NaN where one is constant."""
    half = weights.sum(1, keepdims=True) / 2
    x_rank, y_rank = (blocks.mid_ranks(weights) - half for blocks in (x, y))
    covariance = np.einsum("rq,rq,rq->r", weights, x_rank, y_rank)
    scale = np.sqrt(
        np.einsum("rq,rq,rq->r", weights, x_rank, x_rank) * np.einsum("rq,rq,rq->r", weights, y_rank, y_rank)
    )
    return np.divide(covariance, scale, out=np.full(len(weights), np.nan), where=scale > 0)


def _correlation(x: np.ndarray, y: np.ndarray, present: np.ndarray) -> np.ndarray:
    n = np.maximum(present.sum(1, keepdims=True), 1)
    x = np.where(present, x - (x * present).sum(1, keepdims=True) / n, 0)
    y = np.where(present, y - (y * present).sum(1, keepdims=True) / n, 0)
    scale = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    return np.clip(np.divide((x * y).sum(1), scale, out=np.zeros(len(x)), where=scale > 0), -1, 1)


def _auroc(wrong_mid_ranks: np.ndarray, total: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    pairs = wrong * (total - wrong)
    wins = wrong_mid_ranks - wrong**2 / 2  # pairs of two wrong queries win half of their comparisons
    return np.divide(wins, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)


def _aurc(counts: np.ndarray, errors: np.ndarray, running_counts: np.ndarray, running_errors: np.ndarray) -> np.ndarray:
    """(R,) areas under the risk-coverage curve.

    Inside a block of w queries with mean error e, the j-th query brings the expected risk (E + e j) / (C + j), where C
    queries with E errors came before; over the block that sums to w e + (E − C e)(H(C + w) − H(C)).
    """
    mean = np.divide(errors, counts, out=np.zeros(counts.shape), where=counts > 0)
    mean *= running_counts[:, :-1]
    np.subtract(running_errors[:, :-1], mean, out=mean)
    growth = np.diff(_harmonic(running_counts), axis=1)
    return (running_errors[:, -1] + np.einsum("rb,rb->r", mean, growth)) / running_counts[:, -1]


def _harmonic(counts: np.ndarray) -> np.ndarray:
    """Harmonic numbers H(n) = 1 + 1/2 + … + 1/n of whole numbers ≥ 0."""
    table = np.concatenate([[0.0], (1 / np.arange(1, int(counts.max()) + 1)).cumsum()])
    return table[counts.astype(np.int64)]


def _risk(running_counts: np.ndarray, running_errors: np.ndarray, coverages: np.ndarray) -> np.ndarray:
    answered = running_counts[:, -1:] * coverages
    rows = zip(answered, running_counts, running_errors, strict=True)
    return np.stack([np.interp(points, counts, errors) for points, counts, errors in rows]) / answered


def _running(values: np.ndarray) -> np.ndarray:
    """(R, B + 1) running sums that begin with 0."""
    running = np.zeros((len(values), values.shape[1] + 1))
    np.cumsum(values, axis=1, out=running[:, 1:])
    return running


def _between(running: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    return np.take_along_axis(running, stops, 1) - np.take_along_axis(running, starts, 1)
