"""Does a recalibrated confidence say how often a match is right, and whether the gallery holds one at all?

Real CLIP embeddings: 500 COCO pairs (ViT-B/16), 1,126 product photos with descriptions (FashionCLIP), 7,000 ImageNet
photos with the texts of their 1,000 classes (ViT-B/32), and, as a control, the COCO pairs through an untrained CLIP.
Pairs are split into two halves by image, and by class where the texts of classes ask. Every map is fitted on the
queries of one half and judged on those of the other, in both roles, so that each query is judged once by a map that has
never seen it; a half is also the gallery of its queries. Scores are those of both halves together, with bootstrap
intervals for the first split, and their mean and range over three splits. Matches are ranked by cosine at a logit scale
of 100.

The KL to the marginal and the hubness of the answer are read off all queries of a half together, without their labels;
where every gallery item has one query of its own, an answer that several queries claim is wrong for most of them. The
map "stacked, each query alone" does without.

A confidence that is exactly right has no expected calibration error of 0 but one that grows with few queries in many
bins: the column "floor" is its mean where correctness is drawn from the confidence itself. `ece_debiased` takes that
noise out of its squares.

*None of these*: every query is asked once with and once without its true matches in the gallery, and judged by whether
one can tell.

The data is found through GROVE_ADAPTERS_DATA (default: ../shared/data beside the project); what is missing is left out
and said so.

    python benchmarks/match_confidence.py            # minutes; writes results/match_confidence.json and .md
    python benchmarks/match_confidence.py --adapter grove --data coco500
    python benchmarks/match_confidence.py --smoke    # a small synthetic world, written nowhere
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
from adapters_quality import DATA, FOLDERS

from grove_adapters import Pairs, _io, create_adapter, seeding
from grove_adapters.calibration import calibrate, recalibrate
from grove_adapters.calibration.recalibrate import Method
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.pipeline import pool
from grove_adapters.pipeline.tables import short
from grove_adapters.tasks import TaskResult, retrieve, retrieve_absent

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SETS = ("coco500", "products1126", "imagenet7k", "control")
RAW: dict[str, Callable[[TaskResult], np.ndarray]] = {
    "largest similarity": lambda result: -result.detail["top_scores"][:, 0],
    "largest probability": lambda result: 1 - result.confidence,
    "entropy": lambda result: result.detail["match_entropy"],
    "margin": lambda result: 1 - result.detail["match_margin"],
    "KL to the marginal": lambda result: -result.detail["match_kl"],
    "hubness of the answer": lambda result: result.detail["answer_hubness"],
}
"""Uncertainties that need no fitting."""
ALONE = ("confidence", "match_entropy", "match_margin", "top_scores", "query_uncertainty", "answer_uncertainty")
MAPS: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in get_args(Method)},
    "stacked, each query alone": {"method": "stacked", "signals": ALONE},
}
"""Maps that are fitted; but for the last, a stacked one also reads signals that need the other queries, unlabelled."""
QUESTIONS: dict[str, Callable[..., TaskResult]] = {
    "is the match right?": functools.partial(retrieve, unmatched="drop"),
    "does the gallery hold one?": retrieve_absent,
}
SCORES = ("auroc", "ece", "ece_debiased", "brier")
BINS = 15
SETTINGS: dict[str, Any] = {"similarity": "cosine", "temperature": 100.0, "marginal": "empirical", "k": 1}


def halves(pairs: Pairs, adapter: str, ask: Callable[..., TaskResult], direction: str, seed: int) -> list[TaskResult]:
    """The queries of two halves of the pairs, each asked of its own half by an adapter fitted on the other."""
    parts = pairs.split(0.5, seed=seed, by="class" if direction == "t2i" and pairs.classes is not None else "image")
    results = []
    for part, other in zip(parts, parts[::-1], strict=True):
        fitted = create_adapter(adapter).fit(other, seed=seed)
        images, texts = fitted.predict(part.images), fitted.predict(part.texts)
        results.append(ask(images, texts, links=part.links, direction=direction, **SETTINGS))
    return results


def judged(results: list[TaskResult]) -> Iterator[tuple[str, TaskResult]]:
    """Every uncertainty and every map, on the queries of both halves together."""
    for name, uncertainty in RAW.items():
        confidence = {} if name == "largest probability" else {"confidence": None}
        changed = [dataclasses.replace(result, uncertainty=uncertainty(result), **confidence) for result in results]
        yield name, pool(changed)
    for name, how in MAPS.items():
        maps = [recalibrate(result, **how) for result in results]
        yield name, pool([map_.apply(half, uncertainty=True) for map_, half in zip(maps[::-1], results, strict=True)])


def floor(result: TaskResult, seed: int, draws: int = 200) -> float:
    """Mean expected calibration error where the confidence is the chance of being right."""
    random = np.random.default_rng(seeding.derive(seed, "floor"))
    bins = np.searchsorted(np.arange(1, BINS) / BINS, result.confidence, side="right")
    gaps = (random.random((draws, len(result))) < result.confidence) - result.confidence
    return float(np.mean([np.abs(np.bincount(bins, gap, minlength=BINS)).sum() for gap in gaps]) / len(result))


def measure(results: Callable[[int], list[TaskResult]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each uncertainty or map: intervals for the first split, mean and range over splits."""
    rows: dict[str, dict[str, Any]] = {}
    for split in range(arguments.splits):
        for name, result in judged(results(split)):
            report = calibrate(result, resamples=arguments.resamples if split == 0 else 0, confidence_bins=BINS)
            row = rows.setdefault(name, {"name": name, "queries": len(result), "right": report.scores["recall"].value})
            for score in SCORES:
                if result.confidence is None and score != "auroc":
                    continue
                found = report.scores[score]
                if split == 0:
                    row |= {score: found.value, f"{score}_low": found.low, f"{score}_high": found.high}
                row.setdefault(f"{score}_splits", []).append(found.value)
            if result.confidence is not None:
                row.setdefault("floor_splits", []).append(floor(result, split))
    return list(rows.values())


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of one data set and direction as Markdown."""
    headings = ["", "AUROC", "over splits", "ECE", "floor", "over splits", "debiased ECE, over splits"]
    lines = [f"| {' | '.join(headings)} |", "| --- |" + " ---: |" * (len(headings) - 1)]
    for row in rows:
        cells = [
            row["name"],
            interval(row, "auroc"),
            spread(row["auroc_splits"]),
            *([""] * 4),
        ]
        if "ece" in row:
            cells[3:] = [
                interval(row, "ece"),
                short(float(np.mean(row["floor_splits"])), 3),
                spread(row["ece_splits"]),
                spread(row["ece_debiased_splits"]),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(row: dict[str, Any], score: str) -> str:
    """A score with its interval where it has one: too few right or wrong queries have none."""
    low, high = row[f"{score}_low"], row[f"{score}_high"]
    return short(row[score], 3) + ("" if math.isnan(low) else f" [{short(low, 3)}, {short(high, 3)}]")


def spread(values: list[float]) -> str:
    """Mean and range."""
    return f"{short(float(np.mean(values)), 3)} ({short(min(values), 3)}–{short(max(values), 3)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small synthetic world, nothing written")
    parser.add_argument("--data", nargs="*", choices=SETS, default=list(SETS), metavar="NAME")
    parser.add_argument("--adapter", default="deterministic", metavar="NAME")
    parser.add_argument("--splits", type=int, default=3, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    arguments.resamples = 10 if arguments.smoke else 1000
    root = Path(os.environ.get("GROVE_ADAPTERS_DATA", ROOT.parent / "shared" / "data"))
    worlds: dict[str, Callable[[], Pairs]] = {}
    if arguments.smoke:
        arguments.splits = 1
        worlds["synthetic"] = lambda: make_pairs(60, dim=32).pairs
    else:
        for name in arguments.data:
            if (root / FOLDERS[name]).is_dir():
                worlds[name] = lambda name=name: DATA[name](root, False).pairs
            else:
                print(f"{name}: skipped, {root} holds no {FOLDERS[name]}; set GROVE_ADAPTERS_DATA")

    stem = "match_confidence" + ("" if arguments.adapter == "deterministic" else f"_{arguments.adapter}")
    content = {
        "what": __doc__.splitlines()[0],
        "adapter": arguments.adapter,
        "splits": arguments.splits,
        "seed": arguments.seed,
        "bins": BINS,
    }
    rows, blocks = [], []
    for name, load in worlds.items():
        pairs = load()
        for direction in ("i2t", "t2i"):
            for question, ask in QUESTIONS.items():

                def results(split: int, ask: Any = ask, pairs: Pairs = pairs, direction: str = direction) -> Any:
                    address = seeding.derive(arguments.seed, "split", split)
                    return halves(pairs, arguments.adapter, ask, direction, address)

                found = measure(results, arguments)
                rows += [{"data": name, "direction": direction, "question": question, **row} for row in found]
                heading = (
                    f"{name}, {direction}: {question} ({found[0]['queries']:,} asked, {found[0]['right']:.1%} yes)"
                )
                blocks.append(f"### {heading}\n\n{table(found)}")
                print(f"\n{blocks[-1]}", flush=True)
        if not arguments.smoke:  # after every data set, so that an interruption keeps those before it
            _io.write_json(RESULTS / f"{stem}.json", {**content, "rows": rows})
            _io.write_text(RESULTS / f"{stem}.md", "\n\n".join(blocks) + "\n")


if __name__ == "__main__":
    main()
