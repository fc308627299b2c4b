"""How fast scenes are made on one core.

    python benchmarks/scenes_speed.py [--smoke]

Pictures must come at 300 a second or more, so that rendering is never what an extraction waits for.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from grove_adapters._io import write_json
from grove_adapters.datasets.scenes import Scenes

RESULTS = Path(__file__).parent / "results" / "scenes_speed.json"


def rate(items: int, work: Callable[[], object]) -> float:
    """Items a second of processor time, which other people's programs do not disturb."""
    start = time.process_time()
    work()
    return round(items / (time.process_time() - start), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few scenes, nothing is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    n = 100 if args.smoke else 3000
    scenes = Scenes.generate(n, seed=0)
    t = len(scenes.captions)
    images, texts = scenes.rows("train")
    result = {
        "scenes": n,
        "captions": t,
        "per_second": {
            "scenes with captions": rate(n, lambda: Scenes.generate(n, seed=1)),
            "pictures of 64 pixels": rate(n, lambda: [scenes.image(row) for row in range(n)]),
            "pictures of 192 pixels": rate(n // 10, lambda: [scenes.image(row, 192) for row in range(n // 10)]),
            "caption ambiguities": rate(t, lambda: scenes.caption_ambiguity),
            "picture ambiguities": rate(n, lambda: scenes.image_ambiguity),
            "questions": rate(n, scenes.questions),
            "checked matches": rate(len(images) * len(texts), lambda: scenes.matches(images, texts)),
        },
    }
    print(json.dumps(result, indent=2))
    if not args.smoke:
        write_json(RESULTS, result)


if __name__ == "__main__":
    main()
