"""From an adapter and pairs to an `Evaluation`: retrieval both ways, calibration, folds, examples."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grove_adapters import seeding
from grove_adapters.config import nearest
from grove_adapters.errors import InputError, UnknownNameError
from grove_adapters.html import Example, Gallery, KnownTruth
from grove_adapters.pipeline.evaluation import Evaluation
from grove_adapters.pipeline.tables import short

if TYPE_CHECKING:
    from grove_adapters.adapters import Adapter
    from grove_adapters.embeddings import Embeddings, Modality, Pairs
    from grove_adapters.posterior import ProbabilisticEmbedding
    from grove_adapters.store import EmbeddingStore
    from grove_adapters.tasks import TaskResult
    from grove_adapters.tasks.retrieval import Direction

DIRECTIONS: tuple[Direction, Direction] = ("i2t", "t2i")
ASKING = {"i2t": "Images", "t2i": "Captions"}
CARDS = {
    "i2t": "Each card shows the picture that asks, the longest of its own captions, and the caption that was found.",
    "t2i": "Each card shows the picture that was found, and below it the caption that asks.",
}
SIDES: dict[Direction, Modality] = {"i2t": "image", "t2i": "text"}
THUMBNAIL = 160  # pixels of the longer side

Known = Mapping[Any, tuple[str, np.ndarray]]
"""direction → (what is known, with its unit; one number for each row of the asking side)."""


def predict_both(
    adapter: Adapter, pairs: Pairs, *, seed: int = 0, device: str = "cpu", progress: bool = False
) -> tuple[ProbabilisticEmbedding, ProbabilisticEmbedding]:
    """The posteriors of the images and of the texts."""
    images = adapter.predict(pairs.images, seed=seed, device=device, progress=progress)
    return images, adapter.predict(pairs.texts, seed=seed, device=device, progress=progress)


def retrieve_both(
    adapter: Adapter,
    pairs: Pairs,
    *,
    directions: Sequence[Direction] = DIRECTIONS,
    seed: int = 0,
    device: str = "cpu",
    progress: bool = False,
    **settings: Any,
) -> list[TaskResult]:
    """Retrieval within `pairs` in each direction; any true match counts, links and positives alike.

    Args:
        adapter: A fitted adapter.
        pairs: The asking and the answering side.
        directions: Any of ``"i2t"`` and ``"t2i"``.
        seed: Address of random numbers in `predict`.
        device: Where to predict.
        progress: Whether to show progress bars.
        settings: Further keywords of `tasks.retrieve`.
    """
    from grove_adapters.tasks import retrieve

    images, texts = predict_both(adapter, pairs, seed=seed, device=device, progress=progress)
    return [
        retrieve(
            images, texts, links=pairs.links, positives=pairs.positives, direction=name, progress=progress, **settings
        )
        for name in directions
    ]


def judge(
    results: Sequence[TaskResult],
    pairs: Pairs,
    *,
    label: str = "",
    levels: int = 10,
    resamples: int = 1000,
    seed: int = 0,
    known: Known | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Calibrate results, and correlate their uncertainty with what is known about the queries.

    Args:
        results: One for each direction.
        pairs: Where their queries come from.
        label: Name of the adapter; default the one in the results' provenance.
        levels: Number of levels of uncertainty.
        resamples: Bootstrap resamples behind every interval.
        seed: Address of the resampling.
        known: Known ambiguities by direction, one number for each row of the asking side.
        facts: Provenance for the heading.
    """
    from grove_adapters.calibration import calibrate, rank_correlation

    reports = [calibrate(result, levels=levels, resamples=resamples, seed=seed) for result in results]
    truths = []
    for result, report in zip(results, reports, strict=True):
        if known is None or result.direction not in known:
            continue
        name, values = known[result.direction]
        truth = np.asarray(values, dtype=float)[_asking(pairs, result.direction).rows(result.ids)]
        score = rank_correlation(result.uncertainty, truth, groups=result.groups, resamples=resamples, seed=seed)
        truths.append(
            KnownTruth(
                adapter=label or report.adapter or "report",
                direction=result.direction,
                name=name,
                truth=truth,
                uncertainty=result.uncertainty,
                score=score,
            )
        )
    labels = (label,) * len(reports) if label else ()
    return Evaluation(reports=reports, labels=labels, known=truths, facts=facts or {})


