"""What `Ensemble` and `Recalibrated` share: adapters as settings, and the posteriors of an adapter inside another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from grove_adapters import _io, adapters, seeding
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.embeddings import Embeddings, Pairs, as_float32
from grove_adapters.errors import ConfigError, InputTypeError
from grove_adapters.posterior import ProbabilisticEmbedding


def described(adapter: Adapter | Mapping[str, Any]) -> dict[str, Any]:
    """The registered name and the settings of an adapter, as JSON types; such a description is passed on."""
    if isinstance(adapter, Mapping):
        return dict(adapter)
    if not isinstance(adapter, Adapter):
        raise InputTypeError(f"expected an adapter such as create_adapter('pfe'), got {type(adapter).__name__}")
    return {"adapter": adapter.name, "config": _io.jsonable(adapter.config.to_dict())}


def revived(description: Mapping[str, Any]) -> Adapter:
    """An unfitted adapter from what `described` gave.

    Raises:
        ConfigError: No such description, or a setting is unknown.
        UnknownNameError: No such adapter.
    """
    if set(description) - {"config"} != {"adapter"}:
        raise ConfigError(
            f"expected an adapter as {{'adapter': name, 'config': {{…}}}}, got keys {sorted(description)}; wrap "
            "adapters themselves, as in Ensemble([create_adapter('pfe'), create_adapter('grove')])"
        )
    return adapters.create_adapter(description["adapter"], **description.get("config", {}))


def fit_inside(adapter: Adapter, pairs: Pairs, validation: Pairs | None, run: FitRun, name: str) -> torch.nn.Module:
    """Fit an adapter as a part of a larger fit; its report goes into the larger one."""
    part = run.part(name)
    with seeding.local(part.seed):
        module = adapter._fit(pairs, validation, part)
    report = {**part.report.to_dict(), "adapter": adapter.name}
    run.report.facts.setdefault("parts", {})[name] = report
    run.report.warnings += [f"{name} ({adapter.name}): {warning}" for warning in part.report.warnings]
    return module.cpu().eval()


def posterior_of(adapter: Adapter, module: torch.nn.Module, batch: Batch) -> tuple[ProbabilisticEmbedding, bool]:
    """What an adapter predicts with the given learned numbers, and whether its uncertainty is one of its own."""
    adapter.module_ = module
    fields: dict[str, Any] = dict(adapter._predict(batch))
    return adapter.posterior_class(modality=batch.modality, **fields), "uncertainty" in fields


def whole_batch(embeddings: Embeddings, seed: int, *, of: Adapter, at_most: int | None = None) -> Batch:
    """Embeddings, or a sample of them, as one batch on the CPU with what an adapter needs."""
    if at_most is not None and len(embeddings) > at_most:
        embeddings = embeddings.take(np.sort(np.random.default_rng(seed).permutation(len(embeddings))[:at_most]))
    return Batch(
        values=as_float32(embeddings.values[:]),
        views=as_float32(embeddings.views[:]) if of.needs_views else None,
        features=as_float32(embeddings.features[:]) if of.needs_features else None,
        modality=embeddings.modality,
        seed=seed,
    )
