"""Several adapters as one: the mixture of their distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grove_adapters import adapters
from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.adapters.wrapping import described, fit_inside, posterior_of, revived, whole_batch
from grove_adapters.config import Config
from grove_adapters.embeddings import MODALITIES, Embeddings, Pairs
from grove_adapters.posterior import ProbabilisticEmbedding

SAMPLE = 4096  # embeddings of each modality that settle the units of the members' uncertainties


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(Config):
    """Settings of an ensemble.

    Attributes:
        members: Of each member its registered name and its settings, ``{"adapter": …, "config": {…}}``; five PFEs
            that differ by their seeds unless given.
    """

    members: tuple[dict, ...] = ({"adapter": "pfe", "config": {}},) * 5

    def check(self) -> None:
        """Refuse an ensemble of fewer than two."""
        self.require(len(self.members) >= 2, "members", "at least two adapters, as Ensemble([…])")


class Ensemble(Adapter):
    """The mixture of what several adapters predict, with its first two moments.

    The mean is the mean of the members' means. The total variance is the mean of their variances plus the variance of
    their means; of it, what members call epistemic themselves and the disagreement of the means is epistemic. Every
    member is fitted on the same pairs with a seed of its own, so copies of one adapter are a deep ensemble.

    Where no member has an uncertainty of its own, that of the ensemble is the total variance. Otherwise it is the mean
    of the members' uncertainties, each in units of its mean and deviation over the fitted embeddings, since the
    entropy of one method cannot be added to the variance of another.

    It is saved like any adapter: one folder, in whose weights the members stand under their numbers.

    Args:
        members: Two or more adapters, of which only the settings are taken, or their descriptions; or the settings of
            an ensemble.
        settings: Settings by name.

    Source: Lakshminarayanan, Pritzel and Blundell 2017, section 2.4, for the moments of the mixture.
    """

    name = "ensemble"
    config_class = EnsembleConfig

    config: EnsembleConfig

    def __init__(
        self, members: Sequence[Adapter | Mapping[str, Any]] | EnsembleConfig | None = None, **settings: Any
    ) -> None:
        if isinstance(members, Sequence):
            members = EnsembleConfig(members=tuple(described(member) for member in members))
        super().__init__(members, **settings)
        self.members_ = [revived(member) for member in self.config.members]
        self.needs_views = any(member.needs_views for member in self.members_)  # type: ignore[misc]
        self.needs_features = any(member.needs_features for member in self.members_)  # type: ignore[misc]

    @classmethod
    def small_settings(cls) -> dict[str, Any]:
        """Two small members of different kinds."""
        kinds = [adapters.ADAPTERS.get(name) for name in ("pfe", "deterministic")]
        return {"members": [described(kind(**kind.small_settings())) for kind in kinds]}

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        fitted = [fit_inside(member, pairs, validation, run, f"member-{k}") for k, member in enumerate(self.members_)]
        reports = run.report.facts["parts"].values()
        run.report.n_validation = max(report["n_validation"] for report in reports)
        run.report.chosen_by = run.report.stopped = "each member for itself"
        module = self._assembled(fitted)
        for embeddings in (pairs.images, pairs.texts):
            module.get_buffer(embeddings.modality).copy_(self._units(module, embeddings, run.seed))
        return module

    def _assembled(self, members: list[torch.nn.Module]) -> torch.nn.Module:
        """The members' modules and, for each modality, the mean and deviation of each member's uncertainty."""
        module = torch.nn.Module()
        module.register_module("members", torch.nn.ModuleList(members))
        for modality in MODALITIES:
            module.register_buffer(modality, torch.zeros(len(members), 2, dtype=torch.float64))
        return module

    @torch.no_grad()
    def _units(self, module: torch.nn.Module, embeddings: Embeddings, seed: int) -> torch.Tensor:
        batch = whole_batch(embeddings, seed, of=self, at_most=SAMPLE)
        values = torch.stack([posterior.uncertainty.double() for posterior, _ in self._posteriors(module, batch)])
        return torch.stack([values.mean(1), values.std(1, correction=0).clamp_min(1e-12)], 1)

    def _posteriors(self, module: torch.nn.Module, batch: Batch) -> list[tuple[ProbabilisticEmbedding, bool]]:
        modules = module.get_submodule("members").children()
        return [posterior_of(member, part, batch) for member, part in zip(self.members_, modules, strict=True)]

    def _facts(self) -> dict[str, Any]:
        facts = []
        for member, part in zip(self.members_, self.module_.get_submodule("members").children(), strict=True):
            member.module_ = part
            facts.append(member._facts())
        return {"members": facts}

    def _build(self, dim: int, facts: Mapping[str, Any]) -> torch.nn.Module:
        return self._assembled(
            [member._build(dim, fact) for member, fact in zip(self.members_, facts["members"], strict=True)]
        )

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        posteriors, own = zip(*self._posteriors(self.module_, batch), strict=True)
        means = torch.stack([posterior.mean for posterior in posteriors])
        variance = torch.stack([posterior.variance for posterior in posteriors]).mean(0)
        epistemic = torch.stack([_epistemic(posterior) for posterior in posteriors]).mean(0)
        disagreement = means.var(0, correction=0)
        fields = {
            "mean": means.mean(0),
            "aleatoric": variance - epistemic,
            "epistemic": epistemic + disagreement,
            "variance": variance + disagreement,
        }
        if any(own):
            centre, spread = self.module_.get_buffer(batch.modality)[:, :, None].unbind(1)
            values = torch.stack([posterior.uncertainty.double() for posterior in posteriors])
            fields["uncertainty"] = ((values - centre) / spread).mean(0)
        return fields


def _epistemic(posterior: ProbabilisticEmbedding) -> torch.Tensor:
    return torch.zeros_like(posterior.mean) if posterior.epistemic is None else posterior.epistemic
