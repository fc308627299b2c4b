"""What do GroVE's choices do to its uncertainty? The ablations of its paper, on any pairs of embeddings.

Each experiment changes one thing from the settings of the first line below it, fits on the other folds and retrieves in
the held-out one (the gallery of a query is its own fold); every interval is a bootstrap over the pooled queries.

* kernel (the paper's Table 5), divergence (Table 6), latent dimension and share of the data (Fig. 5), λ₂ and
  harmonization (Fig. 6, left), noise (homoscedastic as published, or not);
* inducing points and exact GP in the few-shot setting (Tables 3 and 10), with milliseconds for one query;
* masking noise (Fig. 6, right), on rendered scenes through the bundled model: patches of the pictures turn grey and
  words of the captions go, ever more of both.

All of them report two uncertainties of one and the same fit: the adapter's own, and the mean predictive variance, which
is the paper's. Every finished cell is kept, so a run that was stopped goes on where it was.

    python benchmarks/grove_ablations.py                        # scenes and the real pairs; writes results/
    python benchmarks/grove_ablations.py --store my-store --out my-results          # on an embedding store
    python benchmarks/grove_ablations.py --experiments kernel divergence --data scenes
    python benchmarks/grove_ablations.py --smoke                # 60 scenes, two settings, two epochs; written nowhere

The real data is found through GROVE_ADAPTERS_DATA (default: ../shared/data beside the project); what is missing is left
out and said so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import grove_adapters
from grove_adapters import Embeddings, EmbeddingStore, Pairs, _io, create_adapter, seeding
from grove_adapters.adapters import Adapter
from grove_adapters.calibration import Score
from grove_adapters.datasets.scenes import Scenes
from grove_adapters.pipeline import DIRECTIONS, judge, pool, predict_both
from grove_adapters.pipeline.tables import markdown_table
from grove_adapters.tasks import retrieve

RESULTS = Path(__file__).resolve().parent / "results"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "grove_adapters" / "grove_ablations"
REAL = {"coco500": ("image.npy", "text.npy"), "products1126": ("image.npy", "text.npy")}
BASE: dict[str, Any] = {"n_inducing": 50, "epochs": 25}  # beside the adapter's defaults
SCENES, SMOKE_PAIRS = 250, 60
MASKED = (0.0, 0.2, 0.4, 0.6, 0.8)
PATCHES = 8  # masking tears a picture into as many rows and columns
GREY = 128


@dataclass(frozen=True)
class Arm:
    """One setting of an experiment.

    Attributes:
        settings: What differs from `BASE`.
        share: Share of the training images that are fitted on.
        images: Most training images, for few shots.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    images: int | None = None

    def part(self, train: Pairs, seed: int) -> Pairs:
        """The pairs to fit on."""
        linked = np.unique(train.links[:, 0])
        n = math.ceil(self.share * len(linked)) if self.images is None else min(self.images, len(linked))
        chosen = np.random.default_rng(seed).permutation(linked)[:n]  # smaller parts lie in larger ones
        return train if n == len(linked) else train.take_images(np.sort(chosen))


def one_by_one(name: str, values: tuple[Any, ...]) -> dict[str, Arm]:
    """An arm for each value of a setting."""
    return {str(value): Arm({name: value}) for value in values}


FEW = 100
EXPERIMENTS: dict[str, tuple[str, dict[str, Arm]]] = {
    "kernel": ("kernel (Table 5)", one_by_one("kernel", ("rbf", "matern15", "matern25", "cosine"))),
    "divergence": ("divergence (Table 6)", one_by_one("alignment", ("kl", "js", "wasserstein2"))),
    "latent_dim": ("latent dimension (Fig. 5, left)", one_by_one("latent_dim", (2, 5, 10, 20))),
    "share": ("share of the data (Fig. 5, right)", {f"{s:g}": Arm(share=s) for s in (0.2, 0.6, 1.0)}),
    "alignment_weight": (
        "λ₂ / λ₁ of the divergence, and harmonization (Fig. 6, left)",
        {
            "none": Arm({"alignment": "none"}),
            **one_by_one("alignment_weight", (0.01, 0.1, 1.0)),
            "harmonization, 100": Arm({"alignment": "harmonization", "alignment_weight": 100.0}),
        },
    ),
    "noise": ("noise", one_by_one("noise", ("homoscedastic", "heteroscedastic"))),
    "few_shot": (
        f"inducing points with {FEW} training images (Tables 3 and 10)",
        {
            **{f"M = {m}": Arm({"n_inducing": m}, images=FEW) for m in (10, 30)},
            "exact": Arm({"exact": True}, images=FEW),
        },
    ),
}
SIGNALS = ("own", "variance")
KEPT = ("recall", "neg_s_r2", "auroc", "known")


