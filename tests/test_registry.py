import importlib.metadata

import pytest

from grove_adapters.errors import ConfigError, UnknownNameError
from grove_adapters.registry import Registry


@pytest.fixture
def registry():
    return Registry("thing", {"fraction": "fractions:Fraction"}, group="grove_adapters.tests")


def test_builtins_are_imported_on_demand(registry):
    from fractions import Fraction

    assert registry.get("fraction") is Fraction
    assert list(registry) == ["fraction"]


def test_unknown_names_offer_the_nearest(registry):
    with pytest.raises(UnknownNameError, match="did you mean 'fraction'"):
        registry.get("fracton")


def test_registered_classes_appear_and_taken_names_are_refused(registry):
    @registry.register("mine")
    class Mine:
        pass

    assert registry.get("mine") is Mine
    assert "mine" in registry
    with pytest.raises(ConfigError, match="taken"):
        registry.register("fraction")(Mine)


def test_entry_points_of_other_packages_appear(registry, monkeypatch):
    entry = importlib.metadata.EntryPoint("foreign", "decimal:Decimal", "grove_adapters.tests")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == entry.group else [])
    from decimal import Decimal

    assert list(registry) == ["foreign", "fraction"]
    assert registry.get("foreign") is Decimal
