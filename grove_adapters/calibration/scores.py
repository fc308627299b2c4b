"""The scores themselves, each for many weightings of the same queries at once.

A weighting says how often every query counts: all ones for the score itself, a bootstrap resample's counts for its
interval. Queries are sorted once by uncertainty, into one block for each distinct value; every score then needs only
running sums over blocks, and none depends on the order of queries that are equally uncertain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grove_adapters.calibration.bins import PROTOCOLS


class Kind(NamedTuple):
    """What is known of a score beforehand.

    Attributes:
        bounds: Smallest and largest possible value.
        larger_is_better: Direction of the one-sided p-value, or None where a permutation tells nothing.
        contrasts: Whether it sets wrong queries against right ones, so that few of either leave nothing to resample.
    """

    bounds: tuple[float, float]
    larger_is_better: bool | None = None
    contrasts: bool = False


SCORES: dict[str, Kind] = {
    "recall": Kind((0, 1)),
    "spearman": Kind((-1, 1), larger_is_better=False, contrasts=True),
    "r2": Kind((0, 1), larger_is_better=True, contrasts=True),
    "neg_s_r2": Kind((-1, 1), larger_is_better=True, contrasts=True),
    "auroc": Kind((0, 1), larger_is_better=True, contrasts=True),
    "aurc": Kind((0, 1), larger_is_better=False),
    "excess_aurc": Kind((0, 1), larger_is_better=False, contrasts=True),
    "ece": Kind((0, 1)),
}
"""The scores of a report, in its order.

* ``recall``: mean correctness.
* ``spearman``: S, rank correlation of a level's number with its recall; −1 is ideal.
* ``r2``: R² of the straight line through recall over the level's number.
* ``neg_s_r2``: −S·R²; 1 is ideal, 0 is no relation. Source: GroVE's headline, with disjoint levels.
* ``auroc``: probability that a wrong query is more uncertain than a right one, ties counting half. Soft correctness c
  is c of a right and 1 − c of a wrong query.
* ``aurc``: mean over n of the error among the n most certain queries; 0 is ideal. Queries of equal uncertainty
  contribute their mean over all orders.
* ``excess_aurc``: AURC minus that of an uncertainty that ranks every error last.
* ``ece``: expected calibration error of the confidence over bins of equal width.
"""

LEVEL_SCORES_NEED = 3  # non-empty levels: a line through two points always fits
COVERAGES = 100  # points of a risk-coverage curve


class Blocks(NamedTuple):
    """Queries sorted into blocks of one value each: `order` (Q,), `starts` (B,) in that order, `values` (B,)."""

    order: np.ndarray
    starts: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Blocks:
        """Blocks of equal values, rising."""
        order = np.argsort(values, kind="stable")
        distinct, starts = np.unique(values[order], return_index=True)
        return cls(order, starts, distinct)

    @property
    def all_single(self) -> bool:
        """Whether no two values are equal."""
        return len(self.starts) == len(self.order)

    def sums(self, in_order: np.ndarray) -> np.ndarray:
        """(R, B) sums over blocks of an (R, Q) array whose columns stand in `order`."""
        return in_order if self.all_single else np.add.reduceat(in_order, self.starts, axis=1)

    def spread(self, of_blocks: np.ndarray) -> np.ndarray:
        """(…, Q) value of each query's block, back in the order of the queries."""
        block = np.empty(len(self.order), dtype=np.int64)
        block[self.order] = np.repeat(np.arange(len(self.starts)), np.diff(self.starts, append=len(self.order)))
        return of_blocks[..., block]

    def mid_ranks(self, weights: np.ndarray) -> np.ndarray:
        """(R, Q) number of queries below each query plus half of those equal to it, itself included."""
        counts = self.sums(weights[:, self.order])
        return self.spread(counts.cumsum(1) - counts / 2)


