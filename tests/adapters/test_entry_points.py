"""An adapter of another package: declared by an entry point, listed, created, loaded and run by the contract checks."""

import importlib
import sys

import pytest

from grove_adapters import create_adapter, list_adapters, load_adapter, testing
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.errors import UnknownNameError

MODULE = '''
import torch
from grove_adapters import Adapter


class Centre(Adapter):
    """Items near the mean of their modality are the less certain ones."""

    name = "test_centre"

    def _build(self, dim, facts):
        module = torch.nn.Module()
        for modality in ("image", "text"):
            module.register_buffer(modality, torch.zeros(dim))
        return module

    def _fit(self, pairs, validation, run):
        module = self._build(pairs.dim, {})
        for part in (pairs.images, pairs.texts):
            module.get_buffer(part.modality).copy_(sum(x.sum(0) for x in part.batches(4096)) / len(part))
        return module

    def _predict(self, batch):
        square = (batch.values - self.module_.get_buffer(batch.modality)).square().sum(1, keepdim=True)
        return {"mean": batch.values, "variance": torch.exp(-square) / batch.values.shape[1]}
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package as an installer leaves it: a module and its metadata in a folder of `sys.path`."""
    (tmp_path / "foreign_adapters.py").write_text(MODULE)
    metadata = tmp_path / "foreign_adapters-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-adapters\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[grove_adapters.adapters]\ntest_centre = foreign_adapters:Centre\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield "test_centre"
    sys.modules.pop("foreign_adapters", None)
    importlib.invalidate_caches()


def test_it_is_listed_while_it_is_installed(package):
    assert package in list_adapters()
    assert "foreign_adapters" not in sys.modules, "listing names imports nothing"
    assert type(create_adapter(package)).__module__ == "foreign_adapters"


def test_it_is_unknown_where_it_is_not_installed():
    assert "test_centre" not in list_adapters()
    with pytest.raises(UnknownNameError, match="test_centre"):
        create_adapter("test_centre")


def test_the_contract_checks_run_on_it(package):
    for check in testing.adapter_checks(package):
        check()


def test_it_is_saved_and_loaded_by_name(package, tmp_path):
    pairs = make_pairs(30, dim=8).pairs
    adapter = create_adapter(package).fit(pairs)
    again = load_adapter(adapter.save(tmp_path / "adapter"))
    assert type(again) is type(adapter)
    assert again.predict(pairs.images).uncertainty.tolist() == adapter.predict(pairs.images).uncertainty.tolist()
