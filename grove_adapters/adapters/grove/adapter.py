"""GroVE as an adapter: start, fit, and one Gaussian for each new embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from grove_adapters import seeding
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.adapters.grove import initialise
from grove_adapters.adapters.grove.config import GroVEConfig
from grove_adapters.adapters.grove.data import LinkedRows
from grove_adapters.adapters.grove.gp import SparseGP
from grove_adapters.adapters.grove.inference import LatentInference
from grove_adapters.adapters.grove.model import Decoders, NaturalGradient, Objective
from grove_adapters.adapters.loop import hold_out, minimise
from grove_adapters.embeddings import MODALITIES, Pairs

ANCHORS = 512  # training latents kept for prediction
VALIDATION_ROWS = 128  # held-out links looked at after each epoch
SMALLEST_DISPLACEMENT = 0.01  # RMS; a fit that moves latents less has not fitted them


class GroVE(Adapter):
    """Multi-modal sparse GPLVM: one latent point a link, one sparse GP a modality from latents to embeddings.

    A new embedding z gets the latent x* that explains it best, and the posterior is the modality's GP there, with the
    Laplace posterior of x propagated: mean μ(x*), aleatoric variance σ² (the likelihood's noise) and epistemic
    variance v(x*) + tr(C JᵀJ) / D, one number for all D dimensions (see `SparseGP`).

    Source: GroVE (Probabilistic Embeddings for Frozen Vision-Language Models), section 3, with errata E1–E7 put right;
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
        latents = torch.nn.Embedding.from_pretrained(start.latents.clone(), freeze=False, sparse=True)
        decoders = self._started(start, seeding.derive(run.seed, "inducing"))
        module = torch.nn.ModuleDict({"latents": latents, "decoders": decoders}).to(run.device)
        refit(decoders, latents.weight, data)
        natural = NaturalGradient(decoders.gps, len(data), config.natural_rate)
        objective = Objective(
            decoders,
            latents,
            data,
            alignment=config.alignment_weight / config.reconstruction_weight,
            align_constants=config.align_constants,
            prior=config.latent_prior,
            natural=natural,
        )
        minimise(
            objective,
            module,
            len(data),
            config,
            run,
            others=[torch.optim.SparseAdam(latents.parameters(), lr=config.latent_learning_rate), natural],
            validate=None if validation is None else self._validation(decoders, objective, validation, run),
        )
        fitted = latents.weight.detach().cpu()
        decoders.anchors.copy_(initialise.sampled(fitted, ANCHORS, seeding.derive(run.seed, "anchors")))
        moved = float((fitted - start.latents).square().sum(1).mean().sqrt())
        chosen = report.history[report.best_epoch - 1]
        report.facts = {
            "latent_displacement_rms": moved,
            "evidence_bound": chosen["log_likelihood"] - chosen["divergence"],
            "alignment": chosen["alignment"],
            "n_inducing": len(decoders.image.inducing),
            **{modality: gp.facts() for modality, gp in decoders.gps.items()},
        }
        if moved < SMALLEST_DISPLACEMENT:
            report.warnings.append(
                f"latents moved by {moved:.2g}, where their spread is about 1: they are where they started; raise "
                "latent_learning_rate or epochs"
            )
        return decoders

    def _started(self, start: initialise.Start, seed: int) -> Decoders:
        inducing = initialise.inducing_inputs(start.latents, self.config.n_inducing, seed)
        dim = len(start.constants["image"])
        decoders = Decoders(len(inducing), self.config.latent_dim, dim, min(ANCHORS, len(start.latents)))
        lengthscale = initialise.median_distance(start.latents, seed)
        with torch.no_grad():
            decoders.anchors.copy_(initialise.sampled(start.latents, ANCHORS, seed))
            for modality, gp in decoders.gps.items():
                gp.constant.copy_(start.constants[modality])
                gp.inducing.copy_(inducing)
                gp.kernel.log_lengthscale.fill_(math.log(lengthscale))
                gp.kernel.log_scale.fill_(math.log(start.variances[modality] / 2))
                gp.log_noise.fill_(math.log(start.variances[modality] / 2))
        return decoders

    def _validation(
        self, decoders: Decoders, objective: Objective, validation: Pairs, run: FitRun
    ) -> Callable[[], float]:
        """The objective of held-out links at the latents that explain both of their sides best."""
        data = LinkedRows(validation, run.device)
        generator = seeding.generator(seeding.derive(run.seed, "validation rows"))
        batch = data.fetch(torch.randperm(len(data), generator=generator)[:VALIDATION_ROWS])
        latents: torch.Tensor | None = None

        def value() -> float:
            nonlocal latents  # where they were after the last epoch is where to look first
            find = LatentInference(
                decoders.gps, decoders.anchors, prior=self.config.latent_prior, restarts=1, tolerance=1e-3
            )
            latents = find(batch, latents).mode
            return objective.held_out(latents, batch)

        return value

    def _facts(self) -> dict[str, Any]:
        decoders = self.module_
        assert isinstance(decoders, Decoders)
        return {"n_inducing": len(decoders.image.inducing), "n_anchors": len(decoders.anchors)}

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        return Decoders(facts["n_inducing"], self.config.latent_dim, dim, facts["n_anchors"])

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        decoders = self.module_
        assert isinstance(decoders, Decoders)
        gp: SparseGP = decoders.gps[batch.modality]
        find = LatentInference(
            {batch.modality: gp}, decoders.anchors, prior=self.config.latent_prior, restarts=self.config.restarts
        )
        posterior = find({batch.modality: batch.values})
        mean, variance = gp.marginal(gp.features(posterior.mode, gp.factor()))
        epistemic = variance + find.propagated(batch.modality, posterior)[:, None]
        fields = {
            "mean": mean + gp.constant,
            "aleatoric": gp.noise.expand_as(epistemic),
            "epistemic": epistemic,
            "variance": gp.noise + epistemic,
        }
        if self.config.uncertainty == "latent_entropy":
            fields["uncertainty"] = posterior.entropy
        return fields


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
