"""The one mini-batch loop: every adapter that iterates is trained by `minimise`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grove_adapters import seeding
from grove_adapters.adapters.base import FitRun
from grove_adapters.config import Config
from grove_adapters.embeddings import Pairs
from grove_adapters.errors import NumericalError

Terms = dict[str, torch.Tensor]
"""The terms of an objective; ``"loss"`` is the one that is minimised, the others are reported."""

FEWEST_IMAGES = 20  # with fewer, nothing is held out


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Config):
    """Settings that every iterating adapter shares; ``preset="paper"`` beside them starts from the published ones.

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


def hold_out(pairs: Pairs, validation: Pairs | None, share: float, run: FitRun) -> tuple[Pairs, Pairs | None]:
    """The pairs to learn from and those to choose and stop by, which are noted in the report.

    Args:
        pairs: What the caller gave to fit on.
        validation: What the caller gave to choose by, or None to hold out a share of the linked images.
        share: Share of the images to hold out, with all their texts.
        run: Seed and report.

    Returns:
        The two parts; the second is None where nothing was given and there is nothing to spare.
    """
    linked = np.unique(pairs.links[:, 0])
    if validation is None and share and len(linked) >= FEWEST_IMAGES:
        pairs, validation = pairs.take_images(linked).split(1 - share, seed=seeding.derive(run.seed, "validation"))
    run.report.n_validation = len(validation or ())
    return pairs, validation


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

    Each epoch draws its random numbers from a seed of its own, so a run that goes on from its checkpoint ends in the
    weights of an undisturbed one, bit for bit, where the objective's memory is in `module` and in the state of the
    optimisers.

    Args:
        objective: From (B,) int64 row numbers on the CPU to the terms of the objective, means over the batch.
        module: Holds everything that is optimised.
        n_rows: Number of rows to shuffle.
        settings: Epochs, batch size, rates, patience.
        run: Seed, device, progress, checkpoint; its report is filled in.
        groups: AdamW parameter groups with their own rates; default all of `module` at `settings.learning_rate`.
        validate: A value to make small, asked for after each epoch; None keeps the last weights.
        others: Optimisers that own the rest of the module's parameters and step beside AdamW, such as SparseAdam for
            an embedding of which a step touches only the rows of its minibatch. Their gradients are not cut.

    Raises:
        NumericalError: A term is NaN or infinite; the message names epoch, step and term.
        StoreError: The checkpoint is of another fit, or cannot be written.
    """
    optimisers = list(others)
    owned = [parameter for optimiser in optimisers for group in optimiser.param_groups for parameter in group["params"]]
    dense = _without(groups if groups is not None else [{"params": list(module.parameters())}], owned)
    if dense:
        optimisers.append(torch.optim.AdamW(dense, lr=settings.learning_rate, weight_decay=settings.weight_decay))
    clipped = [parameter for group in dense for parameter in group["params"]]
    report = run.report
    report.stopped, report.chosen_by = "all epochs", "last epoch" if validate is None else "validation"
    memory = _Memory(module, optimisers, run)
    memory.resume()
    for epoch in _epochs(settings.epochs, run):
        with seeding.local(seeding.derive(run.seed, "noise", epoch)):
            totals: dict[str, float] = {}
            module.train()
            for step, rows in enumerate(_minibatches(n_rows, settings.batch_size, run.seed, epoch), start=1):
                for optimiser in optimisers:
                    optimiser.zero_grad(set_to_none=True)
                terms = objective(rows)
                _accumulate(totals, terms, len(rows) / n_rows, f"epoch {epoch}, step {step}")
                terms["loss"].backward()
                norm = _clip(clipped, settings.clip_norm)
                if not math.isfinite(norm):
                    raise NumericalError(
                        f"expected finite gradients, got norm {norm} at epoch {epoch}, step {step}; lower learning_rate"
                    )
                report.clipped_steps += int(norm > settings.clip_norm)
                for optimiser in optimisers:
                    optimiser.step()
                report.steps += 1
            report.epochs = epoch
            report.history.append({"epoch": epoch, **totals})
            if validate is None:
                report.best_epoch = epoch
            else:
                module.eval()
                with torch.no_grad():
                    value = float(validate())
                if not math.isfinite(value):
                    raise NumericalError(
                        f"expected a finite validation value, got {value} after epoch {epoch}; lower learning_rate"
                    )
                report.history[-1]["validation"] = value
                memory.judge(epoch, value)
                if epoch - report.best_epoch >= settings.patience:
                    report.stopped = "no improvement"
        memory.keep()
    memory.restore_best()


class _Memory:
    """What a loop must not forget: the best weights so far, and everything that going on after a crash needs.

    Args:
        module: What is trained.
        optimisers: What trains it.
        run: Where the checkpoint and the report are.
    """

    _NUMBERS = ("epochs", "steps", "stopped", "best_epoch", "clipped_steps", "history")

    def __init__(self, module: torch.nn.Module, optimisers: Sequence[torch.optim.Optimizer], run: FitRun) -> None:
        self._module = module
        self._optimisers = optimisers
        self._run = run
        self._best: dict[str, torch.Tensor] = {}
        self._best_value = math.inf

    def judge(self, epoch: int, value: float) -> None:
        """Remember the weights where their validation value is the smallest so far."""
        if value < self._best_value:
            self._best_value, self._run.report.best_epoch = value, epoch
            self._best = copy.deepcopy(self._module.state_dict())

    def restore_best(self) -> None:
        """Put the best weights into the module, where any were chosen."""
        if self._best:
            self._module.load_state_dict(self._best)

    def keep(self) -> None:
        """Write the checkpoint, where one was asked for."""
        if self._run.checkpoint is None:
            return
        tensors = {f"module.{name}": tensor for name, tensor in self._module.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self._best.items()}
        counts = {}
        for address, _, state in self._optimiser_states():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{address}.{name}"] = value
                else:
                    counts[f"{address}.{name}"] = value
        report = {name: getattr(self._run.report, name) for name in self._NUMBERS}
        self._run.checkpoint.write(tensors, {"report": report, "counts": counts})

    def resume(self) -> None:
        """Take up the checkpoint, where there is one."""
        found = None if self._run.checkpoint is None else self._run.checkpoint.read()
        if found is None:
            return
        tensors, progress = found
        for name, value in progress["report"].items():
            setattr(self._run.report, name, value)
        self._module.load_state_dict(_below("module", tensors))
        self._best = _below("best", tensors)
        if self._best:
            self._best_value = self._run.report.history[self._run.report.best_epoch - 1]["validation"]
        for address, parameter, state in self._optimiser_states():
            state.update(_below(address, progress["counts"]))
            for name, tensor in _below(address, tensors).items():
                state[name] = tensor if name == "step" else tensor.to(parameter.device)  # AdamW counts on the CPU

    def _optimiser_states(self) -> Iterator[tuple[str, torch.nn.Parameter, dict[str, Any]]]:
        """Address, parameter and state of everything optimised.

        Optimizer.load_state_dict would do, but it rounds states to the type of their parameter.
        """
        for k, optimiser in enumerate(self._optimisers):
            parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
            for p, parameter in enumerate(parameters):
                yield f"optimiser-{k}-{p}", parameter, optimiser.state[parameter]


def _epochs(n: int, run: FitRun) -> Iterator[int]:
    """Numbers of the epochs still to come, counted from 1; ends early where the report says why."""
    from tqdm.auto import tqdm

    first = run.report.epochs
    label = f"{run.report.adapter}: fit"
    with tqdm(total=n, initial=first, desc=label, unit="epoch", disable=not run.progress) as bar:
        for epoch in range(first + 1, n + 1):
            if run.report.stopped != "all epochs":
                return
            yield epoch
            last = run.report.history[-1]
            bar.set_postfix({name: f"{value:.4g}" for name, value in last.items() if name != "epoch"}, refresh=False)
            bar.update()


def _minibatches(n_rows: int, size: int, seed: int, epoch: int) -> Iterable[torch.Tensor]:
    return torch.randperm(n_rows, generator=seeding.generator(seeding.derive(seed, "epoch", epoch))).split(size)


def _accumulate(totals: dict[str, float], terms: Terms, weight: float, where: str) -> None:
    for name, value in terms.items():
        number = float(value.detach())
        if not math.isfinite(number):
            raise NumericalError(f"expected a finite {name}, got {number} at {where}; lower learning_rate")
        totals[name] = totals.get(name, 0.0) + weight * number


def _clip(parameters: Sequence[torch.nn.Parameter], largest: float) -> float:
    """Scale gradients down to the largest norm; their norm before, which is infinite or NaN where one of them is."""
    try:
        return float(torch.nn.utils.clip_grad_norm_(parameters, largest, error_if_nonfinite=True))
    except RuntimeError:  # the squares of gradients above 1e19 overflow in float32
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        for gradient in gradients if math.isfinite(norm) else []:
            gradient.mul_(largest / norm)
        return norm


def _without(groups: Iterable[Mapping[str, Any]], left_out: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    hidden = {id(parameter) for parameter in left_out}
    kept = [{**group, "params": [item for item in group["params"] if id(item) not in hidden]} for group in groups]
    return [group for group in kept if group["params"]]


def _below(address: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{address}."
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}
