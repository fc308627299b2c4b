"""Resampling with an address: bootstrap counts, permutations, intervals and p-values.

Queries that are no independent draws (the captions of one image) form a group, and groups are drawn or exchanged whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from grove_adapters import seeding

BLOCK = 1 << 17  # entries of one block of resamples: 1 MiB of float64, so that what one needs stays inside the cache


def group_codes(groups: np.ndarray | None, n: int) -> np.ndarray:
    """(n,) groups renumbered from 0; without groups every query is one."""
    return np.arange(n) if groups is None else np.unique(groups, return_inverse=True)[1]


def resampled_counts(groups: np.ndarray, resamples: int, *, seed: int) -> Iterator[np.ndarray]:
    """(≤ resamples, Q) float64 blocks of how often each query is in each bootstrap resample.

    As many groups as there are are drawn with replacement; a query is there as often as its group.

    Args:
        groups: (Q,) codes from 0 as `group_codes` gives them.
        resamples: Number of resamples over all blocks.
        seed: Address of the draws.
    """
    n = int(groups.max()) + 1
    alone = np.array_equal(groups, np.arange(n))
    random = np.random.default_rng(seeding.derive(seed, "bootstrap"))
    for size in _block_sizes(resamples, len(groups)):
        draws = random.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        counts = np.bincount(draws.ravel(), minlength=size * n).reshape(size, n)
        yield (counts if alone else counts[:, groups]).astype(np.float64)


def permutations(groups: np.ndarray, resamples: int, *, seed: int) -> Iterator[np.ndarray]:
    """(≤ permuted, Q) int64 blocks of rows: query q receives what query ``rows[·, q]`` had.

    Groups are laid end to end in a random order over the groups as they stand, so that queries of one group keep
    receiving from one group: exactly where groups are equally large, and but for their edges otherwise.

    Args:
        groups: (Q,) codes from 0 as `group_codes` gives them.
        resamples: Number of permutations over all blocks.
        seed: Address of the draws.
    """
    by_group = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    starts = sizes.cumsum() - sizes
    alone = len(sizes) == len(groups)
    random = np.random.default_rng(seeding.derive(seed, "permutation"))
    for size in _block_sizes(resamples, len(groups)):
        rows = np.empty((size, len(groups)), dtype=np.int64)
        for row in rows:
            drawn: np.ndarray = random.permutation(len(sizes))
            if alone:
                row[:] = drawn
                continue
            length = sizes[drawn]
            drawn = np.repeat(starts[drawn] - (length.cumsum() - length), length) + np.arange(len(groups))
            row[by_group] = by_group[drawn]
        yield rows


def interval(draws: np.ndarray, value: float, coverage: float, bounds: tuple[float, float]) -> tuple[float, float]:
    """The bootstrap interval of a score: its percentiles, joined with the same percentiles moved onto the value.

    Resampling adds noise a second time, which lowers R² where a trend is strong, raises it where there is none, and
    raises the ECE; plain percentiles then miss the score one would expect of as many queries too often, or even the
    value itself. Moving their median onto the value mends the strong case and spoils the null one. The hull of the
    two held its nominal coverage in both (simulated, 200 runs each at 500 and 2,000 queries); for scores without such
    a shift it is the percentile interval, give or take the median.

    Args:
        draws: (R,) resampled scores; undefined ones (NaN) are left out.
        value: The score itself.
        coverage: Nominal coverage, e.g. 0.95.
        bounds: Smallest and largest possible score; the interval stays inside.

    Returns:
        Lower and upper end; NaN where the value or every resample is undefined.
    """
    draws = draws[np.isfinite(draws)]
    if not np.isfinite(value) or not len(draws):
        return np.nan, np.nan
    low, middle, high = np.quantile(draws, [(1 - coverage) / 2, 0.5, (1 + coverage) / 2])
    shift = value - middle
    return float(np.clip(min(low, low + shift), *bounds)), float(np.clip(max(high, high + shift), *bounds))


def p_value(null: np.ndarray, value: float, *, larger_is_better: bool) -> float:
    """One-sided permutation p-value (1 + #{null at least as good}) / (1 + P); undefined nulls count as as good.

    Source: Phipson & Smyth 2010, which never reports 0.
    """
    if not np.isfinite(value) or not len(null):
        return np.nan
    tolerance = 1e-12 * max(1.0, abs(value))  # sums of the same terms in another order
    worse = null < value - tolerance if larger_is_better else null > value + tolerance
    return float((1 + (~worse).sum()) / (1 + len(null)))


def difference_p_value(draws: np.ndarray, value: float) -> float:
    """Two-sided bootstrap p-value of "no difference", at most as small as `interval` allows.

    It is twice the share of resampled differences on the other side of zero, of the resamples as they are and with
    their median moved onto the value, whichever is larger: small exactly where `interval` keeps clear of zero.

    Args:
        draws: (R,) resampled differences; undefined ones (NaN) are left out.
        value: The difference itself.
    """
    draws = draws[np.isfinite(draws)]
    if not np.isfinite(value) or not len(draws):
        return np.nan
    p = 0.0
    for sample in (draws, draws + (value - np.median(draws))):
        side = min((1 + (sample <= 0).sum()), (1 + (sample >= 0).sum()))
        p = max(p, 2 * side / (1 + len(sample)))
    return float(min(p, 1.0))


def _block_sizes(total: int, width: int) -> Iterator[int]:
    size = max(1, BLOCK // width)
    for start in range(0, total, size):
        yield min(size, total - start)
