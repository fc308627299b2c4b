"""Sets of answers that hold a true one as often as promised, whatever the model: conformal prediction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from grove_adapters import _checks, _io, seeding
from grove_adapters.calibration.kinds import kind_of, refuse_another_kind
from grove_adapters.errors import InputError, InputTypeError, UnreadableError
from grove_adapters.tasks.base import TaskResult

Nonconformity = Literal["threshold", "adaptive", "rank"]

SCHEMA = 1
EVERYBODY = ""  # the one category of marginal sets


@dataclass(frozen=True, eq=False, kw_only=True)
class ConformalSets:
    """A set of answers for each of Q queries.

    Attributes:
        ids: (Q,) ids of the queries.
        top: (Q, K) gallery rows, closest first.
        included: (Q, K) which of them are in the set.
        unbounded: (Q,) where only the whole gallery holds a true match often enough.
        covered: (Q,) whether the set holds a true match; False where the gallery has none.
        n_gallery: G.
    """

    ids: np.ndarray
    top: np.ndarray
    included: np.ndarray
    unbounded: np.ndarray
    covered: np.ndarray
    n_gallery: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sizes(self) -> np.ndarray:
        """(Q,) numbers of answers, from 0 to G."""
        return np.where(self.unbounded, self.n_gallery, self.included.sum(1))

    @property
    def coverage(self) -> float:
        """Share of the queries whose set holds a true match."""
        return float(self.covered.mean())

    def rows(self, query: int) -> np.ndarray:
        """Gallery rows in the set of the query at this place, closest first."""
        if self.unbounded[query]:
            rest = np.setdiff1d(np.arange(self.n_gallery), self.top[query])
            return np.concatenate([self.top[query], rest])
        return self.top[query][self.included[query]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Conformal:
    """Fitted thresholds. Made by `conformalise`.

    Attributes:
        score: The nonconformity of an answer; see `conformalise`.
        alpha: Share of queries whose set may miss every true match.
        thresholds: By category, the largest nonconformity that is let in; infinite where too few queries were seen.
        depth: First answers that are looked at, or None for the whole ranking.
        seed: Address of the draws of adaptive sets.
        fitted_on: What another result must share with the fitted one, and ``n_queries``, of them the independent ones.
    """

    score: Nonconformity
    alpha: float
    thresholds: Mapping[str, float]
    depth: int | None
    seed: int = 0
    fitted_on: Mapping[str, Any] = field(default_factory=dict)

    def sets(
        self,
        result: TaskResult,
        *,
        query_categories: np.ndarray | None = None,
        gallery_categories: np.ndarray | None = None,
    ) -> ConformalSets:
        """A set of answers for each query of another result.

        Args:
            result: One made as the one this was fitted on, at least as deep.
            query_categories: (Q,) known categories of the queries, for thresholds fitted by category.
            gallery_categories: (G,) categories of the answers instead; each answer is held to the threshold of its own,
                which needs the whole ranking. A category never seen lets everything in.

        Raises:
            InputError: Another kind of result, not deep enough, or categories where there should be others.
        """
        refuse_another_kind(self.fitted_on.get("kind", {}), result, what="conformal sets", refit="conformalise")
        n_gallery = len(result.detail["gallery_ids"])
        depth = n_gallery if self.depth is None else min(self.depth, n_gallery)
        scores = _scores(result, self.score, depth, seeding.derive(self.seed, "sets"))
        top = result.detail["top"][:, :depth]
        given = [name for name in (query_categories, gallery_categories) if name is not None]
        if len(given) != (EVERYBODY not in self.thresholds):
            raise InputError(
                "conformal sets expected "
                + ("no categories" if EVERYBODY in self.thresholds else "query_categories or gallery_categories")
                + f" as they were fitted, got {len(given)} of the two"
            )
        if query_categories is not None:
            threshold = self._of(query_categories, len(result), "query_categories")[:, None]
        elif gallery_categories is not None:
            if depth < n_gallery:
                raise InputError(
                    f"gallery_categories expected the whole ranking, got the first {depth} of {n_gallery} answers; "
                    "retrieve with k equal to the size of the gallery, for both results"
                )
            threshold = self._of(gallery_categories, n_gallery, "gallery_categories")[top]
        else:
            threshold = np.full((len(result), 1), self.thresholds[EVERYBODY])
        included = scores <= threshold
        unbounded = np.isinf(threshold).all(1) & (depth < n_gallery)
        covered = (included & result.detail["top_correct"][:, :depth]).any(1)
        return ConformalSets(
            ids=result.ids,
            top=top,
            included=included,
            unbounded=unbounded,
            covered=covered | (unbounded & (result.detail["n_matches"] > 0)),
            n_gallery=n_gallery,
        )

    def _of(self, categories: np.ndarray, n: int, what: str) -> np.ndarray:
        names, place = np.unique(np.asarray(categories).astype(np.str_), return_inverse=True)
        _checks.same_rows(n, len(place), what=what)
        return np.array([self.thresholds.get(str(name), math.inf) for name in names])[place]

    def save(self, path: str | Path) -> Path:
        """Write one JSON file that `load` reads back; an infinite threshold is written as null.

        Raises:
            StoreError: The file cannot be written.
        """
        _io.write_json(path, {"schema": SCHEMA, "conformal": dataclasses.asdict(self)})
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Conformal:
        """Read what `save` wrote.

        Raises:
            UnreadableError: The file is missing, damaged or no conformal thresholds of this schema.
        """
        content = _io.read_json(path)
        try:
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema {content['schema']}")
            fields = content["conformal"]
            numbers = {name: math.inf if x is None else float(x) for name, x in fields["thresholds"].items()}
            loaded = cls(**{**fields, "thresholds": numbers})
            _checks.choice(loaded.score, get_args(Nonconformity), what="score")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnreadableError(
                f"expected conformal thresholds of schema {SCHEMA} in {path}, got something else ({error!r}); write "
                "them with Conformal.save"
            ) from error
        return loaded


def conformalise(
    result: TaskResult,
    *,
    alpha: float = 0.1,
    score: Nonconformity = "threshold",
    categories: np.ndarray | None = None,
    seed: int = 0,
) -> Conformal:
    """Fit thresholds on held-out queries so that a new query's set holds a true match with probability ≥ 1 − alpha.

    The promise is exact for any model and any number of queries, provided held-out and new queries are exchangeable:
    drawn alike, and asked of the same gallery or of one made alike. With many true matches it is that the set holds
    *at least one*: what counts of a query is the nonconformity of its best true match. An answer beyond the first K
    of the result is infinitely nonconforming, so sets stay within them. Of queries that form a group (the captions of
    one image) one is drawn, because the others are no further evidence.

    Args:
        result: A retrieval of queries that will not be judged, as deep as sets may become: ``k=(1, 100)``.
        alpha: Share of queries whose set may miss, between 0 and 1.
        score: ``"threshold"``: −log p of the answer's probability, which orders as 1 − p does and rounds nothing away;
            the smallest sets on average. ``"adaptive"``: the mass of
            likelier answers and a uniform share of its own; larger where the query is hard, so that hard queries are
            covered too. ``"rank"``: the place in the ranking; every set is the first k, with the k that suffices.
        categories: (Q,) a category of each query, or of its true match, for one threshold each; the promise then holds
            within every category.
        seed: Address of the draws.

    Raises:
        InputError: alpha out of range, an unknown score, categories of another length, a query without a true match,
            or a result without probabilities or the truth of its first answers.
        InputTypeError: `result` is no `TaskResult`.

    Source: Vovk et al. 2005 (split and Mondrian sets), Sadinle et al. 2019 (threshold), Romano et al. 2020 (adaptive,
    randomised; sets may be empty), Dunn et al. 2022 (one query a group).
    """
    if not isinstance(result, TaskResult):
        raise InputTypeError(f"conformalise expected a TaskResult, got {type(result).__name__}; run a task first")
    if not 0 < alpha < 1:
        raise InputError(f"alpha expected a share above 0 and below 1, got {alpha}")
    _checks.choice(score, get_args(Nonconformity), what="score")
    scores = _scores(result, score, None, seeding.derive(seed, "fit"))
    lost = np.flatnonzero(result.detail["n_matches"] == 0)
    if len(lost):
        raise InputError(
            f"conformalise expected a true match in the gallery for every query, got {len(lost)} without one (first: "
            f"{str(result.ids[lost[0]])!r}); retrieve with unmatched='drop'"
        )
    best = np.where(result.detail["top_correct"], scores, math.inf).min(1)
    names = np.full(len(result), EVERYBODY) if categories is None else np.asarray(categories).astype(np.str_)
    _checks.same_rows(len(result), len(names), what="categories")
    alone = _one_a_group(result.groups, len(result), seed)
    n_gallery = len(result.detail["gallery_ids"])
    return Conformal(
        score=score,
        alpha=float(alpha),
        thresholds={str(name): quantile(best[alone][names[alone] == name], alpha) for name in np.unique(names)},
        depth=None if scores.shape[1] == n_gallery else scores.shape[1],
        seed=seed,
        fitted_on=_io.jsonable({"kind": kind_of(result), "n_queries": len(alone), "n_gallery": n_gallery}),
    )


def quantile(scores: np.ndarray, alpha: float) -> float:
    """The ⌈(n + 1)(1 − alpha)⌉-th smallest of n scores, infinite where that is more than n.

    A further exchangeable score is no larger with probability at least 1 − alpha and, without ties, at most
    1 − alpha + 1 / (n + 1).
    """
    place = math.ceil((len(scores) + 1) * (1 - alpha) - 1e-9)  # 10 · (1 − .1) may come out above 9
    return float(np.sort(scores)[place - 1]) if 1 <= place <= len(scores) else math.inf


def _scores(result: TaskResult, score: str, depth: int | None, seed: int) -> np.ndarray:
    """(Q, depth) nonconformities of the first answers, never falling along a row."""
    needed = ["top", "top_correct", "n_matches", "gallery_ids"] + ["top_probabilities"] * (score != "rank")
    missing = [name for name in needed if name not in result.detail]
    if missing:
        raise InputError(
            f"conformal sets expected a result with {', '.join(needed)}, got a {result.task} result without "
            f"{', '.join(missing)}; retrieve with a temperature, or use score='rank'"
        )
    found = result.detail["top"].shape[1]
    depth = found if depth is None else depth
    if found < depth:
        raise InputError(
            f"conformal sets expected the first {depth} answers of each query, got {found}; retrieve with k={depth}"
        )
    if score == "rank":
        return np.broadcast_to(np.arange(1.0, depth + 1), (len(result), depth))
    probability = result.detail["top_probabilities"][:, :depth]
    if score == "threshold":
        return -np.log(np.maximum(probability, np.finfo(np.float64).tiny))
    share = np.random.default_rng(seed).random((len(result), 1))
    return probability.cumsum(1) - (1 - share) * probability


def _one_a_group(groups: np.ndarray | None, n: int, seed: int) -> np.ndarray:
    """Rows of one query of each group, drawn at random."""
    if groups is None:
        return np.arange(n)
    order = np.random.default_rng(seeding.derive(seed, "groups")).permutation(n)
    return np.sort(order[np.unique(groups[order], return_index=True)[1]])
