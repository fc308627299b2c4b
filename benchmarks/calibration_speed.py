"""What 1,000 resamples of every score cost, against a loop over resamples with the usual libraries.

    python benchmarks/calibration_speed.py [--queries 25000] [--resamples 1000] [--smoke]

`calibrate` scores every bootstrap resample for all scores, and every permutation for those that have a null; it should
take no more than 3 s for 25,000 queries on two cores that are free. The loop draws a resample and calls scikit-learn
and SciPy for six of the scores, without permutations; it is timed on a few resamples and scaled. Both run in turns, so
that what else the machine does falls on both; medians of the rounds, in seconds of wall time and of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import stats
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from grove_adapters._io import write_json
from grove_adapters.calibration import calibrate, compare
from grove_adapters.tasks import TaskResult

RESULTS = Path(__file__).parent / "results" / "calibration_speed.json"
LOOPED = 5  # resamples of the loop that are timed


def queries(n: int, kind: str, seed: int = 0) -> TaskResult:
    """A result of n queries: alone, with tied uncertainties, or captions that share an image by fives."""
    random = np.random.default_rng(seed)
    uncertainty = random.random(n)
    right = 0.9 - 0.5 * uncertainty
    correct = (random.random(n) < right).astype(float)
    return TaskResult(
        task="retrieval",
        ids=np.array([f"q{row:06d}" for row in range(n)]),
        correct=correct,
        uncertainty=uncertainty.round(2) if kind == "tied" else uncertainty,
        confidence=np.clip(right + 0.1 * random.normal(size=n), 0, 1),
        recall_at={1: correct, 5: correct, 10: correct},
        groups=np.arange(n) // 5 if kind == "groups of five" else None,
    )


def loop(result: TaskResult, resamples: int, seed: int = 0) -> None:
    """Six scores of a few resamples as one would write it with the libraries."""
    random = np.random.default_rng(seed)
    for _ in range(resamples):
        rows = random.integers(len(result), size=len(result))
        correct, uncertainty, confidence = (x[rows] for x in (result.correct, result.uncertainty, result.confidence))
        parts = np.array_split(correct[np.argsort(uncertainty)], 10)
        recall = [part.mean() for part in parts]
        stats.spearmanr(np.arange(10), recall)
        stats.linregress(np.arange(10), recall)
        roc_auc_score(1 - correct, uncertainty)
        calibration_curve(correct, confidence, n_bins=15)
        brier_score_loss(correct, confidence)
        log_loss(correct, confidence)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds of `work`."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=25_000, metavar="N")
    parser.add_argument("--resamples", type=int, default=1000, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--smoke", action="store_true", help="200 queries, 20 resamples, one round; nothing is written")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.queries, arguments.resamples, arguments.rounds = 200, 20, 1

    load = os.getloadavg()[0]  # of everything else: more than zero makes the wall times pessimistic
    how = {"resamples": arguments.resamples}
    rows = []
    for kind in ("alone", "tied", "groups of five"):
        result, other = queries(arguments.queries, kind), queries(arguments.queries, kind, seed=1)
        works: dict[str, Callable[[], object]] = {
            "calibrate": lambda result=result: calibrate(result, **how),
            "compare": lambda result=result, other=other: compare(result, other, **how),
            "loop": lambda result=result: loop(result, LOOPED),
        }
        rounds = [{name: timed(work) for name, work in works.items()} for _ in range(arguments.rounds)]
        row: dict[str, object] = {"queries": kind}
        for name in works:
            scale = arguments.resamples / LOOPED if name == "loop" else 1
            wall, processor = (scale * statistics.median(part[name][index] for part in rounds) for index in (0, 1))
            row |= {f"{name}_wall": round(wall, 2), f"{name}_processor": round(processor, 2)}
        ratios = [part["loop"][0] * arguments.resamples / LOOPED / part["calibrate"][0] for part in rounds]
        row["loop_over_calibrate"] = round(statistics.median(ratios), 1)
        rows.append(row)
        print(json.dumps(row))
    if not arguments.smoke:
        about = {"what": __doc__.splitlines()[0], **vars(arguments), "load_average": load, "cores": os.cpu_count()}
        write_json(RESULTS, {**about, "rows": rows})


if __name__ == "__main__":
    main()
