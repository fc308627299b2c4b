"""The contract every adapter keeps: what is checked, cut, seeded and saved once, for all of them."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, final

import numpy as np
import torch

from grove_adapters import _checks, _io, seeding
from grove_adapters.adapters.checkpoint import Checkpoint
from grove_adapters.config import Config
from grove_adapters.embeddings import Embeddings, Modality, Pairs, Source, as_float32
from grove_adapters.errors import (
    ConfigError,
    InputError,
    InputTypeError,
    NotFittedError,
    NumericalError,
    SourceMismatchError,
    StoreError,
    UnreadableError,
)
from grove_adapters.posterior import GaussianEmbedding, ProbabilisticEmbedding

SCHEMA = 1


@dataclass(kw_only=True)
class FitReport:
    """What happened during one fit, in JSON types.

    Attributes:
        adapter: Registered name.
        seed: Address of every random number drawn.
        n_pairs: Links fitted on.
        n_validation: Links held out for choosing and stopping; 0 for none.
        seconds: Wall time of the fit.
        epochs: Passes over the links; 0 for adapters that don't iterate.
        steps: Optimiser steps.
        stopped: Why it ended: ``"closed form"``, ``"all epochs"``, ``"no improvement"`` or ``"converged"``.
        chosen_by: What chose the weights that were kept.
        best_epoch: The epoch they come from, counted from 1; 0 where that means nothing.
        clipped_steps: Steps whose gradient norm was cut.
        history: One entry an epoch: every term of the objective, averaged over the epoch, and the validation value.
        facts: What else the method wants known (e.g. jitter used, how far latents moved).
        warnings: Sentences a user should read.
    """

    adapter: str
    seed: int
    n_pairs: int
    n_validation: int = 0
    seconds: float = 0.0
    epochs: int = 0
    steps: int = 0
    stopped: str = "closed form"
    chosen_by: str = "closed form"
    best_epoch: int = 0
    clipped_steps: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Every attribute as JSON types."""
        return _io.jsonable(dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class FitRun:
    """What a fit is told besides the data.

    Attributes:
        seed: Address of every random number to draw.
        device: Where to compute.
        progress: Whether to show a progress bar.
        report: To be filled in by the method and the loop.
        checkpoint: Where loops keep what going on after a crash needs, or None.
    """

    seed: int
    device: torch.device
    progress: bool
    report: FitReport
    checkpoint: Checkpoint | None = None

    def part(self, name: str) -> FitRun:
        """The run of one of several fits inside this one: with a seed, a report and a checkpoint of its own."""
        seed = seeding.derive(self.seed, name)
        report = FitReport(adapter=self.report.adapter, seed=seed, n_pairs=self.report.n_pairs)
        checkpoint = None if self.checkpoint is None else self.checkpoint.part(name)
        return dataclasses.replace(self, seed=seed, report=report, checkpoint=checkpoint)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive rows handed to `Adapter._predict`.

    Attributes:
        values: (B, D) float32 on the device.
        views: (B, K, D) float32 on the device, or None.
        features: (B, F) float32 on the device, or None.
        modality: ``"image"`` or ``"text"``.
        seed: The same for every batch of one call, so that results don't depend on where rows are cut.
    """

    values: torch.Tensor
    views: torch.Tensor | None
    features: torch.Tensor | None = None
    modality: Modality
    seed: int


class Adapter(abc.ABC):
    """Frozen embeddings in, probabilistic embeddings out.

    `fit`, `predict`, `save` and `load` are final: they check, cut, move and seed. An author writes `_fit` and
    `_predict`, and `_build` where there is something learned to load again. Adapters are composed by wrapping, not by
    subclassing a finished one.

    Args:
        config: Settings as an instance of `config_class`.
        settings: Settings by name, instead of `config`.

    Attributes:
        name: Name in the registry.
        config_class: Class of the settings.
        posterior_class: The posterior `predict` makes.
        needs_views: Whether `predict` reads the K views instead of the plain embeddings.
        needs_features: Whether `fit` and `predict` read the features of the encoders' last linear layers too.
        gallery_aware: See `ProbabilisticEmbedding.gallery_aware`.
        config: The settings.
        dim_: D of the fitted embeddings.
        source_: Source of the fitted embeddings.
        fit_report_: What happened during the fit.
        module_: Every learned number, as parameters and buffers of one module on the CPU.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[Config]] = Config
    posterior_class: ClassVar[type[ProbabilisticEmbedding]] = GaussianEmbedding
    needs_views: ClassVar[bool] = False
    needs_features: ClassVar[bool] = False
    gallery_aware: ClassVar[bool] = False

    dim_: int
    source_: Source
    fit_report_: FitReport
    module_: torch.nn.Module

    def __init__(self, config: Config | None = None, **settings: Any) -> None:
        if config is not None and settings:
            raise ConfigError(f"{self.name} expected a config or settings by name, got both; use config.replace(…)")
        if config is not None and not isinstance(config, self.config_class):
            raise ConfigError(f"{self.name} expected a {self.config_class.__name__}, got a {type(config).__name__}")
        self.config = config if config is not None else self.config_class.from_dict(settings)

    @abc.abstractmethod
    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        """Learn from checked pairs and return every learned number as one module."""

    @abc.abstractmethod
    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The fields of `posterior_class` for one plain batch, and ``"uncertainty"`` where it is not the default."""

    def _facts(self) -> dict[str, Any]:
        """JSON facts beyond the width that `_build` needs to make a module of the right shapes."""
        return {}

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        """A module whose state a saved one is loaded into; the default has none."""
        return torch.nn.Module()

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """Settings with which a fit on a few hundred pairs takes about a second, for the contract checks."""
        return {}

    @final
    def fit(
        self,
        pairs: Pairs,
        *,
        validation: Pairs | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        progress: bool = False,
        checkpoint: str | Path | None = None,
    ) -> Self:
        """Learn from pairs; a second fit forgets the first, a failed one leaves it in place.

        Args:
            pairs: Image and text embeddings of one frozen model with their links.
            validation: Pairs to choose and stop by, disjoint from `pairs`; methods that iterate hold some of `pairs`
                out by image where this is None.
            seed: Address of every random number drawn; equal seeds give equal results.
            device: Where to compute.
            progress: Whether to show a progress bar.
            checkpoint: Folder for the state after each epoch. The same call after an interruption goes on from there
                and ends in the same numbers; the folder is removed when the fit has ended.

        Returns:
            The adapter itself.

        Raises:
            InputError: NaN in the data, widths that differ.
            SourceMismatchError: Images, texts or validation pairs come from different models.
            NumericalError: The fit diverged; the message says where.
            StoreError: The checkpoint is of another fit, or cannot be written.
        """
        for part, what in ((pairs, "pairs"), (validation, "validation")):
            if part is not None and not isinstance(part, Pairs):
                raise InputTypeError(f"{self.name}.fit expected {what} as Pairs, got {type(part).__name__}")
        for embeddings in _parts(pairs, validation):
            _checks.same_dim(pairs.dim, embeddings.dim, what=f"{self.name}.fit")
            self._same_source(pairs.source, embeddings, "fit")
            _checks.finite(embeddings.values, what=f"{embeddings.modality} embeddings", ids=embeddings.ids)
            self._has_what_it_needs(embeddings)
            if self.needs_features:
                _checks.finite(embeddings.features, what=f"features of {embeddings.modality}s", ids=embeddings.ids)
        report = FitReport(adapter=self.name, seed=seed, n_pairs=len(pairs), n_validation=len(validation or ()))
        kept = None if checkpoint is None else Checkpoint(Path(checkpoint), self._identity(pairs, validation, seed))
        run = FitRun(seed=seed, device=torch.device(device), progress=progress, report=report, checkpoint=kept)
        started = time.perf_counter()
        with seeding.local(seed):
            module = self._fit(pairs, validation, run)
        report.seconds = time.perf_counter() - started
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise NumericalError(f"{self.name}.fit expected finite numbers, got NaN or infinity in {name!r}")
        self.module_ = module.cpu().eval().requires_grad_(False)
        self.dim_, self.source_, self.fit_report_ = pairs.dim, pairs.source, report
        if kept is not None:
            kept.remove()
        return self

    @final
    def predict(
        self,
        embeddings: Embeddings,
        *,
        batch_size: int = 4096,
        seed: int = 0,
        device: str | torch.device = "cpu",
        progress: bool = False,
    ) -> ProbabilisticEmbedding:
        """One distribution for each embedding, in the order given; results don't depend on `batch_size`.

        Raises:
            NotFittedError: `fit` or `load` was not called.
            InputError: Another width than fitted on, missing views, NaN.
            SourceMismatchError: Embeddings of another model, precision or preprocessing than fitted on.
        """
        self._fitted("predict")
        if not isinstance(embeddings, Embeddings):
            raise InputTypeError(
                f"{self.name}.predict expected Embeddings, got {type(embeddings).__name__}; wrap arrays as "
                "Embeddings(values, ids, modality='image')"
            )
        if embeddings.dim != self.dim_:
            raise InputError(
                f"{self.name} was fitted on {self.dim_}-d embeddings from {self.source_} but predict got shape "
                f"{tuple(embeddings.values.shape)} from {embeddings.source}; use embeddings of the same model or fit "
                "another adapter"
            )
        self._same_source(self.source_, embeddings, "predict")
        self._has_what_it_needs(embeddings)
        _checks.count(batch_size, what="batch_size")
        from tqdm.auto import tqdm

        starts = tqdm(
            range(0, len(embeddings), batch_size),
            desc=f"{self.name}: {embeddings.modality}s",
            unit="batch",
            disable=not progress,
        )
        module = self.module_
        try:
            self.module_ = module.to(device)
            with seeding.local(seed), torch.no_grad():
                parts = [self._predict(self._batch(embeddings, start, batch_size, device, seed)) for start in starts]
        finally:
            self.module_ = module.cpu()
        fields = {name: torch.cat([part[name].detach().float().cpu() for part in parts]) for name in parts[0]}
        return self.posterior_class(
            ids=np.asarray(embeddings.ids),
            modality=embeddings.modality,
            source=embeddings.source,
            gallery_aware=self.gallery_aware,
            backbone=embeddings.values,
            maker={
                "adapter": self.name,
                "config": self.config.to_dict(),
                "fit_seed": self.fit_report_.seed,
                "seed": seed,
            },
            **fields,
        )

    @final
    def save(self, folder: str | Path) -> Path:
        """Write `adapter.json`, `weights.safetensors` and `fit_report.json`; an adapter already there is replaced.

        Raises:
            NotFittedError: There is nothing to save.
            StoreError: The folder holds something that is no adapter, or cannot be written.
        """
        self._fitted("save")
        folder = Path(folder)
        if (
            folder.exists()
            and not (folder / "adapter.json").is_file()
            and (not folder.is_dir() or any(folder.iterdir()))
        ):
            raise StoreError(
                f"expected a free name or an adapter's folder at {folder}, got other files; choose another"
            )
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        try:
            _io.write_tensors(partial / "weights.safetensors", self.module_.state_dict(), {"adapter": self.name})
            _io.write_json(partial / "fit_report.json", self.fit_report_.to_dict())
            _io.write_json(
                partial / "adapter.json",
                {
                    "schema": SCHEMA,
                    "adapter": self.name,
                    "config": self.config.to_dict(),
                    "dim": self.dim_,
                    "source": self.source_.to_dict(),
                    "facts": self._facts(),
                    "weights_sha256": _io.sha256(partial / "weights.safetensors"),
                },
            )
            _io.replace_folder(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return folder

    @classmethod
    @final
    def load(cls, folder: str | Path) -> Self:
        """Read what `save` wrote; nothing is unpickled.

        Raises:
            UnreadableError: A file is missing, damaged, edited or of another adapter.
            ConfigError: A setting is unknown to this version.
        """
        folder = Path(folder)
        facts = _io.read_json(folder / "adapter.json")
        if facts.get("adapter") != cls.name or facts.get("schema") != SCHEMA:
            raise UnreadableError(
                f"expected a {cls.name!r} adapter of schema {SCHEMA} in {folder}, got {facts.get('adapter')!r} of "
                f"schema {facts.get('schema')!r}; use load_adapter, or fit it again with this version"
            )
        weights = folder / "weights.safetensors"
        tensors, _ = _io.read_tensors(weights)
        if facts.get("weights_sha256") != _io.sha256(weights):
            raise UnreadableError(
                f"expected the weights written with {folder / 'adapter.json'}, got others; save it again"
            )
        adapter = cls(cls.config_class.from_dict(facts["config"]))
        adapter.dim_, adapter.source_ = int(facts["dim"]), Source.from_dict(facts["source"])
        adapter.module_ = adapter._build(adapter.dim_, facts["facts"])
        try:
            adapter.module_.load_state_dict(tensors)
        except RuntimeError as error:
            raise UnreadableError(f"expected weights that fit {folder / 'adapter.json'}, got {error}") from error
        adapter.module_.eval().requires_grad_(False)
        adapter.fit_report_ = FitReport(**_io.read_json(folder / "fit_report.json"))
        return adapter

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.config.to_dict().items())
        return f"{type(self).__name__}({settings})"

    def _fitted(self, call: str) -> None:
        if not hasattr(self, "module_"):
            raise NotFittedError(
                f"{self.name} expected to be fitted before {call}; call fit(pairs) or load_adapter first"
            )

    def _identity(self, pairs: Pairs, validation: Pairs | None, seed: int) -> dict[str, Any]:
        """What tells one fit from another, for its checkpoint."""
        digest = hashlib.sha256()
        for part in (pairs, validation):
            if part is not None:
                digest.update(np.ascontiguousarray(part.links).tobytes())
        for embeddings in _parts(pairs, validation):
            digest.update("\n".join(embeddings.ids).encode())
        return {
            "adapter": self.name,
            "config": self.config.to_dict(),
            "seed": seed,
            "source": pairs.source.fingerprint,
            "data": digest.hexdigest(),
        }

    def _same_source(self, expected: Source, embeddings: Embeddings, call: str) -> None:
        if embeddings.source.fingerprint != expected.fingerprint:
            raise SourceMismatchError(
                f"{self.name}.{call} expected {embeddings.modality} embeddings from {expected}, got "
                f"{embeddings.source} ({expected.difference(embeddings.source)}); use one frozen model for everything"
            )

    def _has_what_it_needs(self, embeddings: Embeddings) -> None:
        if self.needs_views and embeddings.n_views < 2:
            raise InputError(
                f"{self.name} expected at least 2 views of every {embeddings.modality}, got {embeddings.n_views}; "
                "extract the store again with views=10"
            )
        if self.needs_features and (embeddings.features is None or embeddings.projection is None):
            raise InputError(
                f"{self.name} expected the features of the {embeddings.modality} encoder's last layer, got embeddings "
                "without; build the store with features=True (on the command line --features), or give features= and "
                "projection= to Embeddings"
            )

    def _batch(self, embeddings: Embeddings, start: int, size: int, device: str | torch.device, seed: int) -> Batch:
        stop = min(start + size, len(embeddings))
        values = as_float32(embeddings.values[start:stop], device)
        views = as_float32(embeddings.views[start:stop], device) if self.needs_views else None
        features = as_float32(embeddings.features[start:stop], device) if self.needs_features else None
        _checks.finite(values, what=f"{embeddings.modality} embeddings", ids=embeddings.ids[start:stop])
        if features is not None:
            _checks.finite(features, what=f"features of {embeddings.modality}s", ids=embeddings.ids[start:stop])
        return Batch(values=values, views=views, features=features, modality=embeddings.modality, seed=seed)


def _parts(pairs: Pairs, validation: Pairs | None) -> list[Embeddings]:
    return [part for both in (pairs, validation) if both is not None for part in (both.images, both.texts)]
