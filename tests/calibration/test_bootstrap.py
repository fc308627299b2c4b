import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grove_adapters.calibration import bootstrap


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 50), st.integers(0, 100))
def test_groups_are_drawn_and_exchanged_whole(groups, resamples, seed):
    codes = bootstrap.group_codes(np.array(groups), len(groups))
    counts = np.concatenate(list(bootstrap.resampled_counts(codes, resamples, seed=seed)))
    assert counts.shape == (resamples, len(groups))
    first = np.unique(codes, return_index=True)[1]
    np.testing.assert_array_equal(counts, counts[:, first][:, codes])
    assert (counts[:, first].sum(1) == len(first)).all(), "as many groups are drawn as there are"
    rows = np.concatenate(list(bootstrap.permutations(codes, resamples, seed=seed)))
    np.testing.assert_array_equal(np.sort(rows, 1), np.tile(np.arange(len(groups)), (resamples, 1)))


def test_equal_groups_receive_from_one_group():
    codes = np.array([2, 0, 1, 1, 0, 2])
    for row in np.concatenate(list(bootstrap.permutations(codes, 50, seed=0))):
        assert {len(set(codes[row[codes == group]])) for group in range(3)} == {1}


def test_blocks_join_to_one_stream(monkeypatch):
    codes = np.arange(50)
    whole = next(bootstrap.resampled_counts(codes, 20, seed=1)), next(bootstrap.permutations(codes, 20, seed=1))
    monkeypatch.setattr(bootstrap, "BLOCK", 120)
    parts = list(bootstrap.resampled_counts(codes, 20, seed=1)), list(bootstrap.permutations(codes, 20, seed=1))
    assert len(parts[0]) == len(parts[1]) == 10
    for one, many in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(one, np.concatenate(many))
    other = next(bootstrap.resampled_counts(codes, 2, seed=2))
    assert not np.array_equal(other, whole[0][:2])


def test_counts_are_uniform():
    counts = np.concatenate(list(bootstrap.resampled_counts(np.arange(20), 4000, seed=0)))
    np.testing.assert_allclose(counts.mean(0), 1, atol=0.08)
    np.testing.assert_allclose(counts.var(0), 1 - 1 / 20, atol=0.12)


def test_interval_of_a_mean_covers_it():
    random = np.random.default_rng(0)
    hits = 0
    for run in range(300):
        sample = random.exponential(size=80)
        counts = np.concatenate(list(bootstrap.resampled_counts(np.arange(80), 300, seed=run)))
        low, high = bootstrap.interval(counts @ sample / 80, sample.mean(), 0.9, (0, np.inf))
        assert low < sample.mean() < high
        hits += low <= 1 <= high
    assert 0.84 < hits / 300 < 0.95


def test_interval_contains_the_value_stays_inside_and_leaves_out_what_is_undefined():
    draws = np.append(np.linspace(0.5, 0.9, 101), [np.nan, np.nan])
    low, high = bootstrap.interval(draws, 0.95, 0.9, (0, 1))
    assert (low, high) == (pytest.approx(0.52), 1)
    low, high = bootstrap.interval(draws, 0.7, 0.9, (0, 1))
    assert (low, high) == (pytest.approx(0.52), pytest.approx(0.88))
    assert np.isnan(bootstrap.interval(draws, np.nan, 0.9, (0, 1))).all()
    assert np.isnan(bootstrap.interval(np.full(5, np.nan), 0.5, 0.9, (0, 1))).all()


def test_p_value_is_one_sided_never_zero_and_counts_undefined_against_us():
    null = np.array([0.1, 0.2, 0.3, 0.4])
    assert bootstrap.p_value(null, 0.35, larger_is_better=True) == pytest.approx(2 / 5)
    assert bootstrap.p_value(null, 0.35, larger_is_better=False) == pytest.approx(4 / 5)
    assert bootstrap.p_value(null, 9.0, larger_is_better=True) == pytest.approx(1 / 5)
    assert bootstrap.p_value(null, 0.4 + 1e-15, larger_is_better=True) == pytest.approx(2 / 5), (
        "rounding is no evidence"
    )
    assert bootstrap.p_value(np.append(null, np.nan), 9.0, larger_is_better=True) == pytest.approx(2 / 6)
    assert np.isnan(bootstrap.p_value(null, np.nan, larger_is_better=True))
    assert np.isnan(bootstrap.p_value(np.empty(0), 0.5, larger_is_better=True))
