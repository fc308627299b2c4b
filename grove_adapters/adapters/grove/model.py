"""Two sparse GPs on one latent space, and their objective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from grove_adapters.adapters.grove.alignments import Alignment, Marginal
from grove_adapters.adapters.grove.data import LinkedRows
from grove_adapters.adapters.grove.gp import SparseGP
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
        kinds: Kernel, ARD and covariance of the GPs, see `SparseGP`.
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


def expected_log_likelihood(
    deviation: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """E[log N(z | g, σ² I)] for g_d ~ N(mean_d, variance_d), summed over d, in nats.

    Args:
        deviation: (B, D) z − c.
        mean: (B, D) mean of g − c.
        variance: (B, D), or (B, 1) where all outputs share it.
        noise: σ².

    Returns:
        (B,).

    Source: GroVE, Eq. 6, the likelihood part.
    """
    dim = mean.shape[1]
    square = (deviation - mean).square().sum(1) + dim * variance.mean(1)
    return -0.5 * (dim * torch.log(2 * math.pi * noise) + square / noise)


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
        x = self._latents(rows.to(self._latents.weight.device))
        features, marginals = self._marginals(x)
        self._observe(features, marginals)
        terms = self._terms(x, self._data.fetch(rows), marginals)
        divergence = (self._decoders.image.divergence() + self._decoders.text.divergence()) / len(self._data)
        terms["loss"] = terms["loss"] + divergence / self._data.dim
        return {**terms, "divergence": divergence}

    @torch.no_grad()
    def held_out(self, x: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> float:
        """The same loss for links that were not fitted, at given latents; KL(q(u) ‖ p(u)) belongs to the fit alone."""
        return float(self._terms(x, batch, self._marginals(x)[1])["loss"])

    def _marginals(self, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Marginal]]:
        features = {modality: gp.differentiable_features(x) for modality, gp in self._decoders.gps.items()}
        return features, {modality: gp.marginal(features[modality]) for modality, gp in self._decoders.gps.items()}

    def _terms(
        self, x: torch.Tensor, batch: Mapping[str, torch.Tensor], marginals: Mapping[str, Marginal]
    ) -> dict[str, torch.Tensor]:
        likelihood = x.new_zeros(())
        for modality, gp in self._decoders.gps.items():
            deviation = batch[modality] - gp.constant
            likelihood = likelihood + expected_log_likelihood(deviation, *marginals[modality], gp.noise).mean()
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
    def _observe(self, features: Mapping[str, torch.Tensor], marginals: Mapping[str, Marginal]) -> None:
        if self._natural is None:
            return
        coupling, bends = self._alignment.stiffness(*self._shifted(marginals).values())
        for modality, gp in self._decoders.gps.items():
            self._natural.observe(
                modality,
                features[modality],
                marginals[modality][1],
                1 / gp.noise + self._weight * coupling,
                self._weight * bends[modality],
            )
