"""How far the way of cutting levels decides −S·R², and who wins by it.

**Nothing to find.** Correctness is drawn with a fixed mean, the uncertainty apart from it, and −S·R² is computed with
every protocol at 5 and 10 levels: how often does it pass .3, which papers print as a result, and how often is our
permutation p-value .05 or less? It should be in one run of twenty, whatever the protocol.

**Real pairs.** Six uncertainties on 500 COCO pairs (OpenAI ViT-B/16) and 1,126 product photos with descriptions
(FashionCLIP), each fitted on four fifths and asked about the rest, five times. All rank by the frozen embeddings, so
they are right and wrong about the same queries. For every protocol and number of levels: the order of the adapters by
−S·R², its Kendall correlation with their order by AUROC and by equal_count with 10 levels, how many differ from
chance, and how many of the pairs of adapters a paired bootstrap tells apart. AUROC, which needs no levels, stands
beside them.

The data is found through GROVE_ADAPTERS_DATA (default: ../shared/data beside the project); what is missing is left out
and said so.

    python benchmarks/protocols.py             # ten minutes on one core; writes results/protocols.json and .md
    python benchmarks/protocols.py --smoke     # few runs, few pairs; written nowhere
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from grove_adapters import Embeddings, Pairs, Source, _io, create_adapter, seeding
from grove_adapters.adapters import ADAPTERS
from grove_adapters.adapters.loop import LoopConfig
from grove_adapters.calibration import bootstrap, calibrate, compare
from grove_adapters.calibration.bins import PROTOCOLS
from grove_adapters.calibration.scores import Null, Queries
from grove_adapters.pipeline import fit_folds, retrieve_folds
from grove_adapters.pipeline.tables import short
from grove_adapters.tasks import TaskResult

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LEVELS = (5, 10)
RECALLS = (0.2, 0.5, 0.8)
ADAPTER_NAMES = ("deterministic", "density_ratio", "failure_head", "pfe", "pcmepp", "vmf")
DATA = {
    # title: folder, source; FashionCLIP states no logit scale, OpenAI's is taken for it
    "COCO, CLIP ViT-B/16": ("coco500", Source(model="ViT-B-16", pretrained="openai", logit_scale=100.0)),
    "products, FashionCLIP": ("products1126", Source(model="FashionCLIP", pretrained="published", logit_scale=100.0)),
}
REFERENCE = ("equal_count", 10)


def null_experiment(runs: int, queries: int, permutations: int, seed: int) -> list[dict[str, Any]]:
    """−S·R² and its p-value of an uncertainty that says nothing, in many runs of every setting."""
    rows = []
    for recall, protocol, levels in itertools.product(RECALLS, PROTOCOLS, LEVELS):
        random = np.random.default_rng(seeding.derive(seed, "null", str(recall)))  # the same runs for every protocol
        values, squares, p_values = [], [], []
        for run in range(runs):
            correct = (random.random(queries) < recall).astype(float)
            ready = Queries.of(correct, random.random(queries), protocol=protocol, levels=levels)
            got = ready.scored(np.ones((1, queries)))
            shuffled = bootstrap.permutations(np.arange(queries), permutations, seed=seeding.derive(seed, "null", run))
            null = Null(ready)
            draws = np.concatenate([null.scored(block)["neg_s_r2"] for block in shuffled])
            values.append(got["neg_s_r2"][0])
            squares.append(got["r2"][0])
            p_values.append(bootstrap.p_value(draws, values[-1], larger_is_better=True))
        rows.append(
            {
                "recall": recall,
                "protocol": protocol,
                "levels": levels,
                "queries": queries,
                "runs": runs,
                "mean": float(np.nanmean(values)),
                "r2": float(np.nanmean(squares)),
                "above_0.3": share(np.array(values) > 0.3),
                "p_at_most_0.05": share(np.array(p_values) <= 0.05),
            }
        )
    return rows


def share(hits: np.ndarray) -> list[float]:
    """A share with its exact 95 % binomial interval."""
    test = stats.binomtest(int(hits.sum()), len(hits)).proportion_ci(0.95, method="exact")
    return [float(hits.mean()), float(test.low), float(test.high)]


def null_table(rows: Sequence[dict[str, Any]]) -> str:
    """The null experiment as Markdown."""
    lines = [
        "| recall | protocol | levels | mean −S·R² | mean R² | −S·R² > .3 | p ≤ .05 |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        shares = [
            f"{value:.1%} [{low:.1%}, {high:.1%}]" for value, low, high in (row["above_0.3"], row["p_at_most_0.05"])
        ]
        lines.append(
            f"| {short(row['recall'], 1)} | {row['protocol']} | {row['levels']} | {short(row['mean'], 2)} | "
            f"{short(row['r2'], 2)} | {' | '.join(shares)} |"
        )
    return "\n".join(lines)


def results_of(pairs: Pairs, name: str, *, folds: int, seed: int, smoke: bool) -> list[TaskResult]:
    """Out-of-fold results of one adapter in both directions, ranked by the frozen embeddings."""
    settings: dict[str, Any] = {}
    if smoke:
        looped = issubclass(ADAPTERS.get(name).config_class, LoopConfig)
        settings = ADAPTERS.get(name).small_settings() | ({"epochs": 2} if looped else {})
    fits = fit_folds(lambda: create_adapter(name, **settings), pairs, folds=folds, seed=seed)
    return retrieve_folds(fits, rank_by="backbone", seed=seed)


def judged(title: str, results: dict[str, TaskResult], resamples: int, seed: int) -> list[dict[str, Any]]:
    """One row for every protocol and number of levels, on one data set in one direction."""
    rows = []
    reference: dict[str, float] = {}
    for protocol, levels in sorted(itertools.product(PROTOCOLS, LEVELS), key=lambda way: way != REFERENCE):
        how: dict[str, Any] = {"protocol": protocol, "levels": levels, "resamples": resamples, "seed": seed}
        reports = {name: calibrate(result, **how) for name, result in results.items()}
        differences = [compare(results[a], results[b], **how) for a, b in itertools.combinations(results, 2)]
        auroc = {name: report.scores["auroc"].value for name, report in reports.items()}
        value = {name: report.scores["neg_s_r2"].value for name, report in reports.items()}
        reference = reference or value
        rows.append(
            {
                "data": title,
                "direction": next(iter(results.values())).direction,
                "protocol": protocol,
                "levels": levels,
                "queries_per_level": int(min(report.levels.count.min() for report in reports.values())),
                "neg_s_r2": value,
                "auroc": auroc,
                "first": max(value, key=lambda name: np.nan_to_num(value[name], nan=-2)),
                "tau_auroc": agreement(value, auroc),
                "tau_reference": agreement(value, reference),
                "significant": sum(report.scores["neg_s_r2"].p_value <= 0.05 for report in reports.values()),
                "significant_auroc": sum(report.scores["auroc"].p_value <= 0.05 for report in reports.values()),
                "told_apart": sum(difference.better("neg_s_r2") != 0 for difference in differences),
                "told_apart_auroc": sum(difference.better("auroc") != 0 for difference in differences),
                "pairs": len(differences),
                "adapters": len(results),
            }
        )
    return rows


def agreement(one: dict[str, float], other: dict[str, float]) -> float:
    """Kendall's τ-b of two orders of the same adapters; undefined values stand last."""
    first, second = (np.nan_to_num(list(values.values()), nan=-2.0) for values in (one, other))
    return float(stats.kendalltau(first, second).statistic)


