"""An adapter whose uncertainty is a probability: the chance that the nearest item of the other modality is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from grove_adapters import adapters
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.adapters.loop import FEWEST_IMAGES, hold_out
from grove_adapters.adapters.wrapping import described, fit_inside, posterior_of, revived, whole_batch
from grove_adapters.config import Config
from grove_adapters.embeddings import MODALITIES, Pairs, as_float32
from grove_adapters.errors import InputError

SMALLEST_SLOPE = 1e-3  # per deviation; keeps the order of uncertainties that say nothing about wrong matches
CHUNK = 1024  # queries compared with the gallery at once


@dataclass(frozen=True, kw_only=True)
class RecalibratedConfig(Config):
    """Settings of a recalibrated adapter.

    Attributes:
        inner: Registered name and settings of the wrapped adapter, ``{"adapter": …, "config": {…}}``; a PFE unless
            given.
        validation_share: Share of the images held out for the map, where the caller gives no validation pairs.
    """

    inner: dict = field(default_factory=lambda: {"adapter": "pfe", "config": {}})
    validation_share: float = 0.2

    def check(self) -> None:
        """Refuse a share that leaves nothing to one side."""
        self.require(0 < self.validation_share < 1, "validation_share", "a share above 0 and below 1")


class Recalibrated(Adapter):
    """A wrapped adapter with a strictly increasing map on its uncertainty, so that no ranking changes.

    The map of each modality is a logistic regression, fitted on validation pairs that the wrapped adapter has not
    seen: from its uncertainty, in deviations, to whether the frozen embedding nearest by cosine among the validation
    items of the other modality is a wrong one. The chance of that grows with the number of candidates, which the
    report names; read it as a probability for galleries of about that size. Everything else of the posterior is left
    as it is. It speaks of an item before anything is searched; what a search has found is mapped to a probability by
    `calibration.recalibrate`.

    Args:
        inner: An adapter, of which only the settings are taken, or its description; or the settings of a recalibrated
            one.
        settings: Settings by name, beside an adapter.

    Source: Platt 1999, with the slope bounded from below.
    """

    name = "recalibrated"
    config_class = RecalibratedConfig

    config: RecalibratedConfig

    def __init__(self, inner: Adapter | Mapping[str, Any] | RecalibratedConfig | None = None, **settings: Any) -> None:
        if isinstance(inner, Adapter | Mapping):
            settings, inner = {"inner": described(inner), **settings}, None
        super().__init__(inner, **settings)
        self.inner_ = revived(self.config.inner)
        self.needs_views = self.inner_.needs_views  # type: ignore[misc]
        self.needs_features = self.inner_.needs_features  # type: ignore[misc]
        self.posterior_class = self.inner_.posterior_class  # type: ignore[misc]

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """A small PFE inside."""
        kind = adapters.ADAPTERS.get("pfe")
        return {"inner": described(kind(**kind.small_settings()))}

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        pairs, validation = hold_out(pairs, validation, self.config.validation_share, run)
        if validation is None:
            raise InputError(
                f"{self.name} expected validation pairs or at least {FEWEST_IMAGES} images to hold some out, got "
                f"{len(pairs.images)}; give fit(…, validation=pairs)"
            )
        module = self._assembled(fit_inside(self.inner_, pairs, None, run, "inner"))
        run.report.chosen_by = run.report.stopped = "the wrapped adapter"
        for modality, (rows, wrong) in _wrong_matches(validation).items():
            embeddings = (validation.images if modality == "image" else validation.texts).take(rows)
            with torch.no_grad():
                batch = whole_batch(embeddings, run.seed, of=self)
                uncertainty = posterior_of(self.inner_, module.get_submodule("inner"), batch)[0].uncertainty.double()
            centre, spread = float(uncertainty.mean()), float(uncertainty.std(correction=0)) or 1.0
            slope, intercept = _logistic(((uncertainty - centre) / spread).numpy(), wrong)
            if slope <= SMALLEST_SLOPE:
                run.report.warnings.append(
                    f"the uncertainty of {modality}s says nothing about wrong matches of the {len(rows)} validation "
                    "queries, so every item gets about the same chance; use more pairs or another adapter"
                )
            module.get_buffer(modality).copy_(torch.tensor([centre, spread, slope, intercept]))
            run.report.facts[modality] = {
                "queries": len(rows),
                "candidates": len(validation.texts if modality == "image" else validation.images),
                "share_wrong": float(wrong.mean()),
                "slope": slope,
                "intercept": intercept,
            }
        return module

    def _assembled(self, inner: torch.nn.Module) -> torch.nn.Module:
        """The wrapped adapter's module and, for each modality, centre, spread, slope and intercept of the map."""
        module = torch.nn.Module()
        module.register_module("inner", inner)
        for modality in MODALITIES:
            module.register_buffer(modality, torch.zeros(4, dtype=torch.float64))
        return module

    def _facts(self) -> dict[str, Any]:
        self.inner_.module_ = self.module_.get_submodule("inner")
        return {"inner": self.inner_._facts()}

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        return self._assembled(self.inner_._build(dim, facts["inner"]))

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        posterior, _ = posterior_of(self.inner_, self.module_.get_submodule("inner"), batch)
        fields = {name: getattr(posterior, name) for name in posterior.tensor_fields}
        centre, spread, slope, intercept = self.module_.get_buffer(batch.modality).unbind()
        chance = torch.sigmoid(intercept + slope * (posterior.uncertainty.double() - centre) / spread)
        return {**{name: value for name, value in fields.items() if value is not None}, "uncertainty": chance}


def _wrong_matches(pairs: Pairs) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each modality the linked rows, and whether their nearest item of the other modality is a wrong one."""
    image, text = (
        torch.nn.functional.normalize(as_float32(part.values[:]), dim=1) for part in (pairs.images, pairs.texts)
    )
    images, texts = (np.unique(pairs.links[:, column]) for column in (0, 1))
    return {
        "image": (images, ~_matched(pairs, images, _nearest(image[images], text))),
        "text": (texts, ~_matched(pairs, _nearest(text[texts], image), texts)),
    }


def _nearest(queries: torch.Tensor, gallery: torch.Tensor) -> np.ndarray:
    return np.concatenate([(part @ gallery.T).argmax(1).numpy() for part in queries.split(CHUNK)])


def _matched(pairs: Pairs, images: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Whether each image belongs to the text beside it, by links, positives or the class of a linked image."""
    truth = pairs.truth()
    matched = np.asarray(truth[images, texts]).ravel().astype(bool)
    if pairs.classes is not None:
        _, labels = np.unique(pairs.classes, return_inverse=True)
        of_text = (truth.T @ np.eye(labels.max() + 1, dtype=np.int64)[labels]) > 0  # (T, classes)
        matched |= of_text[texts, labels[images]]
    return matched


def _logistic(values: np.ndarray, wrong: np.ndarray) -> tuple[float, float]:
    """Slope ≥ `SMALLEST_SLOPE` and intercept of the chance of `wrong` given standardised values."""
    from sklearn.linear_model import LogisticRegression

    if 0 < wrong.sum() < len(wrong):
        model = LogisticRegression().fit(values[:, None], wrong)
        slope, intercept = float(model.coef_[0, 0]), float(model.intercept_[0])
        if slope > SMALLEST_SLOPE:
            return slope, intercept
    share = (wrong.sum() + 1) / (len(wrong) + 2)
    return SMALLEST_SLOPE, math.log(share / (1 - share))
