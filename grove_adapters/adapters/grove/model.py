"""Two sparse GPs on one latent space, and their objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from grove_adapters.adapters.grove.alignments import Alignment, Marginal
from grove_adapters.adapters.grove.data import LinkedRows
from grove_adapters.adapters.grove.gp import Noise, SparseGP, SparseProcess
from grove_adapters.adapters.grove.inference import LatentInference
from grove_adapters.adapters.grove.mismatch import Mismatch
from grove_adapters.adapters.grove.natural import NaturalGradient
from grove_adapters.embeddings import MODALITIES


class Decoders(torch.nn.Module):
    """What prediction needs: the GP of each modality, and latents from which the search for a new one may start.

    Attributes:
        image: GP from latents to image embeddings.
        text: GP from latents to text embeddings.
        anchors: (A, L) latents of training links, spread over all of them.
        share: How far a predictive mean around the frozen embedding goes towards the decoding.
        cross_shares: (2, 2) the same for predictions of the other modality from an image and from a text: how far by
            the difference of the two decodings, and from there how far to the other's decoding.
        cross_noise: (2, 2) log noise variance of those predictions, and how much it rises with a standard deviation
            of the mismatch.
        mismatch: How far the partners of an item are, by modality.
        searches: Latent inference made ready, by modality and device; nothing that is learned.

    Args:
        n_inducing: M.
        latent_dim: L.
        dim: D.
        n_anchors: A.
        kinds: Kernel, ARD, covariance and noise of the GPs, see `SparseGP`.
    """

    def __init__(self, n_inducing: int, latent_dim: int, dim: int, n_anchors: int, **kinds: Any) -> None:
        super().__init__()
        self.image = SparseGP(n_inducing, latent_dim, dim, "image", **kinds)
        self.text = SparseGP(n_inducing, latent_dim, dim, "text", **kinds)
        self.register_buffer("anchors", torch.zeros(n_anchors, latent_dim))
        self.register_buffer("share", torch.zeros(()))
        self.register_buffer("cross_shares", torch.zeros(2, 2))
        self.register_buffer("cross_noise", torch.zeros(2, 2))
        self.mismatch = torch.nn.ModuleDict({modality: Mismatch(n_inducing) for modality in MODALITIES})
        self.searches: dict[Any, LatentInference] = {}

    anchors: torch.Tensor
    share: torch.Tensor
    cross_shares: torch.Tensor
    cross_noise: torch.Tensor

    def mismatch_of(self, modality: str) -> Mismatch:
        """How far the partners of that modality's items are."""
        mismatch = self.mismatch[modality]
        assert isinstance(mismatch, Mismatch)
        return mismatch

    def expected_mismatch(self, modality: str, latents: torch.Tensor, *, standardised: bool = False) -> torch.Tensor:
        """(B,) mismatch to expect at latents, as a log squared distance or in standard deviations."""
        mismatch = self.mismatch_of(modality)
        values = mismatch(self.gps[modality], latents)
        return mismatch.standardised(values) if standardised else values

    @property
    def gps(self) -> dict[str, SparseGP]:
        """Both GPs by modality."""
        return {"image": self.image, "text": self.text}

    @property
    def processes(self) -> dict[str, SparseProcess]:
        """All that has a q(u): both GPs by modality, and the processes of their noise by `noise_of` it."""
        noises = {noise_of(modality): gp.noise_process for modality, gp in self.gps.items()}
        return {**self.gps, **{name: process for name, process in noises.items() if process is not None}}


def noise_of(modality: str) -> str:
    """The name of a modality's noise process."""
    return f"{modality} noise"


def expected_log_likelihood(
    deviation: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, noise: Noise
) -> torch.Tensor:
    """E[log N(z | g, σ² I)] for g_d ~ N(mean_d, variance_d), summed over d, in nats.

    Args:
        deviation: (B, D) z − c.
        mean: (B, D) mean of g.
        variance: (B, D), or (B, 1) where all outputs share it.
        noise: σ², independent of g.

    Returns:
        (B,).

    Source: GroVE, Eq. 6, the likelihood part; with noise that is uncertain, Lázaro-Gredilla and Titsias 2011, Eq. 8.
    """
    scale, precision = noise.log + math.log(2 * math.pi), noise.precision
    return -0.5 * (mean.shape[1] * scale.flatten() + _square_error(deviation, mean, variance) * precision.flatten())


