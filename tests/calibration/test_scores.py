import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.linear_model import LinearRegression
from sklearn.metrics import roc_auc_score

from grove_adapters.calibration import bins
from grove_adapters.calibration.scores import Blocks, Null, Queries, confidence_bin, rank_correlations


@st.composite
def samples(draw, max_size=40):
    """Correctness (hard or soft), uncertainty (tied or not), confidence (with both ends) and weights."""
    n = draw(st.integers(1, max_size))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    correct = random.integers(0, 2, n) if draw(st.booleans()) else random.integers(0, 11, n) / 10
    uncertainty = random.integers(0, 6, n) if draw(st.booleans()) else random.random(n)
    confidence = np.clip(random.random(n) * 1.4 - 0.2, 0, 1)
    weights = random.integers(0, 4, n)
    weights[random.integers(n)] += 1
    return correct.astype(float), uncertainty.astype(float), confidence, weights


def scored(correct, uncertainty, confidence=None, recall_at=None, weights=None, **settings_):
    queries = Queries.of(np.asarray(correct, float), np.asarray(uncertainty, float), confidence, recall_at, **settings_)
    weights = np.ones(len(correct)) if weights is None else weights
    return {name: value[0] for name, value in queries.scored(np.asarray(weights, float)[None]).items()}


def definitions(correct, uncertainty, confidence, levels, protocol):
    """Every score from its definition, with libraries and plain loops."""
    n, error = len(correct), 1 - correct
    level = bins.assign(uncertainty, levels, protocol)
    present = np.unique(level)
    recall = np.array([correct[level == number].mean() for number in present]).round(12)
    out = {"recall": correct.mean(), "spearman": np.nan, "r2": np.nan}
    if len(present) >= 3 and np.ptp(recall) > 0:
        out["spearman"] = stats.spearmanr(present, recall).statistic
        out["r2"] = LinearRegression().fit(present[:, None], recall).score(present[:, None], recall)
    out["neg_s_r2"] = -out["spearman"] * out["r2"]

    wrong, right = error.sum(), correct.sum()
    wins = (uncertainty[:, None] > uncertainty) + 0.5 * (uncertainty[:, None] == uncertainty)
    out["auroc"] = (error[:, None] * correct * wins).sum() / (wrong * right) if wrong * right else np.nan

    def area(score):
        expected = error.copy()  # the mean over all orders of equal scores
        for value in np.unique(score):
            expected[score == value] = error[score == value].mean()
        running = expected[np.argsort(score, kind="stable")].cumsum()
        return (running / np.arange(1, n + 1)).mean()

    out["aurc"] = area(uncertainty)
    out["excess_aurc"] = out["aurc"] - area(error)
    bin_of = np.minimum((confidence * 15).astype(int), 14)
    out["ece"] = sum(
        (bin_of == b).mean() * abs(confidence[bin_of == b].mean() - correct[bin_of == b].mean())
        for b in np.unique(bin_of)
    )
    return out


@pytest.mark.parametrize("protocol", bins.PROTOCOLS)
@settings(deadline=None, max_examples=150)
@given(samples(), st.integers(2, 12))
def test_equal_their_definitions_under_any_weights(protocol, sample, levels):
    """Weights mean copies: scoring w copies of each query by the definitions gives the same."""
    correct, uncertainty, confidence, weights = sample
    got = scored(correct, uncertainty, confidence, weights=weights, levels=levels, protocol=protocol)
    copies = np.repeat(np.arange(len(weights)), weights)
    expected = definitions(correct[copies], uncertainty[copies], confidence[copies], levels, protocol)
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, abs=1e-9, nan_ok=True), name


@settings(deadline=None)
@given(samples(max_size=30))
def test_weightings_do_not_touch_each_other(sample):
    correct, uncertainty, confidence, weights = sample
    queries = Queries.of(correct, uncertainty, confidence, {1: correct})
    both = queries.scored(np.stack([np.ones(len(weights)), weights]).astype(float))
    for name, value in queries.scored(weights[None].astype(float)).items():
        np.testing.assert_allclose(both[name][1], value[0], rtol=1e-12, atol=1e-12, err_msg=name)


def test_auroc_equals_scikit_learn():
    random = np.random.default_rng(0)
    for digits in (1, 2, 16):
        uncertainty = random.random(500).round(digits)
        wrong = random.random(500) < uncertainty
        assert scored(~wrong, uncertainty)["auroc"] == pytest.approx(roc_auc_score(wrong, uncertainty))


