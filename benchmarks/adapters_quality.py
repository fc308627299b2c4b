"""Every adapter on scenes and on real CLIP embeddings: whose uncertainty finds the wrong matches, out of fold?

Data: rendered scenes of known ambiguity (bundled tiny CLIP, four views), 500 COCO pairs (OpenAI ViT-B/16), 1,126
product photos with descriptions (FashionCLIP), ImageNet photos with the texts of their classes (OpenAI ViT-B/32), and
the COCO pairs through an untrained CLIP as the control, where nothing should be found. Each adapter is fitted on four
fifths and asked about the rest, five times; ImageNet is cut by class. The gallery of a query is its own fold, and every
interval is a bootstrap.

No default was chosen on what is measured here. Scales, rates, epochs and draws of PFE, PCME, PCME++ and ProLIP were
chosen on 500 scenes of another seed, on another synthetic world and on ImageNet's classes of even number, for which
reason ImageNet's rows hold the 500 classes of odd number only.

Two leaderboards, because they answer different questions. *Input only*: all adapters rank by the frozen embeddings, so
that they are right and wrong about the same queries, and what is judged is the uncertainty an item has before anything
is searched. *Gallery aware*: each ranks by its own posterior and is judged by what its match distribution, the softmax
over the gallery, says after the search: 1 − the largest probability; the entropy H, which orders queries as D_KL =
log n − H against the gallery does, the other way round; 1 − the margin between the two largest; and minus the
divergence from the mean match distribution of all queries. "deterministic" there is the frozen model alone: what a
posterior has to beat. One table holds the correlations with known noise (synthetic) and known ambiguity (scenes).

Every finished cell (data × adapter) is kept in a cache, so a run that was stopped goes on where it was.

The real data is found through GROVE_ADAPTERS_DATA (default: ../shared/data beside the project); what is missing is left
out and said so.

    python benchmarks/adapters_quality.py             # under an hour of one core; writes results/adapters_quality.*
    python benchmarks/adapters_quality.py --redo grove                         # its code has changed: its cells anew
    python benchmarks/adapters_quality.py --kept                               # tables of what has been measured so far
    python benchmarks/adapters_quality.py --data coco500 --adapters deterministic density_ratio    # printed only
    python benchmarks/adapters_quality.py --smoke                  # 60 pairs of each, two epochs; written nowhere
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np

import grove_adapters
from grove_adapters import Embeddings, Pairs, Source, _io, seeding
from grove_adapters.adapters import ADAPTERS, Adapter, create_adapter, list_adapters
from grove_adapters.adapters.loop import LoopConfig
from grove_adapters.calibration import Score, rank_correlation
from grove_adapters.datasets import synthetic
from grove_adapters.pipeline import DIRECTIONS, Evaluation, judge, pool, predict_both
from grove_adapters.pipeline.tables import markdown_table
from grove_adapters.posterior import ProbabilisticEmbedding
from grove_adapters.tasks import TaskResult, retrieve

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "grove_adapters" / "adapters_quality"
SCALE = 100.0  # logit scale of OpenAI's CLIP; taken for FashionCLIP too, which states none
OPENAI = Source(model="ViT-B-16", pretrained="openai", logit_scale=SCALE)
SMOKE_PAIRS = 60
SCENES = 1000


@dataclasses.dataclass(frozen=True)
class Data:
    """One data set.

    Attributes:
        pairs: Its pairs.
        known: Known ambiguities by direction, as `pipeline.judge` takes them, or None.
        by: What folds must not tear apart.
    """

    pairs: Pairs
    known: dict[str, tuple[str, np.ndarray]] | None = None
    by: Literal["image", "class"] = "image"


def paired(images: np.ndarray, texts: np.ndarray, source: Source, links: np.ndarray | None = None) -> Data:
    """Arrays as pairs; by default row n belongs to row n."""
    sides = [Embeddings(x, modality=m, source=source) for x, m in ((images, "image"), (texts, "text"))]
    rows = np.repeat(np.arange(len(images))[:, None], 2, 1) if links is None else links
    return Data(Pairs(sides[0], sides[1], rows))


def from_files(folder: str, images: str, texts: str, source: Source) -> Callable[[Path, bool], Data]:
    """A loader of two arrays whose rows run in parallel."""

    def load(data: Path, smoke: bool) -> Data:
        n = SMOKE_PAIRS if smoke else None
        return paired(*(_io.read_array(data / folder / name)[:n] for name in (images, texts)), source)

    return load


def imagenet(data: Path, smoke: bool) -> Data:
    """Photos and the texts of their classes; in a smoke run those of the first classes."""
    with np.load(data / "imagenet7k" / "imagenet7k.npz", allow_pickle=False) as archive:
        images, texts, label = (archive[name] for name in ("image", "text_b", "label"))
    texts = texts / np.linalg.norm(texts, axis=1, keepdims=True)
    kept = np.flatnonzero(label < 20) if smoke else np.arange(len(label))
    links = np.stack([np.arange(len(kept)), label[kept]], 1)
    source = Source(model="ViT-B-32", pretrained="openai", logit_scale=SCALE)
    pairs = paired(images[kept], texts[: label[kept].max() + 1], source, links).pairs
    return Data(dataclasses.replace(pairs, classes=label[kept]), by="class")


def scenes(data: Path, smoke: bool) -> Data:
    """Rendered scenes through the bundled model; nothing is read from `data`."""
    from grove_adapters.datasets.scenes import Scenes
    from grove_adapters.datasets.tiny_clip import MODEL_NAME, load_tiny_clip
    from grove_adapters.extract import OpenCLIPExtractor
    from grove_adapters.store import EmbeddingStore

    model, preprocess, tokenizer = load_tiny_clip()
    extractor = OpenCLIPExtractor(model, preprocess=preprocess, tokenizer=tokenizer, name=MODEL_NAME)
    world = Scenes.generate(SMOKE_PAIRS if smoke else SCENES, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"views": 4, "features": True, "progress": False}
        store = EmbeddingStore.build(extractor, world.records(), Path(folder) / "store", **settings)
        pairs = store.pairs()
        known = {
            direction: (f"ambiguity of the {side}", store.column(side, "ambiguity"))
            for direction, side in (("i2t", "image"), ("t2i", "text"))
        }
        arrays = ("values", "views", "features")
        sides = [
            dataclasses.replace(x, **{name: np.array(getattr(x, name)) for name in arrays})
            for x in (pairs.images, pairs.texts)
        ]
        return Data(Pairs(sides[0], sides[1], pairs.links, pairs.classes, pairs.positives), known)


DATA: dict[str, Callable[[Path, bool], Data]] = {
    "scenes": scenes,
    "coco500": from_files("coco500", "image.npy", "text.npy", OPENAI),
    "products1126": from_files(
        "products1126",
        "image.npy",
        "text.npy",
        Source(model="FashionCLIP", pretrained="published", logit_scale=SCALE),
    ),
    "imagenet7k": imagenet,
    "control": from_files(
        "coco500",
        "image_untrained.npy",
        "text_untrained.npy",
        dataclasses.replace(OPENAI, pretrained="untrained"),
    ),
}
FOLDERS = {"coco500": "coco500", "products1126": "products1126", "imagenet7k": "imagenet7k", "control": "coco500"}


TITLES = {name: name for name in DATA} | {"imagenet7k": "imagenet7k, odd classes"}


def chosen(name: str, root: Path, smoke: bool) -> Data:
    """Data to measure on; of ImageNet the classes of odd number, since defaults were chosen on the others."""
    data = DATA[name](root, smoke)
    if name != "imagenet7k":
        return data
    assert data.pairs.classes is not None
    return dataclasses.replace(data, pairs=data.pairs.take_images(np.flatnonzero(data.pairs.classes % 2 == 1)))


WRAPPED: dict[str, tuple[str, dict[str, Any]]] = {
    # a wrapper is measured around adapters that answer different questions; a monotone map changes no ranking in a fold
    "ensemble of pcmepp and density_ratio": (
        "ensemble",
        {"members": [{"adapter": name, "config": {}} for name in ("pcmepp", "density_ratio")]},
    ),
    "recalibrated density_ratio": ("recalibrated", {"inner": {"adapter": "density_ratio", "config": {}}}),
}
LABELS = [name for name in list_adapters() if name not in ("ensemble", "recalibrated")] + list(WRAPPED)


def make(label: str, smoke: bool) -> Adapter:
    """An adapter with its defaults, or with the least that runs."""
    name, settings = WRAPPED.get(label, (label, {}))
    if smoke and label not in WRAPPED:
        least = {"epochs": 2} if issubclass(ADAPTERS.get(name).config_class, LoopConfig) else {}
        settings = {**ADAPTERS.get(name).small_settings(), **least}
    return create_adapter(name, **settings)


SIGNALS: dict[str, Callable[[TaskResult], np.ndarray]] = {
    "1 − p": lambda result: 1 - result.confidence,
    "H": lambda result: result.detail["match_entropy"],
    "1 − margin": lambda result: 1 - result.detail["match_margin"],
    "−KL to marginal": lambda result: -result.detail["match_kl"],
}
"""Uncertainties after a search, larger = less certain."""

Answers = list[tuple[tuple[ProbabilisticEmbedding, ProbabilisticEmbedding], Pairs]]
"""Posteriors of images and texts of each fold, and its pairs."""


def search(answers: Answers, direction: Literal["i2t", "t2i"], **settings: Any) -> list[TaskResult]:
    """Retrieval inside each fold."""
    return [
        retrieve(*both, links=test.links, positives=test.positives, direction=direction, **settings)
        for both, test in answers
    ]


def boards(answers: Answers, data: Data, *, resamples: int, seed: int) -> dict[str, Evaluation]:
    """Board and signal → scores of the pooled folds in both directions."""
    before = [pool(search(answers, name, rank_by="backbone", uncertainty="posterior")) for name in DIRECTIONS]
    after = [search(answers, name, marginal="empirical") for name in DIRECTIONS]
    found = {"input only": before}
    for signal, read in SIGNALS.items():
        found[signal] = [pool([dataclasses.replace(x, uncertainty=read(x)) for x in folds]) for folds in after]
    return {
        board: judge(
            results,
            data.pairs,
            known=(data.known or {}) if board == "input only" else None,
            resamples=resamples,
            seed=seed,
        )
        for board, results in found.items()
    }


def measure(label: str, data: Data, arguments: argparse.Namespace) -> dict[str, Any]:
    """One cell: rows of both boards, and seconds of fitting."""
    start, fits = time.perf_counter(), []
    for number, (train, test) in enumerate(data.pairs.folds(arguments.folds, seed=arguments.seed, by=data.by)):
        adapter = make(label, arguments.smoke).fit(train, seed=seeding.derive(arguments.seed, "fold", number))
        fits.append((adapter, test))
    spent = time.perf_counter() - start
    answers = [(predict_both(adapter, test, seed=arguments.seed), test) for adapter, test in fits]
    judged = boards(answers, data, resamples=arguments.resamples, seed=arguments.seed)
    rows = [
        {"signal": board, **{name: row[name] for name in KEPT if name in row}}
        for board, evaluation in judged.items()
        for row in evaluation.rows()
    ]
    return {"fit_seconds": spent, "rows": rows}


def mark(data: Data, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The frozen model alone with the whole data as one gallery: nothing is fitted, so nothing need be held out."""
    adapter = create_adapter("deterministic").fit(data.pairs)
    judged = boards(
        [(predict_both(adapter, data.pairs), data.pairs)], data, resamples=arguments.resamples, seed=arguments.seed
    )
    return [{"signal": board, **row} for board, evaluation in judged.items() for row in evaluation.rows()]