def real_table(rows: Sequence[dict[str, Any]]) -> str:
    """The real pairs as Markdown."""
    lines = [
        "| data | queries | protocol | levels | first by −S·R² | τ with AUROC | τ with equal_count, 10 | "
        "better than chance | pairs told apart |",
        "| --- | --- | --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        asking = {"i2t": "images ask", "t2i": "captions ask"}[row["direction"]]
        lines.append(
            f"| {row['data']} | {asking} | {row['protocol']} | {row['levels']} | {row['first']} | "
            f"{short(row['tau_auroc'], 2)} | {short(row['tau_reference'], 2)} | "
            f"{row['significant']} of {row['adapters']} | {row['told_apart']} of {row['pairs']} |"
        )
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if (key := (row["data"], row["direction"])) not in seen:
            seen.add(key)
            asking = {"i2t": "images ask", "t2i": "captions ask"}[row["direction"]]
            lines.append(
                f"| {row['data']} | {asking} | AUROC, no levels | | {max(row['auroc'], key=row['auroc'].get)} | 1.00 | "
                f"{short(row['tau_auroc'], 2)} | {row['significant_auroc']} of {row['adapters']} | "
                f"{row['told_apart_auroc']} of {row['pairs']} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few runs, 60 pairs, two epochs, nothing written")
    parser.add_argument("--runs", type=int, default=1000, metavar="N", help="of the null experiment")
    parser.add_argument("--queries", type=int, default=500, metavar="N", help="of the null experiment")
    parser.add_argument("--folds", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    resamples = 1000
    if arguments.smoke:
        arguments.runs, arguments.queries, arguments.folds, resamples = 20, 100, 2, 50
    root = Path(os.environ.get("GROVE_ADAPTERS_DATA", ROOT.parent / "shared" / "data"))

    null = null_experiment(arguments.runs, arguments.queries, 19 if arguments.smoke else 199, arguments.seed)
    blocks = [f"## Nothing to find: {arguments.queries} queries, {arguments.runs} runs\n\n{null_table(null)}"]
    print(f"\n{blocks[-1]}\n", flush=True)
    rows: list[dict[str, Any]] = []
    for title, (folder, source) in DATA.items():
        if not (root / folder).is_dir():
            print(f"{title}: skipped, {root} holds no {folder}; set GROVE_ADAPTERS_DATA")
            continue
        n = 60 if arguments.smoke else None
        images, texts = (_io.read_array(root / folder / f"{name}.npy")[:n] for name in ("image", "text"))
        pairs = Pairs(
            Embeddings(images, modality="image", source=source),
            Embeddings(texts, modality="text", source=source),
            np.repeat(np.arange(len(images))[:, None], 2, axis=1),
        )
        both: tuple[dict[str, TaskResult], dict[str, TaskResult]] = ({}, {})
        for name in ADAPTER_NAMES:
            how = {"folds": arguments.folds, "seed": arguments.seed, "smoke": arguments.smoke}
            for results, result in zip(both, results_of(pairs, name, **how), strict=True):
                results[name] = result
            print(f"{title}: {name} fitted {arguments.folds} times", flush=True)
        for results in both:
            rows += judged(title, results, resamples, arguments.seed)
    if rows:
        blocks.append(f"## Real pairs\n\n{real_table(rows)}")
        print(f"\n{blocks[-1]}")
    if arguments.smoke:
        return
    content = {
        "what": __doc__.splitlines()[0],
        "seed": arguments.seed,
        "folds": arguments.folds,
        "adapters": ADAPTER_NAMES,
    }
    _io.write_json(RESULTS / "protocols.json", {**content, "null": null, "rows": rows})
    _io.write_text(RESULTS / "protocols.md", "\n\n".join(blocks) + "\n")


if __name__ == "__main__":
    main()
