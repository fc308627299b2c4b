"""Do conformal sets of answers hold the true one as often as promised, and how large must they be?

7,000 ImageNet photos ask for the text of their class among 1,000 (OpenAI ViT-B/32, cosine, logit scale 100). A thousand
times, half of them, drawn at random, fit the thresholds and the other half is answered with sets. In every such split
the number of covered queries follows an exact law whatever the model, the beta-binomial distribution; where ties are
possible (the rank) coverage is only bounded from below. So the share of splits that fall inside the central 95 % of
the law must itself be 95 %, give or take its binomial error.

Sets by category hold every part of the classes to its own threshold. They need whole rankings, so only the photos of
the first 200 classes ask the texts of these; the classes are cut into five parts by k-means of their texts, which knows
nothing of the photos.

The data is found through GROVE_ADAPTERS_DATA (default: ../shared/data beside the project); without it nothing is
measured, and the exit code is 0.

    python benchmarks/conformal_coverage.py            # minutes; writes results/conformal_coverage.json and .md
    python benchmarks/conformal_coverage.py --smoke    # a small synthetic world, written nowhere
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any, get_args

import numpy as np
from adapters_quality import DATA
from scipy.stats import betabinom, binom
from sklearn.cluster import KMeans

from grove_adapters import Pairs, _io, create_adapter, seeding
from grove_adapters.calibration import conformalise
from grove_adapters.calibration.conformal import Nonconformity
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.pipeline.tables import short
from grove_adapters.tasks import TaskResult, retrieve

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ALPHAS = (0.1, 0.05)
CATEGORIES = 5
CLASSES = 200  # of those that are asked about by category


def ask(pairs: Pairs, depth: int) -> TaskResult:
    """Every image asks the whole gallery of texts, by cosine at a logit scale of 100."""
    adapter = create_adapter("deterministic").fit(pairs)
    posteriors = adapter.predict(pairs.images), adapter.predict(pairs.texts)
    return retrieve(*posteriors, links=pairs.links, similarity="cosine", temperature=100.0, k=(1, depth))


def law(n: int, m: int, alpha: float) -> Any:
    """Distribution of the number of m new queries that are covered after n held-out ones, where no scores are tied."""
    missed = n + 1 - math.ceil((n + 1) * (1 - alpha) - 1e-9)
    return betabinom(m, n + 1 - missed, missed)


def coverage(result: TaskResult, *, splits: int, seed: int) -> list[dict[str, Any]]:
    """Marginal sets of every kind over random halves."""
    n = len(result) // 2
    m = len(result) - n
    found: dict[tuple[str, float], list[tuple[int, np.ndarray]]] = {}
    for split in range(splits):
        order = np.random.default_rng(seeding.derive(seed, "split", split)).permutation(len(result))
        held_out, others = result.take(order[:n]), result.take(order[n:])
        for score in get_args(Nonconformity):
            for alpha in ALPHAS:
                rule = conformalise(held_out, alpha=alpha, score=score, seed=split)
                sets = rule.sets(others)
                found.setdefault((score, alpha), []).append((int(sets.covered.sum()), sets.sizes))
    rows = []
    for (score, alpha), outcomes in found.items():
        covered = np.array([count for count, _ in outcomes])
        sizes = np.concatenate([size for _, size in outcomes])
        expected = law(n, m, alpha)
        inside = int(((expected.ppf(0.025) <= covered) & (covered <= expected.ppf(0.975))).sum())
        nominal = expected.cdf(expected.ppf(0.975)) - expected.cdf(expected.ppf(0.025) - 1)
        low, high = binom(splits, nominal).ppf([0.005, 0.995]) / splits
        rows.append(
            {
                "score": score,
                "alpha": alpha,
                "splits": splits,
                "held_out": n,
                "judged": m,
                "coverage": covered.mean() / m,
                "coverage_std": covered.std(ddof=1) / m,
                "law_mean": expected.mean() / m,
                "law_std": expected.std() / m,
                "share_inside_95": inside / splits,
                "share_inside_99_interval": [low, high],
                "agrees": bool(low <= inside / splits <= high),
                "mean_size": sizes.mean(),
                "median_size": float(np.median(sizes)),
                "size_90": float(np.quantile(sizes, 0.9)),
                "empty": (sizes == 0).mean(),
                "single": (sizes == 1).mean(),
            }
        )
    return rows


def by_category(result: TaskResult, texts: np.ndarray, truth: np.ndarray, *, splits: int, seed: int) -> dict[str, Any]:
    """Coverage within parts of the gallery, with one threshold for all and with one each, at the first alpha."""
    parts = KMeans(CATEGORIES, random_state=seed, n_init=3).fit_predict(texts)
    own, n, alpha = parts[truth], len(result) // 2, ALPHAS[0]
    covered: dict[str, list[np.ndarray]] = {"one threshold": [], "one each": []}
    sizes: dict[str, list[float]] = {name: [] for name in covered}
    inside = []
    for split in range(splits):
        order = np.random.default_rng(seeding.derive(seed, "category", split)).permutation(len(result))
        held_out, others = result.take(order[:n]), result.take(order[n:])
        of_held_out, of_others = own[order[:n]], own[order[n:]]
        for name, sets in (
            ("one threshold", conformalise(held_out, alpha=alpha).sets(others)),
            (
                "one each",
                conformalise(held_out, alpha=alpha, categories=of_held_out).sets(others, gallery_categories=parts),
            ),
        ):
            hits = np.bincount(of_others, sets.covered, minlength=CATEGORIES)
            covered[name].append(hits / np.bincount(of_others, minlength=CATEGORIES))
            sizes[name].append(float(sets.sizes.mean()))
        for part in range(CATEGORIES):
            expected = law((of_held_out == part).sum(), (of_others == part).sum(), alpha)
            inside.append(expected.ppf(0.025) <= hits[part] <= expected.ppf(0.975))
    mean = {name: np.mean(values, 0) for name, values in covered.items()}
    return {
        "alpha": alpha,
        "splits": splits,
        "categories": np.bincount(parts, minlength=CATEGORIES),
        "coverage": mean,
        "worst": {name: values.min() for name, values in mean.items()},
        "best": {name: values.max() for name, values in mean.items()},
        "mean_size": {name: np.mean(values) for name, values in sizes.items()},
        "share_inside_95": float(np.mean(inside)),
    }


def table(rows: list[dict[str, Any]], classes: dict[str, Any]) -> str:
    """The findings as Markdown."""
    lines = [
        "| sets | promised | coverage: mean ± std | the law's | splits inside its 95 % | mean size | one answer |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        lines.append(
            f"| {row['score']} | {short(1 - row['alpha'], 2)} | {short(row['coverage'], 4)} ± "
            f"{short(row['coverage_std'], 4)} | {short(row['law_mean'], 4)} ± {short(row['law_std'], 4)} | "
            f"{row['share_inside_95']:.1%} | {row['mean_size']:.2f} | {row['single']:.0%} |"
        )
    lines += ["", "| coverage by category | worst | best | mean size |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {name} | {short(classes['worst'][name], 3)} | {short(classes['best'][name], 3)} | "
        f"{classes['mean_size'][name]:.2f} |"
        for name in classes["coverage"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small synthetic world, nothing written")
    parser.add_argument("--splits", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    root = Path(os.environ.get("GROVE_ADAPTERS_DATA", ROOT.parent / "shared" / "data"))
    if arguments.smoke:
        pairs, arguments.splits, depth = make_pairs(100, dim=32).pairs, 10, 100
    elif not (root / "imagenet7k").is_dir():
        print(f"skipped: {root} holds no imagenet7k; set GROVE_ADAPTERS_DATA")
        return
    else:
        pairs, depth = DATA["imagenet7k"](root, False).pairs, 100

    rows = coverage(ask(pairs, depth), splits=arguments.splits, seed=arguments.seed)
    few = pairs.take_images(pairs.links[pairs.links[:, 1] < CLASSES, 0])
    classes = by_category(
        ask(few, len(few.texts)),
        np.asarray(few.texts.values[:], dtype=np.float32),
        few.links[np.argsort(few.links[:, 0], kind="stable"), 1],
        splits=max(1, arguments.splits // 10),
        seed=arguments.seed,
    )
    text = table(rows, classes)
    print(text)
    exact = [row for row in rows if row["score"] != "rank"]
    verdict = (
        f"{sum(row['agrees'] for row in exact)} of {len(exact)} kinds without ties have as many splits inside the "
        "law's 95 % as its 99 % binomial interval allows."
    )
    print(f"\n{verdict}")
    if arguments.smoke:
        return
    content = {"what": __doc__.splitlines()[0], "data": "imagenet7k", "seed": arguments.seed, "depth": depth}
    _io.write_json(
        RESULTS / "conformal_coverage.json", {**content, "rows": rows, "classes": classes, "verdict": verdict}
    )
    _io.write_text(RESULTS / "conformal_coverage.md", f"{text}\n\n{verdict}\n")


if __name__ == "__main__":
    main()
