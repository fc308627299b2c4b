"""Every adapter on scenes and on real CLIP embeddings: whose uncertainty finds the wrong matches, out of fold?

Data: rendered scenes of known ambiguity (bundled tiny CLIP, four views), 500 COCO pairs (OpenAI ViT-B/16), 1,126
product photos with descriptions (FashionCLIP), 7,000 ImageNet photos with the texts of their 1,000 classes (OpenAI
ViT-B/32), and the COCO pairs through an untrained CLIP as the control, where nothing should be found. Each adapter is
fitted on four fifths and asked about the rest, five times; ImageNet is cut by class. The gallery of a query is its own
fold, and every interval is a bootstrap.

Two leaderboards, because they answer different questions. *Input only*: all adapters rank by the frozen embeddings, so
that they are right and wrong about the same queries, and what is judged is the uncertainty an item has before anything
is searched. *Gallery aware*: each ranks by its own posterior and is judged by what it says after the search, 1 − the
confidence of the first answer. Beside them stand correlations with known noise (synthetic) and ambiguity (scenes).

The real data is found through GROVE_ADAPTERS_DATA (default: ../shared/data beside the project); what is missing is left
out and said so.

    python benchmarks/adapters_quality.py             # hours on two cores; writes results/adapters_quality.json and .md
    python benchmarks/adapters_quality.py --data coco500 --adapters deterministic density_ratio
    python benchmarks/adapters_quality.py --smoke                  # 60 pairs of each, two epochs; written nowhere
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from grove_adapters import Embeddings, Pairs, Source, _io, seeding
from grove_adapters.adapters import ADAPTERS, Adapter, create_adapter, list_adapters
from grove_adapters.adapters.loop import LoopConfig
from grove_adapters.calibration import rank_correlation
from grove_adapters.datasets import synthetic
from grove_adapters.pipeline import Evaluation, judge, retrieve_folds

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCALE = 100.0  # logit scale of OpenAI's CLIP; taken for FashionCLIP too, which states none
OPENAI = Source(model="ViT-B-16", pretrained="openai", logit_scale=SCALE)
SMOKE_PAIRS = 60


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
    kept = np.flatnonzero(label < 9) if smoke else np.arange(len(label))
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
    world = Scenes.generate(SMOKE_PAIRS if smoke else 1500, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        store = EmbeddingStore.build(extractor, world.records(), Path(folder) / "store", views=4, progress=False)
        pairs = store.pairs()
        known = {
            direction: (f"ambiguity of the {side}", store.column(side, "ambiguity"))
            for direction, side in (("i2t", "image"), ("t2i", "text"))
        }
        sides = [
            Embeddings(np.array(x.values), x.ids, modality=x.modality, source=x.source, views=np.array(x.views))
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


def make(name: str, smoke: bool) -> Adapter:
    """An adapter with its defaults, or with the least that runs."""
    if not smoke:
        return create_adapter(name)
    least = {"epochs": 2} if issubclass(ADAPTERS.get(name).config_class, LoopConfig) else {}
    return create_adapter(name, **{**ADAPTERS.get(name).small_settings(), **least})


def boards(name: str, data: Data, arguments: argparse.Namespace) -> tuple[Evaluation, Evaluation, float]:
    """One adapter on one data set: input only, gallery aware, and seconds of fitting."""
    start = time.perf_counter()
    fits = [
        (make(name, arguments.smoke).fit(train, seed=seeding.derive(arguments.seed, "fold", number)), test)
        for number, (train, test) in enumerate(data.pairs.folds(arguments.folds, seed=arguments.seed, by=data.by))
    ]
    spent = time.perf_counter() - start
    common: dict[str, Any] = {"label": name, "resamples": arguments.resamples, "seed": arguments.seed}
    known = data.known or {}
    before = retrieve_folds(fits, rank_by="backbone", uncertainty="posterior", seed=arguments.seed)
    after = [
        dataclasses.replace(result, uncertainty=1 - result.confidence)
        for result in retrieve_folds(fits, seed=arguments.seed)
        if result.confidence is not None
    ]
    return (
        judge(before, data.pairs, known=known, **common),
        judge(after, data.pairs, **common),
        spent,
    )


def known_noise(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Spearman correlation of an adapter's uncertainty with the noise of synthetic items it was not fitted on."""
    world = synthetic.make_pairs(200 if arguments.smoke else 2000, dim=16 if arguments.smoke else 64)
    half = len(world.pairs) // 2
    adapter = make(name, arguments.smoke).fit(world.pairs.take_images(np.arange(half)), seed=arguments.seed)
    row: dict[str, Any] = {"data": "synthetic", "adapter": name}
    for part, noise in ((world.pairs.images, world.image_noise), (world.pairs.texts, world.text_noise)):
        rows = np.arange(half, 2 * half)
        posterior = adapter.predict(part.take(rows))
        score = rank_correlation(posterior.uncertainty, noise[rows], resamples=arguments.resamples)
        row |= {part.modality: score.value, f"{part.modality}_low": score.low, f"{part.modality}_high": score.high}
    return row