@dataclass(frozen=True)
class Data:
    """Pairs, and the known ambiguities of either side as `pipeline.judge` takes them, or None."""

    pairs: Pairs
    known: dict[str, tuple[str, np.ndarray]] | None = None


@functools.cache
def extractor() -> Any:
    """The bundled model."""
    from grove_adapters.datasets.tiny_clip import MODEL_NAME, load_tiny_clip
    from grove_adapters.extract import OpenCLIPExtractor

    model, preprocess, tokenizer = load_tiny_clip()
    return OpenCLIPExtractor(model, preprocess=preprocess, tokenizer=tokenizer, name=MODEL_NAME)


def masked_picture(image: Image.Image, share: float, id: str) -> Image.Image:
    """A picture of which a share of the patches is grey; what is masked stays so where the share grows."""
    pixels = np.array(image.convert("RGB"))
    hidden = np.random.default_rng(seeding.derive(0, "mask", id)).random((PATCHES, PATCHES)) < share
    rows, columns = (np.arange(size) * PATCHES // size for size in pixels.shape[:2])
    pixels[hidden[np.ix_(rows, columns)]] = GREY
    return Image.fromarray(pixels)


def masked_caption(text: str, share: float, id: str) -> str:
    """A caption that has lost a share of its words; the one that holds out longest stays."""
    words = text.split()
    strength = np.random.default_rng(seeding.derive(0, "mask", id)).random(len(words))
    kept = strength >= min(share, strength.max())
    return " ".join(word for word, stays in zip(words, kept, strict=True) if stays)


def embedded(world: Scenes, share: float) -> tuple[Embeddings, Embeddings]:
    """Both sides of a world with a share masked."""
    model = extractor()
    pictures = [masked_picture(world.image(row), share, id) for row, id in enumerate(world.image_ids)]
    captions = [masked_caption(text, share, id) for text, id in zip(world.texts, world.text_ids, strict=True)]
    sides = []
    for modality, embed, items, ids in (
        ("image", model.embed_images, pictures, world.image_ids),
        ("text", model.embed_texts, captions, world.text_ids),
    ):
        values = np.concatenate([np.asarray(embed(items[start : start + 64])) for start in range(0, len(items), 64)])
        sides.append(Embeddings(values, list(ids), modality=modality, source=model.source))
    return sides[0], sides[1]


@functools.cache
def world(smoke: bool) -> Scenes:
    """The rendered scenes."""
    return Scenes.generate(SMOKE_PAIRS if smoke else SCENES, seed=0)


@functools.cache
def load(name: str, smoke: bool) -> Data:
    """Scenes, a real data set, or the store at a path."""
    if name == "scenes":
        scenes = world(smoke)
        known = {
            "i2t": ("ambiguity of the image", scenes.image_ambiguity),
            "t2i": ("ambiguity of the text", scenes.caption_ambiguity),
        }
        return Data(Pairs(*embedded(scenes, 0.0), scenes.links, positives=scenes.positives), known)
    if name in REAL:
        sides = [
            Embeddings(_io.read_array(data_folder() / name / file)[: SMOKE_PAIRS if smoke else None], modality=modality)
            for file, modality in zip(REAL[name], ("image", "text"), strict=True)
        ]
        return Data(Pairs(sides[0], sides[1], np.repeat(np.arange(len(sides[0]))[:, None], 2, 1)))
    return Data(EmbeddingStore.open(name).pairs())


def data_folder() -> Path:
    """Where the real data is."""
    return Path(os.environ.get("GROVE_ADAPTERS_DATA", RESULTS.parents[2] / "shared" / "data"))


def adapter_of(arm: Arm, smoke: bool) -> Adapter:
    """An unfitted adapter of an arm."""
    least = {"epochs": 2, "n_inducing": 20} if smoke else {}
    return create_adapter("grove", **{**BASE, **least, **arm.settings})


def measure(arm: Arm, data: Data, arguments: argparse.Namespace) -> dict[str, Any]:
    """One cell: scores by direction and signal, seconds of a fit and milliseconds for one query."""
    answers: dict[tuple[str, str], list[Any]] = {}
    spent, asked = 0.0, 0.0
    for number, (train, test) in enumerate(data.pairs.folds(arguments.folds, seed=arguments.seed)):
        seed = seeding.derive(arguments.seed, "fold", number)
        started = time.perf_counter()
        adapter = adapter_of(arm, arguments.smoke).fit(arm.part(train, seed), seed=seed)
        spent += time.perf_counter() - started
        both = dict(zip(DIRECTIONS, predict_both(adapter, test, seed=arguments.seed), strict=True))
        started = time.perf_counter()
        adapter.predict(test.images.take(np.arange(1)))
        asked += time.perf_counter() - started
        for direction, asking in both.items():
            own = retrieve(*both.values(), links=test.links, positives=test.positives, direction=direction)
            spread = dataclasses.replace(own, uncertainty=asking.variance.mean(1).double().numpy())
            for signal, result in zip(SIGNALS, (own, spread), strict=True):
                answers.setdefault((direction, signal), []).append(result)
    rows = []
    for (direction, signal), results in answers.items():
        evaluation = judge(
            [pool(results)], data.pairs, known=data.known, resamples=arguments.resamples, seed=arguments.seed
        )
        row = evaluation.rows()[0]
        ends = {f"{name}{end}": row.get(f"{name}{end}") for name in KEPT for end in ("", "_low", "_high")}
        rows.append({"direction": direction, "signal": signal, "queries": row["queries"], **ends})
    return {"fit_seconds": spent / arguments.folds, "query_ms": 1e3 * asked / arguments.folds, "rows": rows}


def masking(arguments: argparse.Namespace) -> dict[str, Any]:
    """Uncertainty of held-out scenes by the share that is masked, each side alone."""
    data = load("scenes", arguments.smoke)
    train, test = next(iter(data.pairs.folds(arguments.folds, seed=arguments.seed)))
    adapter = adapter_of(Arm(), arguments.smoke).fit(train, seed=arguments.seed)
    levels: dict[tuple[str, str], list[np.ndarray]] = {}
    for share in MASKED:
        sides = zip(embedded(world(arguments.smoke), share), (test.images, test.texts), strict=True)
        for embeddings, part in sides:
            asked = embeddings.take(embeddings.rows(part.ids))
            posterior = adapter.predict(asked, seed=arguments.seed)
            for signal, values in zip(SIGNALS, (posterior.uncertainty, posterior.variance.mean(1)), strict=True):
                levels.setdefault((asked.modality, signal), []).append(values.double().numpy())
    rows = []
    for (modality, signal), columns in levels.items():
        values = np.stack(columns)
        level = (values - values[0].mean()) / values[0].std()  # in standard deviations of the unmasked
        draws = np.random.default_rng(arguments.seed).integers(
            values.shape[1], size=(arguments.resamples, values.shape[1])
        )
        means = level[:, draws].mean(2)
        rising = (np.diff(level, axis=0) > 0).mean()
        rows += [
            {
                "modality": modality,
                "signal": signal,
                "masked": share,
                "uncertainty": float(level[k].mean()),
                "uncertainty_low": float(np.quantile(means[k], 0.025)),
                "uncertainty_high": float(np.quantile(means[k], 0.975)),
                "rising_steps": float(rising),
            }
            for k, share in enumerate(MASKED)
        ]
    return {"rows": rows}


class Cells:
    """Finished cells, one JSON file each, measured again where what they hold was made otherwise.

    Args:
        folder: Where they are kept; None keeps them for this run only.
        common: What made all of them.
    """

    def __init__(self, folder: Path | None, common: dict[str, Any]) -> None:
        self._folder = folder
        self._common = common
        self._found: dict[str, dict[str, Any]] = {}

    def get(self, name: str, made: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The cell kept under a name, or else measured now and kept."""
        if name not in self._found:
            key = _io.jsonable({**self._common, **made})
            path = None if self._folder is None else self._folder / f"{name}.json"
            kept = _io.read_json(path) if path is not None and path.is_file() else {}
            if kept.get("key") != key:
                kept = {"key": key, **_io.jsonable(compute())}
                if path is not None:
                    _io.write_json(path, kept)
            self._found[name] = kept
        return self._found[name]


def score(row: Mapping[str, Any], name: str) -> Score | None:
    """A score of a row with its interval."""
    if row.get(name) is None:
        return None
    return Score(*(math.nan if row[f"{name}{end}"] is None else row[f"{name}{end}"] for end in ("", "_low", "_high")))


def tables(title: str, data: str, cells: Mapping[str, Mapping[str, Any]], *, timed: bool) -> str:
    """One experiment on one data set as Markdown, a table a direction."""
    blocks = []
    for direction in DIRECTIONS:
        lines, known = [], False
        for label, cell in cells.items():
            by = {row["signal"]: row for row in cell["rows"] if row["direction"] == direction}
            own, variance = (by[signal] for signal in SIGNALS)
            known = known or own.get("known") is not None
            scores = [
                score(own, "recall"),
                *(score(row, name) for name in ("neg_s_r2", "auroc") for row in (own, variance)),
            ]
            if known:
                scores += [score(row, "known") for row in (own, variance)]
            if timed:
                scores.append(Score(cell["query_ms"]))
            lines.append((label, scores))
        headings = ["R@1", "−S·R²", "−S·R², variance", "AUROC", "AUROC, variance"]
        headings += (["ρ known", "ρ known, variance"] if known else []) + (["ms a query"] if timed else [])
        blocks.append(markdown_table(f"{data}, {direction}", ["", *headings], lines))
    return f"### {title}\n\n" + "\n\n".join(blocks)


def masking_table(rows: list[dict[str, Any]]) -> str:
    """The masking experiment as Markdown."""
    lines = []
    for modality in ("image", "text"):
        for signal in SIGNALS:
            by = {row["masked"]: row for row in rows if (row["modality"], row["signal"]) == (modality, signal)}
            rising = next(iter(by.values()))["rising_steps"]
            lines.append(
                (f"{modality}, {signal}", [*(score(by[share], "uncertainty") for share in MASKED), Score(rising)])
            )
    headings = ["masked", *(f"{share:.0%}" for share in MASKED), "share of steps up"]
    title = "Mean uncertainty of scenes in standard deviations of the unmasked"
    return f"### masking (Fig. 6, right)\n\n{markdown_table(title, headings, lines)}"


def draw(found: Mapping[str, Mapping[str, Mapping[str, Any]]], masked: list[dict[str, Any]], path: Path) -> None:
    """Every experiment as one panel: −S·R² of images and texts by setting; the masking as the last."""
    from matplotlib.figure import Figure

    names = [name for name in EXPERIMENTS if name in found]
    columns = 2
    figure = Figure(figsize=(11, 3.2 * math.ceil((len(names) + 1) / columns)), layout="constrained")
    panels = figure.subplots(math.ceil((len(names) + 1) / columns), columns, squeeze=False).flatten()
    for panel in panels[len(names) + bool(masked) :]:
        panel.axis("off")
    for panel, name in zip(panels, names, strict=False):
        title, arms = EXPERIMENTS[name]
        for data, cells in found[name].items():
            for direction, style in zip(DIRECTIONS, ("-o", "--s"), strict=True):
                rows = [
                    next(r for r in cells[label]["rows"] if (r["direction"], r["signal"]) == (direction, "own"))
                    for label in arms
                ]
                scores = [score(row, "neg_s_r2") or Score(math.nan) for row in rows]
                ends = [[s.value - s.low for s in scores], [s.high - s.value for s in scores]]
                ends = np.nan_to_num(np.maximum(ends, 0))
                panel.errorbar(
                    list(arms), [s.value for s in scores], ends, fmt=style, capsize=2, label=f"{data} {direction}"
                )
        panel.set_title(title, fontsize=9)
        panel.set_ylabel("−S·R²", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.axhline(0, color="0.8", zorder=0)
        panel.legend(fontsize=6)
    if masked:
        panel = panels[len(names)]
        for modality in ("image", "text"):
            for signal, style in zip(SIGNALS, ("-o", "--s"), strict=True):
                rows = [row for row in masked if (row["modality"], row["signal"]) == (modality, signal)]
                means = [row["uncertainty"] for row in rows]
                panel.plot([row["masked"] for row in rows], means, style, label=f"{modality}, {signal}")
        panel.set_title("masking (Fig. 6, right)", fontsize=9)
        panel.set_xlabel("share masked", fontsize=8)
        panel.set_ylabel("mean uncertainty, sd of the unmasked", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.legend(fontsize=6)
    with _io.written_whole(path) as partial:
        figure.savefig(partial, format="png", dpi=75)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few pairs, few steps, nothing written")
    parser.add_argument("--data", nargs="*", choices=["scenes", *REAL], default=["scenes", *REAL], metavar="NAME")
    parser.add_argument("--store", nargs="*", default=[], metavar="PATH", help="embedding stores, instead of --data")
    choices = [*EXPERIMENTS, "masking"]
    parser.add_argument("--experiments", nargs="*", choices=choices, default=choices, metavar="NAME")
    parser.add_argument("--folds", type=int, default=2, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="FOLDER", help="finished cells (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the results go (%(default)s)"
    )
    arguments = parser.parse_args()
    arguments.resamples = 50 if arguments.smoke else 1000
    arguments.folds = 2 if arguments.smoke else arguments.folds
    common = {name: getattr(arguments, name) for name in ("folds", "seed", "resamples")}
    common |= {"version": grove_adapters.__version__, "scenes": SCENES}
    if arguments.fresh:
        common["measured"] = time.time()
    cells = Cells(None if arguments.smoke else arguments.cache, common)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    blocks = []
    for name in arguments.store or arguments.data[: 1 if arguments.smoke else None]:
        if name in REAL and not arguments.store and not (data_folder() / name).is_dir():
            print(f"{name}: skipped, {data_folder()} holds no {name}; set GROVE_ADAPTERS_DATA")
            continue
        for experiment in (item for item in EXPERIMENTS if item in arguments.experiments):
            title, arms = EXPERIMENTS[experiment]
            measured = {}
            for label, arm in list(arms.items())[: 2 if arguments.smoke else None]:
                settings = adapter_of(arm, arguments.smoke).config.to_dict()
                made = {"data": name, "config": settings, "share": arm.share, "images": arm.images}
                address = (
                    f"{Path(name).name}-{seeding.derive(0, repr(sorted(map(repr, _io.jsonable(made).items())))):x}"
                )
                measured[label] = cells.get(
                    address, made, lambda arm=arm, name=name: measure(arm, load(name, arguments.smoke), arguments)
                )
                print(f"{name}: {experiment} {label}, a fit {measured[label]['fit_seconds']:.1f} s", flush=True)
            found.setdefault(experiment, {})[name] = measured
            blocks.append(tables(title, name, measured, timed=experiment == "few_shot"))
    masked = []
    if "masking" in arguments.experiments and "scenes" in arguments.data and not arguments.store:
        settings = {"config": adapter_of(Arm(), arguments.smoke).config.to_dict(), "levels": MASKED}
        masked = cells.get("masking", settings, lambda: masking(arguments))["rows"]
        blocks.append(masking_table(masked))
    own = adapter_of(Arm(), False).config.to_dict()["uncertainty"]
    base = f"{arguments.folds} folds; beside what is named: the defaults, for which uncertainty is {own!r}, with " + (
        ", ".join(f"{name}={value}" for name, value in BASE.items())
    )
    print("\n" + "\n\n".join(blocks))
    if arguments.smoke:
        return
    rows = [
        {"experiment": experiment, "data": Path(name).name, "setting": label, **facts, **row}
        for experiment, by_data in found.items()
        for name, measured in by_data.items()
        for label, cell in measured.items()
        for facts in [{key: cell[key] for key in ("fit_seconds", "query_ms")}]
        for row in cell["rows"]
    ]
    content = {"what": __doc__.splitlines()[0], **common, "base": BASE, "own": own, "rows": rows, "masking": masked}
    _io.write_json(arguments.out / "grove_ablations.json", content)
    _io.write_text(arguments.out / "grove_ablations.md", "\n\n".join([f"{base}.", *blocks]) + "\n")
    draw(found, masked, arguments.out / "grove_ablations.png")


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