def known_noise(label: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Spearman correlation of an adapter's uncertainty with the noise of synthetic items it was not fitted on."""
    world = synthetic.make_pairs(200 if arguments.smoke else 2000, dim=16 if arguments.smoke else 64)
    half = len(world.pairs) // 2
    adapter = make(label, arguments.smoke).fit(world.pairs.take_images(np.arange(half)), seed=arguments.seed)
    row: dict[str, Any] = {}
    for part, noise in ((world.pairs.images, world.image_noise), (world.pairs.texts, world.text_noise)):
        rows = np.arange(half, 2 * half)
        posterior = adapter.predict(part.take(rows))
        score = rank_correlation(posterior.uncertainty, noise[rows], resamples=arguments.resamples)
        row |= {part.modality: score.value, f"{part.modality}_low": score.low, f"{part.modality}_high": score.high}
    return row


class Cells:
    """Finished cells, kept as one JSON file each.

    Args:
        folder: Where they are kept; None keeps nothing.
        redo: Labels whose cells are measured anew.
        common: What tells the cells of one run from another's, besides data and adapter.
        only: Whether nothing is measured.
    """

    def __init__(self, folder: Path | None, redo: Iterable[str], common: dict[str, Any], *, only: bool) -> None:
        self._folder = folder
        self._redo = set(redo)
        self._common = {**common, "version": grove_adapters.__version__}
        self._only = only

    def get(self, data: str, label: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The cell as it was kept where nothing that made it has changed, or else measured now; None if neither."""
        key = _io.jsonable({**self._common, "data": data, "config": make(label, False).config.to_dict()})
        path = None if self._folder is None else self._folder / data / f"{label.replace(' ', '-')}.json"
        if path is not None and path.is_file() and label not in self._redo:
            cell = _io.read_json(path)
            if cell["key"] == key:
                return cell
        if self._only:
            return None
        cell = {"key": key, **compute()}
        if path is not None:
            _io.write_json(path, cell)
            cell = _io.read_json(path)  # what a later run will see
        return cell


COLUMNS = {"recall": "R@1", "spearman": "S", "r2": "R²", "neg_s_r2": "−S·R²", "auroc": "AUROC", "known": "ρ known"}
KEPT = [
    *("direction", "queries", "auroc_p", "aurc", "ece"),
    *(f"{name}{end}" for name in COLUMNS for end in ("", "_low", "_high")),
]
ASKING = {"i2t": "images ask, texts answer", "t2i": "texts ask, images answer"}


def score(row: dict[str, Any], name: str) -> Score | None:
    """A score of a row with its interval."""
    if row.get(name) is None:
        return None
    ends = [row.get(f"{name}{end}") for end in ("", "_low", "_high")]
    return Score(*(math.nan if end is None else end for end in ends))


def tables(title: str, cells: dict[str, dict[str, Any]]) -> str:
    """Both leaderboards of one data set as Markdown."""
    blocks = []
    for direction in DIRECTIONS:
        found = {
            (label, row["signal"]): row
            for label, cell in cells.items()
            for row in cell["rows"]
            if row["direction"] == direction
        }
        queries = next(iter(found.values()))["queries"]
        about = f"{title}: {ASKING[direction]}, {queries:,} queries"
        scores = [(label, {name: score(found[label, "input only"], name) for name in COLUMNS}) for label in cells]
        columns = [name for name in COLUMNS if any(row[name] is not None for _, row in scores)]
        lines = [(label, [row[name] for name in columns]) for label, row in scores]
        blocks.append(markdown_table(f"*Input only*, {about}", ["adapter", *(COLUMNS[x] for x in columns)], lines))
        for name in ("auroc", "neg_s_r2"):
            lines = [
                (label, [score(found[label, "1 − p"], "recall"), *(score(found[label, x], name) for x in SIGNALS)])
                for label in cells
            ]
            heading = f"*Gallery aware*, {COLUMNS[name]}, {about}"
            blocks.append(markdown_table(heading, ["adapter", "R@1", *SIGNALS], lines))
    return f"## {title}\n\n" + "\n\n".join(blocks)


def mark_line(title: str, rows: list[dict[str, Any]]) -> str:
    """The frozen model alone as one sentence."""
    by = {(row["signal"], row["direction"]): row for row in rows}

    def both(signal: str, name: str) -> str:
        return "/".join(f"{by[signal, direction][name]:.2f}".replace("0.", ".") for direction in DIRECTIONS)

    return (
        f"The frozen model alone with all of {title} as one gallery, i2t/t2i: R@1 {both('H', 'recall')}, AUROC of H "
        f"{both('H', 'auroc')}, −S·R² of H {both('H', 'neg_s_r2')}; AUROC of 1 − p {both('1 − p', 'auroc')}, of the "
        f"divergence from the marginal {both('−KL to marginal', 'auroc')}."
    )


def known_table(noise: dict[str, dict[str, Any]], cells: dict[str, dict[str, Any]]) -> str:
    """Correlations with known noise and ambiguity as Markdown."""
    headings = ["adapter", "synthetic images", "synthetic texts"] + (["scenes", "their captions"] if cells else [])
    lines = []
    for label in dict.fromkeys([*noise, *cells]):
        of_synthetic = [score(noise.get(label, {}), modality) for modality in ("image", "text")]
        rows = {
            row["direction"]: row for row in cells.get(label, {"rows": []})["rows"] if row["signal"] == "input only"
        }
        of_scenes = [score(rows.get(direction, {}), "known") for direction in DIRECTIONS] if cells else []
        lines.append((label, [*of_synthetic, *of_scenes]))
    return markdown_table("Spearman with the known noise (synthetic) and the known ambiguity (scenes)", headings, lines)


def control_verdict(rows: list[dict[str, Any]]) -> str:
    """Whether any adapter finds something where there is nothing, at 5 % over all of them."""
    p_values = [row["auroc_p"] for row in rows if row["data"] == "control" and row.get("auroc_p") is not None]
    if not p_values:
        return "Control: not measured."
    bound = 0.05 / len(p_values)
    side = "below" if min(p_values) < bound else "not below"
    return (
        f"Control: the smallest of {len(p_values)} one-sided permutation p-values of AUROC is {min(p_values):.4f}, "
        f"{side} .05/{len(p_values)} = {bound:.4f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few pairs, few steps, nothing written")
    parser.add_argument("--data", nargs="*", choices=list(DATA), default=list(DATA), metavar="NAME")
    parser.add_argument("--adapters", nargs="*", choices=LABELS, default=LABELS, metavar="NAME")
    parser.add_argument("--folds", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="FOLDER", help="finished cells (%(default)s)")
    parser.add_argument("--redo", nargs="*", choices=LABELS, default=[], metavar="NAME", help="measure these anew")
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    parser.add_argument("--kept", action="store_true", help="measure nothing: the tables of the cells that are kept")
    arguments = parser.parse_args()
    arguments.resamples = 50 if arguments.smoke else 1000
    if arguments.smoke:
        arguments.folds = 2
    root = Path(os.environ.get("GROVE_ADAPTERS_DATA", ROOT.parent / "shared" / "data"))
    common = {"folds": arguments.folds, "seed": arguments.seed, "resamples": arguments.resamples, "scenes": SCENES}
    redo = LABELS if arguments.fresh else arguments.redo
    cells = Cells(None if arguments.smoke else arguments.cache, redo, common, only=arguments.kept)

    def reads_more(label: str) -> bool:
        kind = ADAPTERS.get(WRAPPED.get(label, (label, {}))[0])
        return kind.needs_views or kind.needs_features

    noise = {}
    for label in arguments.adapters:
        if reads_more(label):
            continue
        cell = cells.get("synthetic", label, lambda label=label: known_noise(label, arguments))
        if cell is not None:
            noise[label] = cell
    blocks, marks, rows, missing = [], {}, [], []
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in arguments.data:
        if name in FOLDERS and not (root / FOLDERS[name]).is_dir():
            print(f"\n{name}: skipped, {root} holds no {FOLDERS[name]}; set GROVE_ADAPTERS_DATA")
            continue
        load = functools.cache(functools.partial(chosen, name, root, arguments.smoke))
        found[name] = {}
        for label in arguments.adapters:
            if reads_more(label) and name != "scenes":  # only the scenes' store holds views and features
                continue
            cell = cells.get(name, label, lambda label=label, load=load: measure(label, load(), arguments))
            if cell is None:
                missing.append(f"{label} on {TITLES[name]}")
                continue
            found[name][label] = cell
            rows += [
                {"data": TITLES[name], "adapter": label, "fit_seconds": cell["fit_seconds"], **row}
                for row in cell["rows"]
            ]
            print(f"{name}: {label}, fitted {arguments.folds} times in {cell['fit_seconds']:.1f} s", flush=True)
        if not found[name]:
            continue
        blocks.append(tables(TITLES[name], found[name]))
        if name in FOLDERS:
            marks[name] = mark(load(), arguments)
            blocks.append(mark_line(TITLES[name], marks[name]))
    blocks.insert(0, f"## Known noise and ambiguity\n\n{known_table(noise, found.get('scenes', {}))}")
    if missing:
        blocks.insert(0, f"Not measured yet: {', '.join(missing)}.")
    blocks.append(control_verdict(rows))
    print("\n" + "\n\n".join(blocks))
    if arguments.smoke or arguments.adapters != LABELS or arguments.data != list(DATA):
        return
    content = {"what": __doc__.splitlines()[0], **common, "version": grove_adapters.__version__}
    content["noise"] = [{"adapter": label, **row} for label, row in noise.items()]
    content |= {"rows": rows, "whole_gallery": marks, "control": blocks[-1]}
    _io.write_json(RESULTS / "adapters_quality.json", content)
    _io.write_text(RESULTS / "adapters_quality.md", "\n\n".join(blocks) + "\n")


if __name__ == "__main__":
    main()
