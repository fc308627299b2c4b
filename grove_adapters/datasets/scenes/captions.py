"""Captions at four levels of detail: English for people and models, a `Description` for the truth.

A scene's captions form a chain: each level says a part of what the next one says. So the scenes a caption fits include
those of every more detailed caption of the same chain, and its ambiguity is never smaller.

| level | says | for example |
| --- | --- | --- |
| 0 | next to nothing | "some shapes", "something red" |
| 1 | how many, and a little more | "three shapes, one of them a star" |
| 2 | colour and shape of every object | "two red circles and a blue star on a navy background" |
| 3 | every attribute, background, and where things are | "a small striped red circle above a large solid blue star …" |
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from grove_adapters.datasets.scenes.describe import RELATIONS, Description, Part, Relation, related
from grove_adapters.datasets.scenes.world import ATTRIBUTES, BACKGROUNDS, PLACES, Scene
from grove_adapters.errors import InputError

DETAIL_LEVELS = 4

NUMBERS = ("no", "one", "two", "three", "four")
SYNONYMS = {
    "large": ("large", "big"),
    "small": ("small", "tiny"),
    "hollow": ("hollow", "outlined"),
    "solid": ("solid", "filled"),
}
"""Words for one value. The first is the value's own name."""


@dataclass(frozen=True, slots=True)
class Caption:
    """One caption of one scene.

    Attributes:
        text: English.
        description: Its exact meaning.
        level: 0 (vague) to 3 (full).
        id: Name of the caption.
    """

    text: str
    description: Description
    level: int
    id: str = "caption"


def caption_chain(scene: Scene, rng: np.random.Generator) -> tuple[Description, Description, Description, Description]:
    """Descriptions of a scene at levels 0 to 3, each a part of the next."""
    full = _full(scene, rng)
    listed = _listed(scene, rng)
    counted = _counted(listed, rng)
    return _vague(counted, rng), counted, listed, full


def _pick(rng: np.random.Generator, n: int) -> int:
    return int(rng.integers(n))


def _full(scene: Scene, rng: np.random.Generator) -> Description:
    """Every attribute of every object, the background, and either the places or a chain of relations."""
    n = len(scene.objects)
    if n == 1 or rng.random() < 0.5:
        return Description(n, n, scene.background, tuple(Part(*thing) for thing in scene.objects))
    order = rng.permutation(n)
    things = [scene.objects[i] for i in order]
    relations = []
    for i in range(n - 1):
        kinds = [kind for kind in RELATIONS if related(kind, things[i].cell, things[i + 1].cell)]
        relations.append(Relation(i, kinds[_pick(rng, len(kinds))], i + 1))
    parts = tuple(Part(*thing)._replace(cell=None) for thing in things)
    return Description(n, n, scene.background, parts, tuple(relations))


def _listed(scene: Scene, rng: np.random.Generator) -> Description:
    """Colour and shape of every object; the background half of the time."""
    n = len(scene.objects)
    background = scene.background if rng.random() < 0.5 else None
    parts = tuple(sorted(Part(shape=thing.shape, colour=thing.colour) for thing in scene.objects))
    return Description(n, n, background, parts)


def _counted(listed: Description, rng: np.random.Generator) -> Description:
    """The number of objects and one thing more: all shapes or colours, one of them, or the background."""
    n = listed.at_most
    kind = _pick(rng, 5 if listed.background else 4)
    if kind == 4:
        return Description(n, n, listed.background)
    dropped: dict[str, None] = {"shape": None} if kind % 2 else {"colour": None}
    parts = tuple(sorted((part._replace(**dropped) for part in listed.parts), key=_words_of))
    if kind < 2:
        return Description(n, n, None, parts)
    return Description(n, n, None, (parts[_pick(rng, n)],))


def _vague(counted: Description, rng: np.random.Generator) -> Description:
    """Nothing at all, "more than one", the background, or one attribute that some object has."""
    kind = rng.random()
    if counted.parts and kind < 0.35:
        return Description(parts=(counted.parts[_pick(rng, len(counted.parts))],))
    if counted.background and kind < 0.35:
        return Description(background=counted.background)
    if counted.at_least > 1 and kind < 0.55:
        return Description(at_least=2)
    return Description()


