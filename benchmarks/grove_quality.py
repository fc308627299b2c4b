"""What is GroVE's uncertainty worth, on scenes and on real CLIP embeddings, and what limits it?

Two questions, asked out of fold (five folds, the gallery of a query is its own fold):

* *How uncertain is this item?* Before any search. All rows answer about the same first answers, those of the frozen
  embeddings: `1 − max cosine`, which has seen the gallery; GroVE's uncertainty and that of its published preset, which
  have not; and what bounds every uncertainty that has not: a classifier of the frozen embedding that was taught, on the
  fitted part, for which queries the first answer is wrong. On scenes there is also the true ambiguity itself.
* *Is this match right?* After the search. 1 − the largest probability of the match distribution, for the frozen model
  and for the likelihood under GroVE's cross-modal prediction (`predict_cross`).

Every difference is taken on the same queries, with a paired bootstrap: of the first kind to 1 − max cosine, of the
second to the frozen model's match probability. ImageNet's rows hold the classes of odd number, because those of even
number chose the defaults; the rendered world has another seed than the one that did. The control is COCO through an
untrained CLIP, where nothing should be found.

The published preset is fitted with all its 200 epochs on the two small sets and with 20 on the others: at its rates,
latents stand still from the first epoch on, and q(u) has settled after a few.

    python benchmarks/grove_quality.py              # most of an hour of one core; writes results/grove_quality.*
    python benchmarks/grove_quality.py --redo grove # its code has changed: its cells anew
    python benchmarks/grove_quality.py --smoke      # 60 pairs of each, two epochs; written nowhere
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import adapters_quality
import numpy as np
from adapters_quality import DATA, FOLDERS, ROOT, TITLES, Data

from grove_adapters import Pairs, _io, create_adapter, seeding
from grove_adapters.calibration import Score, calibrate, compare, rank_correlation
from grove_adapters.pipeline import DIRECTIONS, pool, predict_both
from grove_adapters.pipeline.tables import markdown_table
from grove_adapters.tasks import TaskResult, retrieve

RESULTS = ROOT / "benchmarks" / "results"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "grove_adapters" / "grove_quality"
BASE = {"item": "1 − max cosine", "match": "match probability"}
KIND = {
    "1 − max cosine": "item",
    "GroVE": "item",
    "GroVE, latent entropy": "item",
    "GroVE, published preset": "item",
    "GroVE, published preset and order": "item",
    "taught from errors": "item",
    "the true ambiguity": "item",
    "match probability": "match",
    "GroVE, cross-modal likelihood": "match",
}
"""Rows of the tables and the question that each answers."""
KEPT = ("direction", "recall", "spearman", "r2", "neg", "auroc", "ece")  # beginnings of columns
FULL_PAPER = ("coco500", "products1126", "control")

Found = Iterator[tuple[str, TaskResult]]


def settings(smoke: bool, **own: Any) -> dict[str, Any]:
    """Settings of a GroVE, or the least that runs."""
    return {**own, **create_adapter("grove").small_settings(), "epochs": 2} if smoke else own


def ask(adapter: Any, test: Pairs, seed: int, direction: Literal["i2t", "t2i"], **how: Any) -> TaskResult:
    """Retrieval inside one fold."""
    both = predict_both(adapter, test, seed=seed)
    return retrieve(*both, links=test.links, positives=test.positives, direction=direction, **how)


def frozen(train: Pairs, test: Pairs, data: Data, title: str, arguments: argparse.Namespace, seed: int) -> Found:
    """The frozen model alone, and what bounds every uncertainty that sees no gallery."""
    adapter = create_adapter("deterministic").fit(train, seed=seed)
    for direction in DIRECTIONS:
        result = ask(adapter, test, seed, direction)
        yield "1 − max cosine", result
        yield "match probability", dataclasses.replace(result, uncertainty=1 - result.confidence)
        taught = taught_from_errors(ask(adapter, train, seed, direction), train, test, direction)
        yield "taught from errors", dataclasses.replace(result, uncertainty=taught)
        if data.known:
            truth = np.asarray(data.known[direction][1], dtype=float)
            rows = (data.pairs.images if direction == "i2t" else data.pairs.texts).rows(result.ids)
            yield "the true ambiguity", dataclasses.replace(result, uncertainty=truth[rows])


def taught_from_errors(told: TaskResult, train: Pairs, test: Pairs, direction: str) -> np.ndarray:
    """(Q,) log odds that the first answer is wrong, by a classifier of the asking embedding alone."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    fitted, asked = ((part.images if direction == "i2t" else part.texts) for part in (train, test))
    wrong = told.correct < 0.5
    if min(wrong.sum(), (~wrong).sum()) < 10:
        return np.zeros(len(asked))
    random = np.random.default_rng(0)
    kept = np.sort(random.permutation(len(wrong))[:4000])
    search = LogisticRegressionCV(
        Cs=np.geomspace(1e-5, 1, 6), cv=4, scoring="roc_auc", max_iter=300, l1_ratios=(0,), use_legacy_attributes=False
    )
    model = make_pipeline(StandardScaler(), search)
    model.fit(np.asarray(fitted.values[kept], dtype=np.float64), wrong[kept])
    return model.decision_function(np.asarray(asked.values[np.arange(len(asked))], dtype=np.float64))


