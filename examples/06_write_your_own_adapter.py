"""Write an adapter of your own: three short methods and a decorator; the contract is checked for you.

python examples/06_write_your_own_adapter.py     (with --smoke: only the first few of the checks)

A package of its own declares the class instead of decorating it, and `list_adapters()` finds it once installed:

    [project.entry-points."grove_adapters.adapters"]
    centre = "my_package:Centre"
"""

from __future__ import annotations

import argparse

import torch

from grove_adapters import testing
from grove_adapters.adapters import ADAPTERS, Adapter, create_adapter
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.embeddings import MODALITIES


@ADAPTERS.register("centre")
class Centre(Adapter):
    """An item is the less certain, the closer it lies to the mean of its modality, where vague items drift."""

    name = "centre"

    def _build(self, dim, facts):
        module = torch.nn.Module()  # what is learned, and saved, are the parameters and buffers of one module
        for modality in MODALITIES:
            module.register_buffer(modality, torch.zeros(dim))
        return module

    def _fit(self, pairs, validation, run):
        module = self._build(pairs.dim, {})
        for part in (pairs.images, pairs.texts):
            total = sum(batch.sum(0) for batch in part.batches(4096))  # a memory map is never read whole
            module.get_buffer(part.modality).copy_(total / len(part))
        return module

    def _predict(self, batch):
        square = (batch.values - self.module_.get_buffer(batch.modality)).square().sum(1, keepdim=True)
        return {"mean": batch.values, "variance": torch.exp(-square) / batch.values.shape[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="run the first few checks only")
    checks = testing.adapter_checks("centre")
    for check in checks[:5] if parser.parse_args().smoke else checks:
        check()  # raises AssertionError where the contract is broken
        print(f"{check}: kept")
    pairs = make_pairs(300, dim=16).pairs
    print(create_adapter("centre").fit(pairs).predict(pairs.images).uncertainty[:5])


if __name__ == "__main__":
    main()
