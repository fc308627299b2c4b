"""The adapter `laplace`: how well do the data determine the last linear layers, and what does that leave open?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from grove_adapters import seeding
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.adapters.laplace.likelihoods import Likelihood, Sigmoid, Softmax
from grove_adapters.adapters.laplace.posterior import Damping, KroneckerPosterior
from grove_adapters.adapters.loop import hold_out
from grove_adapters.config import Config
from grove_adapters.embeddings import MODALITIES, Pairs, Projection, Source, as_float32
from grove_adapters.errors import InputError
from grove_adapters.similarity import cosine_moments

PSEUDO_DATA_COUNTS = tuple(10.0 ** (power / 2) for power in range(-8, 9))
"""What is tried for τ where it is to be chosen: from 1e-4 to 1e4 in half decades."""


@dataclass(frozen=True, kw_only=True)
class LaplaceConfig(Config):
    """Settings of the Laplace adapter; ``preset="paper"`` beside them starts from the published ones.

    Attributes:
        batch_size: Links at once; the items of the other modality among them are the candidates of the loss, as in the
            model's training.
        pseudo_data_count: τ, how often every item counts: the fitted data stand for that many times as much. None
            chooses the τ under which held-out matches are the most probable, or takes 1 where none can be held out.
        prior_precision: λ of the Gaussian prior of both layers' weights; None maximises the evidence of each layer.
        damping: ``"exact"`` adds λ to the eigenvalues of the Kronecker product; ``"factored"`` adds √λ to those of both
            factors, as published, which makes the variances smaller.
        loss: ``"softmax"`` (InfoNCE) or ``"sigmoid"`` (SigLIP); None takes the sigmoid where the source has a logit
            bias.
        logit_scale: a, the multiplier of cosines the model was trained with; None takes the source's.
        logit_bias: b, which the sigmoid loss adds; None takes the source's, or 0.
        validation_share: Share of the images held out to choose τ by, where the caller gives none.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"batch_size": 32_768, "damping": "factored"}}

    batch_size: int = 1024
    pseudo_data_count: float | None = None
    prior_precision: float | None = None
    damping: Damping = "exact"
    loss: Literal["softmax", "sigmoid"] | None = None
    logit_scale: float | None = None
    logit_bias: float | None = None
    validation_share: float = 0.1

    def check(self) -> None:
        """Refuse settings out of range."""
        self.require(self.batch_size >= 2, "batch_size", "a whole number ≥ 2")
        for name in ("pseudo_data_count", "prior_precision", "logit_scale"):
            value = getattr(self, name)
            self.require(value is None or (math.isfinite(value) and value > 0), name, "a number > 0 or None")
        self.require(0 <= self.validation_share < 1, "validation_share", "a share from 0 up to, not including, 1")


