"""Two sparse GPs on one latent space, their objective, and the natural-gradient step of q(u)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from grove_adapters.adapters.grove.data import LinkedRows
from grove_adapters.adapters.grove.gp import SparseGP, cholesky
from grove_adapters.embeddings import MODALITIES

Marginal = tuple[torch.Tensor, torch.Tensor]
"""(B, D) mean less the constant and (B, 1) variance, as `SparseGP.marginal` gives them."""


class Decoders(torch.nn.Module):
    """What prediction needs: the GP of each modality, and latents from which the search for a new one may start.

    Attributes:
        image: GP from latents to image embeddings.
        text: GP from latents to text embeddings.
        anchors: (A, L) latents of training links, spread over all of them.
    """

    def __init__(self, n_inducing: int, latent_dim: int, dim: int, n_anchors: int) -> None:
        super().__init__()
        self.image = SparseGP(n_inducing, latent_dim, dim, "image")
        self.text = SparseGP(n_inducing, latent_dim, dim, "text")
        self.register_buffer("anchors", torch.zeros(n_anchors, latent_dim))

    anchors: torch.Tensor

    @property
    def gps(self) -> dict[str, SparseGP]:
        """Both GPs by modality."""
        return {"image": self.image, "text": self.text}


def expected_log_likelihood(
    deviation: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """E[log N(z | g, σ² I)] for g_d ~ N(mean_d, variance), summed over d, in nats.

    Args:
        deviation: (B, D) z − c.
        mean: (B, D) mean of g − c.
        variance: (B, 1).
        noise: σ².

    Returns:
        (B,).

    Source: GroVE, Eq. 6, the likelihood part.
    """
    dim = mean.shape[1]
    square = (deviation - mean).square().sum(1) + dim * variance[:, 0]
    return -0.5 * (dim * torch.log(2 * math.pi * noise) + square / noise)


def symmetric_kl(
    mean_a: torch.Tensor, variance_a: torch.Tensor, mean_b: torch.Tensor, variance_b: torch.Tensor
) -> torch.Tensor:
    """½ [KL(a ‖ b) + KL(b ‖ a)] of D-dim Gaussians whose variance is the same in every dimension, in nats.

    Args:
        mean_a: (B, D).
        variance_a: (B, 1).
        mean_b: (B, D).
        variance_b: (B, 1).

    Returns:
        (B,).

    Source: GroVE, Eq. 9.
    """
    ratio = (variance_a / variance_b)[:, 0]
    mahalanobis = (mean_a - mean_b).square().sum(1) * (1 / variance_a + 1 / variance_b)[:, 0]
    return 0.25 * (mean_a.shape[1] * (ratio + 1 / ratio - 2) + mahalanobis)


class NaturalGradient(torch.optim.Optimizer):
    """Natural-gradient steps of every q(u), which know the scale of their own problem and so need no tuned rate.

    Given the other modality the objective is quadratic in m with curvature T = I + (N/B) Σ τₙ rₙ rₙᵀ, kept as a running
    mean over minibatches, and m takes a share of a Newton step: m ← m − ρ T⁻¹ ∇. The factor F of S takes the
    natural-gradient step in its own coordinates, F ← F (I − ρ G / (1 + κ)) with G the lower triangle of Fᵀ ∇_F and its
    diagonal halved. The Fisher metric does not know the alignment, whose curvature is bounded by κ: without it a strong
    alignment makes the two S swing against each other. The step is cut to norm 1/2, so S stays positive definite.
    ρ = rate · min(1, B / M).

    Args:
        gps: The GPs whose `mean` and `root` are optimised.
        n_rows: N, the number of links.
        rate: ρ of a minibatch of at least M links, in (0, 1].

    Source: Hensman, Fusi and Lawrence 2013 (stochastic variational inference for GPs); Lin, Nielsen, Khan and Schmidt
    2021 (local coordinates for triangular factors). GroVE uses Adam, whose rate of 1e-5 moves nothing (erratum E6).
    """

    def __init__(self, gps: Mapping[str, SparseGP], n_rows: int, rate: float) -> None:
        super().__init__([parameter for gp in gps.values() for parameter in (gp.mean, gp.root)], {"rate": rate})
        self._gps = dict(gps)
        self._n_rows = n_rows
        self._rate = rate
        self._share = rate
        self._curvature: dict[str, torch.Tensor] = {}
        self._stiffness: dict[str, float] = {}

    @torch.no_grad()
    def observe(
        self,
        modality: str,
        features: torch.Tensor,
        variance: torch.Tensor,
        mean_weights: torch.Tensor,
        variance_weights: torch.Tensor,
    ) -> None:
        """Take note of a minibatch.

        Args:
            modality: Whose GP.
            features: (B, M) r.
            variance: (B, 1) v.
            mean_weights: (B,) τ, second derivative of a link's objective by one output's mean.
            variance_weights: (B,) second derivative of a link's alignment, per output, by log v.
        """
        batch, n_inducing = features.shape
        scale = self._n_rows / batch
        features = features.float()
        curvature = ((features.T * (scale * mean_weights).float()) @ features).double()
        curvature.diagonal().add_(1)
        self._share = self._rate * min(1.0, batch / n_inducing)
        if modality in self._curvature:
            self._curvature[modality].lerp_(curvature, self._share)
        else:
            self._curvature[modality] = curvature
        spread = features @ self._gps[modality].root.tril() / variance.sqrt().float()
        # ∂ log v / ∂E = 2 h hᵀ / v in local coordinates; a largest eigenvalue is at most the largest row sum
        self._stiffness[modality] = float(4 * scale * ((spread @ spread.T).square() @ variance_weights.float()).max())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step from the gradients of the objective per link and dimension."""
        for modality, gp in self._gps.items():
            assert gp.mean.grad is not None
            assert gp.root.grad is not None
            factor, _ = cholesky(self._curvature[modality], what=f"{modality} curvature of the variational means")
            newton = torch.cholesky_inverse(factor).float() @ gp.mean.grad
            gp.mean.sub_(newton, alpha=self._share * self._n_rows * gp.dim)
            root = gp.root.tril()
            local = (root.T @ gp.root.grad.tril()).tril_()
            local.diagonal().mul_(0.5)
            local.mul_(self._share * self._n_rows / (1 + self._stiffness[modality]))
            local.div_((2 * local.norm()).clamp_min(1.0))
            gp.root.copy_(root - root @ local)


