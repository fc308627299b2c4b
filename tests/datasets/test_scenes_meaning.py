"""Descriptions and captions: what they mean, what share of the world they fit, and whether the English says so."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grove_adapters.datasets.scenes import (
    Description,
    Part,
    Relation,
    Scene,
    SceneIndex,
    ScenePrior,
    Thing,
    caption_chain,
    describes,
    log_share,
    matches,
    phrase,
    vocabulary,
)
from grove_adapters.datasets.scenes.captions import NUMBERS, SYNONYMS
from grove_adapters.datasets.scenes.world import ATTRIBUTES, BACKGROUNDS, PLACES
from grove_adapters.errors import InputError

PRIOR = ScenePrior()


def maybe(values):
    return st.one_of(st.none(), st.sampled_from(values))


parts = st.builds(
    Part,
    shape=maybe(("circle", "star")),
    colour=maybe(("red", "blue")),
    size=maybe(("small",)),
    fill=maybe(("solid",)),
    cell=maybe((0, 4)),
)


@st.composite
def descriptions(draw) -> Description:
    """Descriptions far wilder than any caption: overlapping parts, loose counts, relations between any two parts."""
    chosen = tuple(draw(st.lists(parts, max_size=3)))
    relations = []
    if len(chosen) > 1:
        pairs = st.tuples(st.integers(0, len(chosen) - 1), st.integers(0, len(chosen) - 1))
        kinds = st.sampled_from(("left of", "right of", "above", "below"))
        for (first, second), kind in draw(st.lists(st.tuples(pairs, kinds), max_size=2)):
            if first != second:
                relations.append(Relation(first, kind, second))
    low = draw(st.integers(1, 4))
    return Description(low, draw(st.integers(low, 4)), draw(maybe(("white", "navy"))), chosen, tuple(relations))


FEW = ScenePrior(  # a small world, where wild descriptions have a chance
    shape=(0.5, 0, 0, 0.3, 0.2, 0), colour=(0.5, 0.4, 0.1, 0, 0, 0, 0), fill=(0.7, 0.3, 0), background=(0.5, 0.5, 0, 0)
)
FEW_SCENES = FEW.draw(300, seed=7, twins=0.3)
MANY_SCENES = SceneIndex(FEW.draw(60_000, seed=8))


@settings(deadline=None, max_examples=60)
@given(descriptions())
def test_the_fast_meaning_is_the_plain_meaning(description):
    fast = matches([description], FEW_SCENES)[0]
    assert fast.tolist() == [describes(description, scene) for scene in FEW_SCENES]


@settings(deadline=None, max_examples=80, derandomize=True)
@given(descriptions())
def test_the_closed_form_share_is_the_share_of_many_drawn_scenes(description):
    exact = math.exp(log_share(description, FEW))
    found = len(MANY_SCENES.rows(description)) / 60_000
    assert abs(found - exact) <= 5 * math.sqrt(exact * (1 - exact) / 60_000) + 1e-9


def test_shares_known_by_hand():
    assert log_share(Description(), PRIOR) == pytest.approx(0, abs=1e-12)
    assert log_share(Description(at_least=2), PRIOR) == pytest.approx(math.log(0.8))
    assert log_share(Description(background="navy"), PRIOR) == pytest.approx(math.log(0.2))
    one_red = Description(1, 1, None, (Part(colour="red", cell=4),))
    assert log_share(one_red, PRIOR) == pytest.approx(math.log(0.2 * 0.2 / 9))
    some_red = Description(parts=(Part(colour="red"),))
    assert math.exp(log_share(some_red, PRIOR)) == pytest.approx(
        sum(PRIOR.count[n - 1] * (1 - 0.8**n) for n in (1, 2, 3, 4))
    )
    assert log_share(Description(1, 1, None, (Part(), Part())), PRIOR) == -math.inf
    # Of two objects in different cells, one stands above the other unless both share a row: 3 * 3 of 36 pairs do.
    above = Description(2, 2, None, (Part(), Part()), (Relation(0, "above", 1),))
    assert math.exp(log_share(above, PRIOR)) == pytest.approx(0.3 * 27 / 36)


def test_distinct_objects_are_needed_for_distinct_parts():
    circle = Thing("circle", "red", "small", "solid", 0)
    two_circles = Description(parts=(Part(shape="circle"), Part(shape="circle")))
    assert not describes(two_circles, Scene((circle,), "white"))
    assert describes(two_circles, Scene((circle, circle._replace(cell=5)), "white"))


def chains(n: int, seed: int):
    scenes = PRIOR.draw(n, seed=seed)
    return scenes, [caption_chain(scene, np.random.default_rng([seed, row])) for row, scene in enumerate(scenes)]


def test_captions_of_one_chain_nest_and_are_true():
    scenes, found = chains(300, seed=4)
    fits = matches([description for chain in found for description in chain], scenes).reshape(300, 4, 300)
    assert fits[np.arange(300), :, np.arange(300)].all()
    assert (fits[:, :-1] >= fits[:, 1:]).all()
    shares = np.array([[log_share(description, PRIOR) for description in chain] for chain in found])
    assert (np.diff(shares, axis=1) <= 1e-12).all()
    assert (shares <= 0).all()
    # A full caption says far more than its vague one, and a vague one next to nothing.
    assert shares[:, 0].min() > -2
    assert shares[:, 3].max() < -9


def test_a_full_caption_tells_its_scene_from_every_near_identical_one():
    scenes = list(PRIOR.draw(150, seed=5, twins=1.0))
    for scene, twin in itertools.pairwise(scenes):
        full = caption_chain(scene, np.random.default_rng(0))[3]
        moved = {thing.attributes for thing in scene.objects} == {thing.attributes for thing in twin.objects}
        if scene.objects != twin.objects and not moved:
            assert not describes(full, twin)


# --- the English says what the description says: an independent reader of captions -----------------------------------

VALUE_OF = {word: value for value, words in SYNONYMS.items() for word in words}
NAME_OF = {value: name for name, values in ATTRIBUTES.items() for value in values}


def read_noun_phrase(text: str) -> list[Part]:
    text = text.strip()
    cell = None
    if place := re.search(r" (?:at|in) the ([a-z ]+)$", text):
        cell, text = PLACES.index(place[1]), text[: place.start()]
    words = text.split()
    count = NUMBERS.index(words[0]) if words[0] in NUMBERS else 1
    said: dict[str, str] = {}
    for word in words[1:]:
        singular = VALUE_OF.get(word, word)
        if singular not in NAME_OF:
            singular = word.removesuffix("es") if word.removesuffix("es") in NAME_OF else word.removesuffix("s")
        if singular != "shape":
            said[NAME_OF[singular]] = singular
    return [Part(**said, cell=cell)] * count


def read(text: str) -> Description:
    background = None
    if found := re.search(r" (?:on|against) a (\w+) background$", text):
        background, text = found[1], text[: found.start()]
    text = re.sub(r"^(a picture of|only) (?!shapes$)", "", text)
    if text in ("some shapes", "shapes", "some things", "a picture of shapes"):
        return Description(background=background)
    if text in ("more than one shape", "several shapes", "at least two shapes"):
        return Description(at_least=2, background=background)
    if found := re.match(r"something (\w+)$", text):
        return Description(background=background, parts=(Part(colour=found[1]),))
    if text.startswith("at least one "):
        return Description(background=background, parts=tuple(read_noun_phrase(text.removeprefix("at least "))))
    if found := re.match(r"(one|two|three|four) shapes?(?:$|, (?:one of them|including) (.+)$)", text):
        n = NUMBERS.index(found[1])
        mentioned = found[2] or ""
        if not mentioned:
            return Description(n, n, background)
        part = Part(colour=mentioned) if mentioned in NAME_OF else read_noun_phrase(mentioned)[0]
        return Description(n, n, background, (part,))
    pieces = re.split(r"(?:, which is)? (?:to the )?(left of|right of|above|below) ", text)
    if len(pieces) > 1:
        told = tuple(read_noun_phrase(piece)[0] for piece in pieces[::2])
        relations = tuple(Relation(i, kind, i + 1) for i, kind in enumerate(pieces[1::2]))
        return Description(len(told), len(told), background, told, relations)
    told = tuple(part for piece in re.split(r", | and ", text) for part in read_noun_phrase(piece))
    return Description(len(told), len(told), background, told)


def in_order(description: Description) -> Description:
    """A list may name its parts in any order; a chain of relations may not."""
    if description.relations:
        return description
    return description._replace(parts=tuple(sorted(description.parts, key=repr)))


def test_the_english_says_what_the_description_says():
    _, found = chains(400, seed=6)
    rng = np.random.default_rng(0)
    for chain in found:
        for description in chain:
            text = phrase(description, rng)
            assert in_order(read(text)) == in_order(description), text


def test_captions_use_the_vocabulary_and_fit_the_model():
    _, found = chains(400, seed=9)
    rng = np.random.default_rng(1)
    texts = [phrase(description, rng) for chain in found for description in chain]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    assert words <= set(vocabulary())
    assert len(set(texts)) > 900
    assert max(len(text.split()) for text in texts) <= 46
    assert phrase(Description(1, 1, "mint", (Part("heart", "orange"),)), np.random.default_rng(3)).endswith(
        "mint background"
    )


def test_relations_that_are_no_chain_cannot_be_put_in_words():
    description = Description(2, 2, None, (Part("star"), Part("heart")), (Relation(1, "above", 0),))
    with pytest.raises(InputError, match="from each part to the next"):
        phrase(description, np.random.default_rng(0))
    with pytest.raises(InputError, match="A relation is one of"):
        matches([description._replace(relations=(Relation(0, "near", 1),))], PRIOR.draw(500, seed=0))


def test_every_value_can_be_told_from_every_other_by_its_words():
    names = [*NAME_OF, *BACKGROUNDS]
    assert len(set(names)) == len(names)
    assert len(VALUE_OF) == sum(map(len, SYNONYMS.values()))