def grove(train: Pairs, test: Pairs, data: Data, title: str, arguments: argparse.Namespace, seed: int) -> Found:
    """GroVE with our defaults: its uncertainties, and the match by its cross-modal likelihood."""
    adapter = create_adapter("grove", **settings(arguments.smoke)).fit(train, seed=seed)
    plain = create_adapter("deterministic").fit(train, seed=seed)
    with tempfile.TemporaryDirectory() as folder:  # the same fit, read in another way
        entropy = reread(adapter, Path(folder), uncertainty="latent_entropy")
    posteriors = {"image": plain.predict(test.images), "text": plain.predict(test.texts)}
    for direction in DIRECTIONS:
        how = {"rank_by": "backbone", "uncertainty": "posterior"}
        yield "GroVE", ask(adapter, test, seed, direction, **how)
        yield "GroVE, latent entropy", ask(entropy, test, seed, direction, **how)
        asking = {"i2t": "image", "t2i": "text"}[direction]
        crossed = adapter.predict_cross(test.images if asking == "image" else test.texts)
        sides = {**posteriors, asking: crossed}
        common = {"links": test.links, "positives": test.positives, "direction": direction}
        matched = retrieve(sides["image"], sides["text"], similarity="likelihood", **common)
        yield "GroVE, cross-modal likelihood", dataclasses.replace(matched, uncertainty=1 - matched.confidence)


def reread(adapter: Any, folder: Path, **own: Any) -> Any:
    """The same fitted adapter with other settings of what it reports."""
    from grove_adapters.adapters import load_adapter

    adapter.save(folder / "fit")
    written = _io.read_json(folder / "fit" / "adapter.json")
    written["config"] |= own
    _io.write_json(folder / "fit" / "adapter.json", written)
    return load_adapter(folder / "fit")


def paper(train: Pairs, test: Pairs, data: Data, title: str, arguments: argparse.Namespace, seed: int) -> Found:
    """The published preset; once about the frozen answers, and once with its own order by Wasserstein distance."""
    own = settings(arguments.smoke, preset="paper")
    if not arguments.smoke and title not in FULL_PAPER:
        own["epochs"] = 20
    adapter = create_adapter("grove", **own).fit(train, seed=seed)
    for direction in DIRECTIONS:
        how = {"rank_by": "backbone", "uncertainty": "posterior"}
        yield "GroVE, published preset", ask(adapter, test, seed, direction, **how)
        yield "GroVE, published preset and order", ask(adapter, test, seed, direction, similarity="wasserstein2")


MAKERS: dict[str, Callable[..., Found]] = {"frozen": frozen, "grove": grove, "paper": paper}


def cell(maker: str, title: str, data: Data, arguments: argparse.Namespace) -> dict[tuple[str, str], TaskResult]:
    """(row, direction) → pooled results of one maker on one data set, from the cache where they are there."""
    folder = arguments.cache / title / maker
    done = folder / "done.json"
    if done.is_file() and maker not in arguments.redo:
        names = _io.read_json(done)["rows"]
        return {(row, way): TaskResult.load(folder / file) for row, way, file in names}
    parts: dict[tuple[str, str], list[TaskResult]] = {}
    started = time.perf_counter()
    for number, (train, test) in enumerate(data.pairs.folds(arguments.folds, seed=arguments.seed, by=data.by)):
        seed = seeding.derive(arguments.seed, "fold", number)
        for row, result in MAKERS[maker](train, test, data, title, arguments, seed):
            slim = dataclasses.replace(result, detail={}, recall_at={})
            parts.setdefault((row, result.direction), []).append(slim)
    pooled = {key: pool(results) for key, results in parts.items()}
    print(f"{title}: {maker} in {time.perf_counter() - started:.0f} s", flush=True)
    names = [[row, way, f"{number}.safetensors"] for number, (row, way) in enumerate(pooled)]
    for row, way, file in names:
        pooled[row, way].save(folder / file)
    _io.write_json(done, {"rows": names})
    return pooled


