"""From a retrieval to a calibration report: its numbers, its figures, and one page to hand on.

python examples/04_calibration_report.py --store grove-demo/store --out calibration
python examples/04_calibration_report.py --smoke
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import grove_adapters as ga
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.html import report_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="grove-demo/store", help="an embedding store with splits train and test")
    parser.add_argument("--out", help="folder for report, figures and page (default: a temporary one)")
    parser.add_argument("--smoke", action="store_true", help="use a toy world instead of a store")
    arguments = parser.parse_args()
    out = Path(arguments.out or tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)

    if arguments.smoke:
        train, test = make_pairs(300, dim=16).pairs.split(0.7)
    else:
        store = ga.EmbeddingStore.open(arguments.store)
        train, test = store.pairs("train"), store.pairs("test")

    adapter = ga.create_adapter("deterministic").fit(train)
    images, texts = adapter.predict(test.images), adapter.predict(test.texts)
    result = ga.tasks.retrieve(images, texts, links=test.links, positives=test.positives, direction="t2i")
    print(result.to_frame().sort_values("uncertainty").head().to_string(index=False))

    report = ga.calibrate(result, levels=10, resamples=50 if arguments.smoke else 1000, seed=0)
    for name, score in report.scores.items():
        print(f"{name:>12}  {score}")

    # A saved report is enough to draw everything again, on another machine and without the data.
    report = ga.CalibrationReport.load(report.save(out / "report.json"))
    for draw in (ga.plots.uncertainty_recall, ga.plots.reliability, ga.plots.risk_coverage):
        draw(report).figure.savefig(out / f"{draw.__name__}.png", dpi=200)
    (out / "report.html").write_text(report_page([report]), encoding="utf-8")
    print("written:", ", ".join(sorted(path.name for path in out.iterdir())))


if __name__ == "__main__":
    main()
