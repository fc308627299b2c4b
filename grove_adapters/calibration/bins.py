"""Rules that cut queries into levels of rising uncertainty.

A rule looks at the sorted *distinct* uncertainties and how many queries stand at each, never at the order queries came
in, so equal uncertainties always share a level. It answers for many weightings at once, which is what lets every
bootstrap resample be cut anew.

Papers differ in the levels and in what they read off them:

* GroVE's and ProbVLM's code nests its levels (`cumulative_width`) and multiplies S by R² of a fitted line
  (``spearman``, ``r2`` and ``neg_s_r2`` among `calibration.scores.SCORES`).
* PCME++'s code takes levels of equal count and the Pearson correlation (``pearson``). It leaves out the Q mod L most
  uncertain queries; `equal_count` spreads them instead, and is the same where L divides Q.
* R² without a fitted line is ``r2_identity``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from grove_adapters import _checks

Cuts = tuple[np.ndarray, np.ndarray]
"""(R, L) start and stop positions among the distinct uncertainties: level l holds ``start ≤ position < stop``."""


def equal_count(values: np.ndarray, running: np.ndarray, levels: int) -> Cuts:
    """Disjoint levels of as equal size as ties allow; without ties, sizes differ by one at most.

    Queries of one uncertainty occupy the quantiles from (queries below) / n to (queries below or equal) / n; the level
    is the one that holds the middle of that stretch.

    Args:
        values: (B,) distinct uncertainties, rising.
        running: (R, B + 1) number of queries below each and, last, of all of them, for R weightings.
        levels: L.

    Source: ours. The public code of ProbVLM and GroVE nests its levels, which inflates R²: at recall .8 and with five
    levels it gives an uninformative uncertainty −S·R² > .3 in two runs of five, where these do in one of ten.
    """
    total = running[:, -1:]
    share = total * np.arange(1, levels) / levels
    reach = np.stack([np.searchsorted(row, edges) for row, edges in zip(running, share, strict=True)])
    # The middle of a stretch passes an edge at the stretch that ends beyond it or at the next one; in units of
    # 1 / (2 L n) both sides are whole numbers and meet exactly.
    middle = levels * (np.take_along_axis(running, reach - 1, 1) + np.take_along_axis(running, reach, 1))
    inner = np.where(middle >= 2 * total * np.arange(1, levels), reach - 1, reach)
    return _disjoint(inner, len(values))


def equal_width(values: np.ndarray, running: np.ndarray, levels: int) -> Cuts:
    """Disjoint levels that each span the same range of uncertainty; some may be empty, one uncertainty fills level 0.

    Args:
        values: (B,) distinct uncertainties, rising.
        running: (R, B + 1) number of queries below each and, last, of all of them, for R weightings.
        levels: L.
    """
    low, high = _range(values, running)
    inner = np.searchsorted(values, low + (high - low) * (np.arange(1, levels) / levels))
    return _disjoint(np.where(high > low, inner, len(values)), len(values))


def cumulative_width(values: np.ndarray, running: np.ndarray, levels: int) -> Cuts:
    """Nested levels: level l holds every query up to the l-th of L equally spaced thresholds from lowest to highest.

    Level 0 holds the most certain query alone (and its equals), the last one all queries. A level therefore repeats
    the one before, which makes neighbouring recalls alike, inflates R², and lets the one query of level 0 decide the
    sign of S. It is here to reproduce published numbers, whose tables it made, and to be compared with.

    Args:
        values: (B,) distinct uncertainties, rising.
        running: (R, B + 1) number of queries below each and, last, of all of them, for R weightings.
        levels: L.

    Source: the equally spaced bins of the public code of ProbVLM and GroVE.
    """
    low, high = _range(values, running)
    stops = np.searchsorted(values, low + (high - low) * (np.arange(levels) / (levels - 1)), side="right")
    stops[:, -1] = len(values)  # which rounding could miss
    return np.zeros_like(stops), stops


CUMULATIVE = frozenset({"cumulative_width"})
"""The rules that put a query into every level from its own on; all others put it into one."""

PROTOCOLS: dict[str, Callable[[np.ndarray, np.ndarray, int], Cuts]] = {
    rule.__name__: rule for rule in (equal_count, equal_width, cumulative_width)
}
"""The rules by name."""


def assign(uncertainty: np.ndarray, levels: int = 10, protocol: str = "equal_count") -> np.ndarray:
    """(Q,) level of every query, 0 for the most certain ones; of nested levels the first that holds it.

    Args:
        uncertainty: (Q,) finite numbers, larger = less certain.
        levels: Number of levels, at least 2.
        protocol: A name in `PROTOCOLS`.

    Raises:
        InputError: An unknown protocol, fewer than two levels, NaN or infinite uncertainties.
    """
    _checks.choice(protocol, tuple(PROTOCOLS), what="protocol")
    _checks.count(levels, what="levels", at_least=2)
    uncertainty = np.asarray(uncertainty, dtype=np.float64)
    _checks.finite(uncertainty, what="uncertainty")
    values, position, counts = np.unique(uncertainty, return_inverse=True, return_counts=True)
    running = np.concatenate([[0], counts.cumsum()])[None]
    _, stops = PROTOCOLS[protocol](values, running, levels)
    return np.searchsorted(stops[0], position, side="right")


def _range(values: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(R, 1) lowest and highest value that any query of a weighting stands at."""
    present = running[:, 1:] > running[:, :-1]
    low, high = present.argmax(1), len(values) - 1 - present[:, ::-1].argmax(1)
    return values[low][:, None], values[high][:, None]


def _disjoint(inner: np.ndarray, n: int) -> Cuts:
    ends = np.zeros((len(inner), 1), dtype=np.int64)
    return np.concatenate([ends, inner], 1), np.concatenate([inner, ends + n], 1)
