"""What holds the two modalities together at a link: divergences of their marginals, or agreement of kernel matrices."""

from __future__ import annotations

import abc
from collections.abc import Mapping

import torch

from grove_adapters.adapters.grove.gp import SparseGP

Marginal = tuple[torch.Tensor, torch.Tensor]
"""(B, D) mean and (B, 1) or (B, D) variance of the outputs, as `SparseGP.marginal` gives them."""


class Alignment(abc.ABC):
    """A term of the objective, averaged over the links of a minibatch, and bounds of its curvature."""

    @abc.abstractmethod
    def __call__(
        self,
        x: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        marginals: Mapping[str, Marginal],
        gps: Mapping[str, SparseGP],
    ) -> torch.Tensor:
        """The term for latents (B, L), embeddings (B, D), marginals and GPs by modality."""

    def stiffness(self, image: Marginal, text: Marginal) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Bounds of a link's second derivatives for one output, by a mean (B,) and by each log-variance (B,)."""
        zeros = torch.zeros_like(image[1][:, 0])
        return zeros, {"image": zeros, "text": zeros}


class Unaligned(Alignment):
    """Nothing: the shared latents alone hold the modalities together."""

    def __call__(
        self,
        x: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        marginals: Mapping[str, Marginal],
        gps: Mapping[str, SparseGP],
    ) -> torch.Tensor:
        """0."""
        return x.new_zeros(())


class Divergence(Alignment):
    """A divergence between the two marginals (without noise) at each link, summed over the outputs."""

    def __call__(
        self,
        x: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        marginals: Mapping[str, Marginal],
        gps: Mapping[str, SparseGP],
    ) -> torch.Tensor:
        """The mean divergence."""
        return self.between(marginals["image"], marginals["text"]).mean()

    @abc.abstractmethod
    def between(self, a: Marginal, b: Marginal) -> torch.Tensor:
        """(B,) divergences of D-dim Gaussians, in nats where they have a unit."""


class SymmetricKL(Divergence):
    """½ [KL(a ‖ b) + KL(b ‖ a)].

    Source: GroVE, Eq. 9.
    """

    def between(self, a: Marginal, b: Marginal) -> torch.Tensor:
        """(B,) divergences."""
        (mean_a, variance_a), (mean_b, variance_b) = a, b
        ratio = variance_a / variance_b
        precision, square = 1 / variance_a + 1 / variance_b, (mean_a - mean_b).square()
        mahalanobis = square.sum(1, keepdim=True) * precision if precision.shape[1] == 1 else square * precision
        return 0.25 * (_summed(ratio + 1 / ratio - 2, mean_a.shape[1]) + mahalanobis.sum(1))

    def stiffness(self, image: Marginal, text: Marginal) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Exact for the means; for a log-variance ¼ (v_I/v_T + v_T/v_I + δ² / v)."""
        (_, v_i), (_, v_t) = image, text
        ratio, gap = v_i / v_t + v_t / v_i, _gap(image, text)
        by_variance = {name: 0.25 * (ratio + gap / v).amax(1) for name, v in (("image", v_i), ("text", v_t))}
        return 0.5 * (1 / v_i + 1 / v_t).amax(1), by_variance


class JensenShannon(Divergence):
    """½ Σ log(v_m / √(v_a v_b)) with v_m = ½ (v_a + v_b) + ¼ (μ_a − μ_b)².

    The mixture of two Gaussians has no entropy in closed form; it is replaced by the Gaussian with its mean and
    variances, which has the larger entropy: an upper bound of the divergence, and unlike it not bounded by log 2.

    Source: GroVE, Eq. 15, which does not say what it computes.
    """

    def between(self, a: Marginal, b: Marginal) -> torch.Tensor:
        """(B,) divergences."""
        (mean_a, variance_a), (mean_b, variance_b) = a, b
        mixed = 0.5 * (variance_a + variance_b) + 0.25 * (mean_a - mean_b).square()
        own = _summed(variance_a.log() + variance_b.log(), mean_a.shape[1])
        return 0.5 * mixed.log().sum(1) - 0.25 * own

    def stiffness(self, image: Marginal, text: Marginal) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """½ / (v_I + v_T) for the means, 1/8 for the log-variances."""
        eighth = torch.full_like(image[1][:, 0], 0.125)
        return (0.5 / (image[1] + text[1])).amax(1), {"image": eighth, "text": eighth}


class SquaredWasserstein(Divergence):
    """‖μ_a − μ_b‖² + Σ (σ_a − σ_b)².

    Source: GroVE, Eqs. 17–19.
    """

    def between(self, a: Marginal, b: Marginal) -> torch.Tensor:
        """(B,) squared distances."""
        spread = (a[1].sqrt() - b[1].sqrt()).square()
        return (a[0] - b[0]).square().sum(1) + _summed(spread, a[0].shape[1])

    def stiffness(self, image: Marginal, text: Marginal) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """2 for the means, v for its logarithm."""
        two = torch.full_like(image[1][:, 0], 2.0)
        return two, {"image": image[1].amax(1), "text": text[1].amax(1)}


class Harmonization(Alignment):
    """Mean square of k(xᵢ, xⱼ) / s² − cos(zᵢ − c, zⱼ − c) over the pairs of a minibatch, summed over the modalities.

    It shapes latents and kernels, so that near items are near in latent space; q(u) does not enter.

    Source: Song, Wang, Huang and Tian 2017 (harmonized multimodal learning with GPLVMs), the difference of kernel and
    similarity matrices; here over a minibatch and with the cosine as similarity.
    """

    def __call__(
        self,
        x: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        marginals: Mapping[str, Marginal],
        gps: Mapping[str, SparseGP],
    ) -> torch.Tensor:
        """The mean square difference."""
        total = x.new_zeros((), dtype=torch.float64)
        for modality, gp in gps.items():
            directions = torch.nn.functional.normalize(batch[modality] - gp.constant, dim=1)
            difference = gp.kernel(x, x) / gp.kernel.scale - (directions @ directions.T).double()
            total = total + difference.square().mean()
        return total


ALIGNMENTS: dict[str, type[Alignment]] = {
    "kl": SymmetricKL,
    "js": JensenShannon,
    "wasserstein2": SquaredWasserstein,
    "harmonization": Harmonization,
    "none": Unaligned,
}
"""The alignments by the name that settings use."""


def _summed(values: torch.Tensor, dim: int) -> torch.Tensor:
    """(B,) sum over the outputs of values that are (B, D), or (B, 1) where all outputs share them."""
    return values.sum(1) * (dim / values.shape[1])


def _gap(a: Marginal, b: Marginal) -> torch.Tensor:
    """Squared differences of the means, output by output, or their average where variances are shared."""
    square = (a[0] - b[0]).square()
    return square if a[1].shape[1] > 1 else square.mean(1, keepdim=True)