@dataclass(frozen=True, eq=False)
class Queries:
    """Q queries made ready for scoring.

    Attributes:
        error: (Q,) 1 − correctness, in [0, 1].
        by_uncertainty: The queries in blocks of equal uncertainty.
        by_error: The queries in blocks of equal error.
        calibration_gap: (Q, bins) confidence − correctness in the column of the query's confidence bin, or None.
        hits: (Q, number of k) columns of recall@k.
        levels: Number of levels.
        protocol: Name of the rule that makes them.
    """

    error: np.ndarray
    by_uncertainty: Blocks
    by_error: Blocks
    calibration_gap: np.ndarray | None
    hits: np.ndarray
    levels: int
    protocol: str

    @classmethod
    def of(
        cls,
        correct: np.ndarray,
        uncertainty: np.ndarray,
        confidence: np.ndarray | None = None,
        recall_at: Mapping[int, np.ndarray] | None = None,
        *,
        levels: int = 10,
        protocol: str = "equal_count",
        confidence_bins: int = 15,
    ) -> Queries:
        """Sort once what every weighting needs."""
        gap = None
        if confidence is not None:
            gap = np.zeros((len(correct), confidence_bins))
            gap[np.arange(len(correct)), confidence_bin(confidence, confidence_bins)] = confidence - correct
        hits = list((recall_at or {}).values())
        return cls(
            error=1 - correct,
            by_uncertainty=Blocks.of(uncertainty),
            by_error=Blocks.of(1 - correct),
            calibration_gap=gap,
            hits=np.stack(hits, 1) if hits else np.empty((len(correct), 0)),
            levels=levels,
            protocol=protocol,
        )

    @property
    def coverages(self) -> np.ndarray:
        """(P,) rising shares of the queries at which the risk-coverage curve is kept."""
        points = min(COVERAGES, len(self.error))
        return np.arange(1, points + 1) / points

    def scored(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Every score under R weightings of whole numbers.

        Args:
            weights: (R, Q) how often each query counts.

        Returns:
            The names of `SCORES` as (R,), ``recall_at`` (R, number of k), and ``risk`` (R, P) at `coverages`.
        """
        blocks = self.by_uncertainty
        in_order = weights[:, blocks.order]
        counts, errors = blocks.sums(in_order), blocks.sums(in_order * self.error[blocks.order])
        running_counts, running_errors = _running(counts), _running(errors)
        total, wrong = running_counts[:, -1], running_errors[:, -1]

        starts, stops = PROTOCOLS[self.protocol](blocks.values, running_counts, self.levels)
        level_counts, level_errors = _between(running_counts, starts, stops), _between(running_errors, starts, stops)
        spearman, r2 = trend(level_counts, level_errors)
        aurc = _aurc(counts, errors, running_counts, running_errors)
        mid_ranks = running_counts[:, 1:] - counts / 2
        scores = {
            "recall": (total - wrong) / total,
            "spearman": spearman,
            "r2": r2,
            "neg_s_r2": -spearman * r2,
            "auroc": _auroc(np.einsum("rb,rb->r", errors, mid_ranks), total, wrong),
            "aurc": aurc,
            "excess_aurc": np.maximum(aurc - self._optimal_aurc(weights), 0),
            "recall_at": weights @ self.hits / total[:, None],
            "risk": _risk(running_counts, running_errors, self.coverages),
        }
        if self.calibration_gap is not None:
            scores["ece"] = np.abs(weights @ self.calibration_gap).sum(1) / total
        return scores

    def optimal_risk(self) -> np.ndarray:
        """(P,) risk at `coverages` of an uncertainty that ranks every error last."""
        counts = self.by_error.sums(np.ones((1, len(self.error))))
        return _risk(_running(counts), _running(counts * self.by_error.values), self.coverages)[0]

    def _optimal_aurc(self, weights: np.ndarray) -> np.ndarray:
        counts = self.by_error.sums(weights[:, self.by_error.order])
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
        spearman, r2 = trend(np.broadcast_to(self._level_counts, sums[:, :-2].shape), sums[:, :-2])
        return {
            "spearman": spearman,
            "r2": r2,
            "neg_s_r2": -spearman * r2,
            "auroc": _auroc(sums[:, -2], total, wrong),
            "aurc": sums[:, -1],
        }


def confidence_bin(confidence: np.ndarray, bins: int) -> np.ndarray:
    """(Q,) bin of equal width over [0, 1]: [low, high) but for the last, which holds confidence 1."""
    return np.searchsorted(np.arange(1, bins) / bins, confidence, side="right")


def trend(counts: np.ndarray, errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """S and R² of recall over the level's number, for R weightings.

    Args:
        counts: (R, L) queries in each level; empty levels are left out.
        errors: (R, L) sums of their errors.

    Returns:
        (R,) Spearman and (R,) R² of the fitted line; NaN with fewer than three levels or the same recall in all.
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
    return spearman, np.where(undefined, np.nan, _correlation(number, recall, present) ** 2)


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
