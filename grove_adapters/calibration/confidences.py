"""The scores of a confidence: is what it calls probable as frequent as it says?"""

from __future__ import annotations

import numpy as np

from grove_adapters.calibration.bins import equal_count
from grove_adapters.calibration.blocks import Blocks


class Confidences:
    """Confidences of Q queries made ready for scoring: every sum a score needs is one row of a sparse matrix."""

    def __init__(self, confidence: np.ndarray, correct: np.ndarray, bins: int) -> None:
        from scipy import sparse

        rows = np.arange(len(correct))
        width, mass = ((bin_of(confidence, bins), rows) for bin_of in (confidence_bin, equal_mass_bin))
        gap = confidence - correct
        certain = np.clip(confidence, np.finfo(float).eps, 1 - np.finfo(float).eps)
        of_bins = [
            sparse.coo_array((values, place), shape=(bins, len(correct)))
            for place, values in (
                (width, np.ones(len(gap))),
                (width, gap),
                (mass, np.ones(len(gap))),
                (mass, gap),
                (mass, np.square(gap)),
            )
        ]
        log_loss = -correct * np.log(certain) - (1 - correct) * np.log1p(-certain)
        of_all = sparse.coo_array(np.stack([correct, np.square(correct), np.square(gap), log_loss]))
        self._bins = bins
        self._rows = sparse.vstack([*of_bins, of_all], format="csc")

    def scored(self, weights: np.ndarray, total: np.ndarray) -> dict[str, np.ndarray]:
        """(R,) scores under (R, Q) weightings with (R,) totals."""
        means = (self._rows @ np.ascontiguousarray(weights.T)).T / total[:, None]
        share, gap, mass_share, mass_gap, mass_square = np.split(means[:, : 5 * self._bins], 5, axis=1)
        correct, correct_square, brier, nll = means[:, 5 * self._bins :].T
        in_bin = np.divide(gap, share, out=np.zeros(gap.shape), where=share > 0)
        reliability = (gap * in_bin).sum(1)
        spread = np.maximum(correct_square - correct**2, 0)
        return {
            "ece": np.abs(gap).sum(1),
            "ece_equal_mass": np.abs(mass_gap).sum(1),
            "ece_debiased": np.sqrt(np.maximum(_debiased(mass_share, mass_gap, mass_square, total[:, None]), 0)),
            "mce": np.abs(in_bin).max(1),
            "brier": brier,
            "brier_reliability": reliability,
            "brier_resolution": reliability + spread - brier,
            "brier_uncertainty": spread,
            "nll": nll,
        }


def confidence_bin(confidence: np.ndarray, bins: int) -> np.ndarray:
    """(Q,) bin of equal width over [0, 1]: [low, high) but for the last, which holds confidence 1."""
    return np.searchsorted(np.arange(1, bins) / bins, confidence, side="right")


def equal_mass_bin(confidence: np.ndarray, bins: int) -> np.ndarray:
    """(Q,) bin of as equal size as ties allow, 0 for the least confident queries."""
    blocks = Blocks.of(confidence)
    running = np.append(blocks.starts, len(confidence))[None].astype(np.float64)
    _, stops = equal_count(blocks.values, running, bins)
    return blocks.spread(np.searchsorted(stops[0], np.arange(len(blocks.values)), side="right"))


def _debiased(share: np.ndarray, gap: np.ndarray, square: np.ndarray, total: np.ndarray) -> np.ndarray:
    """(R,) sums over bins of the squared gap without the variance of a mean of n gaps, which is unbiased."""
    in_bin = np.divide(gap, share, out=np.zeros(gap.shape), where=share > 0)
    others = share * total - 1
    noise = np.divide(square - gap * in_bin, others, out=gap * in_bin, where=others > 0.5)
    return (gap * in_bin - noise).sum(1)
