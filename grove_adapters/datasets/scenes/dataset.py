"""`Scenes`: pictures, captions, questions and everything that is known about them, in one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from scipy import sparse

from grove_adapters import seeding
from grove_adapters.datasets.scenes.captions import DETAIL_LEVELS, Caption, caption_chain, phrase
from grove_adapters.datasets.scenes.describe import SceneIndex, log_share
from grove_adapters.datasets.scenes.evidence import evidence, log_share_shown
from grove_adapters.datasets.scenes.questions import KINDS, Question, ask
from grove_adapters.datasets.scenes.render import SIZE, render_image
from grove_adapters.datasets.scenes.world import Scene, ScenePrior, SceneTable
from grove_adapters.errors import InputError

if TYPE_CHECKING:
    from grove_adapters.extract.records import Records

SPLITS: Mapping[str, float] = {"train": 0.6, "validation": 0.2, "test": 0.2}


@dataclass(frozen=True)
class Drawing:
    """A picture yet to be drawn: what an extractor's record holds in place of a file."""

    scene: Scene

    @property
    def key(self) -> str:
        """Everything the picture depends on, by which an interrupted extraction knows it again."""
        return repr(self.scene)

    def __call__(self) -> Image.Image:
        return render_image(self.scene)


@dataclass(frozen=True, eq=False)
class Scenes:
    """N pictures with T captions whose ambiguity is known. Made by `Scenes.generate`; nothing is stored on disk.

    Attributes:
        table: The N scenes.
        captions: The T captions, those of one picture after those of the one before, in the order of `levels`.
        split: (N,) names of the splits, each split one contiguous block.
        levels: Level of detail of each of a picture's captions.
        prior: The distribution of scenes, to which all ambiguities refer.
        seed: The seed everything was made from.
    """

    table: SceneTable
    captions: tuple[Caption, ...]
    split: np.ndarray
    levels: tuple[int, ...]
    prior: ScenePrior
    seed: int

    @classmethod
    def generate(
        cls,
        n: int,
        *,
        seed: int = 0,
        levels: Sequence[int] = (0, 1, 2, 3),
        splits: Mapping[str, float] = SPLITS,
        twins: float = 0.2,
        prior: ScenePrior | None = None,
    ) -> Scenes:
        """Draws scenes and writes their captions.

        Args:
            n: Number of pictures, >= 1.
            seed: Any integer >= 0; the same arguments give the same scenes, captions, pictures and questions.
            levels: Level of detail, 0 (vague) to 3 (full), of each of a picture's captions. Captions of different
                levels form a chain: each says a part of what the more detailed ones say.
            splits: Names of the splits and their shares, which add up to 1.
            twins: Share of scenes that are near-identical to the scene before them (see `ScenePrior.draw`).
            prior: The distribution of scenes, by default `ScenePrior()`; `ScenePrior().clean()` has no degradation.

        Returns:
            The data set.

        Raises:
            InputError: If an argument is out of range.
        """
        levels, prior = tuple(levels), prior or ScenePrior()
        if n < 1:
            raise InputError(f"Scenes.generate expects n >= 1 pictures, got {n}.")
        if not levels or not set(levels) <= set(range(DETAIL_LEVELS)):
            raise InputError(f"Scenes.generate expects levels from 0 to {DETAIL_LEVELS - 1}, got {levels}.")
        if not splits or min(splits.values()) < 0 or abs(sum(splits.values()) - 1) > 1e-9:
            raise InputError(f"Scenes.generate expects shares of splits that add up to 1, got {dict(splits)}.")
        ends = np.round(np.cumsum([0.0, *splits.values()]) * n).astype(int)
        sizes = dict(zip(splits, np.diff(ends).tolist(), strict=True))
        # Every split has a stream of its own, so no twin stands across the border of two splits.
        table = SceneTable.concatenate(
            [prior.draw(size, seed=seeding.derive(seed, "scenes", name), twins=twins) for name, size in sizes.items()]
        )
        table = replace(table, ids=tuple(f"scene-{row:06d}" for row in range(n)))
        captions = tuple(
            caption
            for row, scene in enumerate(table)
            for caption in _captions(scene, levels, seeding.derive(seed, "captions", row))
        )
        split = np.repeat(np.array(list(sizes)), list(sizes.values()))
        return cls(table, captions, split, levels, prior, seed)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def captions_per_image(self) -> int:
        """K: captions of each picture; T = N K."""
        return len(self.levels)

    @property
    def image_ids(self) -> tuple[str, ...]:
        """(N,) such as "scene-000123"."""
        return self.table.ids

    @cached_property
    def text_ids(self) -> tuple[str, ...]:
        """(T,) such as "scene-000123/caption-2"."""
        return tuple(caption.id for caption in self.captions)

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """(T,) the captions in English."""
        return tuple(caption.text for caption in self.captions)

    def scene(self, row: int) -> Scene:
        """The scene behind picture `row`."""
        return self.table[row]

    def image(self, row: int, size: int = SIZE) -> Image.Image:
        """Picture `row`, drawn when asked for (0.4 ms at 64 pixels)."""
        return render_image(self.table[row], size)

    @cached_property
    def links(self) -> np.ndarray:
        """(T, 2) int64 rows: every caption with the picture it was written for."""
        texts = np.arange(len(self.captions))
        return np.column_stack([texts // self.captions_per_image, texts])

    def rows(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Picture rows and caption rows of one split.

        Raises:
            InputError: If there is no such split.
        """
        images = np.flatnonzero(self.split == split)
        if not len(images):
            raise InputError(f"These scenes have no split {split!r}; they have {', '.join(np.unique(self.split))}.")
        return images, np.flatnonzero(self.split[self.links[:, 0]] == split)

    def matches(self, images: np.ndarray | Sequence[int], texts: np.ndarray | Sequence[int]) -> sparse.csr_array:
        """All true matches among some pictures and some captions, links included.

        Args:
            images: Q picture rows.
            texts: G caption rows.

        Returns:
            (Q, G) sparse bool: whether the caption is true of the scene in the picture, degraded or not.
        """
        index = SceneIndex(self.table.rows(images))
        fitting = [index.rows(self.captions[row].description) for row in texts]
        pointers = np.cumsum([0, *map(len, fitting)])
        rows = np.concatenate([np.empty(0, np.int64), *fitting])
        data = np.ones(len(rows), bool)
        return sparse.csc_array((data, rows, pointers), shape=(len(images), len(fitting))).tocsr()

    @cached_property
    def positives(self) -> np.ndarray:
        """(R, 2) int64 rows of pictures and captions of one split that match beyond the links."""
        pairs = []
        for split in dict.fromkeys(self.split.tolist()):
            images, texts = self.rows(split)
            found = self.matches(images, texts).tocoo()
            pairs.append(np.column_stack([images[found.row], texts[found.col]]))
        every = np.concatenate(pairs)
        return every[every[:, 1] // self.captions_per_image != every[:, 0]]

    def records(self, *, positives: bool = True) -> Records:
        """The data set as an extractor takes it, with `level` and `ambiguity` as columns.

        Args:
            positives: Whether true matches beyond the links go along; their number grows with the square of N.
        """
        from grove_adapters.extract.records import Caption as RecordCaption
        from grove_adapters.extract.records import Record, Records

        captions = [
            RecordCaption(caption.text, caption.id, {"level": caption.level, "ambiguity": ambiguity})
            for caption, ambiguity in zip(self.captions, self.caption_ambiguity.tolist(), strict=True)
        ]
        k = self.captions_per_image
        records = [
            Record(
                scene.id,
                Drawing(scene),
                captions[row * k : row * k + k],
                split=str(self.split[row]),
                columns={"ambiguity": float(self.image_ambiguity[row])},
            )
            for row, scene in enumerate(self.table)
        ]
        return Records(records, positives=self.positives if positives else None)

    @cached_property
    def caption_level(self) -> np.ndarray:
        """(T,) level of detail, 0 (vague) to 3 (full)."""
        return np.array([caption.level for caption in self.captions])

    @cached_property
    def caption_ambiguity(self) -> np.ndarray:
        """(T,) log of the expected share of scenes each caption fits (`log_share`); larger = more ambiguous."""
        return np.array([log_share(caption.description, self.prior) for caption in self.captions])

    @cached_property
    def image_ambiguity(self) -> np.ndarray:
        """(N,) log of the expected share of scenes a picture could show (`log_share_shown`); larger = less certain."""
        return np.array([log_share_shown(evidence(scene), self.prior) for scene in self.table])

    def questions(self, per_image: int = 1) -> tuple[Question, ...]:
        """Questions of different kinds about every picture, each with ten annotators' answers, picture after picture.

        Raises:
            InputError: If `per_image` is not between 1 and the number of kinds.
        """
        if not 1 <= per_image <= len(KINDS):
            raise InputError(f"Scenes.questions expects 1 to {len(KINDS)} questions an image, got {per_image}.")
        questions = []
        for row, scene in enumerate(self.table):
            rng = np.random.default_rng(seeding.derive(self.seed, "questions", row))
            kinds = [KINDS[i] for i in rng.permutation(len(KINDS))[:per_image]]
            questions += [ask(scene, kind, rng, self.prior) for kind in kinds]
        return tuple(questions)


def _captions(scene: Scene, levels: tuple[int, ...], seed: int) -> list[Caption]:
    """One caption per level; a level that is asked for again gets a chain of its own."""
    rng = np.random.default_rng(seed)
    chains = [caption_chain(scene, rng) for _ in range(max(map(levels.count, levels)))]
    captions = []
    for number, level in enumerate(levels):
        description = chains[levels[:number].count(level)][level]
        captions.append(Caption(phrase(description, rng), description, level, f"{scene.id}/caption-{number}"))
    return captions
