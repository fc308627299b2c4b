"""How far an uncertainty can be trusted: levels, scores, intervals, and the report that holds them.

And what makes it trustworthy on held-out queries: `recalibrate` (probabilities) and `conformalise` (sets of answers).
"""

from grove_adapters.calibration.comparison import Comparison, compare
from grove_adapters.calibration.conformal import Conformal, ConformalSets, conformalise
from grove_adapters.calibration.measure import calibrate, rank_correlation
from grove_adapters.calibration.recalibrate import Recalibration, recalibrate, with_confidence_none
from grove_adapters.calibration.report import CalibrationReport, Levels, Reliability, RiskCoverage, Score

__all__ = [
    "CalibrationReport",
    "Comparison",
    "Conformal",
    "ConformalSets",
    "Levels",
    "Recalibration",
    "Reliability",
    "RiskCoverage",
    "Score",
    "calibrate",
    "compare",
    "conformalise",
    "rank_correlation",
    "recalibrate",
    "with_confidence_none",
]
