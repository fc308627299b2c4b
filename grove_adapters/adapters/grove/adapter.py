"""GroVE as an adapter: start, fit, and one Gaussian for each new embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from grove_adapters import seeding
from grove_adapters.adapters.base import Adapter, Batch, FitReport, FitRun
from grove_adapters.adapters.grove import initialise
from grove_adapters.adapters.grove.alignments import ALIGNMENTS
from grove_adapters.adapters.grove.backbone import cross_noise, decoding_share, matching
from grove_adapters.adapters.grove.collapsed import CollapsedObjective
from grove_adapters.adapters.grove.config import GroVEConfig
from grove_adapters.adapters.grove.data import CHUNK, LinkedRows
from grove_adapters.adapters.grove.gp import SparseGP
from grove_adapters.adapters.grove.inference import LatentInference, LatentPosterior, blocks
from grove_adapters.adapters.grove.model import Decoders, Objective
from grove_adapters.adapters.grove.natural import NaturalGradient
from grove_adapters.adapters.loop import LoopConfig, hold_out, minimise
from grove_adapters.embeddings import MODALITIES, Embeddings, Pairs
from grove_adapters.errors import InputError
from grove_adapters.posterior import ProbabilisticEmbedding

ANCHORS = 512  # training latents kept for prediction
NOISE_INDUCING = 50  # inducing inputs of the noise, which is smoother than what it is the noise of
FIRST_NOISE_VARIANCE = 0.1  # of the logarithm of the noise over latent space, to begin with
OTHER = {"image": "text", "text": "image"}
LEAST_NOISE = 0.1  # share of a cross prediction's variance that is never put down to doubt about the latent
MISMATCH_ITEMS = 4096  # training items that a mismatch is learned from
VALIDATION_ROWS = 256  # held-out links looked at after each epoch
MOST_EXACT = 2000  # links of an exact GP, whose kernel matrix has their square
SMALLEST_DISPLACEMENT = 0.01  # RMS; a fit that moves latents less has not fitted them


class GroVE(Adapter):
    """Multi-modal sparse GPLVM: one latent point a link, one sparse GP a modality from latents to embeddings.

    A new embedding z gets the latent x* that explains it best, and the posterior is the modality's GP there, with the
    Laplace posterior of x propagated: aleatoric variance σ² (the likelihood's noise) and epistemic variance
    v(x*) + tr(C JᵀJ) / D, one number for all D dimensions where q(u) is shared (see `SparseGP`). The mean is the
    decoding μ(x*), or stays at the frozen embedding as far as that serves retrieval (`GroVEConfig.mean`).
    `predict_cross` reads the other modality off the same latent.

    Source: GroVE (Probabilistic Embeddings for Frozen Vision-Language Models), section 3; deliberate differences are
    named in `GroVEConfig`, `NaturalGradient` and `LatentInference`.
    """

    name = "grove"
    config_class = GroVEConfig

    config: GroVEConfig

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """Settings for data of a few hundred pairs."""
        return {"latent_dim": 8, "n_inducing": 60, "epochs": 30, "batch_size": 64}

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        config, report = self.config, run.report
        pairs, validation = hold_out(pairs, validation, config.validation_share, run)
        data = LinkedRows(pairs, run.device)
        start = initialise.start(
            data, config.latent_dim, seeding.derive(run.seed, "latents"), random=config.latent_init == "random"
        )
        if config.exact and len(data) > MOST_EXACT:
            raise InputError(
                f"grove with exact=True expected at most {MOST_EXACT} links to fit, got {len(data)}; use exact=False"
            )
        latents = torch.nn.Embedding.from_pretrained(start.latents.clone(), freeze=False, sparse=True)
        decoders = self._started(start, seeding.derive(run.seed, "inducing"))
        module = torch.nn.ModuleDict({"latents": latents, "decoders": decoders}).to(run.device)
        refit(decoders, latents.weight, data)
        objective, loop, optimisers = self._training(decoders, latents, data)
        minimise(
            objective,
            module,
            len(data),
            loop,
            run,
            others=optimisers,
            validate=None if validation is None else self._validation(module, objective, validation, run),
        )
        if isinstance(objective, CollapsedObjective):
            objective.settle()
        fitted = latents.weight.detach()
        decoders.anchors.copy_(initialise.sampled(fitted, ANCHORS, seeding.derive(run.seed, "anchors")))
        self._learn_mismatch(decoders, data, pairs, run)
        if config.mean == "backbone":
            self._lean_on_backbone(decoders, validation, run)
        self._tell(report, decoders, float((fitted.cpu() - start.latents).square().sum(1).mean().sqrt()))
        return decoders

    def _training(
        self, decoders: Decoders, latents: torch.nn.Embedding, data: LinkedRows
    ) -> tuple[Objective, LoopConfig, list[torch.optim.Optimizer]]:
        """What is minimised, in which minibatches, and the optimisers of latents and q(u)."""
        config = self.config
        settings: dict[str, Any] = {
            "alignment": ALIGNMENTS[config.alignment](),
            "weight": config.alignment_weight / config.reconstruction_weight,
            "align_constants": config.align_constants,
            "prior": config.latent_prior,
        }
        moving = torch.optim.SparseAdam(latents.parameters(), lr=config.latent_learning_rate)
        if config.exact or config.training == "collapsed":
            for gp in decoders.gps.values():
                gp.follows_optimum(inducing_too=config.exact)
            collapsed = CollapsedObjective(decoders, latents, data, exact=config.exact, **settings)
            return collapsed, config.replace(batch_size=len(data)), [moving]
        natural = NaturalGradient(decoders.processes, len(data), data.dim, config.natural_rate)
        return Objective(decoders, latents, data, natural=natural, **settings), config, [moving, natural]

    def _tell(self, report: FitReport, decoders: Decoders, moved: float) -> None:
        """Facts of the fit for its report, and a warning where latents stood still."""
        chosen = report.history[report.best_epoch - 1]
        report.facts = {
            "latent_displacement_rms": moved,
            "evidence_bound": chosen["log_likelihood"] - chosen["divergence"],
            "alignment": chosen["alignment"],
            "n_inducing": len(decoders.image.inducing),
            "decoding_share": float(decoders.share),
            **{modality: gp.facts() for modality, gp in decoders.gps.items()},
        }
        if moved < SMALLEST_DISPLACEMENT:
            report.warnings.append(
                f"latents moved by {moved:.2g}, where their spread is about 1: they are where they started; raise "
                "latent_learning_rate or epochs"
            )

    def _started(self, start: initialise.Start, seed: int) -> Decoders:
        inducing = start.latents
        if not self.config.exact:
            inducing = initialise.inducing_inputs(start.latents, self.config.n_inducing, seed)
        dim = len(start.constants["image"])
        varies = self.config.noise == "heteroscedastic"
        spots = initialise.inducing_inputs(start.latents, NOISE_INDUCING, seed) if varies else inducing[:0]
        decoders = self._decoders(len(inducing), dim, min(ANCHORS, len(start.latents)), len(spots))
        lengthscale = initialise.median_distance(start.latents, seed)
        with torch.no_grad():
            decoders.anchors.copy_(initialise.sampled(start.latents, ANCHORS, seed))
            for modality, gp in decoders.gps.items():
                half = math.log(start.variances[modality] / 2)
                gp.constant.copy_(start.constants[modality])
                gp.inducing.copy_(inducing)
                gp.kernel.start(lengthscale)
                gp.kernel.log_scale.fill_(half)
                gp.log_noise.fill_(half)
                if gp.noise_process is not None:
                    gp.noise_process.inducing.copy_(spots)
                    gp.noise_process.kernel.start(lengthscale)
                    gp.noise_process.kernel.log_scale.fill_(math.log(FIRST_NOISE_VARIANCE))
        return decoders

    def _validation(
        self, module: torch.nn.ModuleDict, objective: Objective, validation: Pairs, run: FitRun
    ) -> Callable[[], float]:
        """The objective of held-out links at the latents that explain both of their sides best."""
        batch = LinkedRows(validation, run.device).fetch(_held_out_rows(validation, run))
        decoders = module["decoders"]
        assert isinstance(decoders, Decoders)
        module.register_buffer("held_out", self._both(decoders, restarts=1)(batch).mode)

        def value() -> float:
            guess = module.get_buffer("held_out")  # where they were after the last epoch is where to look first
            guess.copy_(self._both(decoders, restarts=1)(batch, guess).mode)
            return objective.held_out(guess, batch)

        return value

    def _both(self, decoders: Decoders, *, restarts: int) -> LatentInference:
        return LatentInference(decoders.gps, decoders.anchors, prior=self.config.latent_prior, restarts=restarts)

    @torch.no_grad()
    def _learn_mismatch(self, decoders: Decoders, data: LinkedRows, pairs: Pairs, run: FitRun) -> None:
        """Learn how far apart partners are where each of them alone is located, from training links."""
        random = np.random.default_rng(seeding.derive(run.seed, "mismatch"))
        for column, modality in enumerate(MODALITIES):
            items = np.unique(pairs.links[:, column])
            items = np.sort(random.permutation(items)[:MISMATCH_ITEMS])
            chosen = np.flatnonzero(np.isin(pairs.links[:, column], items))
            place = torch.as_tensor(np.searchsorted(items, pairs.links[chosen, column]), device=run.device)
            count = torch.bincount(place, minlength=len(items)).double()
            distance, values = torch.zeros_like(count), None
            for start in range(0, len(chosen), CHUNK):
                batch, rows = data.fetch(chosen[start : start + CHUNK]), place[start : start + CHUNK]
                distance.index_add_(0, rows, (batch["image"] - batch["text"]).double().square().sum(1))
                values = batch[modality].new_empty(len(items), data.dim) if values is None else values
                values[rows] = batch[modality]
            assert values is not None
            latents = self._located(decoders, modality, values).mode
            decoders.mismatch_of(modality).learn(decoders.gps[modality], latents, distance / count)

    @torch.no_grad()
    def _lean_on_backbone(self, decoders: Decoders, validation: Pairs | None, run: FitRun) -> None:
        """Learn from held-out links how far to go from the frozen embeddings, and how good cross predictions are."""
        decoders.cross_noise[:, 0] = torch.log(decoders.image.noise + decoders.text.noise)
        if validation is None:
            return
        rows = _held_out_rows(validation, run)
        frozen = LinkedRows(validation, run.device).fetch(rows)
        linked, true = (matching(validation, rows.numpy(), positives=also).to(run.device) for also in (False, True))
        own, other, expected = {}, {}, {}
        for modality, values in frozen.items():
            posterior = self._located(decoders, modality, values)
            own[modality] = _decoded(decoders.gps[modality], posterior.mode)[0]
            other[modality] = _decoded(decoders.gps[OTHER[modality]], posterior.mode)[0]
            expected[modality] = decoders.expected_mismatch(modality, posterior.mode, standardised=True)
        decoders.searches.clear()
        decoders.share.fill_(decoding_share(frozen, own, linked))
        for place, modality in enumerate(MODALITIES):
            partner = OTHER[modality]
            z, truth = frozen[modality], {partner: frozen[partner]}
            moved = z + other[modality] - own[modality]
            first = decoding_share({modality: z, **truth}, {modality: moved, **truth}, linked)
            moved = torch.lerp(z, moved, first)
            second = decoding_share({modality: moved, **truth}, {modality: other[modality], **truth}, linked)
            decoders.cross_shares[place] = torch.tensor([first, second])
            square = torch.cdist(torch.lerp(moved, other[modality], second), frozen[partner]).square()
            scale = validation.images.source.logit_scale
            start = 1 / scale if scale else float(square.diagonal().mean()) / z.shape[1]
            noise = cross_noise(square, expected[modality], true if modality == "image" else true.T, start)
            decoders.cross_noise[place] = torch.tensor(noise)

    def _facts(self) -> dict[str, Any]:
        decoders = self._fitted_decoders()
        noise = decoders.image.noise_process
        return {
            "n_inducing": len(decoders.image.inducing),
            "n_anchors": len(decoders.anchors),
            "n_noise": 0 if noise is None else len(noise.inducing),
        }

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        return self._decoders(facts["n_inducing"], dim, facts["n_anchors"], facts.get("n_noise", 0))

    def _decoders(self, n_inducing: int, dim: int, n_anchors: int, n_noise: int) -> Decoders:
        config = self.config
        return Decoders(
            n_inducing,
            config.latent_dim,
            dim,
            n_anchors,
            kernel=config.kernel,
            ard=config.ard,
            covariance=config.covariance,
            n_noise=n_noise,
        )

    def predict_cross(
        self,
        embeddings: Embeddings,
        *,
        batch_size: int = 4096,
        seed: int = 0,
        device: str | torch.device = "cpu",
        progress: bool = False,
    ) -> ProbabilisticEmbedding:
        """Where the partners of items should be: for each image a Gaussian over text embeddings, and the reverse.

        With x* the latent that explains the item, μ its modality's decoder and ν the other's, the mean is ν(x*) with
        ``mean="constant"``. With ``"backbone"`` it is the frozen embedding z, moved by a share of ν(x*) − μ(x*) and
        from there by a share of the way to ν(x*); what the latent does not explain of z is so carried over. Both shares
        are those with which held-out links find each other best, and so is the total variance, which may rise with the
        mismatch to expect at x* (`grove.backbone.cross_noise`); it is wider than the squared error of a dimension,
        whose errors are not independent. With a constant mean, the variance is the other decoder's. The epistemic part
        is that of ν at x* with the Laplace posterior of x propagated.

        The result keeps ids and modality of the items, so that it takes their place as queries of a gallery of the
        other modality: `tasks.retrieve` of ``adapter.predict_cross(images)`` and texts by ``"likelihood"`` has as
        confidence the posterior probability of the best match.

        Args:
            embeddings: Items of either modality.
            batch_size: Rows worked on together, which changes nothing else.
            seed: Kept for the record; no random number is drawn.
            device: Where to compute.
            progress: Whether to show a progress bar.

        Raises:
            NotFittedError: `fit` or `load` was not called.
            InputError: As for `predict`.
            SourceMismatchError: As for `predict`.
        """
        return _Crossing(self).predict(embeddings, batch_size=batch_size, seed=seed, device=device, progress=progress)

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        decoders = self._fitted_decoders()
        posterior = self._located(decoders, batch.modality, batch.values)
        mean, epistemic = self._read_off(decoders, batch.modality, posterior)
        if self.config.mean == "backbone":
            mean = torch.lerp(batch.values, mean, decoders.share)
        fields = _parts(mean, _noise(decoders.gps[batch.modality], posterior.mode), epistemic)
        if self.config.uncertainty == "latent_entropy":
            fields["uncertainty"] = posterior.entropy
        elif self.config.uncertainty == "mismatch":
            fields["uncertainty"] = decoders.expected_mismatch(batch.modality, posterior.mode)
        return fields

    def _predict_cross(self, batch: Batch) -> dict[str, torch.Tensor]:
        decoders, partner, place = self._fitted_decoders(), OTHER[batch.modality], MODALITIES.index(batch.modality)
        posterior = self._located(decoders, batch.modality, batch.values)
        mean, epistemic = self._read_off(decoders, partner, posterior)
        if self.config.mean == "constant":
            return _parts(mean, _noise(decoders.gps[partner], posterior.mode), epistemic)
        own, _ = _decoded(decoders.gps[batch.modality], posterior.mode)
        first, second = decoders.cross_shares[place]
        moved = torch.lerp(batch.values, batch.values + mean - own, first)
        level, slope = decoders.cross_noise[place].double()
        expected = decoders.expected_mismatch(batch.modality, posterior.mode, standardised=True)
        total = torch.exp(level + slope * expected)[:, None]
        epistemic = epistemic.mean(1, keepdim=True).clamp_max((1 - LEAST_NOISE) * total)
        return _parts(torch.lerp(moved, mean, second), total - epistemic, epistemic)

    def _fitted_decoders(self) -> Decoders:
        assert isinstance(self.module_, Decoders)
        return self.module_

    def _read_off(
        self, decoders: Decoders, modality: str, posterior: LatentPosterior
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoded mean (B, D) and epistemic variance, (B, 1) or (B, D), at Laplace posteriors of latents."""
        mean, variance = _decoded(decoders.gps[modality], posterior.mode)
        find = self._inference(decoders, modality, posterior.mode.device)
        return mean, variance + find.propagated(modality, posterior)[:, None]

    def _located(self, decoders: Decoders, modality: str, values: torch.Tensor) -> LatentPosterior:
        """The latents of new embeddings of one modality."""
        return self._inference(decoders, modality, values.device)({modality: values})

    def _inference(self, decoders: Decoders, modality: str, device: torch.device) -> LatentInference:
        """Inference of one modality, made ready once a device."""
        if (modality, device) not in decoders.searches:
            decoders.searches[modality, device] = LatentInference(
                {modality: decoders.gps[modality]},
                decoders.anchors,
                prior=self.config.latent_prior,
                restarts=self.config.restarts,
            )
        return decoders.searches[modality, device]


class _Crossing(Adapter):
    """A fitted `GroVE` whose predictions are of the other modality, with all the checks of `Adapter.predict`."""

    name = GroVE.name
    config_class = GroVEConfig

    def __init__(self, fitted: GroVE) -> None:
        super().__init__(fitted.config)
        fitted._fitted("predict_cross")
        self._of = fitted
        self.module_, self.dim_, self.source_ = fitted.module_, fitted.dim_, fitted.source_
        self.fit_report_ = fitted.fit_report_

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        return self._of._fit(pairs, validation, run)

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        return self._of._predict_cross(batch)


def _parts(mean: torch.Tensor, noise: torch.Tensor, epistemic: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "mean": mean,
        "aleatoric": noise.expand_as(epistemic),
        "epistemic": epistemic,
        "variance": noise + epistemic,
    }


def _held_out_rows(validation: Pairs, run: FitRun) -> torch.Tensor:
    generator = seeding.generator(seeding.derive(run.seed, "validation rows"))
    return torch.randperm(len(validation.links), generator=generator)[:VALIDATION_ROWS]


@torch.no_grad()
def _decoded(gp: SparseGP, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean (B, D) and variance (B, 1) or (B, D) of the outputs at latents, in blocks of one size."""
    factor = gp.factor()
    parts = [gp.marginal(gp.features(x, factor)) for x in blocks(latents)]
    mean, variance = (torch.cat(items)[: len(latents)] for items in zip(*parts, strict=True))
    return mean + gp.constant, variance


@torch.no_grad()
def _noise(gp: SparseGP, latents: torch.Tensor) -> torch.Tensor:
    """Expected noise variance at latents, () or (B, 1), in blocks of one size."""
    if gp.noise_process is None:
        return gp.noise
    return torch.cat([gp.noise_at(x).variance for x in blocks(latents)])[: len(latents)]


@torch.no_grad()
def refit(decoders: Decoders, latents: torch.Tensor, data: LinkedRows) -> None:
    """Set q(u) of both GPs to the optimum of the evidence bound, in one sweep over the links."""
    factors = {modality: gp.factor() for modality, gp in decoders.gps.items()}
    gram = {modality: torch.zeros_like(factor) for modality, factor in factors.items()}
    cross = {modality: gp.mean.new_zeros(gp.mean.shape, dtype=torch.float64) for modality, gp in decoders.gps.items()}
    for rows, batch in data.sweep():
        x = latents[rows.to(latents.device)]
        for modality, gp in decoders.gps.items():
            features = gp.features(x, factors[modality])
            gram[modality] += features.T @ features
            cross[modality] += (features.T.float() @ (batch[modality] - gp.constant)).double()
    for modality in MODALITIES:
        decoders.gps[modality].set_optimal(gram[modality], cross[modality])
