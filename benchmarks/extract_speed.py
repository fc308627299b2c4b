"""What extraction costs beyond the work that nobody can avoid.

    python benchmarks/extract_speed.py [--images 2000] [--device cpu] [--workers N] [--smoke]

The floor is the encoder on ready tensors and, apart, decoding plus preprocessing, each measured alone in this process.
Where both compete for the same cores the floor is their sum; where the encoder has a GPU it is the slower of the two.
Measured in turns, so that whatever else the machine does falls on all three alike. Photographs are real ones where
GROVE_ADAPTERS_DATA (default ../shared/data) has them, else noise.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from grove_adapters import EmbeddingStore
from grove_adapters._io import write_json
from grove_adapters.extract import OpenCLIPExtractor, Record
from grove_adapters.extract.loop import ImageStage, default_workers, embed_from
from grove_adapters.extract.records import read_image

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "extract_speed.json"
DATA = Path(os.environ.get("GROVE_ADAPTERS_DATA", ROOT.parent / "shared" / "data"))


def photographs(n: int, folder: Path) -> list[Record]:
    """`n` photographs, taken again under another id where there are fewer."""
    paths = sorted((DATA / "hierarcaps" / "assets" / "test_imgs").glob("*.jpg"))
    while len(paths) < min(n, 1000):
        noise = np.random.default_rng(len(paths)).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        paths.append(folder / f"{len(paths)}.jpg")
        Image.fromarray(noise).resize((256, 256), Image.Resampling.BICUBIC).save(paths[-1])
    return [Record(f"i{row}", paths[row % len(paths)]) for row in range(n)]


class NoEncoder:
    """Stands in for the encoder where loading is measured alone."""

    device = torch.device("cpu")

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        """(B, 1) zeros."""
        return torch.zeros(len(images), 1)


def seconds(work: Callable[[], object]) -> float:
    """Wall time of `work`, in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--model", default="ViT-B-32", help="open_clip architecture, with random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, help="loading processes (default: what a build takes)")
    parser.add_argument("--rounds", type=int, default=4, help="turns among which the images are divided")
    parser.add_argument("--smoke", action="store_true", help="few images, nothing is written")
    arguments = parser.parse_args()
    n, rounds = (64, 1) if arguments.smoke else (arguments.images, arguments.rounds)
    workers = default_workers() if arguments.workers is None else arguments.workers
    batch = arguments.batch_size
    extractor = OpenCLIPExtractor(arguments.model, device=arguments.device)
    on_gpu = extractor.device.type == "cuda"

    def encode(records: list[Record]) -> None:
        for start in range(0, len(records), batch):
            with torch.no_grad():
                extractor.model.encode_image(ready[: min(batch, len(records) - start)])  # type: ignore[operator]
        if on_gpu:
            torch.cuda.synchronize()

    def decode(records: list[Record]) -> None:
        if on_gpu:  # beside the encoder, so with the same processes
            stage = ImageStage(records, extractor.preprocess, 0, 0)
            list(embed_from(0, stage, NoEncoder(), batch_size=batch, views=0, num_workers=workers))  # type: ignore[arg-type]
        else:
            for record in records:
                extractor.preprocess(read_image(record.loader))

    times: dict[str, list[float]] = {"encoder alone": [], "decoding and preprocessing alone": [], "extraction": []}
    with tempfile.TemporaryDirectory() as name:
        records = photographs(n, Path(name))
        ready = torch.stack([extractor.preprocess(read_image(record.loader)) for record in records[:batch]])
        ready = ready.to(extractor.device)
        encode(records[: 2 * batch])  # warm up
        for turn in range(rounds):
            part = records[turn * n // rounds : (turn + 1) * n // rounds]

            def extract(part: list[Record] = part, turn: int = turn) -> None:
                path = Path(name) / f"store{turn}"
                EmbeddingStore.build(extractor, part, path, batch_size=batch, num_workers=workers, progress=False)

            for what, work in (("encoder alone", encode), ("decoding and preprocessing alone", decode)):
                times[what].append(seconds(lambda work=work, part=part: work(part)))  # type: ignore[misc]
            times["extraction"].append(seconds(extract))
    totals = {what: sum(turns) for what, turns in times.items()}
    alone = [totals["encoder alone"], totals["decoding and preprocessing alone"]]
    floor = max(alone) if on_gpu else sum(alone)
    result = {
        "model": arguments.model,
        "images": n,
        "device": torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads",
        "batch size": batch,
        "workers": workers,
        "seconds": {what: round(total, 2) for what, total in totals.items()},
        "images a second": round(n / totals["extraction"], 1),
        "floor": "the slower of the two" if on_gpu else "their sum",
        "ratio to the floor": round(totals["extraction"] / floor, 3),
        "ratio by turn": [
            round(whole / (max(pair) if on_gpu else sum(pair)), 3)
            for whole, *pair in zip(times["extraction"], *list(times.values())[:2], strict=True)
        ],
    }
    print(json.dumps(result, indent=2))
    if not arguments.smoke:
        write_json(RESULTS.with_name("extract_speed_gpu.json") if on_gpu else RESULTS, result)


if __name__ == "__main__":
    main()
