"""Data whose uncertainty is known: rendered scenes with a bundled tiny CLIP, and a synthetic toy world."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grove_adapters.datasets import scenes, synthetic, tiny_clip
    from grove_adapters.datasets.scenes import Scenes
    from grove_adapters.datasets.tiny_clip import load_tiny_clip

_HOMES = {"Scenes": "scenes", "load_tiny_clip": "tiny_clip"}
_ROOMS = ("scenes", "synthetic", "tiny_clip")

__all__ = ["Scenes", "load_tiny_clip", "scenes", "synthetic", "tiny_clip"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
