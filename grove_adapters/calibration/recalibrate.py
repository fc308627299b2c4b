"""Maps from what a search says of a match to the probability that it is right, fitted on held-out queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from scipy.special import expit, logit

from grove_adapters import _checks, _io
from grove_adapters.calibration.kinds import kind_of, refuse_another_kind
from grove_adapters.errors import InputError, InputTypeError, UnreadableError
from grove_adapters.tasks.base import TaskResult

Method = Literal["temperature", "platt", "beta", "isotonic", "histogram", "stacked"]

SCHEMA = 1
SMALLEST = 1e-6  # probabilities and entropies are kept this far from 0, where a logarithm says nothing of a float32 sum
FARTHEST = 5.0  # deviations beyond which a signal of a stacked map counts as this far: no query is that extraordinary
BINS = 15  # of a histogram
WEAK, STRONG = 1.0, 1e6  # inverse ridge: stacked signals are nearly collinear, the others need none


def _log_odds(probability: np.ndarray) -> np.ndarray:
    return logit(np.clip(probability, SMALLEST, 1 - SMALLEST))


SIGNALS: dict[str, Callable[[TaskResult], np.ndarray]] = {
    "confidence": lambda result: _log_odds(_confidence(result)),
    "match_entropy": lambda result: np.log(np.maximum(result.detail["match_entropy"], SMALLEST)),
    "match_margin": lambda result: _log_odds(result.detail["match_margin"]),
    "match_kl": lambda result: result.detail["match_kl"],
    "answer_hubness": lambda result: result.detail["answer_hubness"],
    "top_scores": lambda result: result.detail["top_scores"][:, 0],
    "query_uncertainty": lambda result: result.detail["query_uncertainty"],
    "answer_uncertainty": lambda result: result.detail["answer_uncertainty"],
}
"""What a stacked map can read, by its name in `TaskResult.detail` (or ``"confidence"``), on the scale it is read."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Recalibration:
    """A fitted map from a task's result to the probability that its first answer is right.

    Attributes:
        method: How it was fitted; see `recalibrate`.
        signals: What it reads, names in `SIGNALS`.
        parameters: Its numbers, lists of floats by name.
        fitted_on: Facts about the held-out result: what another result must share with it, ``n_queries``,
            ``n_gallery`` and ``share`` (mean correctness).
    """

    method: Method
    signals: tuple[str, ...]
    parameters: Mapping[str, list[float]]
    fitted_on: Mapping[str, Any] = field(default_factory=dict)

    def probability(self, result: TaskResult) -> np.ndarray:
        """(Q,) probabilities in [0, 1] that each query's `correct` is 1.

        Raises:
            InputError: The result lacks a signal, or was made in another way than the one this was fitted on.
        """
        kind = self.fitted_on.get("kind", {})
        refuse_another_kind(kind, result, what="recalibration", refit="recalibrate")
        features = _features(self.method, self.signals, result)
        if self.method == "isotonic":
            return np.interp(features[:, 0], self.parameters["confidence"], self.parameters["share"])
        if self.method == "histogram":
            return np.array(self.parameters["share"])[
                np.searchsorted(self.parameters["edges"], features[:, 0], "right")
            ]
        deviations = _deviations(self.method, features, self.parameters)
        return expit(deviations @ self.parameters["weights"] + self.parameters["intercept"])

    def apply(self, result: TaskResult, *, uncertainty: bool = False) -> TaskResult:
        """The result with calibrated confidence, all else as it was.

        Args:
            result: One made as the one this was fitted on, of other queries.
            uncertainty: Whether its uncertainty becomes 1 − the calibrated confidence too.

        Raises:
            InputError: As `probability`.
        """
        if result.task != self.fitted_on.get("task", result.task):
            raise InputError(
                f"recalibration expected a result of task {self.fitted_on['task']!r}, got {result.task!r}; see "
                "with_confidence_none for a map fitted on presence"
            )
        confidence = self.probability(result)
        provenance = {**result.provenance, "recalibration": self.method}
        changes: dict[str, Any] = {}
        if uncertainty:
            changes = {"uncertainty": 1 - confidence}
            provenance["uncertainty"] = "one_minus_confidence"
        return dataclasses.replace(result, confidence=confidence, provenance=provenance, **changes)

    def save(self, path: str | Path) -> Path:
        """Write one JSON file that `load` reads back, for instance into the folder of the adapter it belongs to.

        Raises:
            StoreError: The file cannot be written.
        """
        _io.write_json(path, {"schema": SCHEMA, "recalibration": dataclasses.asdict(self)})
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Recalibration:
        """Read what `save` wrote.

        Raises:
            UnreadableError: The file is missing, damaged or no recalibration of this schema.
        """
        content = _io.read_json(path)
        try:
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema {content['schema']}")
            fields = content["recalibration"]
            loaded = cls(**{**fields, "signals": tuple(fields["signals"])})
            _checks.choice(loaded.method, get_args(Method), what="method")
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableError(
                f"expected a recalibration of schema {SCHEMA} in {path}, got something else ({error!r}); write it with "
                "Recalibration.save"
            ) from error
        return loaded