def _square_error(deviation: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """E‖z − c − g‖², (B,)."""
    return (deviation - mean).square().sum(1) + mean.shape[1] * variance.mean(1)


class Objective:
    """The training objective over minibatches of links, per link and dimension.

    λ₁ (−ELBO) + λ₂ A, where the ELBO of a link is E[log p(z_I)] + E[log p(z_T)] − KL(q(u) ‖ p(u)) / N plus the log
    prior of its latent, and A is the alignment. All of it is divided by λ₁ D, which changes no optimum and makes values
    comparable between models.

    Args:
        decoders: The two GPs.
        latents: (N, L) latent of each link, as an embedding with sparse gradients.
        data: The links.
        alignment: What holds the modalities together.
        weight: λ₂ / λ₁ of it.
        align_constants: Whether the alignment sees the constants c too, as published, or only what varies around them.
        prior: Whether latents have the prior N(0, I).
        natural: The optimiser of q(u), told about every minibatch, or None.

    Source: GroVE, Eqs. 6–10 in the per-datum convention of its public code.
    """

    def __init__(
        self,
        decoders: Decoders,
        latents: torch.nn.Embedding,
        data: LinkedRows,
        *,
        alignment: Alignment,
        weight: float,
        align_constants: bool,
        prior: bool,
        natural: NaturalGradient | None,
    ) -> None:
        self._decoders = decoders
        self._latents = latents
        self._data = data
        self._alignment = alignment
        self._weight = weight
        self._prior = prior
        self._natural = natural
        gap = decoders.image.constant - decoders.text.constant
        self._gap = gap if align_constants else torch.zeros_like(gap)

    def __call__(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Terms of one minibatch of links; everything but the loss in nats per link, summed over dimensions."""
        x, batch = self._latents(rows.to(self._latents.weight.device)), self._data.fetch(rows)
        features, marginals = self._marginals(x)
        self._observe(features, marginals, batch)
        terms = self._terms(x, batch, marginals)
        divergences = [process.divergence() for process in self._decoders.processes.values()]
        divergence = torch.stack(divergences).sum() / len(self._data)
        terms["loss"] = terms["loss"] + divergence / self._data.dim
        return {**terms, "divergence": divergence}

    @torch.no_grad()
    def held_out(self, x: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> float:
        """The same loss for links that were not fitted, at given latents; KL(q(u) ‖ p(u)) belongs to the fit alone."""
        return float(self._terms(x, batch, self._marginals(x)[1])["loss"])

    def _marginals(self, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Marginal]]:
        processes = self._decoders.processes
        features = {name: process.differentiable_features(x) for name, process in processes.items()}
        return features, {name: process.marginal(features[name]) for name, process in processes.items()}

    @staticmethod
    def _noise(modality: str, gp: SparseGP, marginals: Mapping[str, Marginal]) -> Noise:
        return gp.noise_given(marginals.get(noise_of(modality)))

    def _terms(
        self, x: torch.Tensor, batch: Mapping[str, torch.Tensor], marginals: Mapping[str, Marginal]
    ) -> dict[str, torch.Tensor]:
        likelihood = x.new_zeros(())
        for modality, gp in self._decoders.gps.items():
            deviation = batch[modality] - gp.constant
            noise = self._noise(modality, gp, marginals)
            likelihood = likelihood + expected_log_likelihood(deviation, *marginals[modality], noise).mean()
        alignment = self._alignment(x, batch, self._shifted(marginals), self._decoders.gps)
        total = self._weight * alignment - likelihood
        if self._prior:
            total = total + 0.5 * x.double().square().sum(1).mean()
        return {"loss": total / self._data.dim, "log_likelihood": likelihood, "alignment": alignment}

    def _shifted(self, marginals: Mapping[str, Marginal]) -> dict[str, Marginal]:
        """The marginals as the alignment is to see them, with or without the gap of the constants."""
        mean, variance = marginals["image"]
        return {"image": (mean + self._gap, variance), "text": marginals["text"]}

    @torch.no_grad()
    def _observe(
        self,
        features: Mapping[str, torch.Tensor],
        marginals: Mapping[str, Marginal],
        batch: Mapping[str, torch.Tensor],
    ) -> None:
        """Tell the natural-gradient optimiser the curvatures of this minibatch."""
        if self._natural is None:
            return
        coupling, bends = self._alignment.stiffness(*self._shifted(marginals).values())
        for modality, gp in self._decoders.gps.items():
            precision = self._noise(modality, gp, marginals).precision.flatten()
            weights = precision + self._weight * coupling, self._weight * bends[modality]
            self._natural.observe(modality, features[modality], marginals[modality][1], *weights)
            name = noise_of(modality)
            if name in features:
                # the likelihood's ½ E‖z − c − g‖² E[1 / σ²] is exp(−m + v / 2) times what m and v do not touch
                misfit = 0.5 * _square_error(batch[modality] - gp.constant, *marginals[modality]) * precision
                variance = marginals[name][1]
                weights = misfit.clamp_min(0.5 * gp.dim), 0.25 * misfit * variance.flatten().square()
                self._natural.observe(name, features[name], variance, *weights)
