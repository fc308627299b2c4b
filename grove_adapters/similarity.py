"""How close two sets of distributions are: every function is (Q, G), and higher means closer.

Distances are negated, so one ranking rule serves them all. Arguments are `ProbabilisticEmbedding`s, or
``(mean, variance)`` tensors of shape (N, D) with the variance as σ² (a broadcast view of (N, 1) is welcome); `cosine`
also takes bare (N, D) arrays. Results have the wider float type of the two sides.

`cosine`, `csd`, `wasserstein2`, `likelihood` and `kl` are matrix products. `expected_likelihood`, `bhattacharyya` and
`js` couple the two variances inside a logarithm in every dimension, which no finite matrix product reproduces; they are
summed in blocks of bounded size. Nothing ever holds a (Q, G, D) tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn.functional import normalize

from grove_adapters import _checks, seeding
from grove_adapters.embeddings import as_float32
from grove_adapters.errors import InputError
from grove_adapters.posterior import ProbabilisticEmbedding

BLOCK = 1 << 16  # float64 entries of a temporary where a similarity is no matrix product: 512 KiB, inside the cache


class Gaussians(NamedTuple):
    """N diagonal Gaussians by their moments; without a variance, N points.

    Attributes:
        mean: (N, D) tensor, or any array that is read by rows (a memory map).
        variance: (N, D) tensor of σ², or None.
    """

    mean: Any
    variance: torch.Tensor | None

    @property
    def dim(self) -> int:
        """D."""
        return int(self.mean.shape[-1])

    @property
    def size(self) -> int:
        """N."""
        return len(self.mean)

    def rows(self, rows: slice | np.ndarray) -> Gaussians:
        """The given rows in memory, as tensors of at least float32."""
        mean = self.mean[rows if not isinstance(self.mean, torch.Tensor) else _index(rows)]
        if not isinstance(mean, torch.Tensor) or mean.dtype in (torch.float16, torch.bfloat16):
            mean = as_float32(mean)
        variance = None if self.variance is None else self.variance[_index(rows)].to(mean)
        return Gaussians(mean, variance)


Distributions = ProbabilisticEmbedding | tuple[torch.Tensor, torch.Tensor] | Gaussians
"""What similarities compare."""


def gaussians(embedding: Distributions | Any, *, need_variance: bool = True) -> Gaussians:
    """The moments of what a caller handed in; a memory map stays on disk.

    Raises:
        InputError: The shapes fit no N Gaussians, or a variance is needed and there is none.
    """
    if isinstance(embedding, ProbabilisticEmbedding):
        return Gaussians(embedding.mean, embedding.variance)
    if isinstance(embedding, tuple):
        mean, variance = embedding
    else:
        mean, variance = embedding, None
    if isinstance(mean, list):
        mean = np.asarray(mean, dtype=np.float32)
    if len(mean.shape) != 2 or 0 in mean.shape:
        raise InputError(f"similarity expected (N, D) means, got shape {tuple(mean.shape)}")
    if variance is not None:
        variance = torch.as_tensor(variance)
        if variance.ndim != 2 or len(variance) != len(mean) or variance.shape[1] not in (1, mean.shape[1]):
            raise InputError(
                f"similarity expected variances of shape {tuple(mean.shape)} or (N, 1), got {tuple(variance.shape)}"
            )
        _checks.positive(variance, what="variance of a similarity")
        variance = variance.expand(len(mean), mean.shape[1])
    elif need_variance:
        raise InputError(
            "this similarity expected distributions, got bare vectors; give a posterior or (mean, variance), or use "
            "cosine"
        )
    return Gaussians(mean, variance)


def cosine(queries: Distributions | Any, gallery: Distributions | Any) -> torch.Tensor:
    """(Q, G) cosines of the means, in [−1, 1]; variances are ignored."""
    q, g = _both(queries, gallery, need_variance=False)
    return normalize(q.mean, dim=1) @ normalize(g.mean, dim=1).T


class CosineMoments(NamedTuple):
    """Moments of the cosines of Q × G pairs of independent draws.

    Attributes:
        mean: (Q, G).
        variance: (Q, G), ≥ 0.
    """

    mean: torch.Tensor
    variance: torch.Tensor


def cosine_moments(queries: Distributions, gallery: Distributions) -> CosineMoments:
    """Mean and variance of the cosine of a draw of each query with a draw of each gallery item.

    The moments of the inner product are E = ⟨μ_q, μ_g⟩ and Var = Σ [σ²_q (σ²_g + μ²_g) + σ²_g μ²_q], exact where the
    coordinates are independent. The lengths of the draws are taken to be their root mean squares √(‖μ‖² + Σσ²), which
    loses little in many dimensions, where the length of a draw hardly varies.

    Source: BayesVLM (Baumann et al., "Post-hoc Probabilistic Vision-Language Models"), ProbCosine.
    """
    q, g = _both(queries, gallery)
    q_square, g_square = q.mean.square(), g.mean.square()
    lengths = [(square + x.variance).sum(1).sqrt() for square, x in ((q_square, q), (g_square, g))]
    scale = 1 / torch.outer(*lengths)
    variance = q.variance @ (g.variance + g_square).T + q_square @ g.variance.T
    return CosineMoments((q.mean @ g.mean.T).mul_(scale), variance.mul_(scale.square()))


def csd(queries: Distributions, gallery: Distributions) -> torch.Tensor:
    """(Q, G) negated closed-form sampled distance: −E‖Z_q − Z_g‖² = −(‖μ_q − μ_g‖² + Σ(σ²_q + σ²_g)) < 0.

    Source: PCME++ Eq. 1, ProLIP Eq. 1 with σ² where the latter prints σ.
    """
    q, g = _both(queries, gallery)
    distance = _square_distance(q.mean, g.mean)
    return distance.add_(q.variance.sum(1)[:, None]).add_(g.variance.sum(1)).neg_()


def wasserstein2(queries: Distributions, gallery: Distributions) -> torch.Tensor:
    """(Q, G) negated *squared* 2-Wasserstein distance, −(‖μ_q − μ_g‖² + ‖σ_q − σ_g‖²) ≤ 0.

    Source: GroVE Eq. 19, which ranks by it.
    """
    q, g = _both(queries, gallery)
    if _isotropic(q) and _isotropic(g):  # ‖σ_q − σ_g‖² = D (σ_q − σ_g)²: one more column instead of D
        points = [torch.cat([x.mean, (x.dim * x.variance[:, :1]).sqrt()], 1) for x in (q, g)]
    else:
        points = [_wasserstein_points(x) for x in (q, g)]
    return _square_distance(*points).neg_()


def match_probability(
    queries: Distributions, gallery: Distributions, *, scale: float = 5.0, shift: float = 5.0
) -> torch.Tensor:
    """(Q, G) probabilities of a match, sigmoid(shift − scale · CSD).

    Args:
        queries: Q distributions.
        gallery: G distributions.
        scale: a > 0, learned by PCME++ and starting at 5.
        shift: b, learned by PCME++ and starting at 5.

    Source: PCME++ Eq. 2.
    """
    return torch.sigmoid(csd(queries, gallery).mul_(scale).add_(shift))


def sampled_match_probability(
    queries: ProbabilisticEmbedding,
    gallery: ProbabilisticEmbedding,
    *,
    samples: int = 8,
    scale: float = 5.0,
    shift: float = 5.0,
    seed: int = 0,
) -> torch.Tensor:
    """(Q, G) Monte Carlo match probabilities, the mean of sigmoid(shift − scale · ‖z_q − z_g‖) over samples² pairs.

    Args:
        queries: Q distributions.
        gallery: G distributions.
        samples: Draws from each distribution.
        scale: a > 0 of the logistic function of the (not squared) distance.
        shift: b of the logistic function.
        seed: Address of the draws.

    Source: PCME, with the plain sigmoid its paper and PCME++ A.3 state; PCME's public code uses sigmoid(2x).
    """
    _checks.same_dim(queries.dim, gallery.dim, what="gallery")
    q = queries.sample(samples, seed=seeding.derive(seed, "queries"))
    g = gallery.sample(samples, seed=seeding.derive(seed, "gallery"))
    total = torch.zeros(len(queries), len(gallery), dtype=torch.promote_types(q.dtype, g.dtype))
    for left in range(samples):
        for right in range(samples):
            distance = torch.cdist(q[:, left].to(total), g[:, right].to(total))
            total += torch.sigmoid(shift - scale * distance)
    return total / samples**2


def expected_likelihood(queries: Distributions, gallery: Distributions) -> torch.Tensor:
    """(Q, G) log ∫ p_q p_g = −½ Σ [(μ_q − μ_g)² / (σ²_q + σ²_g) + log 2π(σ²_q + σ²_g)], in nats.

    Source: PFE's mutual likelihood score with its constant; the log density of "both are the same point".
    """
    return _blockwise("expected_likelihood", *_both(queries, gallery))


def likelihood(queries: Distributions, gallery: Distributions | Any) -> torch.Tensor:
    """(Q, G) log densities log N(μ_g; μ_q, σ²_q) of the gallery's means under the queries, in nats.

    What a query predicts is compared with what is there, so the gallery needs no variance and what it has is ignored:
    a vague gallery item is not favoured for being near everything. Only for queries that predict the gallery's
    modality, such as `GroVE.predict_cross`, is this a likelihood of a match.
    """
    q, g = gaussians(queries), gaussians(gallery, need_variance=False)
    _checks.same_dim(q.dim, g.dim, what="gallery")
    q, g = q.rows(slice(None)), g.rows(slice(None))
    assert q.variance is not None
    dtype = torch.promote_types(q.mean.dtype, g.mean.dtype)
    centre = g.mean.double().mean(0)  # differences stay; squares to be cancelled get smaller
    mean, points, precision = q.mean.double() - centre, g.mean.double() - centre, 1 / q.variance.double()
    square = precision @ points.square().T - 2 * (mean * precision) @ points.T
    constant = (mean.square() * precision - precision.log() + math.log(2 * math.pi)).sum(1, keepdim=True)
    return (-0.5 * (square + constant)).to(dtype)


def kl(queries: Distributions, gallery: Distributions) -> torch.Tensor:
    """(Q, G) negated KL(query ‖ gallery) ≤ 0 in nats. Not symmetric: a vague gallery item forgives, a sharp one not."""
    q, g = _both(queries, gallery)
    dtype = torch.promote_types(q.mean.dtype, g.mean.dtype)
    centre = g.mean.double().mean(0)  # differences stay; squares to be cancelled get smaller
    q_mean, q_variance = q.mean.double() - centre, q.variance.double()
    g_mean, precision = g.mean.double() - centre, 1 / g.variance.double()
    twice = (
        (q_variance + q_mean.square()) @ precision.T
        - 2 * q_mean @ (g_mean * precision).T
        + ((g_mean.square() * precision) - precision.log()).sum(1)
        - q_variance.log().sum(1, keepdim=True)
        - q.dim
    )
    return (-0.5 * twice.clamp_min(0)).to(dtype)


def js(queries: Distributions, gallery: Distributions) -> torch.Tensor:
    """(Q, G) negated moment-matched Jensen–Shannon divergence ≤ 0, in nats.

    The mixture of two Gaussians has no closed-form entropy. Here it is replaced by the Gaussian of the same mean and
    per-dimension variance σ²_m = ½(σ²_q + σ²_g) + ¼(μ_q − μ_g)², which gives ½ Σ log(σ²_m / σ_q σ_g): an upper bound
    of the divergence, because a Gaussian has the largest entropy for its variance. Unlike the divergence, it is not
    bounded by log 2.
    """
    return _blockwise("js", *_both(queries, gallery))


def bhattacharyya(queries: Distributions, gallery: Distributions) -> torch.Tensor:
    """(Q, G) log of the Bhattacharyya coefficient ∫ √(p_q p_g), ≤ 0.

    With v = ½(σ²_q + σ²_g) it is −Σ [(μ_q − μ_g)² / 8v + ½ log(v / σ_q σ_g)].
    """
    return _blockwise("bhattacharyya", *_both(queries, gallery))


SIMILARITIES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    function.__name__: function
    for function in (cosine, csd, wasserstein2, expected_likelihood, likelihood, kl, js, bhattacharyya)
}
"""The similarities that rank a gallery, by name."""

POINT_GALLERIES = ("cosine", "likelihood")
"""Those that read no variance of the gallery."""


def lift(
    embedding: Distributions,
    similarity: Literal["csd", "wasserstein2"],
    *,
    side: Literal["query", "gallery"],
    metric: Literal["inner_product", "l2"] = "inner_product",
) -> torch.Tensor:
    """(N, D′) vectors that any inner-product or Euclidean index searches in exactly the order of the similarity.

    ``lift(q, s, side="query") @ lift(g, s, side="gallery").T`` is the similarity itself; with ``metric="l2"`` the
    squared Euclidean distance of the two is its negative. D′ is D or 2D plus 0 to 2 columns.

    Args:
        embedding: N distributions.
        similarity: ``"csd"`` or ``"wasserstein2"``.
        side: Which of the two sides this is; they are lifted differently.
        metric: What the index compares.

    Source: PCME++ App. C searches means and re-ranks by σ; appending the offset makes a single search exact.
    """
    _checks.choice(similarity, ("csd", "wasserstein2"), what="lift")
    _checks.choice(side, ("query", "gallery"), what="side")
    _checks.choice(metric, ("inner_product", "l2"), what="metric")
    x = gaussians(embedding).rows(slice(None))
    if similarity == "csd":
        points, offset = x.mean, x.variance.sum(1, keepdim=True)  # type: ignore[union-attr]
    else:
        points, offset = _wasserstein_points(x), torch.zeros_like(x.mean[:, :1])
    is_query = side == "query"
    if metric == "l2":
        if similarity == "wasserstein2":
            return points
        zeros = torch.zeros_like(offset)
        return torch.cat([points, offset.sqrt(), zeros] if is_query else [points, zeros, offset.sqrt()], 1)
    ones, own = torch.ones_like(offset), -(points.square().sum(1, keepdim=True) + offset)
    return torch.cat([2 * points, ones, own] if is_query else [points, own, ones], 1)


def paired(similarity: str, queries: Gaussians, gallery: Gaussians) -> torch.Tensor:
    """(…) similarity of pairs whose (…, D) moments broadcast, summed term by term in float64.

    Without the cancellation and the shape-dependent rounding of a matrix product, so equal pairs score equally
    wherever they stand. `tasks.index` settles near-ties by it.
    """
    q_mean, g_mean = queries.mean.double(), gallery.mean.double()
    if similarity == "cosine":
        return (normalize(q_mean, dim=-1) * normalize(g_mean, dim=-1)).sum(-1)
    assert queries.variance is not None
    if similarity == "likelihood":
        variance = queries.variance.double()
        return _likelihood_terms((q_mean - g_mean).square_(), variance, torch.zeros_like(variance)).sum(-1)
    assert gallery.variance is not None
    terms = _TERMS[similarity]((q_mean - g_mean).square_(), queries.variance.double(), gallery.variance.double())
    return terms.sum(-1)


def _likelihood_terms(square: torch.Tensor, q: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    total = q + g
    return (square / total + (2 * math.pi * total).log_()).mul_(-0.5)


def _bhattacharyya_terms(square: torch.Tensor, q: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    mean = (q + g).mul_(0.5)
    return (square / (8 * mean) + 0.5 * mean.log() - 0.25 * (q.log() + g.log())).neg_()


_TERMS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "csd": lambda square, q, g: -(square + q + g),
    "wasserstein2": lambda square, q, g: -(square + (q.sqrt() - g.sqrt()).square()),
    "kl": lambda square, q, g: -0.5 * ((square + q) / g - 1 + g.log() - q.log()),
    "expected_likelihood": _likelihood_terms,
    "bhattacharyya": _bhattacharyya_terms,
    "js": lambda square, q, g: -0.5 * ((0.5 * (q + g) + 0.25 * square).log() - 0.5 * (q.log() + g.log())),
}
"""What one dimension adds, from (μ_q − μ_g)², σ²_q and σ²_g."""


def _both(queries: Any, gallery: Any, *, need_variance: bool = True) -> tuple[Any, Any]:
    q, g = (gaussians(side, need_variance=need_variance).rows(slice(None)) for side in (queries, gallery))
    _checks.same_dim(q.dim, g.dim, what="gallery")
    dtype = torch.promote_types(q.mean.dtype, g.mean.dtype)
    return tuple(
        Gaussians(x.mean.to(dtype), None if x.variance is None or not need_variance else x.variance.to(dtype))
        for x in (q, g)
    )  # type: ignore[return-value]


def _square_distance(q: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    norms = g.square().sum(1)
    distance = torch.addmm(norms[None], q, g.T, alpha=-2)
    return distance.add_(q.square().sum(1)[:, None]).clamp_min_(0)


def _wasserstein_points(x: Gaussians) -> torch.Tensor:
    assert x.variance is not None
    return torch.cat([x.mean, x.variance.sqrt()], 1)


def _isotropic(x: Gaussians) -> bool:
    return x.variance is not None and (x.dim == 1 or x.variance.stride(1) == 0)


def _blockwise(similarity: str, q: Gaussians, g: Gaussians) -> torch.Tensor:
    result = torch.empty(q.size, g.size, dtype=q.mean.dtype, device=q.mean.device)
    width = max(1, min(g.size, BLOCK // q.dim))
    height = max(1, BLOCK // (q.dim * width))
    for top in range(0, q.size, height):
        left = q.rows(slice(top, top + height))
        tall = Gaussians(left.mean[:, None], left.variance[:, None])  # type: ignore[index]
        for start in range(0, g.size, width):
            right = g.rows(slice(start, start + width))
            result[top : top + height, start : start + width] = paired(similarity, tall, right)
    return result


def _index(rows: slice | np.ndarray) -> Any:
    return rows if isinstance(rows, slice) else torch.as_tensor(rows)