class Objective:
    """The training objective over minibatches of links, per link and dimension.

    λ₁ (−ELBO) + λ₂ KL, where the ELBO of a link is E[log p(z_I)] + E[log p(z_T)] − KL(q(u) ‖ p(u)) / N plus the log
    prior of its latent, and the alignment is the symmetric KL between the two GPs' marginals (without noise) at it.
    All of it is divided by λ₁ D, which changes no optimum and makes values comparable between models.

    Args:
        decoders: The two GPs.
        latents: (N, L) latent of each link, as an embedding with sparse gradients.
        data: The links.
        alignment: λ₂ / λ₁.
        align_constants: Whether the alignment sees the constants c too, as published, or only what varies around them.
        prior: Whether latents have the prior N(0, I).
        natural: The optimiser of q(u), told about every minibatch.

    Source: GroVE, Eqs. 6–10 in the per-datum convention of its public code.
    """

    def __init__(
        self,
        decoders: Decoders,
        latents: torch.nn.Embedding,
        data: LinkedRows,
        *,
        alignment: float,
        align_constants: bool,
        prior: bool,
        natural: NaturalGradient,
    ) -> None:
        self._decoders = decoders
        self._latents = latents
        self._data = data
        self._alignment = alignment
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
        features = {modality: gp.features(x, gp.factor()) for modality, gp in self._decoders.gps.items()}
        return features, {modality: gp.marginal(features[modality]) for modality, gp in self._decoders.gps.items()}

    def _terms(
        self, x: torch.Tensor, batch: Mapping[str, torch.Tensor], marginals: Mapping[str, Marginal]
    ) -> dict[str, torch.Tensor]:
        likelihood = x.new_zeros(())
        for modality, gp in self._decoders.gps.items():
            deviation = batch[modality] - gp.constant
            likelihood = likelihood + expected_log_likelihood(deviation, *marginals[modality], gp.noise).mean()
        (mean_i, variance_i), (mean_t, variance_t) = (marginals[modality] for modality in MODALITIES)
        alignment = symmetric_kl(mean_i + self._gap, variance_i, mean_t, variance_t).mean()
        total = self._alignment * alignment - likelihood
        if self._prior:
            total = total + 0.5 * x.double().square().sum(1).mean()
        return {"loss": total / mean_i.shape[1], "log_likelihood": likelihood, "alignment": alignment}

    @torch.no_grad()
    def _observe(self, features: Mapping[str, torch.Tensor], marginals: Mapping[str, Marginal]) -> None:
        (mean_i, variance_i), (mean_t, variance_t) = (marginals[modality] for modality in MODALITIES)
        gap = (mean_i + self._gap - mean_t).square().mean(1)
        coupling = 0.5 * self._alignment * (1 / variance_i + 1 / variance_t)[:, 0]
        ratio = 0.25 * (variance_i / variance_t + variance_t / variance_i)[:, 0]
        for modality, gp in self._decoders.gps.items():
            variance = marginals[modality][1]
            self._natural.observe(
                modality,
                features[modality],
                variance,
                1 / gp.noise + coupling,
                self._alignment * (ratio + 0.25 * gap / variance[:, 0]),
            )
