"""The world itself: what a scene is made of, the prior it is drawn from, and the array form of many scenes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from grove_adapters.errors import InputError

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "pink")
SIZES = ("small", "large")
FILLS = ("solid", "hollow", "striped")
BACKGROUNDS = ("white", "navy", "beige", "mint")
PLACES = (
    "top left", "top centre", "top right",
    "centre left", "centre", "centre right",
    "bottom left", "bottom centre", "bottom right",
)  # fmt: skip

ATTRIBUTES = {"shape": SHAPES, "colour": COLOURS, "size": SIZES, "fill": FILLS}
"""The attributes an object has besides its cell, with their values. The order is the column order of `SceneTable`."""

GRID = 3
CELLS = GRID * GRID
MAX_OBJECTS = 4
LEVELS = 4
"""Degradation levels of each kind: 0 (none) to 3 (severe)."""

_CELL = len(ATTRIBUTES)  # column of the cell in SceneTable.objects, after the attributes


def _blocks(height: int, width: int) -> tuple[tuple[int, ...], ...]:
    """All places where a card of `height` x `width` cells can lie on the grid."""
    return tuple(
        tuple((top + i) * GRID + left + j for i in range(height) for j in range(width))
        for top in range(GRID - height + 1)
        for left in range(GRID - width + 1)
    )


COVERS = (((),), _blocks(1, 2) + _blocks(2, 1), _blocks(2, 2), _blocks(2, 3) + _blocks(3, 2))
"""The cells hidden by an occluding card: `COVERS[level][position]`."""


class Thing(NamedTuple):
    """One object of a scene."""

    shape: str
    colour: str
    size: str
    fill: str
    cell: int

    @property
    def attributes(self) -> tuple[str, str, str, str]:
        """Shape, colour, size and fill, in the order of `ATTRIBUTES`."""
        return self[:4]

    @property
    def place(self) -> str:
        """The cell in words, such as "top left"."""
        return PLACES[self.cell]


class Degradation(NamedTuple):
    """How much a picture hides: three levels from 0 to 3, and where the occluding card lies."""

    blur: int = 0
    noise: int = 0
    occlusion: int = 0
    cover: int = 0

    @property
    def covered(self) -> tuple[int, ...]:
        """The cells under the occluding card."""
        return COVERS[self.occlusion][self.cover]

    @property
    def severity(self) -> int:
        """Sum of the three levels, 0 to 9."""
        return self.blur + self.noise + self.occlusion


PRISTINE = Degradation()


@dataclass(frozen=True, slots=True)
class Scene:
    """One to four objects on a 3 x 3 grid, a background, and how badly the picture shows them.

    Attributes:
        objects: The objects, in reading order of their distinct cells.
        background: One of `BACKGROUNDS`.
        degradation: Blur, noise and occlusion.
        look: Seed of everything that carries no meaning (sub-cell jitter, grain).
        id: Name of the scene.
    """

    objects: tuple[Thing, ...]
    background: str
    degradation: Degradation = PRISTINE
    look: int = 0
    id: str = "scene"

    def __post_init__(self) -> None:
        cells = [thing.cell for thing in self.objects]
        if not 1 <= len(cells) <= MAX_OBJECTS or len(set(cells)) != len(cells):
            raise InputError(
                f"A scene needs 1 to {MAX_OBJECTS} objects in distinct cells, got cells {cells}. Move or remove some."
            )
        object.__setattr__(self, "objects", tuple(sorted(self.objects, key=lambda thing: thing.cell)))


@dataclass(frozen=True, eq=False)
class SceneTable:
    """Many scenes as arrays: the form in which descriptions are checked against thousands of scenes.

    Attributes:
        objects: (N, 4, 5) int8: value indices of shape, colour, size, fill (order of `ATTRIBUTES`) and the cell; -1
            where a scene has fewer objects. Objects stand in reading order of their cells.
        background: (N,) int8 indices into `BACKGROUNDS`.
        degradation: (N, 4) int8: blur, noise, occlusion, cover.
        look: (N,) uint32 seeds of jitter and grain.
        ids: (N,) unique strings.
    """

    objects: np.ndarray
    background: np.ndarray
    degradation: np.ndarray
    look: np.ndarray
    ids: tuple[str, ...]

    @classmethod
    def from_scenes(cls, scenes: Sequence[Scene]) -> SceneTable:
        """The array form of scenes made by hand."""
        objects = np.full((len(scenes), MAX_OBJECTS, _CELL + 1), -1, np.int8)
        for row, scene in enumerate(scenes):
            for column, thing in enumerate(scene.objects):
                values = zip(ATTRIBUTES.values(), thing.attributes, strict=True)
                objects[row, column] = [*(names.index(value) for names, value in values), thing.cell]
        return cls(
            objects,
            np.array([BACKGROUNDS.index(scene.background) for scene in scenes], np.int8),
            np.array([scene.degradation for scene in scenes], np.int8).reshape(len(scenes), len(Degradation._fields)),
            np.array([scene.look for scene in scenes], np.uint32),
            tuple(scene.id for scene in scenes),
        )

    @classmethod
    def concatenate(cls, tables: Sequence[SceneTable]) -> SceneTable:
        """The rows of several tables, one after another."""
        return cls(
            np.concatenate([table.objects for table in tables]),
            np.concatenate([table.background for table in tables]),
            np.concatenate([table.degradation for table in tables]),
            np.concatenate([table.look for table in tables]),
            tuple(name for table in tables for name in table.ids),
        )

    @property
    def count(self) -> np.ndarray:
        """(N,) number of objects."""
        return (self.objects[:, :, _CELL] >= 0).sum(axis=1)

    @property
    def cell(self) -> np.ndarray:
        """(N, 4) cells, -1 where there is no object."""
        return self.objects[:, :, _CELL]

    def attribute(self, name: str) -> np.ndarray:
        """(N, 4) value indices of one attribute, -1 where there is no object."""
        return self.objects[:, :, tuple(ATTRIBUTES).index(name)]

    def rows(self, rows: np.ndarray | Sequence[int] | slice) -> SceneTable:
        """The table of some rows, in the order asked for."""
        chosen = np.arange(len(self))[rows]
        return SceneTable(
            self.objects[chosen],
            self.background[chosen],
            self.degradation[chosen],
            self.look[chosen],
            tuple(self.ids[row] for row in chosen),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> Scene:
        things = tuple(
            Thing(SHAPES[shape], COLOURS[colour], SIZES[size], FILLS[fill], cell)
            for shape, colour, size, fill, cell in self.objects[row].tolist()
            if cell >= 0
        )
        degradation = Degradation(*self.degradation[row].tolist())
        return Scene(things, BACKGROUNDS[self.background[row]], degradation, int(self.look[row]), self.ids[row])

    def __iter__(self) -> Iterator[Scene]:
        return (self[row] for row in range(len(self)))


@dataclass(frozen=True, kw_only=True)
class ScenePrior:
    """The distribution scenes are drawn from. Every probability in this package is a statement about it.

    Given the number of objects, the attributes of all objects are independent, their cells are a uniform choice without
    replacement, and background and degradations are independent of everything.

    Attributes:
        count: Probabilities of 1, 2, 3 and 4 objects.
        shape, colour, size, fill: Probabilities of the values, in the order of `ATTRIBUTES`.
        background: Probabilities in the order of `BACKGROUNDS`.
        blur, noise, occlusion: Probabilities of levels 0 to 3.
    """

    count: tuple[float, ...] = (0.2, 0.3, 0.3, 0.2)
    shape: tuple[float, ...] = (0.22, 0.22, 0.18, 0.14, 0.12, 0.12)
    colour: tuple[float, ...] = (0.2, 0.2, 0.16, 0.14, 0.12, 0.1, 0.08)
    size: tuple[float, ...] = (0.5, 0.5)
    fill: tuple[float, ...] = (0.5, 0.25, 0.25)
    background: tuple[float, ...] = (0.4, 0.2, 0.2, 0.2)
    blur: tuple[float, ...] = (0.7, 0.12, 0.1, 0.08)
    noise: tuple[float, ...] = (0.7, 0.12, 0.1, 0.08)
    occlusion: tuple[float, ...] = (0.7, 0.12, 0.1, 0.08)

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in ATTRIBUTES.items()}
        lengths |= {"count": MAX_OBJECTS, "background": len(BACKGROUNDS)}
        lengths |= dict.fromkeys(("blur", "noise", "occlusion"), LEVELS)
        for name, length in lengths.items():
            weights = getattr(self, name)
            if len(weights) != length or min(weights) < 0 or abs(sum(weights) - 1) > 1e-9:
                raise InputError(
                    f"ScenePrior.{name} needs {length} probabilities that add up to 1, got {weights}. Normalise them."
                )

    def clean(self) -> ScenePrior:
        """The same prior without any degradation."""
        never = (1.0, *[0.0] * (LEVELS - 1))
        return replace(self, blur=never, noise=never, occlusion=never)

    def draw(self, n: int, *, seed: int, twins: float = 0.0, name: str = "scene") -> SceneTable:
        """Draws scenes.

        Args:
            n: How many.
            seed: Any integer >= 0; the same seed gives the same scenes.
            twins: Share in [0, 1] of scenes that are near-identical to the scene before them: one attribute of one
                object, or its cell, is changed by a Metropolis step. The step leaves the prior invariant, so twins
                make a gallery harder without changing the distribution of any single scene.
            name: First part of the ids, as in "scene-000123".

        Returns:
            A table of n scenes.

        Raises:
            InputError: If `n` < 0 or `twins` is outside [0, 1].
        """
        if n < 0 or not 0 <= twins <= 1:
            raise InputError(f"draw expects n >= 0 and twins in [0, 1], got n={n}, twins={twins}.")
        rng = np.random.default_rng(seed)
        objects = np.empty((n, MAX_OBJECTS, _CELL + 1), np.int8)
        for column, (attribute, values) in enumerate(ATTRIBUTES.items()):
            objects[:, :, column] = rng.choice(len(values), (n, MAX_OBJECTS), p=getattr(self, attribute))
        objects[:, :, _CELL] = rng.permuted(np.tile(np.arange(CELLS), (n, 1)), axis=1)[:, :MAX_OBJECTS]
        counts = rng.choice(np.arange(1, MAX_OBJECTS + 1), n, p=self.count)
        objects[np.arange(MAX_OBJECTS) >= counts[:, None]] = -1
        background = rng.choice(len(BACKGROUNDS), n, p=self.background).astype(np.int8)
        for row in np.flatnonzero(rng.random(n) < twins):
            if row > 0:
                background[row] = background[row - 1]
                objects[row] = self._neighbour(objects[row - 1], rng)
        reading = np.argsort(np.where(objects[:, :, _CELL] < 0, CELLS, objects[:, :, _CELL]), axis=1, kind="stable")
        objects = np.take_along_axis(objects, reading[:, :, None], axis=1)
        levels = np.stack([rng.choice(LEVELS, n, p=getattr(self, kind)) for kind in ("blur", "noise", "occlusion")], 1)
        cover = rng.integers(np.array([len(positions) for positions in COVERS])[levels[:, 2]])
        degradation = np.column_stack([levels, cover]).astype(np.int8)
        look = rng.integers(2**32, size=n, dtype=np.uint32)
        return SceneTable(objects, background, degradation, look, tuple(f"{name}-{row:06d}" for row in range(n)))

    def _neighbour(self, objects: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One Metropolis step on the objects (4, 5) of a scene: propose another value, accept by the prior's ratio."""
        objects = objects.copy()
        present = np.flatnonzero(objects[:, _CELL] >= 0)
        thing = rng.choice(present)
        column = rng.integers(_CELL + 1)
        if column == _CELL:
            objects[thing, _CELL] = rng.choice(np.setdiff1d(np.arange(CELLS), objects[present, _CELL]))
            return objects
        weights: Iterable[float] = getattr(self, tuple(ATTRIBUTES)[column])
        weights = np.asarray(weights)
        old = objects[thing, column]
        new = (old + rng.integers(1, len(weights))) % len(weights)
        if rng.random() * weights[old] < weights[new]:
            objects[thing, column] = new
        return objects