class Laplace(Adapter):
    """A Laplace approximation of the posterior over the encoders' last linear layers. Nothing is trained.

    The layers are where training has left them. A Gaussian about each, whose precision is the curvature of the model's
    own loss on the fitted pairs, says how far its weights could be elsewhere without the loss noticing. An item whose
    features the data hardly determine, or whose vector g = W φ + b is short, could then lie in many directions.

    With (n τ A ⊗ B + λ I)⁻¹ as the covariance of W, g is Gaussian with covariance U_B diag(v) U_Bᵀ, where v_j =
    Σ_i (φᵀ u_i)² / (n τ α_i β_j + λ); see `KroneckerPosterior`. Its direction g / ‖g‖ has the mean and the variance of
    `Outputs.unit_moments`; where the source is not normalised, the posterior is that of g.

    All of the variance is epistemic: what the fitted pairs leave open about the layer, seen at the length of g. That is
    not ambiguity: over rendered scenes and the bundled model, it ranks captions against their known ambiguity (Spearman
    −.9), and images too (−.5), as a vague caption is a common one. Nor is it strangeness as such: there, pictures of
    noise have long vectors and count as certain. Measure on your own pairs whether it finds wrong matches.

    It reads features, so the store must have been built with them:

    ```python
    store = ga.EmbeddingStore.build(extractor, records, "photos-store", features=True)
    adapter = ga.create_adapter("laplace").fit(store.pairs("train"))
    images, texts = (adapter.predict(store.embeddings(m, "test")) for m in ("image", "text"))
    mean, variance = ga.similarity.cosine_moments(images, texts)  # of the cosine of every image and text
    ```

    Source: BayesVLM (Baumann et al., "Post-hoc Probabilistic Vision-Language Models", arXiv 2412.06014): separate
    posteriors of the two layers, Kronecker factors, τ by the predictive density, λ by the evidence. Deliberate
    differences: λ enters the eigenvalues of the product exactly (``damping="factored"`` is the published form); a bias
    is part of the layer; an item that is in a batch twice counts once; and the moments are those of the direction, so
    that what varies along g, which no cosine sees, is left out.
    """

    name = "laplace"
    config_class = LaplaceConfig
    needs_features = True

    config: LaplaceConfig

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """Settings for data of a few hundred pairs."""
        return {"batch_size": 256}

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        likelihood, chosen = self._likelihood(pairs.source), self.config.pseudo_data_count
        if chosen is None:
            pairs, validation = hold_out(pairs, validation, self.config.validation_share, run)
        posteriors = self._posteriors(pairs, likelihood, run)
        if chosen is None and validation is not None:
            chosen = self._most_probable(posteriors, validation, likelihood, run)
        self._settle(posteriors, 1.0 if chosen is None else chosen)
        for modality, posterior in posteriors.items():
            run.report.facts[modality] = {
                "items": int(posterior.items),
                "pseudo_data_count": float(posterior.pseudo_data_count),
                "prior_precision": float(posterior.prior_precision),
                "parameters": posterior.n_parameters,
                "effective_parameters": float(posterior.effective_parameters()),
                "log_evidence": float(posterior.log_evidence()),
            }
        return torch.nn.ModuleDict(posteriors)

    def _likelihood(self, source: Source) -> Likelihood:
        config = self.config
        scale = config.logit_scale or source.logit_scale
        if scale is None:
            raise InputError(
                f"{self.name} expected the logit scale the model was trained with, got a source without one "
                f"({source}); give logit_scale=100 for OpenAI's CLIP, or what your model's training ended with"
            )
        bias = source.logit_bias if config.logit_bias is None else config.logit_bias
        loss = config.loss or ("softmax" if bias is None else "sigmoid")
        return Softmax(scale) if loss == "softmax" else Sigmoid(scale, bias or 0.0)

    def _posteriors(self, pairs: Pairs, likelihood: Likelihood, run: FitRun) -> dict[str, KroneckerPosterior]:
        """Both layers with the factors of their curvatures, from one pass over the links in random order."""
        posteriors = {
            modality: KroneckerPosterior.around(projection, of_directions=pairs.source.normalised).to(run.device)
            for modality, projection in _projections(pairs).items()
        }
        a = {modality: torch.zeros_like(x.feature_vectors.double()) for modality, x in posteriors.items()}
        b = {modality: torch.zeros_like(x.output_vectors.double()) for modality, x in posteriors.items()}
        items = dict.fromkeys(MODALITIES, 0)
        order = np.random.default_rng(seeding.derive(run.seed, "batches")).permutation(len(pairs))
        for images, texts in self._batches(pairs.links[order], run):
            features = _features(pairs, images, texts, run.device)
            vectors = {modality: posteriors[modality].vectors(features[modality]) for modality in MODALITIES}
            for modality, other in (MODALITIES, MODALITIES[::-1]):
                inputs = posteriors[modality].inputs(features[modality])
                a[modality] += inputs.T @ inputs
                b[modality] += likelihood.curvature(vectors[modality], normalize(vectors[other], dim=1))
                items[modality] += len(inputs)
        for modality, n in items.items():
            if not float(b[modality].trace()) > 0:
                raise InputError(
                    f"{self.name} expected pairs on which the loss bends where the {modality} encoder changes, got a "
                    "flat one, as a single pair or equal embeddings make it; give more and different pairs"
                )
            posteriors[modality].condition(a[modality] / n, b[modality] / n, n)
        return posteriors

    def _batches(self, links: np.ndarray, run: FitRun) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows of the distinct images and texts of about `batch_size` links after others."""
        parts = np.array_split(links, math.ceil(len(links) / self.config.batch_size))
        for part in tqdm(parts, desc=f"{self.name}: batches of pairs", unit="batch", disable=not run.progress):
            yield np.unique(part[:, 0]), np.unique(part[:, 1])

    def _settle(self, posteriors: Mapping[str, KroneckerPosterior], pseudo_data_count: float) -> None:
        """Set τ, and λ as the settings say."""
        for posterior in posteriors.values():
            posterior.pseudo_data_count.fill_(pseudo_data_count)
            if self.config.prior_precision is None:
                posterior.maximise_evidence()
            else:
                posterior.prior_precision.fill_(self.config.prior_precision)

    def _most_probable(
        self, posteriors: Mapping[str, KroneckerPosterior], pairs: Pairs, likelihood: Likelihood, run: FitRun
    ) -> float:
        """The τ under which the matches of held-out pairs are the most probable."""
        covariances = {}
        for count in PSEUDO_DATA_COUNTS:
            self._settle(posteriors, count)
            covariances[count] = {name: x.covariances(self.config.damping) for name, x in posteriors.items()}
        surprises, n, truth = dict.fromkeys(covariances, 0.0), 0, pairs.truth()
        for images, texts in self._batches(pairs.links, run):
            features = _features(pairs, images, texts, run.device)
            matches = torch.from_numpy(truth[images][:, texts].toarray()).to(run.device)
            n += len(images)
            for count, of in covariances.items():
                moments = [
                    posterior.outputs(features[modality], of[modality]).unit_moments()
                    for modality, posterior in posteriors.items()
                ]
                surprises[count] += len(images) * float(likelihood.surprise(*cosine_moments(*moments), matches))
        run.report.chosen_by = "predictive density of held-out matches"
        run.report.facts["surprise"] = {f"{count:g}": total / n for count, total in surprises.items()}
        chosen = min(surprises, key=lambda count: surprises[count])
        if chosen == max(surprises):
            run.report.warnings.append(
                f"held-out matches are the most probable under the largest pseudo_data_count tried, {chosen:g}: the "
                "variances do not help to predict matches here; compare with other adapters, or set pseudo_data_count"
            )
        return chosen

    def _facts(self) -> dict[str, Any]:
        return {
            modality: {"width": posterior.weight.shape[1], "has_bias": len(posterior.bias) > 0}
            for modality, posterior in _named(self.module_).items()
        }

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        return torch.nn.ModuleDict({modality: KroneckerPosterior(dim, **facts[modality]) for modality in MODALITIES})

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        posterior = _named(self.module_)[batch.modality]
        assert batch.features is not None  # the base class has refused embeddings without features
        dim, width = posterior.weight.shape
        if batch.features.shape[1] not in (width, width + dim):
            raise InputError(
                f"{self.name} was fitted on {width} features of every {batch.modality} but predict got "
                f"{batch.features.shape[1]}; use features of the same layer"
            )
        outputs = posterior.outputs(batch.features, posterior.covariances(self.config.damping))
        mean, variance = outputs.unit_moments() if posterior.of_directions else outputs.moments()
        return {"mean": mean, "variance": variance, "epistemic": variance}


def _features(pairs: Pairs, images: np.ndarray, texts: np.ndarray, device: torch.device) -> dict[str, torch.Tensor]:
    """Features of the given rows; in float64, as differences of squares are to come."""
    return {
        "image": as_float32(pairs.images.features[images], device).double(),
        "text": as_float32(pairs.texts.features[texts], device).double(),
    }


def _projections(pairs: Pairs) -> dict[str, Projection]:
    parts = {part.modality: part.projection for part in (pairs.images, pairs.texts)}
    return {modality: projection for modality, projection in parts.items() if projection is not None}


def _named(module: torch.nn.Module) -> dict[str, KroneckerPosterior]:
    return {name: part for name, part in module.named_children() if isinstance(part, KroneckerPosterior)}
