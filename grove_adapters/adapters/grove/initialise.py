"""Where a fit starts: latents from principal components, inducing inputs from k-means, scales from the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from grove_adapters.adapters.grove.data import LinkedRows
from grove_adapters.embeddings import MODALITIES
from grove_adapters.errors import InputError

SAMPLE = 20_000  # links from which directions, inducing inputs and length scale are estimated
FEW = 4  # times as many dimensions as links make links the cheaper side to find directions from


@dataclass(frozen=True)
class Start:
    """Starting values.

    Attributes:
        latents: (N, L) float32, unit variance in every direction the data fill, zeros in the others.
        constants: (D,) mean of each modality.
        variances: Mean variance of one dimension, for each modality.
    """

    latents: torch.Tensor
    constants: dict[str, torch.Tensor]
    variances: dict[str, float]


def start(data: LinkedRows, latent_dim: int, seed: int, *, random: bool = False) -> Start:
    """Principal components of the joint (image, text) embeddings, each modality centred and weighed by its variance.

    Args:
        data: The links.
        latent_dim: L.
        seed: Address of the random numbers.
        random: Draw the latents from N(0, I) instead, as published.

    Raises:
        InputError: All embeddings of one modality are equal.
    """
    constants: dict[str, torch.Tensor] = {name: torch.zeros(data.dim, dtype=torch.float64) for name in MODALITIES}
    for _, batch in data.sweep():
        for modality, values in batch.items():
            constants[modality] += values.double().sum(0).cpu() / len(data)
    numbers = np.random.default_rng(seed)
    sample = np.sort(numbers.choice(len(data), min(SAMPLE, len(data)), replace=False))
    few = FEW * len(sample) < 2 * data.dim  # of so many dimensions that a matrix between links is the smaller one
    if few:
        scatter = _joint(data.fetch(sample), constants).double() / math.sqrt(len(sample))
        diagonal = scatter.square().sum(0)
    else:
        scatter = torch.zeros(2 * data.dim, 2 * data.dim, dtype=torch.float64)
        for rows in np.array_split(sample, math.ceil(len(sample) / 4096)):
            joint = _joint(data.fetch(rows), constants)
            scatter += (joint.T @ joint).double() / len(sample)
        diagonal = scatter.diagonal()
    variances: dict[str, float] = {}
    for place, modality in enumerate(MODALITIES):
        block = diagonal[place * data.dim : (place + 1) * data.dim]
        variances[modality] = float(block.mean())
        if variances[modality] < 1e-12 * max(1.0, float(constants[modality].square().max())):
            raise InputError(
                f"grove expected {modality} embeddings that differ, got {len(data)} links to equal ones; "
                "check how the embeddings were made"
            )
    if random:
        latents = torch.from_numpy(numbers.standard_normal((len(data), latent_dim))).float()
    else:
        weights = torch.cat([torch.full((data.dim,), variances[modality] ** -0.5) for modality in MODALITIES])
        leading = _from_links if few else _from_covariance
        latents = _components(
            data, constants, *leading(scatter, weights.double(), latent_dim), weights.double(), latent_dim
        )
    return Start(latents, {name: value.float() for name, value in constants.items()}, variances)


def _joint(batch: dict[str, torch.Tensor], constants: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([batch[modality].cpu() - constants[modality].float() for modality in MODALITIES], 1)


def _from_covariance(covariance: torch.Tensor, weights: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(≤ n,) largest eigenvalues, and (2D, ≤ n) eigenvectors, of the weighted (2D, 2D) covariance."""
    values, vectors = torch.linalg.eigh(weights[:, None] * covariance * weights)
    return values.flip(0)[:n], vectors.flip(1)[:, :n]


def _from_links(joint: torch.Tensor, weights: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the (P, 2D) centred links over √P: their right singular vectors."""
    _, values, vectors = torch.linalg.svd(joint * weights, full_matrices=False)
    return values.square()[:n], vectors[:n].T


def _components(
    data: LinkedRows,
    constants: dict[str, torch.Tensor],
    values: torch.Tensor,
    vectors: torch.Tensor,
    weights: torch.Tensor,
    latent_dim: int,
) -> torch.Tensor:
    """(N, L) scores of the leading principal components, scaled to unit variance."""
    vectors = vectors * vectors.sum(0).sign()  # eigenvectors have no sign of their own
    filled = values > 1e-9 * values[0]
    directions = torch.zeros(len(weights), latent_dim)
    directions[:, : len(values)] = torch.where(filled, weights[:, None] * vectors * values.abs().rsqrt(), 0).float()
    latents = torch.empty(len(data), latent_dim)  # whole at once: small pieces kept between large ones pin memory
    for rows, batch in data.sweep():
        latents[rows] = _joint(batch, constants) @ directions
    return latents


def inducing_inputs(latents: torch.Tensor, n: int, seed: int) -> torch.Tensor:
    """(≤ n, L) k-means centres of the latents; fewer where fewer of them are distinct."""
    from sklearn.cluster import KMeans

    sample = sampled(latents, SAMPLE, seed).double().numpy()
    distinct = np.unique(sample, axis=0)
    if len(distinct) <= n:
        return torch.from_numpy(distinct).float()
    means = KMeans(n, init="k-means++", n_init=1, max_iter=20, algorithm="lloyd", random_state=seed % 2**32)
    return torch.from_numpy(means.fit(sample).cluster_centers_).float()


def median_distance(latents: torch.Tensor, seed: int) -> float:
    """Median distance between two latents, the usual first length scale; 1 where all of them are equal."""
    distance = float(torch.pdist(sampled(latents, 1000, seed).double()).median()) if len(latents) > 1 else 0.0
    return distance or 1.0


def sampled(latents: torch.Tensor, n: int, seed: int) -> torch.Tensor:
    """At most `n` rows, drawn without replacement."""
    if len(latents) <= n:
        return latents
    rows = np.sort(np.random.default_rng(seed).choice(len(latents), n, replace=False))
    return latents[torch.from_numpy(rows)]