def recalibrate(
    result: TaskResult, *, method: Method = "stacked", signals: Sequence[str] | None = None
) -> Recalibration:
    """Fit the probability that a first answer is right on held-out queries.

    All but ``"stacked"`` map the confidence alone; all but that and ``"histogram"`` never reverse its order.

    Args:
        result: A result of queries that will not be judged. Soft correctness counts in part.
        method: ``"temperature"``: log odds over one number. ``"platt"``: and a shift. ``"beta"``: log p and
            log(1 − p) weighted apart, which leaves a good confidence as it is. ``"isotonic"``: the best rising step
            function, interpolated. ``"histogram"``: the share of right answers in each of 15 bins of as many queries.
            ``"stacked"``: a logistic regression on several signals, which may reorder queries.
        signals: What a stacked map reads, names in `SIGNALS`; default all that the result has.

    Raises:
        InputError: No confidence, an unknown method, a signal that is unknown or missing.
        InputTypeError: `result` is no `TaskResult`.

    Source: Guo et al. 2017 (temperature; here of the odds of the first answer against all others, the temperature of
    the gallery's softmax is `retrieve`'s), Platt 1999 with its smoothed targets for all logistic maps, Kull et al.
    2017 (beta), Zadrozny & Elkan 2001 and 2002 (histogram, isotonic), Wolpert 1992 (stacking).
    """
    if not isinstance(result, TaskResult):
        raise InputTypeError(f"recalibrate expected a TaskResult, got {type(result).__name__}; run a task first")
    _checks.choice(method, get_args(Method), what="method")
    if method != "stacked":
        if signals is not None:
            raise InputError(f"signals expected method='stacked', got {method!r}, which reads the confidence alone")
        chosen: tuple[str, ...] = ("confidence",)
    elif signals is None:
        chosen = tuple(name for name in SIGNALS if _has(result, name))
    else:
        chosen = tuple(_checks.choice(name, tuple(SIGNALS), what="signals") for name in signals)
    if not chosen:
        raise InputError(f"a stacked map expected at least one of the signals {', '.join(SIGNALS)}, got none of them")
    features = _features(method, chosen, result)
    if method == "isotonic":
        parameters = _isotonic(features[:, 0], result.correct)
    elif method == "histogram":
        parameters = _histogram(features[:, 0], result.correct)
    else:
        parameters = _logistic(features, result.correct, method)
    fitted_on = {
        "task": result.task,
        "kind": kind_of(result),
        "n_queries": len(result),
        "n_gallery": result.provenance.get("n_gallery"),
        "share": float(result.correct.mean()),
    }
    return Recalibration(
        method=method,
        signals=chosen,
        parameters={name: np.asarray(values, dtype=np.float64).tolist() for name, values in parameters.items()},
        fitted_on=_io.jsonable(fitted_on),
    )


def with_confidence_none(result: TaskResult, presence: Recalibration, *, absent_share: float = 0.5) -> TaskResult:
    """The result with `detail` ``confidence_none``: the probability that the gallery holds no true match of a query.

    Args:
        result: A retrieval.
        presence: A map that `recalibrate` fitted on what `tasks.retrieve_absent` returned for held-out queries.
        absent_share: Share of queries that are expected to have no true match; odds are moved from those of the
            fitting, where it is about a half.

    Raises:
        InputError: The map was fitted on another task, the share is not between 0 and 1, or as
            `Recalibration.probability`.

    Source: Elkan 2001, Theorem 2, for the change of the share.
    """
    task = presence.fitted_on.get("task")
    if task != "presence":
        raise InputError(
            f"with_confidence_none expected a map fitted on task 'presence', got {task!r}; fit one with "
            "recalibrate(tasks.retrieve_absent(…))"
        )
    if not 0 < absent_share < 1:
        raise InputError(f"absent_share expected a share above 0 and below 1, got {absent_share}")
    odds = _log_odds(presence.probability(result)) - logit(presence.fitted_on["share"]) + logit(1 - absent_share)
    return dataclasses.replace(result, detail={**result.detail, "confidence_none": expit(-odds)})


