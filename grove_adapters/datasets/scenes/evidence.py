"""What a degraded picture still shows, by a known rule, and how ambiguous the picture is therefore.

The rule is exact because `render` draws the evidence and nothing else: an attribute that a degradation hides does not
reach a single pixel. So no model, however good, can know more about the scene than its evidence says.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from grove_adapters.datasets.scenes.describe import Part
from grove_adapters.datasets.scenes.world import (
    ATTRIBUTES,
    BACKGROUNDS,
    CELLS,
    MAX_OBJECTS,
    Scene,
    ScenePrior,
    SceneTable,
)

HIDDEN_BY_BLUR: tuple[tuple[str, ...], ...] = ((), ("fill",), ("fill", "shape"), ("fill", "shape", "size"))
HIDDEN_BY_NOISE: tuple[tuple[str, ...], ...] = (
    (),
    ("fill",),
    ("fill", "colour"),
    ("fill", "colour", "size", "background"),
)
"""What each level hides. Blur takes detail first; noise, like a photograph in the dark, takes colour."""


class Evidence(NamedTuple):
    """What can still be seen.

    Attributes:
        parts: What can be read of each visible object (`None` where hidden), its cell apart.
        cells: Where each visible object stands.
        covered: The cells under the occluding card, of which nothing is known.
        background: The background, or `None` where hidden.
    """

    parts: tuple[Part, ...]
    cells: tuple[int, ...]
    covered: tuple[int, ...]
    background: str | None


def evidence(scene: Scene) -> Evidence:
    """What can be seen of a scene through its degradation."""
    degradation = scene.degradation
    hidden = {*HIDDEN_BY_BLUR[degradation.blur], *HIDDEN_BY_NOISE[degradation.noise]}
    visible = [thing for thing in scene.objects if thing.cell not in degradation.covered]
    readable = [name for name in ATTRIBUTES if name not in hidden]
    return Evidence(
        tuple(Part(**{name: getattr(thing, name) for name in readable}) for thing in visible),
        tuple(thing.cell for thing in visible),
        degradation.covered,
        None if "background" in hidden else scene.background,
    )


def compatible(seen: Evidence, table: SceneTable) -> np.ndarray:
    """(N,) bool: the scenes which, through the same degradation, would show exactly this evidence."""
    visible = (table.cell >= 0) & ~np.isin(table.cell, seen.covered)
    fits = visible.sum(axis=1) == len(seen.parts)
    if seen.background is not None:
        fits &= table.background == BACKGROUNDS.index(seen.background)
    for part, cell in zip(seen.parts, seen.cells, strict=True):
        there = table.cell == cell
        for (name, values), value in zip(ATTRIBUTES.items(), part, strict=False):
            if value is not None:
                there &= table.attribute(name) == values.index(value)
        fits &= there.any(axis=1)
    return fits


def count_posterior(seen: Evidence, prior: ScenePrior) -> np.ndarray:
    """(4,) probabilities of 1 to 4 objects given the evidence."""
    joint = _joint_with_count(seen, prior)
    return joint / joint.sum()


def log_share_shown(seen: Evidence, prior: ScenePrior) -> float:
    """Log of the expected share of scenes that would show this evidence: the true ambiguity of a picture.

    A caption that tells everything (every attribute and every place) stands for exactly one content of a scene. So this
    is also the log of the expected share of such captions, one a scene, that fit what can be seen: the same scale
    as `describe.log_share`. The value is exact: given n objects, the visible ones stand where they are seen and the
    others under the card, in C(covered, n - visible) of the C(9, n) equally likely ways.

    Args:
        seen: From `evidence(scene)`.
        prior: The distribution of scenes.

    Returns:
        A number <= 0, in nats; larger = more ambiguous.
    """
    share = _joint_with_count(seen, prior).sum()
    for part in seen.parts:
        for (name, values), value in zip(ATTRIBUTES.items(), part, strict=False):
            if value is not None:
                share *= getattr(prior, name)[values.index(value)]
    if seen.background is not None:
        share *= prior.background[BACKGROUNDS.index(seen.background)]
    return math.log(share)


def _joint_with_count(seen: Evidence, prior: ScenePrior) -> np.ndarray:
    """(4,) probabilities of n objects, of which exactly the visible ones stand outside the covered cells."""
    visible, covered = len(seen.parts), len(seen.covered)
    return np.array(
        [
            prior.count[n - 1] * math.comb(covered, n - visible) / math.comb(CELLS, n) if n >= visible else 0.0
            for n in range(1, MAX_OBJECTS + 1)
        ]
    )