def noise_table(rows: list[dict[str, Any]]) -> str:
    """Correlations with the known noise as Markdown."""
    lines = ["| adapter | images | texts |", "| --- | ---: | ---: |"]
    for row in rows:
        cells = [f"{row[m]:.2f} [{row[f'{m}_low']:.2f}, {row[f'{m}_high']:.2f}]" for m in ("image", "text")]
        lines.append(f"| {row['adapter']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def control_verdict(rows: list[dict[str, Any]]) -> str:
    """Whether any adapter finds something where there is nothing, at 5 % over all of them."""
    p_values = [row["auroc_p"] for row in rows if row["data"] == "control" and "auroc_p" in row]
    if not p_values:
        return "Control: not measured."
    bound = 0.05 / len(p_values)
    side = "below" if min(p_values) < bound else "not below"
    return (
        f"Control: the smallest of {len(p_values)} one-sided permutation p-values of AUROC is {min(p_values):.3f}, "
        f"{side} .05/{len(p_values)} = {bound:.4f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few pairs, few steps, nothing written")
    parser.add_argument("--data", nargs="*", choices=list(DATA), default=list(DATA), metavar="NAME")
    parser.add_argument("--adapters", nargs="*", default=list_adapters(), metavar="NAME")
    parser.add_argument("--folds", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    arguments.resamples = 50 if arguments.smoke else 1000
    if arguments.smoke:
        arguments.folds = 2
    root = Path(os.environ.get("GROVE_ADAPTERS_DATA", ROOT.parent / "shared" / "data"))

    rows, blocks = [], []
    noise = [known_noise(name, arguments) for name in arguments.adapters if not ADAPTERS.get(name).needs_views]
    blocks.append(f"## Known noise of the synthetic world, Spearman\n\n{noise_table(noise)}")
    print(blocks[-1], flush=True)
    for title in arguments.data:
        if title in FOLDERS and not (root / FOLDERS[title]).is_dir():
            print(f"\n{title}: skipped, {root} holds no {FOLDERS[title]}; set GROVE_ADAPTERS_DATA")
            continue
        data = DATA[title](root, arguments.smoke)
        parts: dict[str, list[Evaluation]] = {"input only": [], "gallery aware": []}
        for name in arguments.adapters:
            if ADAPTERS.get(name).needs_views and data.pairs.images.n_views < 2:
                continue
            before, after, spent = boards(name, data, arguments)
            for board, evaluation in zip(parts, (before, after), strict=True):
                parts[board].append(evaluation)
                rows += [{"data": title, "board": board, "fit_seconds": spent, **row} for row in evaluation.rows()]
            print(f"{title}: {name} fitted {arguments.folds} times in {spent:.1f} s", flush=True)
        for board, evaluations in parts.items():
            table = Evaluation.join(evaluations, names=[e.labels[0] for e in evaluations]).table(markdown=True)
            blocks.append(f"## {title}, {board}\n\n{table}")
            print(f"\n{blocks[-1]}\n", flush=True)
    verdict = control_verdict(rows)
    print(verdict)
    if arguments.smoke:
        return
    content = {
        "what": __doc__.splitlines()[0],
        "data": arguments.data,
        "folds": arguments.folds,
        "seed": arguments.seed,
    }
    _io.write_json(RESULTS / "adapters_quality.json", {**content, "noise": noise, "rows": rows, "control": verdict})
    _io.write_text(RESULTS / "adapters_quality.md", "\n\n".join([*blocks, verdict]) + "\n")


if __name__ == "__main__":
    main()
