"""What adapters make and everybody else reads: one distribution over the embedding space for each item."""

from __future__ import annotations

import abc
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final

import numpy as np
import torch

from grove_adapters import _checks, _io, seeding
from grove_adapters.embeddings import Modality, Source, as_float32, take_rows
from grove_adapters.errors import InputError, UnreadableError
from grove_adapters.spherical import POWER_SPHERICAL, VON_MISES_FISHER, Law, Moments

Summary = Literal["mean", "sum", "geometric_mean", "log_det", "max"]
SUMMARIES: tuple[Summary, ...] = ("mean", "sum", "geometric_mean", "log_det", "max")


@dataclass(frozen=True, eq=False, kw_only=True)
class ProbabilisticEmbedding(abc.ABC):
    """N independent distributions over R^D, one an item, with their ids.

    Readers use `mean`, `variance`, `uncertainty`, `sample` and `log_prob` and know nothing of how it was made.

    Attributes:
        ids: (N,) unique strings.
        modality: ``"image"`` or ``"text"``.
        source: The frozen model underneath.
        uncertainty: (N,) float tensor, **larger is less certain** for every adapter and both modalities. Left out, it
            is the arithmetic mean of the variance over dimensions.
        gallery_aware: True where the item alone says nothing and the best uncertainty is that of the match itself
            (1 − max similarity), which readers that hold a gallery then use; see `tasks.retrieve`.
        backbone: (N, D) the frozen embeddings underneath, for readers that rank by them, or None.
        maker: What made it, as JSON types: adapter name, configuration, seed.
    """

    ids: np.ndarray = None  # type: ignore[assignment]
    modality: Modality
    source: Source = field(default_factory=lambda: Source(model="unknown"))
    uncertainty: torch.Tensor = None  # type: ignore[assignment]
    gallery_aware: bool = False
    backbone: Any = None
    maker: dict[str, Any] = field(default_factory=dict)

    tensor_fields: ClassVar[tuple[str, ...]]
    """Names of the (N, …) tensors that define the distribution, in the order of the constructor."""

    def __post_init__(self) -> None:
        what = f"{type(self).__name__} of {self.modality}s"
        for name in self.tensor_fields:
            value = getattr(self, name)
            if value is not None:
                value = torch.as_tensor(value)
                value = value if value.is_floating_point() else value.float()
                object.__setattr__(self, name, value)
                _checks.finite(value, what=f"{name} of {what}")
        self._check(what)
        object.__setattr__(self, "ids", _checks.as_ids(self.ids, len(self), what=what))
        uncertainty = self.summarise("mean") if self.uncertainty is None else torch.as_tensor(self.uncertainty)
        _checks.same_rows(len(self), uncertainty.numel(), what=f"uncertainty of {what}")
        _checks.finite(uncertainty, what=f"uncertainty of {what}", ids=self.ids)
        object.__setattr__(self, "uncertainty", uncertainty.reshape(-1))
        if self.backbone is not None:
            _checks.same_rows(len(self), len(self.backbone), what=f"backbone of {what}")

    @abc.abstractmethod
    def _check(self, what: str) -> None:
        """Refuse tensors that define no distribution."""

    if TYPE_CHECKING:  # a final class declares these as fields or as properties, whichever defines it

        @property
        def mean(self) -> torch.Tensor:
            """(N, D) means."""

        @property
        def variance(self) -> torch.Tensor:
            """(N, D) total variances σ² > 0; may be a broadcast view."""

        @property
        def aleatoric(self) -> torch.Tensor | None:
            """(N, D) part of the variance that more data would not remove, or None; adds up with `epistemic`."""

        @property
        def epistemic(self) -> torch.Tensor | None:
            """(N, D) part of the variance that more data would remove, or None; adds up with `aleatoric`."""

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def dim(self) -> int:
        """D, the width of the embedding space."""
        return int(self.mean.shape[1])

    @property
    def std(self) -> torch.Tensor:
        """(N, D) standard deviations σ."""
        return self.variance.sqrt()

    def summarise(self, kind: Summary = "mean") -> torch.Tensor:
        """(N,) one number an item from its D variances.

        Args:
            kind: ``"mean"`` (arithmetic; GroVE, ProbVLM, TTDA), ``"sum"`` (total variance; PCME++, ProLIP),
                ``"geometric_mean"``, ``"log_det"`` (of the diagonal covariance) or ``"max"``.
        """
        _checks.choice(kind, SUMMARIES, what="summarise")
        variance = self.variance
        if kind == "mean":
            return variance.mean(1)
        if kind == "sum":
            return variance.sum(1)
        if kind == "max":
            return variance.amax(1)
        log_det = variance.double().log().sum(1)
        return (log_det if kind == "log_det" else (log_det / self.dim).exp()).to(variance.dtype)

    @abc.abstractmethod
    def sample(self, n: int, *, seed: int = 0) -> torch.Tensor:
        """(N, n, D) independent draws from every item's distribution."""

    @abc.abstractmethod
    def log_prob(self, points: torch.Tensor) -> torch.Tensor:
        """(N, G) log densities (nats) of G points of shape (G, D) under each of the N distributions."""

    def take(self, rows: Sequence[int] | np.ndarray) -> Self:
        """The given rows as a posterior of their own."""
        rows = np.asarray(rows, dtype=np.int64)
        _checks.rows_in_range(rows, len(self), what=type(self).__name__)
        index = torch.as_tensor(rows)
        changes: dict[str, Any] = {name: value[index] for name, value in self._tensors().items()}
        changes["ids"] = np.asarray(self.ids)[rows]
        changes["uncertainty"] = self.uncertainty[index]
        changes["backbone"] = None if self.backbone is None else take_rows(self.backbone, rows)
        return dataclasses.replace(self, **changes)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The defining tensors that are there, with one column where all columns are the same memory."""
        given = {name: getattr(self, name) for name in self.tensor_fields}
        return {
            name: value[:, :1] if value.ndim == 2 and value.stride(1) == 0 else value
            for name, value in given.items()
            if value is not None
        }

    def save(self, path: str | Path) -> Path:
        """Write one `.safetensors` file that `load` reads back; the frozen backbone is copied into it.

        Raises:
            StoreError: The file cannot be written.
        """
        path = Path(path)
        tensors = {**self._tensors(), "uncertainty": self.uncertainty}
        if self.backbone is not None:
            tensors["backbone"] = as_float32(self.backbone)
        ids = json.dumps([str(item) for item in self.ids]).encode()
        tensors["ids"] = torch.frombuffer(bytearray(ids), dtype=torch.uint8)
        facts = {
            "posterior": type(self).__name__,
            "modality": self.modality,
            "source": self.source.to_dict(),
            "gallery_aware": self.gallery_aware,
            "maker": self.maker,
        }
        _io.write_tensors(path, tensors, {"grove_adapters": json.dumps(_io.jsonable(facts))})
        return path

    @staticmethod
    def load(path: str | Path) -> ProbabilisticEmbedding:
        """Read what `save` wrote, as the class it was.

        Raises:
            UnreadableError: The file is missing, damaged or no posterior.
        """
        tensors, metadata = _io.read_tensors(path)
        try:
            facts = json.loads(metadata["grove_adapters"])
            kind = _FINALS[facts["posterior"]]
            ids = np.array(json.loads(bytes(tensors.pop("ids").numpy()).decode()))
            modality, source = facts["modality"], Source.from_dict(facts["source"])
        except (KeyError, ValueError, TypeError) as error:
            raise UnreadableError(
                f"expected a saved posterior in {path}, got a safetensors file without its facts ({error!r}); "
                "write it with posterior.save"
            ) from error
        return kind(
            ids=ids,
            modality=modality,
            source=source,
            gallery_aware=facts["gallery_aware"],
            maker=facts["maker"],
            **tensors,
        )


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class GaussianEmbedding(ProbabilisticEmbedding):
    """Diagonal Gaussians.

    Attributes:
        mean: (N, D).
        variance: (N, D), or (N, 1) for one variance over all dimensions, which is kept unexpanded. Left out, it is
            the sum of the two parts.
        aleatoric: (N, D) or (N, 1) part of the variance, or None.
        epistemic: (N, D) or (N, 1) part of the variance, or None.
    """

    mean: torch.Tensor
    variance: torch.Tensor = None  # type: ignore[assignment]
    aleatoric: torch.Tensor | None = None
    epistemic: torch.Tensor | None = None

    tensor_fields = ("mean", "variance", "aleatoric", "epistemic")

    def _check(self, what: str) -> None:
        _two_dimensional(self.mean, what)
        if self.variance is None:
            if self.aleatoric is None or self.epistemic is None:
                raise InputError(f"{what}: expected a variance or both of its parts, got neither; give variance=")
            object.__setattr__(self, "variance", self.aleatoric + self.epistemic)
        _checks.positive(self.variance, what=f"variance of {what}")
        for name in ("variance", "aleatoric", "epistemic"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _expanded(value, self.mean, f"{name} of {what}"))
        if self.aleatoric is not None and self.epistemic is not None:
            total = self.aleatoric[:, :1] + self.epistemic[:, :1]
            if not torch.allclose(total, self.variance[:, :1], rtol=1e-3, atol=1e-12):
                raise InputError(f"{what}: expected aleatoric + epistemic = variance, got parts that don't add up")

    def sample(self, n: int, *, seed: int = 0) -> torch.Tensor:
        """(N, n, D) independent Gaussian draws."""
        _checks.count(n, what="number of samples")
        noise = torch.randn(len(self), n, self.dim, generator=seeding.generator(seed), dtype=self.mean.dtype)
        return self.mean[:, None] + self.std[:, None] * noise

    def log_prob(self, points: torch.Tensor) -> torch.Tensor:
        """(N, G) log densities (nats) of G points of shape (G, D) under each of the N Gaussians."""
        points = _points(points, self)
        precision = 1 / self.variance
        square = (
            precision @ points.T.square()
            - 2 * (precision * self.mean) @ points.T
            + (precision * self.mean.square()).sum(1, keepdim=True)
        )
        log_det = self.variance.log().sum(1, keepdim=True)
        return -0.5 * (square.clamp_min(0) + log_det + self.dim * math.log(2 * math.pi))


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class GeneralizedGaussianEmbedding(ProbabilisticEmbedding):
    """Independent generalized Gaussians β / (2 α Γ(1/β)) · exp(−(|z − μ| / α)^β) in every dimension.

    Attributes:
        location: (N, D) μ.
        scale: (N, D) α > 0.
        shape: (N, D) β > 0; 2 is a Gaussian with σ² = α²/2, 1 a Laplace distribution.
        epistemic: (N, D) variance of μ itself (e.g. over dropout passes), or None.

    Source: ProbVLM's likelihood in its correct form (its public code multiplies by β instead of raising to it).
    """

    location: torch.Tensor
    scale: torch.Tensor
    shape: torch.Tensor
    epistemic: torch.Tensor | None = None

    tensor_fields = ("location", "scale", "shape", "epistemic")

    def _check(self, what: str) -> None:
        _two_dimensional(self.location, what)
        for name in ("scale", "shape"):
            _checks.positive(getattr(self, name), what=f"{name} of {what}")
        for name in ("scale", "shape", "epistemic"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _expanded(value, self.location, f"{name} of {what}"))

    @property
    def mean(self) -> torch.Tensor:
        """(N, D) means, equal to the locations."""
        return self.location

    @property
    def aleatoric(self) -> torch.Tensor:
        """(N, D) α² Γ(3/β) / Γ(1/β)."""
        return self.scale.square() * torch.exp(torch.lgamma(3 / self.shape) - torch.lgamma(1 / self.shape))

    @property
    def variance(self) -> torch.Tensor:
        """(N, D) aleatoric variance plus the epistemic one where it is known."""
        return self.aleatoric if self.epistemic is None else self.aleatoric + self.epistemic

    def sample(self, n: int, *, seed: int = 0) -> torch.Tensor:
        """(N, n, D) independent draws: μ ± α G^(1/β) with G ~ Gamma(1/β), plus Gaussian epistemic noise."""
        _checks.count(n, what="number of samples")
        random = seeding.generator(seed)
        size = (len(self), n, self.dim)
        power = (1 / self.shape)[:, None].expand(size)
        with seeding.local(int(torch.randint(2**62, (1,), generator=random))):
            gamma = torch._standard_gamma(power.contiguous())
        sign = torch.randint(0, 2, size, generator=random) * 2 - 1
        draws = self.location[:, None] + sign * self.scale[:, None] * gamma.pow(power)
        if self.epistemic is not None:
            noise = torch.randn(size, generator=random, dtype=draws.dtype)
            draws = draws + self.epistemic.sqrt()[:, None] * noise
        return draws

    def log_prob(self, points: torch.Tensor) -> torch.Tensor:
        """(N, G) log densities (nats) under the aleatoric distribution; the epistemic part is left out."""
        points = _points(points, self)
        normaliser = (self.shape.log() - math.log(2) - self.scale.log() - torch.lgamma(1 / self.shape)).sum(1)
        rows = [
            -((points - location).abs() / scale).pow(shape).sum(1)
            for location, scale, shape in zip(self.location, self.scale, self.shape, strict=True)
        ]
        return torch.stack(rows) + normaliser[:, None]


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class SampledEmbedding(ProbabilisticEmbedding):
    """Distributions known by S ≥ 2 samples each.

    Attributes:
        samples: (N, S, D).
    """

    samples: torch.Tensor
    aleatoric: ClassVar[None] = None
    epistemic: ClassVar[None] = None

    tensor_fields = ("samples",)
    variance_floor: ClassVar[float] = 1e-12
    """σ² of items whose samples all agree, so that densities and ratios stay finite."""

    def _check(self, what: str) -> None:
        if self.samples.ndim != 3 or self.samples.shape[1] < 2 or 0 in self.samples.shape:
            raise InputError(f"{what} expected samples of shape (N, S ≥ 2, D), got {tuple(self.samples.shape)}")

    @property
    def mean(self) -> torch.Tensor:
        """(N, D) sample means."""
        return self.samples.mean(1)

    @property
    def variance(self) -> torch.Tensor:
        """(N, D) unbiased sample variances, floored at `variance_floor`."""
        return self.samples.var(1, unbiased=True).clamp_min(self.variance_floor)

    def sample(self, n: int, *, seed: int = 0) -> torch.Tensor:
        """(N, n, D) draws with replacement from each item's samples."""
        _checks.count(n, what="number of samples")
        size = (len(self), n)
        chosen = torch.randint(self.samples.shape[1], size, generator=seeding.generator(seed))
        return self.samples.gather(1, chosen[:, :, None].expand(*size, self.dim))

    def log_prob(self, points: torch.Tensor) -> torch.Tensor:
        """(N, G) log densities (nats) under the Gaussian of the same mean and variance."""
        gaussian = GaussianEmbedding(mean=self.mean, variance=self.variance, ids=self.ids, modality=self.modality)
        return gaussian.log_prob(points)


