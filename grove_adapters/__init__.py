"""Post-hoc uncertainty for frozen vision-language models: know when to trust a match.

The stages, in the order data flows through them:

1. `extract`, `datasets`  images and captions become frozen embeddings
2. `EmbeddingStore`       which are kept on disk and opened as `Pairs` of `Embeddings`
3. `create_adapter`       an adapter is fitted on them and predicts a `ProbabilisticEmbedding` for each item
4. `tasks`                retrieval turns posteriors into one row a query: correct?, confidence, uncertainty
5. `calibrate`            which becomes a `CalibrationReport`: numbers with intervals
6. `plots`, `html`        and is drawn
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grove_adapters import calibration, datasets, extract, plots, similarity, tasks, testing
    from grove_adapters.adapters import Adapter, create_adapter, list_adapters, load_adapter
    from grove_adapters.calibration import CalibrationReport, calibrate
    from grove_adapters.embeddings import Embeddings, Pairs, Projection, Source
    from grove_adapters.posterior import (
        GaussianEmbedding,
        GeneralizedGaussianEmbedding,
        PowerSphericalEmbedding,
        ProbabilisticEmbedding,
        SampledEmbedding,
        VonMisesFisherEmbedding,
    )
    from grove_adapters.store import EmbeddingStore

__version__ = "0.1.0"

_HOMES = {
    "Adapter": "adapters",
    "CalibrationReport": "calibration",
    "EmbeddingStore": "store",
    "Embeddings": "embeddings",
    "GaussianEmbedding": "posterior",
    "GeneralizedGaussianEmbedding": "posterior",
    "Pairs": "embeddings",
    "PowerSphericalEmbedding": "posterior",
    "ProbabilisticEmbedding": "posterior",
    "Projection": "embeddings",
    "SampledEmbedding": "posterior",
    "Source": "embeddings",
    "VonMisesFisherEmbedding": "posterior",
    "calibrate": "calibration",
    "create_adapter": "adapters",
    "list_adapters": "adapters",
    "load_adapter": "adapters",
}
_ROOMS = ("calibration", "datasets", "extract", "plots", "similarity", "tasks", "testing")

__all__ = [  # noqa: RUF022  the order of the stages
    "EmbeddingStore",
    "Embeddings",
    "Pairs",
    "Source",
    "Projection",
    "Adapter",
    "create_adapter",
    "list_adapters",
    "load_adapter",
    "ProbabilisticEmbedding",
    "GaussianEmbedding",
    "GeneralizedGaussianEmbedding",
    "SampledEmbedding",
    "VonMisesFisherEmbedding",
    "PowerSphericalEmbedding",
    "calibrate",
    "CalibrationReport",
    "calibration",
    "datasets",
    "extract",
    "plots",
    "similarity",
    "tasks",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"grove_adapters.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"grove_adapters.{name}")
    raise AttributeError(f"module 'grove_adapters' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
