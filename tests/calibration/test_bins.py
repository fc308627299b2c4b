import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grove_adapters.calibration import bins
from grove_adapters.errors import InputError

uncertainties = st.lists(st.one_of(st.integers(-3, 3), st.floats(-1e6, 1e6)), min_size=1, max_size=60).map(
    lambda values: np.array(values, dtype=np.float64)
)


@pytest.mark.parametrize("protocol", bins.PROTOCOLS)
@settings(deadline=None)
@given(uncertainties, st.integers(2, 15), st.randoms(use_true_random=False))
def test_every_query_is_in_one_level_and_ties_share_it(protocol, uncertainty, levels, random):
    level = bins.assign(uncertainty, levels, protocol)
    assert level.shape == uncertainty.shape
    assert level.min() >= 0
    assert level.max() < levels
    order = np.argsort(uncertainty)
    assert (np.diff(level[order]) >= 0).all(), "levels rise with uncertainty"
    for value in np.unique(uncertainty):
        assert len(np.unique(level[uncertainty == value])) == 1
    shuffled = np.array(random.sample(range(len(uncertainty)), len(uncertainty)))
    np.testing.assert_array_equal(bins.assign(uncertainty[shuffled], levels, protocol), level[shuffled])

    values, counts = np.unique(uncertainty, return_counts=True)
    starts, stops = bins.PROTOCOLS[protocol](values, np.concatenate([[0], counts.cumsum()])[None], levels)
    covered = np.concatenate([np.arange(*cut) for cut in zip(starts[0], stops[0], strict=True)])
    np.testing.assert_array_equal(covered, np.arange(len(values)))


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(2, 20))
def test_equal_count_is_equal_without_ties(n, levels):
    counts = np.bincount(bins.assign(np.random.default_rng(n).permutation(n), levels), minlength=levels)
    assert counts.sum() == n
    assert counts.max() - counts.min() <= 1


def test_equal_count_moves_ties_to_the_level_of_their_middle():
    assert bins.assign(np.array([0, 1, 1, 1, 1, 2]), 3).tolist() == [0, 1, 1, 1, 1, 2]
    assert bins.assign(np.array([1, 1, 1, 1, 2, 3]), 3).tolist() == [1, 1, 1, 1, 2, 2]
    assert bins.assign(np.zeros(5), 4).tolist() == [2] * 5


def test_equal_width_follows_the_values():
    assert bins.assign(np.array([0.0, 0.1, 0.24, 0.26, 0.5, 1.0]), 4, "equal_width").tolist() == [0, 0, 0, 1, 2, 3]
    assert bins.assign(np.zeros(3), 4, "equal_width").tolist() == [0, 0, 0]


def test_bad_input_is_one_sentence():
    with pytest.raises(InputError, match="did you mean 'equal_count'"):
        bins.assign(np.zeros(3), 4, "equal_counts")
    with pytest.raises(InputError, match="levels expected a whole number ≥ 2"):
        bins.assign(np.zeros(3), 1)
    with pytest.raises(InputError, match="NaN"):
        bins.assign(np.array([0.0, np.nan]), 2)
