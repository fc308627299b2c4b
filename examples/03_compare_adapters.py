"""Compare adapters on the same test pairs: who knows best when its first answer is wrong?

python examples/03_compare_adapters.py --store grove-demo/store --out comparison.html
python examples/03_compare_adapters.py --smoke
"""

from __future__ import annotations

import argparse

import grove_adapters as ga
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.pipeline import Evaluation, evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="grove-demo/store", help="an embedding store with splits train and test")
    parser.add_argument("--adapters", nargs="+", default=["deterministic", "ttda", "grove"], help="which to compare")
    parser.add_argument("--out", help="write one HTML page with tables and figures")
    parser.add_argument("--smoke", action="store_true", help="use a toy world instead of a store")
    arguments = parser.parse_args()

    if arguments.smoke:
        train, test = make_pairs(300, dim=16).pairs.split(0.7)
    else:
        store = ga.EmbeddingStore.open(arguments.store)
        train, test = store.pairs("train"), store.pairs("test")

    parts = []
    for name in arguments.adapters:
        settings = {"latent_dim": 4, "n_inducing": 30, "epochs": 5} if arguments.smoke and name == "grove" else {}
        adapter = ga.create_adapter(name, **settings).fit(train, seed=0, progress=not arguments.smoke)
        parts.append(evaluate(adapter, test, resamples=50 if arguments.smoke else 1000))
    comparison = Evaluation.join(parts)
    print(comparison.table())

    # The reports are about the same queries, so they can be subtracted score by score.
    baseline = parts[0].reports
    for part, name in zip(parts[1:], arguments.adapters[1:], strict=True):
        for report, reference in zip(part.reports, baseline, strict=True):
            gain = report.compare(reference)["auroc"]
            print(f"{name} over {arguments.adapters[0]}, {report.direction}: AUROC {gain:+.3f}")
    if arguments.out:
        print("written:", comparison.write_page(arguments.out))


if __name__ == "__main__":
    main()
