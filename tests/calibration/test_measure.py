import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from grove_adapters.calibration import calibrate, rank_correlation
from grove_adapters.calibration.bins import PROTOCOLS
from grove_adapters.calibration.measure import clopper_pearson
from grove_adapters.calibration.scores import SCORES
from grove_adapters.errors import InputError, InputTypeError
from grove_adapters.tasks import TaskResult


def result(n=300, *, signal=0.8, seed=0, **changes):
    random = np.random.default_rng(seed)
    uncertainty = random.random(n)
    right = 0.9 - signal * uncertainty
    correct = (random.random(n) < right).astype(float)
    fields = {
        "task": "retrieval",
        "direction": "i2t",
        "ids": np.array([f"q{row:05d}" for row in range(n)]),
        "correct": correct,
        "uncertainty": uncertainty,
        "confidence": np.clip(right + 0.05, 0, 1),
        "recall_at": {1: correct, 5: np.maximum(correct, random.random(n) < 0.5)},
        "provenance": {"query_maker": {"adapter": "toy"}},
    }
    return TaskResult(**{**fields, **changes})


def test_an_informative_uncertainty_is_seen():
    report = calibrate(result())
    assert list(report.scores) == list(SCORES)
    for name, score in report.scores.items():
        assert score.low <= score.value <= score.high, name
    assert report.scores["neg_s_r2"].value > 0.7
    assert report.scores["auroc"].value > 0.7
    for name, kind in SCORES.items():
        if kind.has_null:
            assert report.scores[name].p_value < 0.01, name
        else:
            assert np.isnan(report.scores[name].p_value), name
    assert (report.n_queries, report.n_groups, report.adapter) == (300, 300, "toy")
    assert report.levels.count.tolist() == [30] * 10
    assert report.provenance["versions"]["numpy"] == np.__version__