def evaluate(
    adapter: Adapter,
    pairs: Pairs,
    *,
    directions: Sequence[Direction] = DIRECTIONS,
    levels: int = 10,
    resamples: int = 1000,
    seed: int = 0,
    device: str = "cpu",
    known: Known | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: bool = False,
    **settings: Any,
) -> Evaluation:
    """Retrieve within `pairs` in each direction and calibrate: `retrieve_both`, then `judge`.

    Args:
        adapter: A fitted adapter.
        pairs: Pairs it was not fitted on.
        directions: Any of ``"i2t"`` and ``"t2i"``.
        levels: Number of levels of uncertainty.
        resamples: Bootstrap resamples behind every interval.
        seed: Address of every random number.
        device: Where to predict.
        known: Known ambiguities by direction, one number for each row of the asking side.
        facts: Provenance for the heading.
        progress: Whether to show progress bars.
        settings: Further keywords of `tasks.retrieve`.
    """
    results = retrieve_both(
        adapter, pairs, directions=directions, seed=seed, device=device, progress=progress, **settings
    )
    return judge(results, pairs, levels=levels, resamples=resamples, seed=seed, known=known, facts=facts)


def evaluate_store(
    adapter: Adapter,
    store: EmbeddingStore,
    split: str | None = "test",
    *,
    directions: Sequence[Direction] = DIRECTIONS,
    levels: int = 10,
    resamples: int = 1000,
    seed: int = 0,
    device: str = "cpu",
    known: str | None = None,
    examples: int = 0,
    picture: Callable[[str], bytes | None] | None = None,
    progress: bool = False,
    **settings: Any,
) -> Evaluation:
    """`evaluate` on a split of a store, with its columns as known ambiguity and as words and pictures of examples.

    Args:
        adapter: A fitted adapter.
        store: The store.
        split: Which of its splits; None asks about everything.
        directions: Any of ``"i2t"`` and ``"t2i"``.
        levels: Number of levels of uncertainty.
        resamples: Bootstrap resamples behind every interval.
        seed: Address of every random number.
        device: Where to predict.
        known: Column that holds a known ambiguity, of images for ``"i2t"`` and of texts for ``"t2i"``; directions
            whose asking side has no such column go without.
        examples: Queries to show in each direction, evenly spread from the most to the least certain.
        picture: From an image id to PNG or JPEG bytes; default a thumbnail of the file in the column ``path``.
        progress: Whether to show progress bars.
        settings: Further keywords of `tasks.retrieve`.

    Raises:
        UnknownNameError: No asking side has the column `known`.
    """
    pairs = store.pairs(split)
    truths = {} if known is None else _known_columns(store, split, known, directions)
    results = retrieve_both(
        adapter, pairs, directions=directions, seed=seed, device=device, progress=progress, **settings
    )
    facts = {"store": Path(store.path).name, "split": split or "everything"}
    evaluation = judge(results, pairs, levels=levels, resamples=resamples, seed=seed, known=truths, facts=facts)
    if not examples:
        return evaluation
    words = store.column("text", "text", split) if "text" in store.columns("text") else np.asarray(pairs.texts.ids)
    galleries = [
        gallery(
            result,
            pairs,
            words,
            picture or _thumbnails(store, split),
            title=f"{ASKING[result.direction]} from most to least certain ({adapter.name})",
            count=examples,
            known=truths.get(result.direction),
        )
        for result in results
    ]
    return dataclasses.replace(evaluation, galleries=galleries)


def fit_folds(
    make: Callable[[], Adapter],
    pairs: Pairs,
    *,
    folds: int = 5,
    seed: int = 0,
    device: str = "cpu",
    progress: bool = False,
) -> list[tuple[Adapter, Pairs]]:
    """For each fold, an adapter fitted on all the others and the pairs it never saw.

    Args:
        make: Makes an unfitted adapter.
        pairs: All pairs.
        folds: Number of folds; all captions of an image stay in one.
        seed: Address of the folds and of the fits.
        device: Where to fit.
        progress: Whether to show progress bars.
    """
    return [
        (make().fit(train, seed=seeding.derive(seed, "fold", number), device=device, progress=progress), test)
        for number, (train, test) in enumerate(pairs.folds(folds, seed=seed))
    ]


def retrieve_folds(
    fits: Sequence[tuple[Adapter, Pairs]],
    *,
    directions: Sequence[Direction] = DIRECTIONS,
    seed: int = 0,
    device: str = "cpu",
    **settings: Any,
) -> list[TaskResult]:
    """Out-of-fold retrieval, pooled: every query asks once, within its own fold, an adapter that never saw it.

    Uncertainties are pooled as they are, so a method whose scale changes from fold to fold pays for it.

    Args:
        fits: What `fit_folds` returned.
        directions: Any of ``"i2t"`` and ``"t2i"``.
        seed: Address of random numbers in `predict`.
        device: Where to predict.
        settings: Further keywords of `tasks.retrieve`.

    Returns:
        One result for each direction.
    """
    parts = [
        retrieve_both(adapter, test, directions=directions, seed=seed, device=device, **settings)
        for adapter, test in fits
    ]
    return [pool(results) for results in zip(*parts, strict=True)]


