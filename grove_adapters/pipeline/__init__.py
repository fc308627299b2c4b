"""From pairs to a report in one call: what the demo, the command line and the benchmarks share.

`run` retrieves, calibrates and pools folds; `evaluation` is what comes out and how it is shown and saved; `tables`
writes it as text; `demonstration` is the whole path on the bundled world.
"""

from grove_adapters.pipeline.demonstration import demo
from grove_adapters.pipeline.evaluation import Evaluation
from grove_adapters.pipeline.run import (
    DIRECTIONS,
    evaluate,
    evaluate_store,
    fit_folds,
    gallery,
    judge,
    pool,
    predict_both,
    retrieve_both,
    retrieve_folds,
)

__all__ = [
    "DIRECTIONS",
    "Evaluation",
    "demo",
    "evaluate",
    "evaluate_store",
    "fit_folds",
    "gallery",
    "judge",
    "pool",
    "predict_both",
    "retrieve_both",
    "retrieve_folds",
]
