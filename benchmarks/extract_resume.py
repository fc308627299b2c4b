"""Does a store survive kill -9? Kill a build at random moments, continue it, and compare every byte.

    python benchmarks/extract_resume.py [--kills 20] [--smoke]

Each trial starts a build in a process of its own, kills it at a random moment, runs the same build again, and compares
the SHA-256 of every file with an undisturbed build. Photographs are real ones where GROVE_ADAPTERS_DATA (default
../shared/data) has them, else drawn; some are damaged, so that skipping is part of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import open_clip
import torch
from PIL import Image

from grove_adapters import EmbeddingStore, seeding
from grove_adapters._io import write_json
from grove_adapters.extract import OpenCLIPExtractor, Record, Records
from grove_adapters.store import building

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "extract_resume.json"
DATA = Path(os.environ.get("GROVE_ADAPTERS_DATA", ROOT.parent / "shared" / "data"))
CONFIG = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 64, "layers": 2, "width": 128, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}


def make_records(n: int, folder: Path) -> Records:
    """`n` images with two captions each, every 29th damaged."""
    photographs = sorted((DATA / "hierarcaps" / "assets" / "test_imgs").glob("*.jpg"))[:n]
    records = []
    for row in range(n):
        path = folder / f"{row}.jpg"
        if row < len(photographs):
            path.write_bytes(photographs[row].read_bytes())
        else:
            noise = np.random.default_rng(row).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((256, 256)).save(path)
        if row % 29 == 28:
            path.write_bytes(path.read_bytes()[:2000])
        captions = [f"photograph number {row}", f"number {row}, with a caption that is rather long " * 2]
        records.append(Record(f"i{row}", path, captions, split=("train", "test")[row % 3 == 0]))
    return Records(records)


def make_extractor() -> OpenCLIPExtractor:
    """A small random model, so that reading and writing are a good part of the time."""
    with seeding.local(0):
        model = open_clip.CLIP(**CONFIG)
    tokenizer = open_clip.get_tokenizer("ViT-B-32", context_length=16)
    preprocess = open_clip.image_transform(64, is_train=False)
    return OpenCLIPExtractor(model, preprocess=preprocess, tokenizer=tokenizer, name="tiny")


def build(extractor: OpenCLIPExtractor, records: Records, path: Path) -> None:
    """The build under test, committing all the time so that kills fall into every part of it."""
    building.COMMIT_SECONDS = 0.02
    EmbeddingStore.build(
        extractor, records, path, views=1, batch_size=16, num_workers=1, on_error="skip", progress=False
    )


def checksums(path: Path) -> dict[str, str]:
    """SHA-256 of every file of a store."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def rows_done(path: Path) -> int:
    """Rows that the journal of an unfinished build vouches for."""
    journal = path.with_name(f"{path.name}.partial") / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
    last = {entry["modality"]: entry["rows"] for entry in map(json.loads, lines)}
    return sum(last.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of trials")
    parser.add_argument("--images", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0, help="address of the moments")
    parser.add_argument("--smoke", action="store_true", help="3 kills of a small build, nothing is written")
    arguments = parser.parse_args()
    kills, n = (3, 40) if arguments.smoke else (arguments.kills, arguments.images)
    logging.disable(logging.WARNING)  # each build says again what it left out
    torch.set_num_threads(1)  # forked children cannot use the parent's thread pool
    random = np.random.default_rng(arguments.seed)
    process = multiprocessing.get_context("fork").Process
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pictures").mkdir()
        records, extractor = make_records(n, folder / "pictures"), make_extractor()
        start = time.perf_counter()
        build(extractor, records, folder / "whole")
        duration, whole = time.perf_counter() - start, checksums(folder / "whole")
        trials = []
        while len(trials) < kills:
            path = folder / f"store{len(trials)}"
            child = process(target=build, args=(extractor, records, path))
            moment = float(random.uniform(0, duration))
            child.start()
            child.join(moment)
            if not child.is_alive():  # faster than the undisturbed one: that was no kill
                duration = 0.9 * moment
                EmbeddingStore.open(path).path.rename(folder / f"early{time.monotonic_ns()}")
                continue
            child.kill()
            child.join()
            kept = rows_done(path)
            build(extractor, records, path)
            trials.append({"seconds": round(moment, 3), "rows kept": kept, "equal": checksums(path) == whole})
            print(
                f"kill {len(trials)} after {moment:.2f} s, {kept} rows kept: equal = {trials[-1]['equal']}", flush=True
            )
    equal = sum(trial["equal"] for trial in trials)
    result = {"images": n, "captions": 2 * n, "kills": kills, "equal": equal, "trials": trials}
    print(f"{equal} of {kills} stores equal the undisturbed one byte for byte")
    if not arguments.smoke:
        write_json(RESULTS, result)
    if equal != kills:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
