"""The one mini-batch loop: every adapter that iterates is trained by `minimise`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from grove_adapters import seeding
from grove_adapters.adapters.base import FitRun
from grove_adapters.config import Config
from grove_adapters.errors import NumericalError

Terms = dict[str, torch.Tensor]
"""The terms of an objective; ``"loss"`` is the one that is minimised, the others are reported."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Config):
    """Settings that every iterating adapter shares.

    Attributes:
        epochs: Passes over the links, at most.
        batch_size: Links in a minibatch.
        learning_rate: Of AdamW, for parameters without a rate of their own.
        weight_decay: Of AdamW (decoupled).
        clip_norm: Largest gradient norm of a step; steps that were cut are counted.
        validation_share: Share of the images held out to choose weights and stop by, where the caller gives none;
            0 trains on everything and keeps the last weights.
        patience: Epochs without improvement of the validation value before stopping.
    """

    epochs: int = 100
    batch_size: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    clip_norm: float = 10.0
    validation_share: float = 0.1
    patience: int = 10

    def check(self) -> None:
        """Refuse settings out of range."""
        for name in ("epochs", "batch_size", "patience"):
            self.require(getattr(self, name) >= 1, name, "a whole number ≥ 1")
        for name in ("learning_rate", "clip_norm"):
            self.require(getattr(self, name) > 0, name, "a number > 0")
        self.require(self.weight_decay >= 0, "weight_decay", "a number ≥ 0")
        self.require(0 <= self.validation_share < 1, "validation_share", "a share from 0 up to, not including, 1")


def minimise(
    objective: Callable[[torch.Tensor], Terms],
    module: torch.nn.Module,
    n_rows: int,
    settings: LoopConfig,
    run: FitRun,
    *,
    groups: Iterable[Mapping[str, Any]] | None = None,
    validate: Callable[[], float] | None = None,
    others: Iterable[torch.optim.Optimizer] = (),
) -> None:
    """Minimise an objective over shuffled minibatches of rows; leaves the chosen weights in `module`.

    Args:
        objective: From (B,) int64 row numbers on the CPU to the terms of the objective, means over the batch.
        module: Holds everything that is optimised.
        n_rows: Number of rows to shuffle.
        settings: Epochs, batch size, rates, patience.
        run: Seed, device, progress; its report is filled in.
        groups: AdamW parameter groups with their own rates; default all of `module` at `settings.learning_rate`.
        validate: A value to make small, asked for after each epoch; None keeps the last weights.
        others: Optimisers that own the rest of the module's parameters and step beside AdamW, such as SparseAdam for
            an embedding of which a step touches only the rows of its minibatch. Their gradients are not cut.

    Raises:
        NumericalError: A term is NaN or infinite; the message names epoch, step and term.
    """
    optimisers = list(others)
    owned = [parameter for optimiser in optimisers for group in optimiser.param_groups for parameter in group["params"]]
    dense = _without(groups if groups is not None else [{"params": list(module.parameters())}], owned)
    if dense:
        optimisers.append(torch.optim.AdamW(dense, lr=settings.learning_rate, weight_decay=settings.weight_decay))
    clipped = [parameter for group in dense for parameter in group["params"]]
    report = run.report
    report.stopped, report.chosen_by = "all epochs", "last epoch" if validate is None else "validation"
    best_value, best_state = math.inf, None
    for epoch in _epochs(settings.epochs, run):
        module.train()
        totals: dict[str, float] = {}
        order = torch.randperm(n_rows, generator=seeding.generator(seeding.derive(run.seed, "epoch", epoch)))
        batches = order.split(settings.batch_size)
        for step, rows in enumerate(batches, start=1):
            for optimiser in optimisers:
                optimiser.zero_grad(set_to_none=True)
            terms = objective(rows)
            _accumulate(totals, terms, len(rows) / n_rows, f"epoch {epoch}, step {step}")
            terms["loss"].backward()
            norm = torch.nn.utils.clip_grad_norm_(clipped, settings.clip_norm)
            if not math.isfinite(float(norm)):
                raise NumericalError(
                    f"expected finite gradients, got norm {float(norm)} at epoch {epoch}, step {step}; "
                    "lower learning_rate"
                )
            report.clipped_steps += int(float(norm) > settings.clip_norm)
            for optimiser in optimisers:
                optimiser.step()
            report.steps += 1
        report.epochs = report.best_epoch = epoch
        report.history.append({"epoch": epoch, **totals})
        if validate is None:
            continue
        module.eval()
        with torch.no_grad():
            value = float(validate())
        if not math.isfinite(value):
            raise NumericalError(
                f"expected a finite validation value, got {value} after epoch {epoch}; lower learning_rate"
            )
        report.history[-1]["validation"] = value
        if value < best_value:
            best_value, best_epoch = value, epoch
            best_state = copy.deepcopy(module.state_dict())
        elif epoch - best_epoch >= settings.patience:
            report.stopped = "no improvement"
            break
    if best_state is not None:
        module.load_state_dict(best_state)
        report.best_epoch = best_epoch


def _epochs(n: int, run: FitRun) -> Iterator[int]:
    from tqdm.auto import tqdm

    bar = tqdm(range(1, n + 1), desc=f"{run.report.adapter}: fit", unit="epoch", disable=not run.progress)
    for epoch in bar:
        yield epoch
        if run.report.history:
            bar.set_postfix({name: f"{value:.4g}" for name, value in run.report.history[-1].items() if name != "epoch"})


def _accumulate(totals: dict[str, float], terms: Terms, weight: float, where: str) -> None:
    for name, value in terms.items():
        number = float(value.detach())
        if not math.isfinite(number):
            raise NumericalError(f"expected a finite {name}, got {number} at {where}; lower learning_rate")
        totals[name] = totals.get(name, 0.0) + weight * number


def _without(groups: Iterable[Mapping[str, Any]], left_out: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    hidden = {id(parameter) for parameter in left_out}
    kept = [{**group, "params": [item for item in group["params"] if id(item) not in hidden]} for group in groups]
    return [group for group in kept if group["params"]]
