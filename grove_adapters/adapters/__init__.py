"""Adapters: frozen embeddings in, probabilistic embeddings out; each behind the same contract.

`base` holds the contract, `loop` the one mini-batch loop and `checkpoint` what it needs to go on after a crash.
`variance_heads` is what the adapters that learn variances by a loss on links share, `wrapping` what the adapters around
other adapters share. Every other module is one adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grove_adapters import _io
from grove_adapters.adapters.base import Adapter, Batch, FitReport, FitRun
from grove_adapters.errors import UnreadableError
from grove_adapters.registry import Registry

__all__ = [
    "ADAPTERS",
    "Adapter",
    "Batch",
    "FitReport",
    "FitRun",
    "create_adapter",
    "list_adapters",
    "load_adapter",
]

ADAPTERS: Registry[Adapter] = Registry(
    "adapter",
    {
        "density_ratio": "grove_adapters.adapters.density_ratio:DensityRatio",
        "deterministic": "grove_adapters.adapters.deterministic:Deterministic",
        "failure_head": "grove_adapters.adapters.failure_head:FailureHead",
        "ensemble": "grove_adapters.adapters.ensemble:Ensemble",
        "grove": "grove_adapters.adapters.grove:GroVE",
        "laplace": "grove_adapters.adapters.laplace:Laplace",
        "power_spherical": "grove_adapters.adapters.vmf:PowerSpherical",
        "probvlm": "grove_adapters.adapters.probvlm:ProbVLM",
        "pcme": "grove_adapters.adapters.pcme:PCME",
        "pcmepp": "grove_adapters.adapters.pcmepp:PCMEPP",
        "pfe": "grove_adapters.adapters.pfe:PFE",
        "prolip": "grove_adapters.adapters.prolip:ProLIP",
        "recalibrated": "grove_adapters.adapters.recalibrated:Recalibrated",
        "ttda": "grove_adapters.adapters.ttda:TTDA",
        "vmf": "grove_adapters.adapters.vmf:VonMisesFisher",
    },
    group="grove_adapters.adapters",
)


def create_adapter(name: str, **settings: Any) -> Adapter:
    """An unfitted adapter by its registered name.

    Args:
        name: One of `list_adapters`.
        settings: Settings of that adapter, see its configuration class.

    Raises:
        UnknownNameError: No such adapter; the nearest name is offered.
        ConfigError: No such setting, or a value out of range.
    """
    return ADAPTERS.get(name)(**settings)


def list_adapters() -> list[str]:
    """Names of every adapter at hand: built in, registered, or declared by an installed package."""
    return list(ADAPTERS)


def load_adapter(folder: str | Path) -> Adapter:
    """Read an adapter of any kind from the folder `Adapter.save` wrote.

    Raises:
        UnreadableError: The folder holds no adapter, or a damaged one.
        UnknownNameError: The adapter's package is not installed.
    """
    facts = _io.read_json(Path(folder) / "adapter.json")
    if not isinstance(facts.get("adapter"), str):
        raise UnreadableError(f"expected the name of an adapter in {Path(folder) / 'adapter.json'}, got none")
    return ADAPTERS.get(facts["adapter"]).load(folder)