def pool(results: Sequence[TaskResult]) -> TaskResult:
    """Results on disjoint queries as one; groups stay apart, and confidence or groups stay only where all have them.

    Raises:
        InputError: No results, or results of different tasks or directions.
    """
    from grove_adapters.tasks import TaskResult

    kinds = {(result.task, result.direction) for result in results}
    if len(kinds) != 1:
        raise InputError(f"pool expected results of one task and direction, got {sorted(kinds) or 'none'}")
    first = results[0]
    sizes = [0, *np.cumsum([len(result) for result in results])]
    groups = None
    if all(result.groups is not None for result in results):
        offsets = np.cumsum([0, *(int(result.groups.max()) + 1 for result in results)])  # type: ignore[union-attr]
        groups = np.concatenate([result.groups + offset for result, offset in zip(results, offsets, strict=False)])
    confidence = None
    if all(result.confidence is not None for result in results):
        confidence = np.concatenate([result.confidence for result in results])
    shared = set.intersection(*(set(result.recall_at) for result in results))
    return TaskResult(
        task=first.task,
        direction=first.direction,
        ids=np.concatenate([result.ids for result in results]),
        correct=np.concatenate([result.correct for result in results]),
        uncertainty=np.concatenate([result.uncertainty for result in results]),
        confidence=confidence,
        recall_at={k: np.concatenate([result.recall_at[k] for result in results]) for k in sorted(shared)},
        groups=groups,
        detail={"fold": np.repeat(np.arange(len(results)), np.diff(sizes))},
        provenance={**first.provenance, "n_queries": int(sizes[-1]), "folds": len(results)},
    )


def gallery(
    result: TaskResult,
    pairs: Pairs,
    captions: Sequence[str] | np.ndarray,
    picture: Callable[[str], bytes | None],
    *,
    title: str,
    count: int = 12,
    known: tuple[str, np.ndarray] | None = None,
) -> Gallery:
    """Queries evenly spread from the most to the least certain, each with its first answer.

    An image is described by the longest of its captions.

    Args:
        result: A retrieval within `pairs`.
        pairs: Where the queries and answers come from.
        captions: The caption of every text row.
        picture: From an image id to PNG or JPEG bytes, or None where there is no picture.
        title: Heading.
        count: Number of examples, at most.
        known: What is known about each row of the asking side, and its name.
    """
    order = np.argsort(result.uncertainty, kind="stable")
    places = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    asking = _asking(pairs, result.direction)
    first = np.asarray(result.detail["top"])[:, 0]
    examples = []
    for place in places:
        query = int(order[place])
        row = int(asking.rows(result.ids[[query]])[0])
        image = row if result.direction == "i2t" else int(first[query])
        if result.direction == "i2t":
            own = [str(captions[text]) for text in pairs.links[pairs.links[:, 0] == row, 1]]
            words, answer = max(own, key=len, default=str(result.ids[query])), str(captions[first[query]])
        else:
            words, answer = str(captions[row]), ""
        note = "" if known is None else f"{known[0]} {short(known[1][row], 2)}"
        examples.append(
            Example(
                query=words,
                image=picture(str(pairs.images.ids[image])),
                answer=answer,
                correct=bool(result.correct[query] >= 0.5),
                uncertainty=float(result.uncertainty[query]),
                place=float(place / max(len(order) - 1, 1)),
                note=note,
            )
        )
    return Gallery(title=title, examples=examples, note=CARDS[result.direction])


def _asking(pairs: Pairs, direction: str) -> Embeddings:
    return pairs.images if direction == "i2t" else pairs.texts


def _known_columns(store: EmbeddingStore, split: str | None, column: str, directions: Sequence[Direction]) -> Known:
    asking = {name: SIDES[name] for name in directions}
    known = {
        name: (f"{column} of the {side}", store.column(side, column, split))
        for name, side in asking.items()
        if column in store.columns(side)
    }
    if not known:
        there = {name for side in asking.values() for name in store.columns(side)}
        raise UnknownNameError(f"the store has no column {column!r};{nearest(column, there)}")
    return known


def _thumbnails(store: EmbeddingStore, split: str | None) -> Callable[[str], bytes | None]:
    """From an image id to a small JPEG of the file in the column ``path``, or None where it is not readable."""
    from PIL import Image, UnidentifiedImageError

    paths = store.column("image", "path", split) if "path" in store.columns("image") else np.empty(0)
    by_id = dict(zip(store.pairs(split).images.ids, paths, strict=False))

    def picture(name: str) -> bytes | None:
        try:
            with Image.open(str(by_id[name])) as image:
                small = image.convert("RGB")
        except (KeyError, OSError, UnidentifiedImageError):
            return None
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        drawn = io.BytesIO()
        small.save(drawn, "JPEG", quality=85)
        return drawn.getvalue()

    return picture