def phrase(description: Description, rng: np.random.Generator) -> str:
    """English for a description; the seeded generator chooses among synonyms and turns of phrase."""
    lower, upper, background, parts, relations = description
    exact = lower == upper
    if relations:
        body = _chained(parts, relations, rng)
    elif parts and exact and len(parts) == upper:
        body = _one_of(("", "", "a picture of ", "only "), rng) + _listing(parts, rng)
    elif parts and exact:
        body = _counted_shapes(upper) + _one_of((", one of them ", ", including "), rng) + _mention(parts[0], rng)
    elif parts:
        body = _existential(parts[0], rng)
    elif exact:
        body = _one_of(("", "", "a picture of "), rng) + _counted_shapes(upper)
    elif lower > 1:
        body = _one_of(("more than one shape", "several shapes", "at least two shapes"), rng)
    else:
        body = _one_of(("some shapes", "a picture of shapes", "shapes", "some things"), rng)
    return body if background is None else f"{body} {_one_of(('on a', 'against a'), rng)} {background} background"


def _one_of(choices: tuple[str, ...], rng: np.random.Generator) -> str:
    return choices[_pick(rng, len(choices))]


def _words_of(part: Part) -> tuple[str, ...]:
    return tuple(str(value) for value in part if value is not None)


def _counted_shapes(n: int) -> str:
    return "one shape" if n == 1 else f"{NUMBERS[n]} shapes"


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def _with_article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def _noun_phrase(part: Part, rng: np.random.Generator, count: int = 1) -> str:
    """Such as "a small striped red circle at the top left" or "two red shapes"."""
    said = [value for value in (part.size, part.fill, part.colour) if value is not None]
    adjectives = [_one_of(SYNONYMS.get(value, (value,)), rng) for value in said]
    noun = part.shape or "shape"
    words = " ".join([*adjectives, noun if count == 1 else _plural(noun)])
    words = _with_article(words) if count == 1 else f"{NUMBERS[count]} {words}"
    if part.cell is None:
        return words
    place = PLACES[part.cell]
    return f"{words} in the centre" if place == "centre" else f"{words} at the {place}"


def _listing(parts: tuple[Part, ...], rng: np.random.Generator) -> str:
    """Such as "two red circles, a blue star and a green heart"; equal parts are counted."""
    groups = [_noun_phrase(part, rng, count) for part, count in Counter(parts).items()]
    order = rng.permutation(len(groups))
    phrases = [groups[i] for i in order]
    return phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"


def _chained(parts: tuple[Part, ...], relations: tuple[Relation, ...], rng: np.random.Generator) -> str:
    """Such as "a red circle above a blue star, which is left of a green heart"."""
    if [(first, second) for first, _, second in relations] != [(i, i + 1) for i in range(len(parts) - 1)]:
        raise InputError(
            f"Only relations from each part to the next can be put in words, got {relations}. Reorder the parts."
        )
    text = _noun_phrase(parts[0], rng)
    for i, (_, kind, _) in enumerate(relations):
        words = f"to the {kind}" if kind.endswith("of") and rng.random() < 0.5 else kind
        text += f"{' ' if i == 0 else ', which is '}{words} {_noun_phrase(parts[i + 1], rng)}"
    return text


def _mention(part: Part, rng: np.random.Generator) -> str:
    """One object among others: "red" where only a colour is said, otherwise a noun phrase."""
    return part.colour if part == Part(colour=part.colour) and part.colour else _noun_phrase(part, rng)


def _existential(part: Part, rng: np.random.Generator) -> str:
    if part == Part(colour=part.colour) and rng.random() < 0.5:
        return f"something {part.colour}"
    return f"at least one {_noun_phrase(part, rng).split(' ', 1)[1]}"


def vocabulary() -> tuple[str, ...]:
    """Every word that `phrase` can write, sorted."""
    grammar = (
        "a an the of at in on to and is which picture only against background one them including something least "
        "more than shape shapes some things several left right above below"
    )
    nouns = [word for shape in ATTRIBUTES["shape"] for word in (shape, _plural(shape))]
    values = [value for name in ("colour", "size", "fill") for value in ATTRIBUTES[name]]
    synonyms = [word for words in SYNONYMS.values() for word in words]
    places = [word for place in PLACES for word in place.split()]
    return tuple(sorted({*grammar.split(), *nouns, *values, *synonyms, *places, *BACKGROUNDS, *NUMBERS[1:]}))
