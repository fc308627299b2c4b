"""Queries sorted once into blocks of one value each, so that every score needs only sums over blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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

    def arranged(self, weights: np.ndarray) -> np.ndarray:
        """(R, Q) weightings with their columns in `order`; not copied where they stand so already."""
        return weights if np.array_equal(self.order, np.arange(len(self.order))) else weights[:, self.order]

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
        counts = self.sums(self.arranged(weights))
        return self.spread(counts.cumsum(1) - counts / 2)

    def medians(self, weights: np.ndarray) -> np.ndarray:
        """(R,) medians of the values under R weightings of whole numbers."""
        running = self.sums(self.arranged(weights)).cumsum(1)
        total = running[:, -1]
        below, above = (
            np.array([np.searchsorted(row, place, side="right") for row, place in zip(running, places, strict=True)])
            for places in ((total - 1) // 2, total // 2)
        )
        return (self.values[below] + self.values[above]) / 2
