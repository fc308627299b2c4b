"""Questions about a picture, answered by ten simulated annotators whose disagreement is known.

An annotator sees the `Evidence` and nothing else. Where the answer can be seen they give it; where it cannot, they draw
it from the posterior under the scene prior; and with a probability that rises with the degradation they slip and answer
at random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from grove_adapters.datasets.scenes.captions import NUMBERS
from grove_adapters.datasets.scenes.evidence import Evidence, count_posterior, evidence
from grove_adapters.datasets.scenes.world import ATTRIBUTES, BACKGROUNDS, MAX_OBJECTS, PLACES, Scene, ScenePrior
from grove_adapters.errors import InputError

ANNOTATORS = 10
SLIP, SLIP_PER_LEVEL = 0.02, 0.02
"""Probability of an answer at random: on a clean picture, and added by each level of blur, noise and occlusion."""

_ASK = {
    "shape": "What is the shape {place}?",
    "colour": "What colour is the shape {place}?",
    "size": "What size is the shape {place}?",
    "fill": "What is the fill of the shape {place}?",
}
KINDS = ("count", "background", "presence", *_ASK)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one picture.

    Attributes:
        text: The question.
        kind: One of `KINDS`.
        candidates: The possible answers.
        answer: The true one.
        answers: What the ten annotators said.
        distribution: Probability of each candidate as an annotator's answer, in the order of `candidates`.
        image_id: The scene.
        id: Name of the question.
    """

    text: str
    kind: str
    candidates: tuple[str, ...]
    answer: str
    answers: tuple[str, ...]
    distribution: tuple[float, ...]
    image_id: str
    id: str

    @property
    def ambiguity(self) -> float:
        """Entropy of `distribution` in nats: the true ambiguity of the question; larger = more ambiguous."""
        return -sum(p * math.log(p) for p in self.distribution if p > 0)


def ask(scene: Scene, kind: str, rng: np.random.Generator, prior: ScenePrior) -> Question:
    """One question with its ten answers; its id is such as "scene-000123/colour".

    Args:
        scene: The picture.
        kind: One of `KINDS`.
        rng: Source of the object asked about and of the annotators.
        prior: What annotators believe about what they cannot see.

    Raises:
        InputError: If there is no such kind.
    """
    seen = evidence(scene)
    candidates: tuple[str, ...]
    if kind == "count":
        text, candidates = "How many shapes are there?", NUMBERS[1:]
        answer, belief = NUMBERS[len(scene.objects)], count_posterior(seen, prior)
    elif kind == "background":
        text, candidates, answer = "What colour is the background?", BACKGROUNDS, scene.background
        belief = _belief(seen.background, candidates, prior.background)
    elif kind == "presence":
        name = ("shape", "colour")[rng.integers(2)]
        values = ATTRIBUTES[name]
        present = [getattr(thing, name) for thing in scene.objects]
        value = present[rng.integers(len(present))] if rng.random() < 0.5 else values[rng.integers(len(values))]
        article = "an" if value[0] in "aeiou" else "a"
        text = f"Is there {article} {value}?" if name == "shape" else f"Is there {article} {value} shape?"
        candidates, answer = ("yes", "no"), "yes" if value in present else "no"
        absent = _probability_absent(seen, name, value, prior)
        belief = np.array([1 - absent, absent])
    elif kind in _ASK:
        thing = scene.objects[rng.integers(len(scene.objects))]
        place = PLACES[thing.cell]
        text = _ASK[kind].format(place="in the centre" if place == "centre" else f"at the {place}")
        candidates, answer = ATTRIBUTES[kind], getattr(thing, kind)
        readable = {cell: getattr(part, kind) for part, cell in zip(seen.parts, seen.cells, strict=True)}
        belief = _belief(readable.get(thing.cell), candidates, getattr(prior, kind))
    else:
        raise InputError(f"A question is of one of the kinds {', '.join(KINDS)}, got {kind!r}.")
    slip = SLIP + SLIP_PER_LEVEL * scene.degradation.severity
    distribution = (1 - slip) * belief + slip / len(candidates)
    answers = tuple(candidates[i] for i in rng.choice(len(candidates), ANNOTATORS, p=distribution))
    return Question(
        text, kind, candidates, answer, answers, tuple(distribution.tolist()), scene.id, f"{scene.id}/{kind}"
    )


def _belief(seen: str | None, candidates: tuple[str, ...], prior: tuple[float, ...]) -> np.ndarray:
    """Certainty where the value is seen, the prior where it is not."""
    if seen is None:
        return np.array(prior)
    return np.array([float(value == seen) for value in candidates])


def _probability_absent(seen: Evidence, name: str, value: str, prior: ScenePrior) -> float:
    """Probability that no object has a value, given the evidence."""
    read = [getattr(part, name) for part in seen.parts]
    if value in read:
        return 0.0
    other = 1 - getattr(prior, name)[ATTRIBUTES[name].index(value)]
    unseen = np.maximum(np.arange(1, MAX_OBJECTS + 1) - len(read), 0)
    return other ** read.count(None) * float(count_posterior(seen, prior) @ other**unseen)
