import numpy as np
import pytest

from grove_adapters.datasets import synthetic
from grove_adapters.errors import InputError


def test_worlds_are_reproducible_and_unit_norm():
    one, two = synthetic.make_pairs(50), synthetic.make_pairs(50)
    np.testing.assert_array_equal(one.pairs.images.values, two.pairs.images.values)
    np.testing.assert_array_equal(one.text_noise, two.text_noise)
    np.testing.assert_allclose(np.linalg.norm(one.pairs.texts.values, axis=1), 1, rtol=1e-6)
    assert one.pairs.images.n_views == 8
    assert synthetic.make_pairs(5, views=0).pairs.images.views is None


def test_noise_really_makes_matches_worse():
    world = synthetic.make_pairs(400)
    scores = world.pairs.images.values @ world.pairs.texts.values.T
    rank = (scores > np.diag(scores)[:, None]).sum(1)
    noise = world.image_noise + world.text_noise
    noisy = noise > np.median(noise)
    assert rank[noisy].mean() > 1.5 * rank[~noisy].mean()
    assert abs(np.corrcoef(world.image_noise, world.text_noise)[0, 1]) < 0.2


@pytest.mark.parametrize("change", [{"n": 0}, {"dim": 0}])
def test_impossible_worlds_are_refused(change):
    with pytest.raises(InputError):
        synthetic.make_pairs(**change)