def test_perfect_and_reversed_uncertainty():
    correct = np.repeat([1.0, 0.0], [60, 40])
    best = scored(correct, np.arange(100))
    assert best["auroc"] == 1
    assert best["excess_aurc"] == pytest.approx(0, abs=1e-12)
    worst = scored(correct, -np.arange(100))
    assert worst["auroc"] == 0
    assert worst["spearman"] == pytest.approx(-best["spearman"])
    straight = scored(np.concatenate([np.repeat([1.0, 0.0], [10 - i, i]) for i in range(10)]), np.repeat(range(10), 10))
    assert (straight["spearman"], straight["r2"], straight["neg_s_r2"]) == pytest.approx((-1, 1, 1))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_right_or_all_wrong_is_undefined_not_zero(value):
    got = scored(np.full(30, value), np.arange(30), np.full(30, 1.0))
    for name in ("spearman", "r2", "neg_s_r2", "auroc"):
        assert np.isnan(got[name]), name
    assert got["aurc"] == pytest.approx(1 - value)
    assert got["excess_aurc"] == pytest.approx(0)
    assert got["ece"] == pytest.approx(1 - value)


def test_one_query_and_constant_uncertainty():
    got = scored([1], [0.5], np.array([0.25]))
    assert np.isnan(got["spearman"])
    assert np.isnan(got["auroc"])
    assert (got["aurc"], got["ece"]) == (0, 0.75)
    flat = scored([1, 0, 1, 0], [2, 2, 2, 2])
    assert np.isnan(flat["spearman"])
    assert flat["auroc"] == 0.5
    assert flat["aurc"] == pytest.approx(0.5)


def test_two_levels_make_no_trend():
    got = scored([1, 1, 0, 0], [0, 0, 1, 1], levels=2)
    assert np.isnan(got["r2"])


def test_confidence_zero_and_one_fall_into_the_outer_bins():
    edges = np.arange(16) / 15
    assert confidence_bin(edges, 15).tolist() == [*range(15), 14]
    assert confidence_bin(np.nextafter(edges[1:], 0), 15).tolist() == list(range(15))
    certain = scored([1, 1, 0, 0], [0, 0, 1, 1], np.array([1.0, 1.0, 0.0, 0.0]))
    assert certain["ece"] == 0
    assert scored([0, 0, 1, 1], [0, 0, 1, 1], np.array([1.0, 1.0, 0.0, 0.0]))["ece"] == 1


def test_recall_at_every_depth_is_a_mean():
    got = scored([1, 0, 0, 0], [1, 2, 3, 4], None, {1: np.array([1, 0, 0, 0]), 5: np.array([1, 1, 1, 0])})
    assert got["recall_at"].tolist() == [0.25, 0.75]
    assert "ece" not in got


@settings(deadline=None, max_examples=60)
@given(samples(max_size=60))
def test_risk_follows_the_most_certain_queries(sample):
    correct, uncertainty, _, _ = sample
    queries = Queries.of(correct, uncertainty)
    risk = queries.scored(np.ones((1, len(correct))))["risk"][0]
    coverage, optimal = queries.coverages, queries.optimal_risk()
    assert coverage[-1] == 1
    assert risk[-1] == pytest.approx(1 - correct.mean())
    assert (optimal <= risk + 1e-12).all()
    assert (np.diff(optimal) >= -1e-12).all()
    if len(np.unique(uncertainty)) == len(uncertainty):
        running = (1 - correct)[np.argsort(uncertainty)].cumsum() / np.arange(1, len(correct) + 1)
        np.testing.assert_allclose(risk, running, atol=1e-12)


@pytest.mark.parametrize("protocol", bins.PROTOCOLS)
@settings(deadline=None, max_examples=100)
@given(samples(), st.integers(0, 1000))
def test_the_null_scores_what_a_permuted_result_scores(protocol, sample, seed):
    correct, uncertainty, _, _ = sample
    rows = np.stack([np.random.default_rng(seed + i).permutation(len(correct)) for i in range(3)])
    null = Null(Queries.of(correct, uncertainty, protocol=protocol, levels=5)).scored(rows)
    for number, row in enumerate(rows):
        direct = scored(correct[row], uncertainty, protocol=protocol, levels=5)
        for name, values in null.items():
            assert values[number] == pytest.approx(direct[name], abs=1e-9, nan_ok=True), name


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(0, 10**6))
def test_rank_correlation_equals_scipy_on_copies(n, seed):
    random = np.random.default_rng(seed)
    x, y, weights = random.integers(0, 8, n), random.random(n).round(1), random.integers(0, 3, n)
    weights[0] += 1
    got = rank_correlations(Blocks.of(x), Blocks.of(y), weights[None].astype(float))[0]
    copies = np.repeat(np.arange(n), weights)
    if np.ptp(x[copies]) == 0 or np.ptp(y[copies]) == 0:
        assert np.isnan(got)
    else:
        assert got == pytest.approx(stats.spearmanr(x[copies], y[copies]).statistic, abs=1e-9)
