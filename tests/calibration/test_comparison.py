import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from grove_adapters.calibration import bootstrap, calibrate, compare
from grove_adapters.errors import InputError, InputTypeError
from grove_adapters.tasks import TaskResult


def pair(n=300, *, first=0.8, second=0.8, seed=0, groups=None):
    """Two results on the same queries: hardness is shared, each uncertainty sees its own share of it."""
    random = np.random.default_rng(seed)
    hard = random.random(n) if groups is None else random.random(n)[groups]
    correct = (random.random(n) < 1 - hard).astype(float)
    results = []
    for signal in (first, second):
        uncertainty = signal * hard + (1 - signal) * random.random(n)
        results.append(
            TaskResult(
                task="retrieval",
                direction="i2t",
                ids=np.array([f"q{row:04d}" for row in range(n)]),
                correct=correct,
                uncertainty=uncertainty,
                confidence=1 - uncertainty,
                recall_at={1: correct},
                groups=groups,
            )
        )
    return results


def test_a_better_uncertainty_is_told_from_a_worse_one():
    comparison = compare(*pair(first=0.9, second=0.3))
    for name in ("auroc", "aurc", "excess_aurc", "accuracy@0.5"):
        assert comparison.better(name) == 1, name
    assert comparison.differences["auroc"].low > 0
    assert comparison.differences["aurc"].high < 0
    recall = comparison.differences["recall"]
    assert (recall.value, recall.low, recall.high, recall.p_value) == (0, 0, 0, 1)
    backwards = compare(*pair(first=0.3, second=0.9))
    assert backwards.better("auroc") == -1
    assert backwards.better("recall") == 0
    with pytest.raises(InputError, match="no score 'auc'"):
        comparison.better("auc")
    with pytest.raises(InputError, match="better direction, got 'brier_uncertainty'"):
        comparison.better("brier_uncertainty")


def test_values_are_the_differences_of_the_reports_and_the_order_of_queries_changes_nothing():
    first, second = pair(first=0.7, second=0.4, groups=np.arange(300) // 3)
    comparison = compare(first, second, resamples=50)
    mine, theirs = (calibrate(result, resamples=0).named() for result in (first, second))
    assert list(comparison.differences) == list(mine)
    for name, difference in comparison.differences.items():
        assert difference.value == pytest.approx(mine[name].value - theirs[name].value, abs=1e-12, nan_ok=True), name
    order = np.random.default_rng(0).permutation(300)
    shuffled = TaskResult(
        task="retrieval",
        direction="i2t",
        ids=second.ids[order],
        correct=second.correct[order],
        uncertainty=second.uncertainty[order],
        confidence=second.confidence[order],
        recall_at={1: second.correct[order]},
        groups=second.groups[order] + 7,
    )
    assert compare(first, shuffled, resamples=50).to_json() == comparison.to_json()
    assert comparison.n_groups == 100
    content = json.loads(comparison.to_json())
    assert content["differences"]["auroc"]["p_value"] == comparison.differences["auroc"].p_value
    assert comparison.row()["auroc_p"] == comparison.differences["auroc"].p_value


@pytest.mark.parametrize("grouped", [False, True])
def test_equals_are_called_different_as_seldom_as_promised(grouped):
    """Two uncertainties of the same worth, each with noise of its own."""
    groups = np.arange(300) // 3 if grouped else None
    names = ("auroc", "neg_s_r2", "aurc", "ece", "brier", "nll")
    p_values, covered = [], []
    for run in range(100):
        comparison = compare(*pair(first=0.6, second=0.6, seed=run, groups=groups), resamples=200, seed=run)
        p_values.append([comparison.differences[name].p_value for name in names])
        covered.append([comparison.differences[n].low <= 0 <= comparison.differences[n].high for n in names])
    for name, column, held in zip(names, np.array(p_values).T, np.array(covered).T, strict=True):
        assert np.mean(column <= 0.05) <= 0.11, name
        assert np.mean(held) >= 0.89, name
    assert stats.kstest(np.array(p_values)[:, 0], "uniform").pvalue > 1e-3


def test_pairing_tells_apart_what_two_intervals_do_not():
    first, second = pair(600, first=0.75, second=0.6, seed=3)
    mine, theirs = (calibrate(result).scores["auroc"] for result in (first, second))
    difference = compare(first, second).differences["auroc"]
    assert mine.low < theirs.high, "the intervals overlap"
    assert difference.p_value < 0.05
    assert difference.high - difference.low < np.hypot(mine.high - mine.low, theirs.high - theirs.low)


def test_undefined_is_nan():
    first, second = pair(40)
    second = dataclasses.replace(second, confidence=None)
    comparison = compare(first, second, resamples=20)
    assert "ece" not in comparison.differences
    right = [dataclasses.replace(result, correct=np.ones(40)) for result in (first, second)]
    auroc = compare(*right, resamples=20).differences["auroc"]
    assert np.isnan([auroc.value, auroc.low, auroc.p_value]).all()
    assert compare(*right, resamples=20).better("auroc") == 0
    quick = compare(first, second, resamples=0).differences["aurc"]
    assert np.isfinite(quick.value)
    assert np.isnan([quick.low, quick.p_value]).all()
    one = [dataclasses.replace(result, groups=np.zeros(40, dtype=int)) for result in (first, second)]
    assert np.isnan(compare(*one).differences["auroc"].low)


@settings(deadline=None, max_examples=50)
@given(st.floats(-2, 2), st.integers(20, 400), st.integers(0, 1000))
def test_the_p_value_is_small_where_the_interval_keeps_clear_of_zero(value, resamples, seed):
    draws = np.random.default_rng(seed).normal(value + 0.3, 1, resamples)
    p = bootstrap.difference_p_value(draws, value)
    low, high = bootstrap.interval(draws, value, 0.95, (-np.inf, np.inf))
    assert 0 < p <= 1
    if p < 0.05 - 4 / resamples:
        assert not low <= 0 <= high
    if p > 0.05 + 4 / resamples:
        assert low <= 0 <= high
    assert bootstrap.difference_p_value(-draws, -value) == pytest.approx(p)


def test_bad_input_is_one_sentence():
    first, second = pair(40)
    with pytest.raises(InputTypeError, match="expected a TaskResult"):
        compare(first, "grove")
    with pytest.raises(InputError, match="same queries"):
        compare(first, pair(41)[0])
    with pytest.raises(InputError, match="same direction, got 'i2t' and 't2i'"):
        compare(first, dataclasses.replace(second, direction="t2i"))
    with pytest.raises(InputError, match="same groups"):
        compare(first, dataclasses.replace(second, groups=np.arange(40) // 2))
    with pytest.raises(InputError, match="levels expected"):
        compare(first, second, levels=1)
