"""Evidence, rendering and questions: what a picture shows, how ambiguous it is, and what annotators make of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from grove_adapters.datasets.scenes import (
    Degradation,
    Scene,
    ScenePrior,
    Thing,
    ask,
    compatible,
    contact_sheet,
    evidence,
    log_share_shown,
    render,
    render_all,
    render_image,
)
from grove_adapters.datasets.scenes.evidence import count_posterior
from grove_adapters.datasets.scenes.questions import ANNOTATORS, KINDS
from grove_adapters.datasets.scenes.render import RGB
from grove_adapters.datasets.scenes.world import ATTRIBUTES
from grove_adapters.errors import InputError

PRIOR = ScenePrior()
SCENE = Scene((Thing("circle", "red", "large", "solid", 0), Thing("star", "blue", "small", "striped", 8)), "white")


def degraded(**levels: int) -> Scene:
    return replace(SCENE, degradation=Degradation(**levels))


# --- evidence --------------------------------------------------------------------------------------------------------


def test_a_clean_picture_shows_everything():
    seen = evidence(SCENE)
    assert [tuple(part[:4]) for part in seen.parts] == [thing.attributes for thing in SCENE.objects]
    assert (seen.cells, seen.covered, seen.background) == ((0, 8), (), "white")


def test_degradations_hide_what_the_rule_says():
    assert evidence(degraded(blur=2)).parts[0][:4] == (None, "red", "large", None)
    assert evidence(degraded(noise=2)).parts[0][:4] == ("circle", None, "large", None)
    assert evidence(degraded(noise=3)).background is None
    assert evidence(degraded(blur=3, noise=2)).parts[0][:4] == (None,) * 4
    assert evidence(degraded(occlusion=1, cover=0)).cells == (8,)


def test_ambiguity_of_a_picture_by_hand():
    thing = Thing("circle", "red", "large", "solid", 0)
    one = Scene((thing,), "navy")
    kinds = math.log(0.22) + math.log(0.2) + math.log(0.5) + math.log(0.5)
    assert log_share_shown(evidence(one), PRIOR) == pytest.approx(math.log(0.2 / 9 * 0.2) + kinds)
    blurred = replace(one, degradation=Degradation(blur=3))
    assert log_share_shown(evidence(blurred), PRIOR) == pytest.approx(math.log(0.2 / 9 * 0.2) + math.log(0.2))


@pytest.mark.parametrize("kind", ["blur", "noise", "occlusion"])
def test_more_degradation_is_never_less_ambiguous(kind):
    for scene in PRIOR.clean().draw(100, seed=0):
        # Of nested cards at the top left; a card that covers an empty cell leaves room for an object there.
        shares = [
            log_share_shown(evidence(replace(scene, degradation=Degradation(**{kind: level}))), PRIOR)
            for level in range(4)
        ]
        assert (np.diff(shares) >= -1e-12).all()
        assert shares[3] > shares[0]


def test_the_closed_form_share_is_the_share_of_scenes_that_look_alike():
    reference = PRIOR.draw(60_000, seed=1)
    checked = 0
    for scene in PRIOR.draw(300, seed=2):
        seen = evidence(scene)
        exact = math.exp(log_share_shown(seen, PRIOR))
        found = compatible(seen, reference).mean()
        assert abs(found - exact) <= 5 * math.sqrt(exact / 60_000) + 2e-5
        checked += exact > 1e-3
    assert checked > 20


def test_compatible_scenes_show_the_same_evidence():
    table = PRIOR.draw(300, seed=3)
    for scene in list(table)[:30]:
        seen = evidence(scene)
        alike = [evidence(replace(other, degradation=scene.degradation)) == seen for other in table]
        assert compatible(seen, table).tolist() == alike


def test_what_a_card_hides_is_counted_by_the_posterior():
    table = PRIOR.draw(60_000, seed=4)
    seen = evidence(replace(SCENE, degradation=Degradation(blur=3, noise=3, occlusion=3)))
    counts = table.count[compatible(seen, table)]
    expected = count_posterior(seen, PRIOR)
    assert len(counts) > 1000
    assert np.abs(np.bincount(counts, minlength=5)[1:] / len(counts) - expected).max() < 0.05


# --- rendering -------------------------------------------------------------------------------------------------------


def test_pictures_are_deterministic_and_of_the_size_asked_for():
    scenes = PRIOR.draw(30, seed=5)
    pictures = render_all(scenes)
    assert pictures.shape == (30, 64, 64, 3)
    assert pictures.dtype == np.uint8
    assert np.array_equal(pictures, render_all(scenes))
    assert render(scenes[0], 150).shape == (150, 150, 3)
    assert render_image(scenes[0]).size == (64, 64)
    assert contact_sheet(list(scenes)[:5], columns=3, size=32, gap=4).size == (112, 76)
    with pytest.raises(InputError, match="16 to 2048"):
        render(scenes[0], 4)


def test_colours_stand_where_the_objects_are():
    picture = render(SCENE).astype(int)
    red, white = np.array(RGB["red"]), np.array(RGB["white"])
    assert np.abs(picture[11, 11] - red).max() < 12  # middle of the top left cell
    assert np.abs(picture[32, 32] - white).max() < 12  # the empty middle
    assert np.abs(picture[11, 52] - white).max() < 20  # the empty top right
    corner = picture[43:, 43:].reshape(-1, 3)
    assert np.abs(corner - RGB["blue"]).max(axis=1).min() < 60


def test_every_attribute_changes_the_picture():
    plain = render(SCENE)
    first, second = SCENE.objects
    for name, values in ATTRIBUTES.items():
        other = values[(values.index(getattr(first, name)) + 1) % len(values)]
        changed = replace(SCENE, objects=(first._replace(**{name: other}), second))
        assert np.abs(render(changed).astype(int) - plain).max() > 60, name
    assert np.abs(render(replace(SCENE, background="beige")).astype(int) - plain).max() > 20


def test_what_is_hidden_reaches_no_pixel():
    """Two scenes with the same evidence and the same look give the same bytes: the known ambiguity is really known."""
    rng = np.random.default_rng(0)
    changed = 0
    for scene in PRIOR.draw(300, seed=6):
        hidden = [
            name for i, name in enumerate(ATTRIBUTES) if evidence(scene).parts and evidence(scene).parts[0][i] is None
        ]
        things = list(scene.objects)
        for i, thing in enumerate(things):
            for name in ATTRIBUTES if thing.cell in scene.degradation.covered else hidden:
                thing = thing._replace(**{name: ATTRIBUTES[name][rng.integers(len(ATTRIBUTES[name]))]})
            things[i] = thing
        other = replace(scene, objects=tuple(things))
        changed += other != scene
        assert evidence(other) == evidence(scene)
        assert np.array_equal(render(other), render(scene))
    assert changed > 100


# --- questions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_annotators_agree_on_clean_pictures_and_disagree_by_the_known_distribution(kind):
    clean, dark = [], []
    for row, scene in enumerate(PRIOR.draw(150, seed=7)):
        question = ask(scene, kind, np.random.default_rng(row), PRIOR)
        assert question == ask(scene, kind, np.random.default_rng(row), PRIOR)
        assert len(question.answers) == ANNOTATORS
        assert set(question.answers) <= set(question.candidates)
        assert question.answer in question.candidates
        assert sum(question.distribution) == pytest.approx(1)
        assert 0 <= question.ambiguity <= math.log(len(question.candidates)) + 1e-9
        (dark if scene.degradation.severity > 3 else clean if scene.degradation.severity == 0 else []).append(question)
    agreement = [question.answers.count(question.answer) / ANNOTATORS for question in clean]
    assert np.mean(agreement) > 0.95
    assert np.mean([question.ambiguity for question in dark]) > np.mean([question.ambiguity for question in clean])


@pytest.mark.parametrize("kind", KINDS)
def test_the_belief_of_an_annotator_is_the_truth_among_scenes_that_look_alike(kind):
    """Asked of every scene with the same evidence, a question has the answers that annotators believe in."""
    scene = replace(SCENE, degradation=Degradation(blur=3, noise=3, occlusion=2, cover=0))
    question = ask(scene, kind, np.random.default_rng(1), PRIOR)
    table = PRIOR.draw(40_000, seed=8)
    alike = [other for other, fits in zip(table, compatible(evidence(scene), table), strict=True) if fits]
    true = np.array([truth_of(question.text, kind, other) for other in alike])
    slip = 0.02 + 0.02 * scene.degradation.severity
    answered = true != "nothing there"
    assert answered.sum() > 150
    for candidate, probability in zip(question.candidates, question.distribution, strict=True):
        expected = (1 - slip) * np.mean(true[answered] == candidate) + slip / len(question.candidates)
        assert abs(expected - probability) < 0.12


def truth_of(text: str, kind: str, scene: Scene) -> str:
    if kind == "count":
        return ("one", "two", "three", "four")[len(scene.objects) - 1]
    if kind == "background":
        return scene.background
    if kind == "presence":
        value = text.removesuffix("?").removesuffix(" shape").split()[-1]
        return "yes" if any(value in thing for thing in scene.objects) else "no"
    for thing in scene.objects:
        if text.removesuffix("?").endswith(f" the {thing.place}"):
            return getattr(thing, kind)
    return "nothing there"


def test_unknown_kinds_are_refused():
    with pytest.raises(InputError, match="one of the kinds"):
        ask(SCENE, "smell", np.random.default_rng(0), PRIOR)
