"""GroVE as an adapter: start, fit, and one Gaussian for each new embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from grove_adapters import seeding
from grove_adapters.adapters.base import Adapter, Batch, FitReport, FitRun
from grove_adapters.adapters.grove import initialise
from grove_adapters.adapters.grove.alignments import ALIGNMENTS
from grove_adapters.adapters.grove.backbone import decoding_share
from grove_adapters.adapters.grove.collapsed import CollapsedObjective
from grove_adapters.adapters.grove.config import GroVEConfig
from grove_adapters.adapters.grove.data import LinkedRows
from grove_adapters.adapters.grove.gp import SparseGP
from grove_adapters.adapters.grove.inference import LatentInference, LatentPosterior, blocks
from grove_adapters.adapters.grove.model import Decoders, Objective
from grove_adapters.adapters.grove.natural import NaturalGradient
from grove_adapters.adapters.loop import LoopConfig, hold_out, minimise
from grove_adapters.embeddings import MODALITIES, Pairs
from grove_adapters.errors import InputError

ANCHORS = 512  # training latents kept for prediction
VALIDATION_ROWS = 256  # held-out links looked at after each epoch
MOST_EXACT = 2000  # links of an exact GP, whose kernel matrix has their square
SMALLEST_DISPLACEMENT = 0.01  # RMS; a fit that moves latents less has not fitted them


class GroVE(Adapter):
    """Multi-modal sparse GPLVM: one latent point a link, one sparse GP a modality from latents to embeddings.

    A new embedding z gets the latent x* that explains it best, and the posterior is the modality's GP there, with the
    Laplace posterior of x propagated: mean μ(x*), aleatoric variance σ² (the likelihood's noise) and epistemic
    variance v(x*) + tr(C JᵀJ) / D, one number for all D dimensions (see `SparseGP`).

    Source: GroVE (Probabilistic Embeddings for Frozen Vision-Language Models), section 3;
    deliberate differences are named in `GroVEConfig`, `NaturalGradient` and `LatentInference`.
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
        if config.mean == "backbone" and validation is not None:
            decoders.share.fill_(self._share(decoders, validation, run))
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
        natural = NaturalGradient(decoders.gps, len(data), config.natural_rate)
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
        decoders = self._decoders(len(inducing), dim, min(ANCHORS, len(start.latents)))
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

    def _share(self, decoders: Decoders, validation: Pairs, run: FitRun) -> float:
        """How far the means of held-out links should go from the frozen embeddings to their decodings."""
        rows = _held_out_rows(validation, run)
        frozen = LinkedRows(validation, run.device).fetch(rows)
        with torch.no_grad():
            decoded = {
                modality: _decoded(decoders.gps[modality], self._located(decoders, modality, values)[1].mode)[0]
                for modality, values in frozen.items()
            }
        decoders.searches.clear()
        return decoding_share(frozen, decoded, validation.links[rows.numpy()])

    def _facts(self) -> dict[str, Any]:
        decoders = self.module_
        assert isinstance(decoders, Decoders)
        return {"n_inducing": len(decoders.image.inducing), "n_anchors": len(decoders.anchors)}

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        return self._decoders(facts["n_inducing"], dim, facts["n_anchors"])

    def _decoders(self, n_inducing: int, dim: int, n_anchors: int) -> Decoders:
        config = self.config
        return Decoders(
            n_inducing,
            config.latent_dim,
            dim,
            n_anchors,
            kernel=config.kernel,
            ard=config.ard,
            covariance=config.covariance,
        )

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        decoders = self.module_
        assert isinstance(decoders, Decoders)
        find, posterior = self._located(decoders, batch.modality, batch.values)
        mean, variance = _decoded(decoders.gps[batch.modality], posterior.mode)
        epistemic = variance + find.propagated(batch.modality, posterior)[:, None]
        noise = decoders.gps[batch.modality].noise
        fields = {
            "mean": mean if self.config.mean == "constant" else torch.lerp(batch.values, mean, decoders.share),
            "aleatoric": noise.expand_as(epistemic),
            "epistemic": epistemic,
            "variance": noise + epistemic,
        }
        if self.config.uncertainty == "latent_entropy":
            fields["uncertainty"] = posterior.entropy
        return fields

    def _located(
        self, decoders: Decoders, modality: str, values: torch.Tensor
    ) -> tuple[LatentInference, LatentPosterior]:
        """The latents of new embeddings of one modality, and what found them, which is made once a device."""
        place = (modality, values.device)
        if place not in decoders.searches:
            decoders.searches[place] = LatentInference(
                {modality: decoders.gps[modality]},
                decoders.anchors,
                prior=self.config.latent_prior,
                restarts=self.config.restarts,
            )
        find = decoders.searches[place]
        return find, find({modality: values})


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