def test_misleading_uncertainty_has_a_large_p_value():
    backwards = result()
    backwards = dataclasses.replace(backwards, uncertainty=-backwards.uncertainty)
    report = calibrate(backwards)
    assert report.scores["neg_s_r2"].value < -0.7
    assert report.scores["auroc"].p_value > 0.99


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_the_order_of_queries_changes_nothing(seed, tied, grouped):
    before = result(60, seed=seed, groups=np.arange(60) // 3 if grouped else None)
    if tied:
        before = dataclasses.replace(before, uncertainty=before.uncertainty.round(1))
    order = np.random.default_rng(seed).permutation(60)
    after = TaskResult(
        task=before.task,
        direction=before.direction,
        ids=before.ids[order],
        correct=before.correct[order],
        uncertainty=before.uncertainty[order],
        confidence=before.confidence[order],
        recall_at={k: hits[order] for k, hits in before.recall_at.items()},
        groups=1000 - before.groups[order] if grouped else None,
        provenance=before.provenance,
    )
    assert calibrate(before, resamples=20).to_json() == calibrate(after, resamples=20).to_json()


def test_same_seed_same_report_and_the_global_state_is_left_alone():
    np.random.seed(0)  # noqa: NPY002
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    first = calibrate(result(), seed=3, resamples=50)
    assert first.to_json() == calibrate(result(), seed=3, resamples=50).to_json()
    assert first.to_json() != calibrate(result(), seed=4, resamples=50).to_json()
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_uninformative_uncertainty_is_called_that(protocol):
    """However levels are made, p-values hold; nested ones make −S·R² > .3 common and lean to the mean recall."""
    random = np.random.default_rng(1)
    values, p_values, covered = [], [], []
    named = [name for name, kind in SCORES.items() if kind.has_null]
    for run in range(100):
        null = result(400, signal=0.0, seed=run)
        null = dataclasses.replace(null, uncertainty=random.random(400), confidence=None)
        report = calibrate(null, protocol=protocol, resamples=99, seed=run)
        values.append(report.scores["neg_s_r2"].value)
        p_values.append([report.scores[name].p_value for name in named])
        covered.append(report.scores["auroc"].low <= 0.5 <= report.scores["auroc"].high)
    if protocol == "equal_count":
        assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(100)
        assert np.mean(np.array(values) > 0.3) < 0.2
    elif protocol == "cumulative_width":
        assert np.mean(np.array(values) > 0.3) > 0.25
    assert np.mean(covered) > 0.88
    for name, column in zip(named, np.array(p_values).T, strict=True):
        assert stats.kstest(column, "uniform").pvalue > 1e-3, name
        assert np.mean(column <= 0.05) < 0.11, name


def test_captions_of_one_image_count_as_one_draw():
    """Five copies of each query carry no more evidence than one."""
    once = result(80)
    five = TaskResult(
        task="retrieval",
        ids=np.array([f"{name}-{copy}" for name in once.ids for copy in range(5)]),
        correct=np.repeat(once.correct, 5),
        uncertainty=np.repeat(once.uncertainty, 5),
        groups=np.repeat(np.arange(80), 5),
    )
    alone = dataclasses.replace(five, groups=None)
    width = {}
    for name, row in {"once": once, "grouped": five, "alone": alone}.items():
        report = calibrate(row)
        width[name] = report.scores["auroc"].high - report.scores["auroc"].low
    assert width["grouped"] == pytest.approx(width["once"], rel=0.15)
    assert width["alone"] < 0.6 * width["grouped"]
    noise = np.random.default_rng(5).random(80)
    weak = dataclasses.replace(five, uncertainty=np.repeat(0.2 * once.uncertainty + noise, 5))
    grouped, ungrouped = (calibrate(row).scores["auroc"] for row in (weak, dataclasses.replace(weak, groups=None)))
    assert grouped.value == ungrouped.value > 0.52
    assert grouped.p_value > 3 * ungrouped.p_value


def test_undefined_is_nan_and_warns_of_nothing():
    for correct in (np.zeros(40), np.ones(40)):
        report = calibrate(result(40, correct=correct, confidence=None), resamples=50)
        for name in ("spearman", "r2", "neg_s_r2", "auroc", "ece"):
            assert np.isnan([*dataclasses.astuple(report.scores[name])]).all(), name
        assert report.reliability is None
        assert report.scores["recall"].value == correct[0]
    single = calibrate(result(1), resamples=50)
    assert np.isnan(single.scores["recall"].low)
    assert single.levels.count.sum() == 1
    assert np.isnan(single.levels.recall).sum() == 9
    one_group = calibrate(result(20, groups=np.zeros(20, dtype=int)), resamples=50)
    assert np.isnan(one_group.scores["auroc"].low)
    assert np.isnan(one_group.scores["auroc"].p_value)
    quick = calibrate(result(), resamples=0)
    assert np.isnan(quick.scores["auroc"].low)
    assert np.isnan(quick.risk_coverage.risk_low).all()
    assert np.isnan(quick.recall_at[5].low)


def test_few_right_queries_get_a_p_value_and_no_interval():
    """One right query among hundreds, as an untrained model gives: nothing may look significant."""
    correct = np.zeros(300)
    correct[:7] = 1
    report = calibrate(result(correct=correct))
    for name in ("spearman", "r2", "neg_s_r2", "auroc", "excess_aurc"):
        score = report.scores[name]
        assert np.isfinite(score.value), name
        assert np.isnan([score.low, score.high]).all(), name
        assert score.p_value > 0.01, name
    assert report.scores["aurc"].low < report.scores["aurc"].high
    correct[7] = 1
    assert np.isfinite(calibrate(result(correct=correct)).scores["auroc"].low)
    same_group = calibrate(result(correct=correct, groups=np.maximum(np.arange(300) - 1, 0)))
    assert np.isnan(same_group.scores["auroc"].low), "seven groups hold the eight right queries"


def test_a_perfect_recall_is_not_certain():
    report = calibrate(result(40, correct=np.ones(40), groups=np.arange(40) // 2), resamples=20)
    expected = stats.binomtest(20, 20).proportion_ci(0.95, method="exact").low
    assert (report.scores["recall"].low, report.scores["recall"].high) == (pytest.approx(expected), 1)
    nothing = calibrate(result(40, recall_at={5: np.zeros(40)}), resamples=20).recall_at[5]
    assert (nothing.low, nothing.high) == (0, pytest.approx(1 - 0.025 ** (1 / 40)))


def test_levels_and_reliability_agree_with_plain_means():
    row = result(217)
    report = calibrate(row, levels=4, protocol="equal_width", confidence_bins=5, resamples=10)
    level = np.minimum(((row.uncertainty - row.uncertainty.min()) / np.ptp(row.uncertainty) * 4).astype(int), 3)
    for number in range(4):
        mine = level == number
        assert report.levels.count[number] == mine.sum()
        assert report.levels.recall[number] == pytest.approx(row.correct[mine].mean())
        assert report.levels.uncertainty[number] == pytest.approx(row.uncertainty[mine].mean())
        assert report.levels.uncertainty_low[number] == row.uncertainty[mine].min()
        assert report.levels.uncertainty_high[number] == row.uncertainty[mine].max()
    bin_of = np.minimum((row.confidence * 5).astype(int), 4)
    reliability = report.reliability
    for number in range(5):
        mine = bin_of == number
        assert reliability.count[number] == mine.sum()
        if mine.any():
            assert reliability.accuracy[number] == pytest.approx(row.correct[mine].mean())
            assert reliability.confidence[number] == pytest.approx(row.confidence[mine].mean())
            assert reliability.accuracy_low[number] <= reliability.accuracy[number] <= reliability.accuracy_high[number]
    assert report.recall_at[5].value == pytest.approx(row.recall_at[5].mean())
    curve = report.risk_coverage
    assert len(curve) == 100
    assert (curve.risk_low <= curve.risk).all()
    assert (curve.risk <= curve.risk_high).all()
    assert (curve.optimal <= curve.risk + 1e-12).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 60), st.data())
def test_clopper_pearson_equals_scipy(trials, data):
    successes = data.draw(st.integers(0, trials))
    low, high = clopper_pearson(np.array([successes, 0]), np.array([trials, 0]), 0.9)
    exact = stats.binomtest(successes, trials).proportion_ci(0.9, method="exact")
    assert (low[0], high[0]) == (pytest.approx(exact.low, abs=1e-9), pytest.approx(exact.high, abs=1e-9))
    assert np.isnan([low[1], high[1]]).all()


def test_rank_correlation_with_a_known_truth():
    random = np.random.default_rng(0)
    truth = random.integers(0, 4, 200)
    uncertainty = truth + random.normal(size=200)
    score = rank_correlation(torch.tensor(uncertainty), truth)
    assert score.value == pytest.approx(stats.spearmanr(uncertainty, truth).statistic)
    assert score.low < score.value < score.high
    assert score.p_value < 0.01
    assert rank_correlation(-uncertainty, truth).p_value > 0.99
    grouped = rank_correlation(np.repeat(uncertainty, 4), np.repeat(truth, 4), groups=np.repeat(np.arange(200), 4))
    assert grouped.high - grouped.low == pytest.approx(score.high - score.low, rel=0.15)
    constant = rank_correlation(uncertainty, np.ones(200))
    assert np.isnan([constant.value, constant.low, constant.p_value]).all()
    assert np.isnan(rank_correlation([1.0], [2.0]).low)
    assert np.isnan(rank_correlation(uncertainty, truth, resamples=0).low)


def test_rank_correlation_null_is_uniform():
    random = np.random.default_rng(2)
    p_values = [rank_correlation(*random.random((2, 40)), resamples=99, seed=run).p_value for run in range(200)]
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3


def test_nested_levels_are_reported_as_they_were_published():
    row = result(200)
    report = calibrate(row, levels=5, protocol="cumulative_width", resamples=10)
    thresholds = np.linspace(row.uncertainty.min(), row.uncertainty.max(), 5)
    held = [row.uncertainty <= threshold for threshold in thresholds]
    assert report.levels.count.tolist() == [mask.sum() for mask in held]
    assert report.levels.count[0] == 1
    np.testing.assert_allclose(report.levels.recall, [row.correct[mask].mean() for mask in held])
    np.testing.assert_allclose(report.levels.uncertainty_high, [row.uncertainty[mask].max() for mask in held])
    flat = report.row()
    assert (flat["protocol"], flat["levels"], flat["queries_per_level"]) == ("cumulative_width", 5, 1)


def test_accuracy_and_coverage_are_read_off_the_most_certain_queries():
    row = result(300)
    report = calibrate(row, coverages=(0.1, 1.0), risks=(0.2,), resamples=50)
    order = np.argsort(row.uncertainty)
    best = report.accuracy_at_coverage[0.1]
    assert best.value == pytest.approx(row.correct[order[:30]].mean())
    assert best.low <= best.value <= best.high
    assert report.accuracy_at_coverage[1.0].value == pytest.approx(row.correct.mean())
    running = (1 - row.correct[order]).cumsum() / np.arange(1, 301)
    share = report.coverage_at_risk[0.2]
    assert share.value == (np.flatnonzero(running <= 0.2)[-1] + 1) / 300
    assert share.low <= share.value <= share.high


def test_bad_input_is_one_sentence():
    with pytest.raises(InputError, match="coverages expected shares above 0 and up to 1, got 80"):
        calibrate(result(), coverages=[80])
    with pytest.raises(InputError, match="risks expected"):
        calibrate(result(), risks=[0.0])
    with pytest.raises(InputTypeError, match="run a task first"):
        calibrate([1, 2])
    with pytest.raises(InputError, match="did you mean 'equal_width'"):
        calibrate(result(), protocol="equalwidth")
    with pytest.raises(InputError, match="levels expected"):
        calibrate(result(), levels=1)
    with pytest.raises(InputError, match="interval expected a coverage"):
        calibrate(result(), interval=95)
    with pytest.raises(InputError, match="resamples expected"):
        calibrate(result(), resamples=-1)
    with pytest.raises(InputError, match="confidence_bins expected"):
        calibrate(result(), confidence_bins=0)
    with pytest.raises(InputError, match="truth: expected 3 rows, got 2"):
        rank_correlation([1, 2, 3], [1, 2])
    with pytest.raises(InputError, match="groups: expected 2 rows"):
        rank_correlation([1, 2], [1, 2], groups=np.array([1]))
    with pytest.raises(InputError, match="NaN"):
        rank_correlation([1, np.nan], [1, 2])
    with pytest.raises(InputError, match="one number an item"):
        rank_correlation([], [])
