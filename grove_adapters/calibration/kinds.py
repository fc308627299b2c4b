"""What two results must share for something fitted on one to hold for the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grove_adapters.errors import InputError
from grove_adapters.tasks.base import TaskResult


def kind_of(result: TaskResult) -> dict[str, Any]:
    """Direction, ranking, temperature, source and adapters of a result, as JSON types."""
    provenance = result.provenance
    return {
        "direction": result.direction,
        **{name: provenance.get(name) for name in ("rank_by", "similarity", "temperature", "marginal")},
        "source": provenance.get("source", {}).get("fingerprint"),
        "adapters": [provenance.get(side, {}).get("adapter") for side in ("query_maker", "gallery_maker")],
    }


def refuse_another_kind(fitted: Mapping[str, Any], result: TaskResult, *, what: str, refit: str) -> None:
    """Refuse a result that was made in another way than the one something was fitted on.

    Args:
        fitted: What `kind_of` gave for that one.
        result: The other one.
        what: What was fitted, for the error.
        refit: Name of the function that fits it anew.
    """
    got = kind_of(result)
    for name, expected in fitted.items():
        if got.get(name) != expected:
            raise InputError(
                f"{what} expected a result with {name} {expected!r} as fitted on, got {got.get(name)!r}; fit anew "
                f"with {refit} on held-out queries of this kind"
            )
