from __future__ import annotations

import numpy as np
import pytest

from grove_adapters.datasets import Scenes
from grove_adapters.datasets.scenes import ScenePrior, describes
from grove_adapters.errors import InputError


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    return Scenes.generate(120, seed=3)


def test_the_same_seed_gives_the_same_data(scenes):
    again = Scenes.generate(120, seed=3)
    assert again.captions == scenes.captions
    assert list(again.table) == list(scenes.table)
    assert again.questions(2) == scenes.questions(2)
    assert again.image(7).tobytes() == scenes.image(7).tobytes()
    assert Scenes.generate(120, seed=4).texts != scenes.texts


def test_shapes_ids_and_splits(scenes):
    assert (len(scenes), scenes.captions_per_image, len(scenes.texts)) == (120, 4, 480)
    assert scenes.image_ids[7] == "scene-000007"
    assert scenes.text_ids[30] == "scene-000007/caption-2"
    assert len(set(scenes.text_ids)) == 480
    assert scenes.caption_level[:8].tolist() == [0, 1, 2, 3] * 2
    assert scenes.image(0, size=128).size == (128, 128)
    sizes = {name: tuple(map(len, scenes.rows(name))) for name in ("train", "validation", "test")}
    assert sizes == {"train": (72, 288), "validation": (24, 96), "test": (24, 96)}
    assert scenes.links.shape == (480, 2)
    for image, text in scenes.links:
        assert scenes.text_ids[text].startswith(scenes.image_ids[image] + "/")


def test_positives_and_links_are_all_the_true_matches_within_a_split(scenes):
    known = set(map(tuple, scenes.positives.tolist())) | set(map(tuple, scenes.links.tolist()))
    assert len(known) == len(scenes.positives) + len(scenes.links)
    image, text = scenes.positives.T
    assert (scenes.split[image] == scenes.split[scenes.links[text, 0]]).all()
    images, texts = scenes.rows("test")
    for i in images:
        for t in texts:
            assert ((i, t) in known) == describes(scenes.captions[t].description, scenes.scene(i))


def test_matches_of_chosen_rows_contain_the_links(scenes):
    images, texts = scenes.rows("validation")
    found = scenes.matches(images, texts)
    assert found.shape == (24, 96)
    assert found.dtype == bool
    dense = found.toarray()
    assert all(dense[row, 4 * row : 4 * row + 4].all() for row in range(24))
    assert np.array_equal(scenes.matches(images[::-1], texts[:10]).toarray(), dense[::-1, :10])
    assert scenes.matches([], texts).shape == (0, 96)
    assert scenes.matches(images, []).shape == (24, 0)


def test_ambiguities(scenes):
    captions = scenes.caption_ambiguity.reshape(120, 4)
    assert (np.diff(captions, axis=1) <= 1e-12).all()
    assert scenes.image_ambiguity.shape == (120,)
    assert (scenes.image_ambiguity < 0).all()
    # How many pictures of the data a caption really fits follows its known share.
    fitted = scenes.matches(np.arange(120), np.arange(480)).toarray().mean(axis=0)
    common = scenes.caption_ambiguity > np.log(0.05)
    assert np.corrcoef(fitted[common], np.exp(scenes.caption_ambiguity[common]))[0, 1] > 0.95


def test_other_levels_splits_and_priors():
    full = Scenes.generate(10, seed=0, levels=(3, 3), splits={"gallery": 1.0}, prior=ScenePrior().clean(), twins=0)
    assert full.captions_per_image == 2
    assert set(full.split) == {"gallery"}
    assert not full.table.degradation[:, :3].any()
    assert len(Scenes.generate(1, splits={"a": 0.5, "b": 0.5})) == 1


def test_records_carry_everything_an_extractor_takes(scenes):
    records = scenes.records()
    assert [record.id for record in records] == list(scenes.image_ids)
    assert records[7].loader().tobytes() == scenes.image(7).tobytes()
    assert len({record.loader.key for record in records}) == 120
    assert records[7].loader.key != Scenes.generate(120, seed=4).records(positives=False)[7].loader.key
    assert records[7].split == scenes.split[7]
    assert records[7].columns == {"ambiguity": scenes.image_ambiguity[7]}
    assert [caption.text for caption in records.captions] == list(scenes.texts)
    assert [caption.id for caption in records.captions] == list(scenes.text_ids)
    assert records.captions[30].columns == {"level": 2, "ambiguity": scenes.caption_ambiguity[30]}
    assert np.array_equal(records.positives, scenes.positives)
    assert not len(scenes.records(positives=False).positives)


def test_questions(scenes):
    questions = scenes.questions(3)
    assert len(questions) == 360
    assert len({question.id for question in questions}) == 360
    assert questions[4].image_id == "scene-000001"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n >= 1"),
        ({"n": 5, "levels": ()}, "levels from 0 to 3"),
        ({"n": 5, "levels": (4,)}, "levels from 0 to 3"),
        ({"n": 5, "splits": {"train": 0.5}}, "add up to 1"),
        ({"n": 5, "twins": -1}, "twins"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Scenes.generate(**arguments)


def test_impossible_requests_are_refused(scenes):
    with pytest.raises(InputError, match="no split 'dev'; they have test, train, validation"):
        scenes.rows("dev")
    with pytest.raises(InputError, match="1 to 7 questions"):
        scenes.questions(8)
