"""Fit GroVE on cached embeddings, look at what the fit did, and list the images it is least sure about.

python examples/02_fit_grove.py --store grove-demo/store     (the store the demo leaves behind)
python examples/02_fit_grove.py --smoke                      (a toy world, a few seconds)
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import grove_adapters as ga
from grove_adapters.datasets.synthetic import make_pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="grove-demo/store", help="an embedding store with splits train and test")
    parser.add_argument("--out", help="folder for the fitted adapter (default: a temporary one)")
    parser.add_argument("--smoke", action="store_true", help="use a toy world instead of a store")
    arguments = parser.parse_args()

    if arguments.smoke:
        train, test = make_pairs(300, dim=16).pairs.split(0.7)
        settings = {"latent_dim": 4, "n_inducing": 30, "epochs": 5}
    else:
        store = ga.EmbeddingStore.open(arguments.store)
        train, test = store.pairs("train"), store.pairs("test")
        settings = {"latent_dim": 10}

    adapter = ga.create_adapter("grove", **settings).fit(train, seed=0, progress=not arguments.smoke)
    fit = adapter.fit_report_
    print(f"{adapter!r}\nfitted on {fit.n_pairs:,} pairs in {fit.seconds:.1f} s: {fit.epochs} epochs, {fit.stopped}")
    print("last epoch:", ", ".join(f"{name} {value:.4g}" for name, value in fit.history[-1].items()))

    # A folder of JSON and safetensors; nothing is pickled. Loaded again it predicts the same numbers.
    folder = adapter.save(Path(arguments.out or tempfile.mkdtemp()) / "grove")
    images = ga.load_adapter(folder).predict(test.images)

    print(f"\n{len(images):,} images of dimension {images.dim}; mean σ {float(images.std.mean()):.3g}")
    order = images.uncertainty.argsort(descending=True)
    for row in order[:5].tolist():
        print(f"  {images.ids[row]}  uncertainty {float(images.uncertainty[row]):.4g}")


if __name__ == "__main__":
    main()
