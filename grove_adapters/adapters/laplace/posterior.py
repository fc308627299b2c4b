"""A Gaussian over the weights of one linear layer, whose precision is a Kronecker product plus a multiple of I."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from grove_adapters.embeddings import Projection, project

Damping = Literal["exact", "factored"]
SMALLEST_VARIANCE = 1e-12  # of a coordinate of a unit vector; none varies along itself
STEPS = 40  # halvings of the bracket of log λ, which leave 1e-10 of it
SPAN = 60.0  # width of that bracket in nats


class Outputs(NamedTuple):
    """Gaussians N(g, U diag(v) Uᵀ) over what a linear layer makes of B items.

    Attributes:
        vectors: (B, D) means g.
        spread: (B, D) variances v along the directions.
        directions: (D, D) orthonormal columns U.
    """

    vectors: torch.Tensor
    spread: torch.Tensor
    directions: torch.Tensor

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, D) means and variances of the vectors."""
        return self.vectors, (self.spread @ self.directions.square().T).clamp_min(SMALLEST_VARIANCE)

    def unit_moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, D) means and variances of the vectors divided by their lengths, in closed form.

        With û = ḡ / ‖ḡ‖ and P = I − ûûᵀ, a vector g that is as long as ḡ along û lies in the direction
        (û + ξ) / √(1 + ‖ξ‖²), where ξ = P g / ‖ḡ‖. With t = E ‖ξ‖² = tr(P Σ P) / ‖ḡ‖² in the place of ‖ξ‖², the mean is
        û / √(1 + t) and the covariance P Σ P / ‖ḡ‖² / (1 + t). These second moments sum to 1, as those of unit vectors
        do, whatever the size of Σ; to first order in Σ the covariance is that of the delta method.
        """
        length = self.vectors.norm(dim=1, keepdim=True)
        unit, spread = self.vectors / length, self.spread / length.square()
        moved = (spread * (unit @ self.directions)) @ self.directions.T  # Σ û
        along = (unit * moved).sum(1, keepdim=True)
        across = spread @ self.directions.square().T - 2 * unit * moved + unit.square() * along
        across = across.clamp_min(SMALLEST_VARIANCE)
        shrink = 1 / (1 + across.sum(1, keepdim=True))
        return unit * shrink.sqrt(), across * shrink


class KroneckerPosterior(torch.nn.Module):
    """N(W, (n τ A ⊗ B + λ I)⁻¹) over the weights W of g = W φ + b, with b as one more column of W.

    A = E[φφᵀ] is the second moment of the features (with a 1 appended where there is a bias) and B the mean curvature
    of the loss in g over n items, which count τ times. With A = U_A diag(α) U_Aᵀ and B = U_B diag(β) U_Bᵀ, the
    precision has the eigenvalues n τ α_i β_j + λ, so that it is inverted exactly, and τ and λ cost nothing to try.

    Args:
        dim: D.
        width: F, the features that the layer reads.
        has_bias: Whether there is a b.

    Attributes:
        of_directions: Whether embeddings are g / ‖g‖ instead of g.

    Source: Ritter, Botev and Barber 2018 ("A Scalable Laplace Approximation for Neural Networks") for the posterior,
    whose factors they damp separately; MacKay 1992 for λ.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    feature_values: torch.Tensor
    feature_vectors: torch.Tensor
    output_values: torch.Tensor
    output_vectors: torch.Tensor
    of_directions: torch.Tensor
    items: torch.Tensor
    pseudo_data_count: torch.Tensor
    prior_precision: torch.Tensor

    def __init__(self, dim: int, width: int, *, has_bias: bool) -> None:
        super().__init__()
        rows = width + has_bias
        self.register_buffer("weight", torch.zeros(dim, width))
        self.register_buffer("bias", torch.zeros(dim if has_bias else 0))
        self.register_buffer("feature_values", torch.zeros(rows, dtype=torch.float64))
        self.register_buffer("feature_vectors", torch.zeros(rows, rows))
        self.register_buffer("output_values", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("output_vectors", torch.zeros(dim, dim))
        self.register_buffer("of_directions", torch.tensor(True))
        for scalar in ("items", "pseudo_data_count", "prior_precision"):
            self.register_buffer(scalar, torch.ones((), dtype=torch.float64))

    @classmethod
    def around(cls, projection: Projection, *, of_directions: bool = True) -> KroneckerPosterior:
        """A posterior about the weights of a layer, still without any data."""
        posterior = cls(projection.dim, projection.width, has_bias=projection.bias is not None)
        posterior.weight.copy_(torch.as_tensor(projection.weight))
        if projection.bias is not None:
            posterior.bias.copy_(torch.as_tensor(projection.bias))
        posterior.of_directions.fill_(of_directions)
        return posterior

    def condition(self, a: torch.Tensor, b: torch.Tensor, items: int) -> None:
        """Take over the eigenvectors of the symmetric factors A and B and n; rounding below zero is cut off."""
        self.items.fill_(items)
        for name, factor in (("feature", a), ("output", b)):
            values, vectors = torch.linalg.eigh((factor + factor.T) / 2)
            getattr(self, f"{name}_values").copy_(values.clamp_min(0))
            getattr(self, f"{name}_vectors").copy_(vectors)

    @property
    def n_parameters(self) -> int:
        """Weights and biases."""
        return self.weight.numel() + self.bias.numel()

    @property
    def square_norm(self) -> torch.Tensor:
        """‖W‖² with the bias."""
        return self.weight.double().square().sum() + self.bias.double().square().sum()

    def curvatures(self) -> torch.Tensor:
        """(F, D) eigenvalues n τ α_i β_j of the loss's part of the precision."""
        return self.items * self.pseudo_data_count * torch.outer(self.feature_values, self.output_values)

    def effective_parameters(self) -> torch.Tensor:
        """γ = Σ h / (h + λ) over the curvatures h: how many parameters the data determine."""
        curvatures = self.curvatures()
        return (curvatures / (curvatures + self.prior_precision)).sum()

    def log_evidence(self) -> torch.Tensor:
        """log ∫ p(D|W) N(W; 0, I/λ) dW of the Laplace approximation, less log p(D|W) at the W that is there, in nats.

        −λ ‖W‖² / 2 + Σ log λ / 2 − log det(n τ A ⊗ B + λ I) / 2.
        """
        ratio = torch.log1p(self.curvatures() / self.prior_precision).sum()
        return -(self.prior_precision * self.square_norm + ratio) / 2

    def maximise_evidence(self) -> None:
        """Set λ to the only maximum of the evidence, where λ ‖W‖² = γ(λ).

        The left side grows with λ and the right side falls, so bisection finds it; it is at most P / ‖W‖², the prior of
        P weights that the data determine.
        """
        high = math.log(self.n_parameters / max(float(self.square_norm), 1e-30))
        low, curvatures, norm = high - SPAN, self.curvatures(), float(self.square_norm)
        for _ in range(STEPS):
            middle = (low + high) / 2
            effective = (curvatures / (curvatures + math.exp(middle))).sum()
            low, high = (middle, high) if float(effective) > math.exp(middle) * norm else (low, middle)
        self.prior_precision.fill_(math.exp((low + high) / 2))

    def covariances(self, damping: Damping) -> torch.Tensor:
        """(F, D) variances of W in the eigenbases: 1 / (n τ α_i β_j + λ).

        With ``"factored"``, 1 / ((√(nτ) α_i + √λ)(√(nτ) β_j + √λ)), which is never larger.
        """
        if damping == "exact":
            return 1 / (self.curvatures() + self.prior_precision)
        root, prior = (self.items * self.pseudo_data_count).sqrt(), self.prior_precision.sqrt()
        return 1 / torch.outer(root * self.feature_values + prior, root * self.output_values + prior)

    def vectors(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D) g = W φ + b, and what goes past the layer."""
        return project(features, self.weight.to(features), self.bias.to(features) if len(self.bias) else None)

    def inputs(self, features: torch.Tensor) -> torch.Tensor:
        """(B, F) what the weights are multiplied by: φ, with a 1 where there is a bias."""
        features = features[:, : self.weight.shape[1]]
        return torch.cat([features, torch.ones_like(features[:, :1])], 1) if len(self.bias) else features

    def outputs(self, features: torch.Tensor, covariances: torch.Tensor) -> Outputs:
        """What the weights, with the given `covariances`, make of (B, F) features."""
        squares = (self.inputs(features) @ self.feature_vectors.to(features)).square()
        spread = squares @ covariances.to(features)
        return Outputs(self.vectors(features), spread, self.output_vectors.to(features))
