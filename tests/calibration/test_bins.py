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
def test_every_query_is_in_its_level_and_ties_share_it(protocol, uncertainty, levels, random):
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
    held = np.zeros(len(values), dtype=int)
    for start, stop in zip(starts[0], stops[0], strict=True):
        held[start:stop] += 1
    if protocol in bins.CUMULATIVE:
        assert protocol.startswith("cumulative")
        np.testing.assert_array_equal(held, levels - bins.assign(values, levels, protocol))
    else:
        np.testing.assert_array_equal(held, 1)


@pytest.mark.parametrize("protocol", bins.PROTOCOLS)
@settings(deadline=None)
@given(uncertainties, st.integers(2, 15), st.integers(0, 10**6))
def test_weights_are_copies(protocol, uncertainty, levels, seed):
    """A resample is cut as the queries it holds would be, whatever stands beside it."""
    weights = np.random.default_rng(seed).integers(0, 4, len(uncertainty))
    weights[seed % len(weights)] += 1
    values, position = np.unique(uncertainty, return_inverse=True)
    counts = np.bincount(position, weights, minlength=len(values))
    running = np.concatenate([[0], counts.cumsum()])
    starts, stops = bins.PROTOCOLS[protocol](values, np.stack([running, 3 * running]), levels)
    copies = np.repeat(uncertainty, weights)
    kept = np.unique(copies, return_counts=True)
    alone = bins.PROTOCOLS[protocol](kept[0], np.concatenate([[0], kept[1].cumsum()])[None], levels)
    sizes = np.concatenate([[0], kept[1].cumsum()])
    for row in (0, 1):
        got = (running[stops[row]] - running[starts[row]]).tolist()
        assert got == (sizes[alone[1][0]] - sizes[alone[0][0]]).tolist()


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


def test_cumulative_width_nests_as_the_published_code():
    """Thresholds from lowest to highest uncertainty; every query at or below one is in its bin."""
    random = np.random.default_rng(0)
    for uncertainty in (random.random(200), random.random(200).round(1), np.array([1.0, 2.0])):
        values, counts = np.unique(uncertainty, return_counts=True)
        running = np.concatenate([[0], counts.cumsum()])
        _, stops = bins.cumulative_width(values, running[None], 5)
        thresholds = np.linspace(uncertainty.min(), uncertainty.max(), 5)
        assert running[stops[0]].tolist() == [(uncertainty <= threshold).sum() for threshold in thresholds]
    assert bins.assign(np.array([0.0, 0.1, 0.25, 0.6, 1.0]), 5, "cumulative_width").tolist() == [0, 1, 1, 3, 4]
    assert bins.assign(np.zeros(3), 4, "cumulative_width").tolist() == [0, 0, 0]


def test_bad_input_is_one_sentence():
    with pytest.raises(InputError, match="did you mean 'equal_count'"):
        bins.assign(np.zeros(3), 4, "equal_counts")
    with pytest.raises(InputError, match="levels expected a whole number ≥ 2"):
        bins.assign(np.zeros(3), 1)
    with pytest.raises(InputError, match="NaN"):
        bins.assign(np.array([0.0, np.nan]), 2)
