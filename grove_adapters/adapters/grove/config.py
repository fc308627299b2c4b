"""Settings of GroVE and the published ones by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from grove_adapters.adapters.loop import LoopConfig


@dataclass(frozen=True, kw_only=True)
class GroVEConfig(LoopConfig):
    """Settings of GroVE; ``preset="paper"`` beside them starts from the published ones.

    Attributes:
        latent_dim: L, dimensions of the shared latent space.
        n_inducing: M, inducing inputs of each GP, fewer where there are fewer distinct latents.
        reconstruction_weight: λ₁ of the evidence bound of a link (0.01 in the paper).
        alignment_weight: λ₂ of the alignment of the modalities at a link (400 in the paper). Only λ₂ / λ₁
            counts. The marginals compared are far narrower than the noise, so a hundredth is already felt; 0.1 and
            more bend the latents until they no longer rank noise.
        align_constants: Whether the alignment also sees the mean of each modality. As published it does, and then pays
            for the modality gap, which is constant, by making every marginal vague.
        alignment: What that term is: ``"kl"`` (symmetric), ``"js"`` (of the moment-matched Gaussian, an upper bound),
            ``"wasserstein2"`` (squared), ``"harmonization"`` of kernel and similarity matrices, or ``"none"``. See
            `grove.alignments`.
        kernel: ``"rbf"``, ``"matern15"``, ``"matern25"`` or ``"cosine"``. See `grove.kernels`.
        ard: Whether the kernel has a length scale for each latent dimension; a cosine has none.
        covariance: Of q(u): ``"shared"`` by the D outputs, which loses nothing where their noise is one,
            ``"diagonal"``, or a full one ``"per_dim"`` as published, with D times the memory and time.
        noise: ``"homoscedastic"``, as published: one noise variance σ² for a modality. ``"heteroscedastic"``: σ²(x)
            varies over latent space, by a second sparse GP for its logarithm; minibatch training only, at twice the
            time. The aleatoric variance then says how far embeddings scatter about their decoding, which is not how
            vague they are: on `datasets.synthetic` noisy items scatter more (the variance's Spearman turns from −.6 to
            .5), vague captions of `datasets.scenes` less (−.9 either way). Where posteriors are ranked by expected
            distance the gallery's own noise then counts, which costs recall: rank by the backbone. See
            `grove.gp.SparseGP`.
        training: ``"minibatch"``: stochastic steps, with q(u) by natural gradients. ``"collapsed"``: one step an epoch
            on the bound of all links with q(u) at its optimum, computed in a stream; the covariance must be
            ``"shared"``.
        exact: Every link's latent is inducing, in collapsed training, so the bound is the log marginal likelihood of
            the exact GPs. For few shots: memory grows with N², time with N³.
        mean: Of the posterior. ``"constant"``, as published: the GP around a constant, that is the decoding μ(x*) of
            the latent, which keeps L of the D dimensions and with them few of the right matches. ``"backbone"``: the GP
            around the frozen embedding z, that is z + w (μ(x*) − z), where w is the share with which held-out links
            match best and 0 where decoding does not help them.
        latent_init: ``"pca"`` of the joint embeddings, or ``"random"`` N(0, I) as published.
        latent_prior: Whether latents have the prior N(0, I). The paper has none.
        latent_learning_rate: Of the latents' row-wise Adam. The published 1e-5 moves a latent by 0.05 in 200
            epochs.
        natural_rate: Share of a natural-gradient step that q(u) takes for a minibatch of at least M links.
        restarts: Starts of the search for the latent of a new embedding.
        uncertainty: What `uncertainty` of the posterior is. ``"mismatch"``: the log mean squared distance from the item
            to its partners that its latent lets expect (`grove.mismatch`), the noise between modalities where the item
            lies. ``"latent_entropy"``: the entropy (nats) of the Laplace posterior p(x | z), large where the decoder is
            flat. ``"variance"``: the mean predictive variance, as published. A GP's variance is smallest where training
            data are dense, and vague items crowd together near the mean: it ranks known noise the wrong way round, the
            other two do not. None of them sees a gallery; whether a match is right is the question of
            `TaskResult.confidence`.
        learning_rate: Of the inducing inputs, length scales, output scales and noises.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "mean": "constant",
            "latent_init": "random",
            "latent_prior": False,
            "reconstruction_weight": 0.01,
            "alignment_weight": 400.0,
            "align_constants": True,
            "uncertainty": "variance",
            "epochs": 200,
            "batch_size": 64,
            "learning_rate": 1e-5,
            "latent_learning_rate": 1e-5,
            "validation_share": 0.0,
        }
    }

    latent_dim: int = 10
    n_inducing: int = 250
    reconstruction_weight: float = 1.0
    alignment_weight: float = 0.01
    align_constants: bool = False
    alignment: Literal["kl", "js", "wasserstein2", "harmonization", "none"] = "kl"
    kernel: Literal["rbf", "matern15", "matern25", "cosine"] = "rbf"
    ard: bool = False
    covariance: Literal["shared", "diagonal", "per_dim"] = "shared"
    noise: Literal["homoscedastic", "heteroscedastic"] = "homoscedastic"
    training: Literal["minibatch", "collapsed"] = "minibatch"
    exact: bool = False
    mean: Literal["constant", "backbone"] = "backbone"
    latent_init: Literal["pca", "random"] = "pca"
    latent_prior: bool = True
    latent_learning_rate: float = 0.05
    natural_rate: float = 0.1
    restarts: int = 2
    uncertainty: Literal["mismatch", "latent_entropy", "variance"] = "mismatch"
    learning_rate: float = 0.01

    def check(self) -> None:
        """Refuse settings out of range."""
        super().check()
        for name in ("latent_dim", "n_inducing", "restarts"):
            self.require(getattr(self, name) >= 1, name, "a whole number ≥ 1")
        for name in ("reconstruction_weight", "latent_learning_rate"):
            self.require(getattr(self, name) > 0, name, "a number > 0")
        self.require(self.alignment_weight >= 0, "alignment_weight", "a number ≥ 0")
        self.require(not (self.ard and self.kernel == "cosine"), "ard", "False, for a cosine has no length scales")
        collapsed = self.exact or self.training == "collapsed"
        self.require(not collapsed or self.covariance == "shared", "covariance", "'shared', for collapsed training")
        self.require(
            not collapsed or self.noise == "homoscedastic",
            "noise",
            "'homoscedastic', for collapsed and exact training, where the best q(u) is known for one noise only",
        )
        self.require(0 < self.natural_rate <= 1, "natural_rate", "a share above 0 and up to 1")
