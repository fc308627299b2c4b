from __future__ import annotations

import itertools

import numpy as np
import pytest

from grove_adapters.datasets.scenes import Degradation, Scene, ScenePrior, SceneTable, Thing
from grove_adapters.datasets.scenes.world import ATTRIBUTES, BACKGROUNDS, COVERS, MAX_OBJECTS
from grove_adapters.errors import InputError

PRIOR = ScenePrior()


def test_the_same_seed_draws_the_same_scenes_and_leaves_the_global_state_alone():
    state = np.random.get_state()[1].copy()  # noqa: NPY002  the state that must not move
    first, again, other = (list(PRIOR.draw(40, seed=seed, twins=0.3)) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert np.array_equal(state, np.random.get_state()[1])  # noqa: NPY002


def test_table_and_scenes_are_two_forms_of_one_thing():
    table = PRIOR.draw(60, seed=1, twins=0.5)
    back = SceneTable.from_scenes(list(table))
    for name in ("objects", "background", "degradation", "look"):
        assert np.array_equal(getattr(table, name), getattr(back, name)), name
    assert back.ids == table.ids
    assert table.rows([3, 1])[0] == table[3]
    joined = SceneTable.concatenate([table.rows(slice(0, 10)), table.rows(slice(10, 60))])
    assert list(joined) == list(table)


@pytest.mark.parametrize("twins", [0.0, 0.9])
def test_every_scene_follows_the_prior_twins_included(twins):
    n = 40_000
    table = PRIOR.draw(n, seed=2, twins=twins)
    present = table.cell >= 0
    # Twins follow one another, so they carry less information than n independent scenes: allow for runs of about 10.
    tolerance = 4 * np.sqrt(0.25 / n) * (1 if twins == 0 else np.sqrt(20))
    for name, values in ATTRIBUTES.items():
        shares = np.bincount(table.attribute(name)[present], minlength=len(values)) / present.sum()
        assert np.abs(shares - getattr(PRIOR, name)).max() < tolerance, name
    assert np.abs(np.bincount(table.count, minlength=5)[1:] / n - PRIOR.count).max() < tolerance
    assert np.abs(np.bincount(table.background) / n - PRIOR.background).max() < tolerance
    assert np.abs(np.bincount(table.cell[present]) / present.sum() - 1 / 9).max() < tolerance
    for column, name in enumerate(("blur", "noise", "occlusion")):
        assert np.abs(np.bincount(table.degradation[:, column]) / n - getattr(PRIOR, name)).max() < tolerance


def test_twins_differ_from_the_scene_before_in_at_most_one_thing():
    scenes = list(PRIOR.draw(200, seed=3, twins=1.0))
    for before, twin in itertools.pairwise(scenes):
        assert before.background == twin.background
        changed = set(before.objects) ^ set(twin.objects)
        assert len(changed) in (0, 2)
        if changed:
            one, other = changed
            assert sum(a != b for a, b in zip(one, other, strict=True)) == 1


def test_clean_prior_draws_no_degradation():
    assert not PRIOR.clean().draw(500, seed=0).degradation[:, :3].any()


def test_cards_cover_as_many_cells_as_their_level_says():
    assert [{len(cells) for cells in positions} for positions in COVERS] == [{0}, {2}, {4}, {6}]
    assert Degradation(occlusion=2, cover=3).covered == (4, 5, 7, 8)


def test_impossible_scenes_and_priors_are_refused():
    thing = Thing("circle", "red", "small", "solid", 0)
    with pytest.raises(InputError, match="distinct cells"):
        Scene((thing, thing), "white")
    with pytest.raises(InputError, match="1 to 4 objects"):
        Scene((), "white")
    with pytest.raises(InputError, match="add up to 1"):
        ScenePrior(size=(0.5, 0.6))
    with pytest.raises(InputError, match="4 probabilities"):
        ScenePrior(background=(0.5, 0.5))
    with pytest.raises(InputError, match="twins"):
        PRIOR.draw(3, seed=0, twins=1.5)


def test_objects_of_a_scene_stand_in_reading_order():
    things = (Thing("star", "red", "small", "solid", 7), Thing("circle", "blue", "large", "hollow", 2))
    assert [thing.cell for thing in Scene(things, "navy").objects] == [2, 7]
    assert things[0].place == "bottom centre"
    assert (len(BACKGROUNDS), MAX_OBJECTS) == (4, 4)
