"""The demo's figures on the rendered world, where the ambiguity of every picture and caption is known.

python benchmarks/demo_world.py            # a few minutes; writes results/demo_world.json
python benchmarks/demo_world.py --smoke    # a small world, written nowhere
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from grove_adapters import _io
from grove_adapters.pipeline import demo

RESULTS = Path(__file__).parent / "results" / "demo_world.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small world, written nowhere")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        evaluation = demo(folder, seed=arguments.seed, smoke=arguments.smoke)
        seconds = time.perf_counter() - started
    print(evaluation.table(), f"\n{seconds:.0f} s", sep="\n")
    if not arguments.smoke:
        content = {"what": __doc__.splitlines()[0], "seconds": round(seconds, 1), "facts": evaluation.facts}
        _io.write_json(RESULTS, {**content, "rows": evaluation.rows()})


if __name__ == "__main__":
    main()