@dataclass(frozen=True, eq=False, kw_only=True)
class DirectionalEmbedding(ProbabilisticEmbedding):
    """Distributions of unit vectors, symmetric about a mean direction; D ≥ 2.

    The mean lies inside the sphere, and the variance is the diagonal of the covariance, which is one number along the
    mean direction and another across it. The uncertainty is a decreasing function of the concentration.

    Attributes:
        direction: (N, D) unit vectors μ.
        concentration: (N,) κ > 0.
    """

    direction: torch.Tensor
    concentration: torch.Tensor
    law: ClassVar[Law]
    aleatoric: ClassVar[None] = None
    epistemic: ClassVar[None] = None

    tensor_fields = ("direction", "concentration")

    def _check(self, what: str) -> None:
        _two_dimensional(self.direction, what)
        if self.direction.shape[1] < 2:
            raise InputError(f"{what} expected at least 2 dimensions, got 1; the unit sphere of R is two points")
        if self.concentration.shape != (len(self.direction),):
            raise InputError(
                f"{what} expected one concentration an item, shape ({len(self.direction)},), got "
                f"{tuple(self.concentration.shape)}"
            )
        _checks.positive(self.concentration, what=f"concentration of {what}")
        if not _checks.normalised(self.direction):
            raise InputError(f"{what} expected directions of unit length, got others; divide them by their norms")
        if self.uncertainty is None:  # the mean of the variance without summing it, so that equal κ give equal numbers
            _, along, across = self.law.moments(self.concentration, self.dim)
            object.__setattr__(self, "uncertainty", (along + (self.dim - 1) * across) / self.dim)

    @property
    def _moments(self) -> Moments:
        return Moments(*(x[:, None] for x in self.law.moments(self.concentration, self.dim)))

    def __len__(self) -> int:
        return len(self.direction)

    @property
    def dim(self) -> int:
        """D, the width of the embedding space."""
        return int(self.direction.shape[1])

    @property
    def mean(self) -> torch.Tensor:
        """(N, D) means, shorter than 1."""
        return self._moments.length * self.direction

    @property
    def variance(self) -> torch.Tensor:
        """(N, D) variances of the coordinates: across + (along − across) μ²."""
        _, along, across = self._moments
        return across + (along - across) * self.direction.square()

    @final
    def sample(self, n: int, *, seed: int = 0) -> torch.Tensor:
        """(N, n, D) independent unit vectors."""
        _checks.count(n, what="number of samples")
        return self.law.sample(self.direction, self.concentration, n, seed=seed)

    @final
    def log_prob(self, points: torch.Tensor) -> torch.Tensor:
        """(N, G) log densities (nats) on the sphere, of the directions of G points of shape (G, D)."""
        points = _points(points, self)
        _checks.nonzero_rows(points, what="points of log_prob")
        cosine = self.direction @ torch.nn.functional.normalize(points, dim=1).T
        normaliser = self.law.log_normaliser(self.concentration, self.dim)
        return normaliser[:, None] + self.law.log_kernel(cosine.clamp(-1, 1), self.concentration[:, None])


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class VonMisesFisherEmbedding(DirectionalEmbedding):
    """Densities C_D(κ) exp(κ ⟨μ, x⟩) on the unit sphere; see `DirectionalEmbedding`."""

    law = VON_MISES_FISHER


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class PowerSphericalEmbedding(DirectionalEmbedding):
    """Densities proportional to (1 + ⟨μ, x⟩)^κ on the unit sphere; see `DirectionalEmbedding`."""

    law = POWER_SPHERICAL


