"""Does the gallery hold the answer at all? Queries asked with and without their true matches in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from grove_adapters import _checks, seeding
from grove_adapters.errors import InputError
from grove_adapters.posterior import ProbabilisticEmbedding
from grove_adapters.tasks.base import TaskResult
from grove_adapters.tasks.retrieval import retrieve
from grove_adapters.tasks.truth import Direction, Truth


def retrieve_absent(
    images: ProbabilisticEmbedding,
    texts: ProbabilisticEmbedding,
    *,
    links: np.ndarray,
    positives: np.ndarray | None = None,
    direction: Direction = "i2t",
    folds: int = 10,
    seed: int = 0,
    **settings: Any,
) -> TaskResult:
    """Ask every query twice: of a gallery with true matches of it, and of one from which all of them are removed.

    Queries are dealt into folds, those whose first true match is the same into the same one. A fold's gallery lacks
    every true match of the fold's queries, which are asked there as *absent*; the next fold's queries are asked there
    as *present*, so that both kinds see galleries of one size. A query of the next fold that has lost all its true
    matches too is asked once only. All queries take part in the empirical marginal.

    Args:
        images: Posteriors of the images.
        texts: Posteriors of the texts.
        links: (P, 2) rows (image, text).
        positives: (R, 2) rows of further true matches, which are removed too.
        direction: ``"i2t"`` or ``"t2i"``.
        folds: Number of folds, at least 2; each gallery lacks about one part in so many.
        seed: Address of the dealing, and `retrieve`'s.
        settings: Passed on to `retrieve`.

    Returns:
        A result of task ``"presence"`` with two rows a query, ``"<id> present"`` and ``"<id> absent"``: `correct` is 1
        where the gallery holds a true match, so that `uncertainty` and `confidence` are judged by whether they tell.
        `groups` keeps a query's two rows together, and queries that `retrieve` would group. `detail` is that of
        `retrieve` (rows of the whole gallery), and ``answer_correct`` (2Q,).

    Raises:
        InputError: As `retrieve`; or a fold whose removal leaves no true match to anybody.
    """
    _checks.count(folds, what="folds", at_least=2)
    truth = Truth.of(links, positives, direction, len(images), len(texts))
    queries, gallery = (images, texts) if direction == "i2t" else (texts, images)
    firsts = np.unique(truth.partner[truth.n_matches > 0])
    if len(firsts) < folds:
        raise InputError(
            f"retrieve_absent expected at least {folds} different true matches, one a fold, got {len(firsts)}; "
            "give fewer folds"
        )
    fold_of_first = np.full(len(gallery) + 1, -1)  # the last place is that of queries without a partner
    fold_of_first[np.random.default_rng(seeding.derive(seed, "folds")).permutation(firsts)] = (
        np.arange(len(firsts)) % folds
    )
    fold = fold_of_first[truth.partner]

    parts = []
    for number in range(folds):
        removed = truth.matches[fold[truth.matches[:, 0]] == number, 1]
        kept = np.setdiff1d(np.arange(len(gallery)), removed)
        new_row = np.full(len(gallery), -1)
        new_row[kept] = np.arange(len(kept))
        left = truth.matches[new_row[truth.matches[:, 1]] >= 0]
        if not len(left):
            raise InputError(
                f"retrieve_absent expected true matches to remain when a fold's are removed, got none of "
                f"{len(truth.matches)}; give more folds, or fewer positives"
            )
        pairs = np.stack([left[:, 0], new_row[left[:, 1]]], 1)
        smaller = gallery.take(kept)
        sides = (queries, smaller) if direction == "i2t" else (smaller, queries)
        found = retrieve(
            *sides,
            links=pairs if direction == "i2t" else pairs[:, ::-1],
            direction=direction,
            unmatched="keep",
            seed=seed,
            **settings,
        )
        holds = found.detail["n_matches"] > 0
        chosen = np.flatnonzero((fold == number) | ((fold == (number + 1) % folds) & holds))
        parts.append((chosen, kept, found.take(chosen)))

    rows = np.concatenate([chosen for chosen, _, _ in parts])
    present = np.concatenate([part.detail["n_matches"] > 0 for _, _, part in parts])
    depth = min(part.detail["top"].shape[1] for _, _, part in parts)
    columns: dict[str, list[np.ndarray]] = {}
    for _, kept, part in parts:
        for name, value in {**part.query_detail, "top": kept[part.detail["top"]]}.items():
            columns.setdefault(name, []).append(value[:, :depth] if name.startswith("top") else value)
    groups = truth.partner if direction == "t2i" else np.arange(len(queries))
    confidences = [part.confidence for _, _, part in parts]
    return TaskResult(
        task="presence",
        direction=direction,
        ids=np.char.add(queries.ids[rows], np.where(present, " present", " absent")),
        correct=present,
        uncertainty=np.concatenate([part.uncertainty for _, _, part in parts]),
        confidence=None if confidences[0] is None else np.concatenate(confidences),  # type: ignore[arg-type]
        groups=groups[rows],
        detail={
            **{name: np.concatenate(values) for name, values in columns.items()},
            "answer_correct": np.concatenate([part.correct for _, _, part in parts]),
            "gallery_ids": np.asarray(gallery.ids),
        },
        provenance={
            **parts[0][2].provenance,
            "n_queries": len(rows),
            "n_gallery": len(gallery),
            "folds": folds,
            "seed": seed,
        },
    )
