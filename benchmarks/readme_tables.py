"""Writes the README's tables from benchmarks/results, so that no figure in it is typed by hand.

python benchmarks/readme_tables.py            # rewrites the tables between the markers in README.md
python benchmarks/readme_tables.py --check    # exit code 1 where the README says something else
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grove_adapters import _io
from grove_adapters.pipeline.tables import short

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
ASKING = {"i2t": "images ask", "t2i": "captions ask"}
DATA = {
    "scenes": "rendered scenes",
    "coco500": "COCO",
    "products1126": "products",
    "imagenet7k": "ImageNet classes",
    "control": "control: COCO, untrained",
}
QUALITY = {
    "How uncertain is this item?": {
        "1 − max cosine": "1 − max cosine",
        "GroVE": "GroVE",
        "GroVE, published preset": "GroVE as published",
        "taught from errors": "taught from errors",
    },
    "Is this match right?": {
        "match probability": "frozen model's match probability",
        "GroVE, cross-modal likelihood": "GroVE's cross-modal likelihood",
    },
}
"""Question → row of the benchmark → heading."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args()
    old = README.read_text(encoding="utf-8")
    new = MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", old)
    if new == old:
        print("README.md agrees with benchmarks/results")
        return 0
    if arguments.check:
        print("README.md differs from benchmarks/results; run python benchmarks/readme_tables.py", file=sys.stderr)
        return 1
    _io.write_text(README, new)
    print("README.md rewritten")
    return 0


def demo() -> str:
    """Every adapter on the rendered world, both directions."""
    rows = _io.read_json(RESULTS / "demo_world.json")["rows"]
    columns = {"recall": "R@1", "spearman": "S", "neg_s_r2": "−S·R²", "auroc": "AUROC", "known": "ρ"}
    return _comparison(rows, columns, lambda row: ASKING[row["direction"]])


def quality() -> str:
    """AUROC of every answer to both questions about a match, on scenes, real pairs and the control."""
    result = _io.read_json(RESULTS / "grove_quality.json")
    rows, blocks = result["rows"], []
    for question, shown in QUALITY.items():
        lines = []
        for data, title in DATA.items():
            for direction, asking in ASKING.items():
                found = {row["name"]: row for row in rows if (row["data"], row["direction"]) == (data, direction)}
                frozen = found["1 − max cosine"]
                lines.append(
                    [f"{title}: {asking}", _score(frozen, "recall"), *(_score(found[n], "auroc") for n in shown)]
                )
        blocks.append(_markdown([question, "R@1", *shown.values()], lines))
    return "\n\n".join([*blocks, result["control"]])


def tiny_clip() -> str:
    """Recall of the bundled model where it is easy and where it is hard."""
    result = _io.read_json(RESULTS / "tiny_clip.json")
    names = {"image_to_text": "image → caption", "text_to_image": "caption → image"}
    gallery = f"gallery of {result['clean']['gallery']:,}"
    lines = []
    for direction, name in names.items():
        hardest = result["mixed"][direction][_hardest(result["mixed"][direction])]["own"]
        lines.append([name, _recall(result["clean"][direction]), _recall(hardest)])
    return _markdown(["R@1, " + gallery, "clean scenes, full captions", "hardest tenth of the mixed world"], lines)


def speed() -> str:
    """Ratios to named rivals, each measured in one run."""
    grove = _io.read_json(RESULTS / "grove_speed.json")
    extract = _io.read_json(RESULTS / "extract_speed.json")
    sizes, ours = grove["sizes"], grove["training, ours"]
    rival = grove["training, one GP per dimension"]["us_per_pair"]
    rows, slow = (grove[f"embedding, {who}"]["rows_per_s"] for who in ("ours", "one GP per dimension"))
    structure = f"one GP per dimension in GPyTorch, D = {sizes['dim']}, M = {sizes['inducing']}"
    return _markdown(
        ["what", "against", "figure"],
        [
            [
                f"training GroVE, a pair, batches of {sizes['batch']} for both",
                structure,
                f"{rival / ours['us_per_pair_rival_batch']:,.0f} × faster",
            ],
            [
                f"training GroVE, a pair, in batches of {sizes['own_batch']:,}",
                f"the same in batches of {sizes['batch']}",
                f"{rival / ours['us_per_pair_own_batch']:,.0f} × faster",
            ],
            [
                f"GroVE's latent of a new embedding, converged: {rows:,.0f} a second",
                "20 Adam steps of the same, not converged",
                f"{rows / slow:,.0f} × faster",
            ],
            ["extraction of photographs, ViT-B/32", "its own encoder + decoding, each alone", _floor(extract)],
        ],
    )