_FINALS: dict[str, type[ProbabilisticEmbedding]] = {
    kind.__name__: kind
    for kind in (
        GaussianEmbedding,
        GeneralizedGaussianEmbedding,
        SampledEmbedding,
        VonMisesFisherEmbedding,
        PowerSphericalEmbedding,
    )
}


def _two_dimensional(mean: torch.Tensor, what: str) -> None:
    if mean.ndim != 2 or 0 in mean.shape:
        raise InputError(f"{what} expected non-empty (N, D) means, got shape {tuple(mean.shape)}")


def _expanded(value: torch.Tensor, like: torch.Tensor, what: str) -> torch.Tensor:
    if value.ndim != 2 or len(value) != len(like) or value.shape[1] not in (1, like.shape[1]):
        raise InputError(f"{what} expected shape {tuple(like.shape)} or (N, 1), got {tuple(value.shape)}")
    return value.expand_as(like)


def _points(points: Any, posterior: ProbabilisticEmbedding) -> torch.Tensor:
    points = torch.as_tensor(points, dtype=posterior.mean.dtype)
    if points.ndim != 2:
        raise InputError(f"log_prob expected points of shape (G, D), got {tuple(points.shape)}")
    _checks.same_dim(posterior.dim, int(points.shape[1]), what="log_prob")
    return points
