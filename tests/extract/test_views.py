import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from grove_adapters import seeding
from grove_adapters.extract.views import DROP, FLIP, RATIO, SCALE, _crop, image_view, text_view

RAMP = Image.fromarray(np.arange(60, dtype=np.uint8)[None, :, None].repeat(40, 0).repeat(3, 2))


def test_views_depend_on_seed_id_and_number_only():
    make = lambda **change: image_view(RAMP, (16, 16), **{"id": "a", "view": 0, "seed": 0, **change}).tobytes()  # noqa: E731
    assert make() == make()
    assert len({make(), make(id="b"), make(view=1), make(seed=1)}) == 4
    words = " ".join(map(str, range(40)))
    say = lambda **change: text_view(words, **{"id": "a", "view": 0, "seed": 0, **change})  # noqa: E731
    assert say() == say()
    assert len({say(), say(id="b"), say(view=1), say(seed=1)}) == 4


def test_the_flip_has_its_probability_and_only_mirrors():
    rising = [np.asarray(image_view(RAMP, (8, 8), id=str(n), view=0, seed=0))[4, [0, -1], 0] for n in range(2000)]
    flipped = np.mean([first > last for first, last in rising])
    assert flipped == pytest.approx(FLIP, abs=4 * np.sqrt(FLIP * (1 - FLIP) / 2000))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 1000))
def test_crops_lie_inside_any_picture(width, height, seed):
    left, top, crop_width, crop_height = _crop(width, height, np.random.default_rng(seed))
    assert crop_width > 0
    assert crop_height > 0
    assert 0 <= left <= width - crop_width
    assert 0 <= top <= height - crop_height


def test_crops_are_distributed_as_torchvisions():
    from torchvision.transforms import RandomResizedCrop

    random = np.random.default_rng(0)
    mine = [w * h / 1e4 for _, _, w, h in (_crop(100, 100, random) for _ in range(3000))]
    with seeding.local(0):
        sizes = [RandomResizedCrop.get_params(torch.zeros(3, 100, 100), SCALE, RATIO)[2:] for _ in range(3000)]
    theirs = [height * width / 1e4 for height, width in sizes]
    assert np.quantile(mine, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(theirs, [0.1, 0.5, 0.9]), abs=0.04)


def test_words_are_dropped_with_their_probability_in_order_and_never_all():
    words = [f"w{n}" for n in range(50)]
    kept = [text_view(" ".join(words), id=str(n), view=0, seed=0).split() for n in range(200)]
    assert all(view == [word for word in words if word in set(view)] for view in kept)
    assert 1 - np.mean([len(view) for view in kept]) / 50 == pytest.approx(DROP, abs=4 * np.sqrt(0.21 / 10_000))
    assert {text_view("alone", id=str(n), view=0, seed=0) for n in range(50)} == {"alone"}
    assert {text_view("two words", id=str(n), view=0, seed=0) for n in range(99)} == {"two", "words", "two words"}
