"""On real CLIP embeddings: does the uncertainty find the wrong matches, and does it find nothing where nothing is?

500 COCO pairs (OpenAI ViT-B/16) and 1,126 product photos with descriptions (FashionCLIP) are imported into stores;
every adapter is fitted on four fifths and asked about the rest, five times, so that each pair is asked about once by an
adapter that never saw it. The gallery of a query is its own fold. The same COCO pairs through an untrained CLIP are the
control: there, no uncertainty should find anything. TTDA is left out, because these data hold no augmented views.

"grove" ranks by its posterior; "grove, backbone order" ranks by the frozen embeddings and takes only the uncertainty
from the posterior, so its recall is that of the frozen model.

The data is found through GROVE_ADAPTERS_DATA (default: ../shared/data beside the project); without it nothing is
measured, and the exit code is 0.

    python benchmarks/real_pairs.py            # some minutes; writes results/real_pairs.json and .md
    python benchmarks/real_pairs.py --smoke    # a tenth of the pairs, written nowhere
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path

from grove_adapters import EmbeddingStore, Source, _io, create_adapter
from grove_adapters.pipeline import Evaluation, fit_folds, judge, retrieve_folds

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

OPENAI = Source(model="ViT-B-16", pretrained="openai", logit_scale=100.0)
DATA = {
    # title: folder, images, texts, source; FashionCLIP's logit scale is not stated, so it has no confidence
    "COCO, CLIP ViT-B/16": ("coco500", "image.npy", "text.npy", OPENAI),
    "products, FashionCLIP": (
        "products1126",
        "image.npy",
        "text.npy",
        Source(model="FashionCLIP", pretrained="published"),
    ),
    "control: COCO, untrained CLIP": (
        "coco500",
        "image_untrained.npy",
        "text_untrained.npy",
        dataclasses.replace(OPENAI, pretrained="untrained"),
    ),
}

VARIANTS = {
    "deterministic": ("deterministic", {}),
    "grove": ("grove", {}),
    "grove, backbone order": ("grove", {"rank_by": "backbone"}),
}


def measure(store: EmbeddingStore, *, folds: int, seed: int, resamples: int, settings: dict[str, dict]) -> Evaluation:
    """Every variant on one store; an adapter is fitted once a fold, however often it is read."""
    pairs = store.pairs()
    fits = {
        name: fit_folds(lambda name=name: create_adapter(name, **settings.get(name, {})), pairs, folds=folds, seed=seed)
        for name in dict.fromkeys(name for name, _ in VARIANTS.values())
    }
    parts = []
    for label, (name, reading) in VARIANTS.items():
        results = retrieve_folds(fits[name], seed=seed, **reading)
        parts.append(judge(results, pairs, label=label, resamples=resamples, seed=seed))
    return Evaluation.join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tenth of the pairs, few steps, nothing written")
    parser.add_argument("--folds", type=int, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    data = Path(os.environ.get("GROVE_ADAPTERS_DATA", ROOT.parent / "shared" / "data"))
    missing = [folder for folder, *_ in DATA.values() if not (data / folder).is_dir()]
    if missing:
        print(f"skipped: {data} holds no {' and no '.join(dict.fromkeys(missing))}; set GROVE_ADAPTERS_DATA")
        return

    rows, blocks = [], []
    settings = {"grove": create_adapter("grove").small_settings() | {"epochs": 2}} if arguments.smoke else {}
    for title, (folder, images, texts, source) in DATA.items():
        with tempfile.TemporaryDirectory() as cache:
            files = {"images": _io.read_array(data / folder / images), "texts": _io.read_array(data / folder / texts)}
            if arguments.smoke:
                files = {name: array[: len(array) // 10] for name, array in files.items()}
            store = EmbeddingStore.from_arrays(Path(cache) / "store", **files, source=source)
            evaluation = measure(
                store,
                folds=arguments.folds,
                seed=arguments.seed,
                resamples=100 if arguments.smoke else 2000,
                settings=settings,
            )
        rows += [{"data": title, **row} for row in evaluation.rows()]
        blocks.append(f"**{title}**\n\n{evaluation.table(markdown=True)}")
        print(f"\n== {title}\n\n{evaluation.table()}", flush=True)

    p_values = [row["auroc_p"] for row in rows if row["data"].startswith("control") and "auroc_p" in row]
    bound = 0.05 / len(p_values)
    verdict = (
        f"control: the smallest of {len(p_values)} one-sided permutation p-values of AUROC is {min(p_values):.3f}, "
        f"{'below' if min(p_values) < bound else 'not below'} .05/{len(p_values)} = {bound:.4f}"
    )
    print(f"\n{verdict}")
    if arguments.smoke:
        return
    content = {"what": __doc__.splitlines()[0], "folds": arguments.folds, "seed": arguments.seed, "resamples": 2000}
    _io.write_json(RESULTS / "real_pairs.json", {**content, "rows": rows, "control": verdict})
    _io.write_text(RESULTS / "real_pairs.md", "\n\n".join([*blocks, verdict[0].upper() + verdict[1:] + "."]) + "\n")


if __name__ == "__main__":
    main()