def judged(title: str, data: Data, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one data set."""
    results: dict[tuple[str, str], TaskResult] = {}
    for maker in MAKERS:
        results |= cell(maker, title, data, arguments)
    rows = []
    for direction in DIRECTIONS:
        for name, kind in KIND.items():
            if (name, direction) not in results:
                continue
            result, base = results[name, direction], results[BASE[kind], direction]
            sampling = {"resamples": arguments.resamples, "seed": arguments.seed}
            scores = calibrate(result, **sampling).row()
            row = {"data": title, "kind": kind, "name": name}
            row |= {name: value for name, value in scores.items() if name.removesuffix("_p").split("_")[0] in KEPT}
            if result is not base and name != BASE[kind]:
                gap = compare(result, base, **sampling).differences["auroc"]
                row |= {"gain": gap.value, "gain_low": gap.low, "gain_high": gap.high, "gain_p": gap.p_value}
            if data.known and kind == "item":
                side = data.pairs.images if direction == "i2t" else data.pairs.texts
                truth = np.asarray(data.known[direction][1], dtype=float)[side.rows(result.ids)]
                rho = rank_correlation(result.uncertainty, truth, groups=result.groups, **sampling)
                row |= {"known": rho.value, "known_low": rho.low, "known_high": rho.high}
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Both questions of one data set as Markdown."""
    columns = {"recall": "R@1", "auroc": "AUROC", "gain": "AUROC, difference", "known": "ρ known"}
    asking = {"i2t": "images ask", "t2i": "texts ask"}
    blocks = []
    for kind, question in (("item", "How uncertain is this item?"), ("match", "Is this match right?")):
        for direction in DIRECTIONS:
            chosen = [row for row in rows if (row["kind"], row["direction"]) == (kind, direction)]
            shown = [name for name in columns if any(name in row for row in chosen)]
            cells = [(row["name"], [score(row, name) for name in shown]) for row in chosen]
            blocks.append(
                markdown_table(f"{question} ({asking[direction]})", ["", *(columns[name] for name in shown)], cells)
            )
    return "\n\n".join(blocks)


def score(row: dict[str, Any], name: str) -> Score | None:
    """A score of a row with its interval."""
    if row.get(name) is None:
        return None
    return Score(*(row.get(f"{name}{end}", float("nan")) for end in ("", "_low", "_high")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few pairs, few steps, nothing written")
    parser.add_argument("--data", nargs="*", choices=list(DATA), default=list(DATA), metavar="NAME")
    parser.add_argument("--redo", nargs="*", choices=list(MAKERS), default=[], metavar="NAME", help=", ".join(MAKERS))
    parser.add_argument("--folds", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    arguments.resamples = 50 if arguments.smoke else 2000
    data_root = Path(os.environ.get("GROVE_ADAPTERS_DATA", ROOT.parent / "shared" / "data"))
    with tempfile.TemporaryDirectory() as folder:
        arguments.cache = CACHE / f"seed-{arguments.seed}-folds-{arguments.folds}"
        if arguments.smoke:
            arguments.folds, arguments.cache = 2, Path(folder)
        rows, blocks = [], []
        for title in arguments.data:
            if title in FOLDERS and not (data_root / FOLDERS[title]).is_dir():
                print(f"{title}: skipped, {data_root} holds no {FOLDERS[title]}; set GROVE_ADAPTERS_DATA")
                continue
            found = judged(title, adapters_quality.chosen(title, data_root, arguments.smoke), arguments)
            rows += found
            blocks.append(f"## {TITLES[title]}\n\n{table(found)}")
            print(f"\n{blocks[-1]}\n", flush=True)
    verdict = adapters_quality.control_verdict(rows)
    print(verdict)
    if arguments.smoke or arguments.data != list(DATA):
        return
    content = {"what": __doc__.splitlines()[0], "folds": arguments.folds, "seed": arguments.seed}
    _io.write_json(RESULTS / "grove_quality.json", {**content, "rows": rows, "control": verdict})
    _io.write_text(RESULTS / "grove_quality.md", "\n\n".join([*blocks, verdict]) + "\n")


if __name__ == "__main__":
    main()