def _confidence(result: TaskResult) -> np.ndarray:
    if result.confidence is None:
        raise InputError(
            f"recalibration expected a confidence, got a {result.task} result without one; run the task with a "
            "temperature, or use method='stacked' with other signals"
        )
    return result.confidence


def _has(result: TaskResult, signal: str) -> bool:
    return result.confidence is not None if signal == "confidence" else signal in result.query_detail


def _features(method: str, signals: tuple[str, ...], result: TaskResult) -> np.ndarray:
    """(Q, F) what a map of this method reads."""
    if method != "stacked":
        confidence = _confidence(result)
        if method in ("isotonic", "histogram"):
            return confidence[:, None]
        if method == "beta":
            inside = np.clip(confidence, SMALLEST, 1 - SMALLEST)
            return np.stack([np.log(inside), -np.log1p(-inside)], 1)
        return _log_odds(confidence)[:, None]
    for name in signals:
        if not _has(result, name):
            raise InputError(
                f"recalibration expected the signal {name!r}, got a {result.task} result without it; run the task as "
                "for the fitting (a temperature, marginal='empirical' for answer_hubness)"
            )
    return np.stack([SIGNALS[name](result) for name in signals], 1)


def _logistic(features: np.ndarray, correct: np.ndarray, method: str) -> dict[str, Any]:
    """Weights of a logistic regression on deviations; but for stacked maps none is negative."""
    from sklearn.linear_model import LogisticRegression

    free = method != "temperature"  # to have an intercept
    centre, spread = features.mean(0) * free, features.std(0)
    spread[spread < 1e-12 * (1 + np.abs(features).max(0))] = 1.0  # a constant, up to rounding
    parameters: dict[str, Any] = {"centre": centre, "spread": spread}
    deviations = _deviations(method, features, parameters)
    right, wrong = correct.sum(), (1 - correct).sum()
    target = correct * (right + 1) / (right + 2) + (1 - correct) / (wrong + 2)
    weights, kept = np.zeros(features.shape[1]), np.arange(features.shape[1])
    while len(kept):
        model = LogisticRegression(C=WEAK if method == "stacked" else STRONG, fit_intercept=free, max_iter=1000)
        model.fit(
            np.tile(deviations[:, kept], (2, 1)),
            np.repeat([1, 0], len(target)),
            sample_weight=np.concatenate([target, 1 - target]),
        )
        slopes, intercept = model.coef_[0], float(np.ravel(model.intercept_)[0])
        if method == "stacked" or slopes.min() >= 0:
            weights[kept] = slopes
            break
        kept = np.delete(kept, slopes.argmin())
    else:
        intercept = float(logit(target.mean())) if free else 0.0
    return {**parameters, "weights": weights, "intercept": [intercept]}


def _deviations(method: str, features: np.ndarray, parameters: Mapping[str, Any]) -> np.ndarray:
    deviations = (features - parameters["centre"]) / parameters["spread"]
    return deviations.clip(-FARTHEST, FARTHEST) if method == "stacked" else deviations


def _isotonic(confidence: np.ndarray, correct: np.ndarray) -> dict[str, Any]:
    from sklearn.isotonic import IsotonicRegression

    model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(confidence, correct)
    return {"confidence": model.X_thresholds_, "share": model.y_thresholds_}


def _histogram(confidence: np.ndarray, correct: np.ndarray) -> dict[str, Any]:
    """Inner edges of the bins, and the share of right answers in each."""
    edges = np.unique(np.quantile(confidence, np.arange(1, BINS) / BINS, method="higher"))
    edges = edges[edges > confidence.min()]  # an edge belongs to the bin above it, so that none is empty
    bins = np.searchsorted(edges, confidence, "right")
    return {"edges": edges, "share": np.bincount(bins, correct) / np.bincount(bins)}