def protocols() -> str:
    """What each way of making levels says of an uncertainty that knows nothing, at recall .8."""
    lines = []
    for row in _io.read_json(RESULTS / "protocols.json")["null"]:
        if row["recall"] != 0.8:
            continue
        high, found = ([f"{100 * value:.0f} %" for value in row[name]] for name in ("above_0.3", "p_at_most_0.05"))
        levels = {"cumulative_width": "nested, equal width (as published)"}.get(row["protocol"], row["protocol"])
        cells = [f"{share} [{low}, {top}]" for share, low, top in (high, found)]
        lines.append([levels.replace("_", " "), str(row["levels"]), short(row["r2"], 2), *cells])
    return _markdown(["levels", "how many", "mean R²", "−S·R² above .3", "our p ≤ .05"], lines)


def match_confidence() -> str:
    """How well a match and its absence are told from what the search says, before and after recalibration."""
    rows = _io.read_json(RESULTS / "match_confidence.json")["rows"]
    found = {(row["data"], row["direction"], row["question"], row["name"]): row for row in rows}
    right, held = "is the match right?", "does the gallery hold one?"
    raw, alone, all_queries = "largest probability", "stacked, each query alone", "stacked"
    lines = []
    for data, direction in dict.fromkeys((row["data"], row["direction"]) for row in rows):
        of = {
            (question, name): found[data, direction, question, name]
            for question in (right, held)
            for name in (raw, alone, all_queries)
        }
        floor = of[right, alone]["floor_splits"]
        lines.append(
            [
                f"{data}: {ASKING[direction]}",
                *(_score(of[right, name], "auroc") for name in (raw, alone, all_queries)),
                *(short(of[right, name]["ece"], 3) for name in (raw, alone, all_queries)),
                short(sum(floor) / len(floor), 3),
                *(_score(of[held, name], "auroc") for name in (alone, all_queries)),
            ]
        )
    return _markdown(
        ["queries", "AUROC: softmax", "alone", "all", "ECE: softmax", "alone", "all", "floor", "none: alone", "all"],
        lines,
    )


def conformal() -> str:
    """Coverage and size of conformal sets over random splits."""
    rows = _io.read_json(RESULTS / "conformal_coverage.json")["rows"]
    lines = [
        [
            row["score"],
            short(1 - row["alpha"], 2),
            f"{short(row['coverage'], 4)} ± {short(row['coverage_std'], 4)}",
            f"{short(row['law_mean'], 4)} ± {short(row['law_std'], 4)}",
            f"{row['mean_size']:.1f}",
        ]
        for row in rows
    ]
    return _markdown(["sets", "promised", "coverage over 1,000 splits", "exact law", "answers of 1,000"], lines)


def _floor(extract: Mapping[str, Any]) -> str:
    return f"{extract['ratio to the floor']:.2f} × their sum"


def _hardest(deciles: Sequence[Mapping[str, Any]]) -> int:
    return min(range(len(deciles)), key=lambda number: deciles[number]["own"]["recall_at_1"])


def _recall(measure: Mapping[str, Any]) -> str:
    low, high = measure["interval_95"]
    return f"{short(measure['recall_at_1'], 3)} [{short(low, 2)}, {short(high, 2)}]"


def _comparison(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], block: Callable[[Any], str]) -> str:
    lines = []
    for row in rows:
        cells = [_score(row, name) for name in columns]
        lines.append([block(row), str(row["adapter"]), *cells])
    return _markdown(["queries", "adapter", *columns.values()], lines)


def _score(row: Mapping[str, Any], name: str) -> str:
    if row.get(name) is None:
        return "undefined"
    interval = ""
    if row.get(f"{name}_low") is not None:
        interval = f" [{short(row[f'{name}_low'], 2)}, {short(row[f'{name}_high'], 2)}]"
    return short(row[name], 3) + interval


def _markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [headings, ["---"] * len(headings), *lines])


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "quality": quality,
    "protocols": protocols,
    "match_confidence": match_confidence,
    "conformal": conformal,
    "tiny_clip": tiny_clip,
    "speed": speed,
}

if __name__ == "__main__":
    sys.exit(main())
