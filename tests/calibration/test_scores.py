import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LinearRegression
from sklearn.metrics import brier_score_loss, log_loss, r2_score, roc_auc_score

from grove_adapters.calibration import bins
from grove_adapters.calibration.blocks import Blocks
from grove_adapters.calibration.confidences import confidence_bin, equal_mass_bin
from grove_adapters.calibration.scores import SCORES, Null, Queries, rank_correlations

COVERAGES, RISKS = (0.1, 0.5, 0.8, 1.0), (0.01, 0.1, 0.29, 0.5, 1.0)


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


def members(uncertainty, levels, protocol):
    """(numbers, masks) of the levels that are not empty."""
    if protocol == "cumulative_width":
        thresholds = np.linspace(uncertainty.min(), uncertainty.max(), levels)
        masks = [uncertainty <= threshold for threshold in thresholds]
    else:
        level = bins.assign(uncertainty, levels, protocol)
        masks = [level == number for number in range(levels)]
    numbers = np.array([number for number, mask in enumerate(masks) if mask.any()])
    return numbers, [masks[number] for number in numbers]


def definitions(correct, uncertainty, levels, protocol):
    """Every score of correctness and uncertainty from its definition, with libraries and plain loops."""
    n, error = len(correct), 1 - correct
    numbers, masks = members(uncertainty, levels, protocol)
    recall = np.array([correct[mask].mean() for mask in masks]).round(12)
    out = dict.fromkeys(("spearman", "pearson", "r2", "r2_identity"), np.nan) | {"recall": correct.mean()}
    if len(numbers) >= 3 and np.ptp(recall) > 0:
        out["spearman"] = stats.spearmanr(numbers, recall).statistic
        out["pearson"] = stats.pearsonr(numbers, recall).statistic
        out["r2"] = LinearRegression().fit(numbers[:, None], recall).score(numbers[:, None], recall)
        out["r2_identity"] = r2_score(recall, 1 - numbers / (levels - 1))
    out["neg_s_r2"] = -out["spearman"] * out["r2"]

    wrong, right = error.sum(), correct.sum()
    wins = (uncertainty[:, None] > uncertainty) + 0.5 * (uncertainty[:, None] == uncertainty)
    out["auroc"] = (error[:, None] * correct * wins).sum() / (wrong * right) if wrong * right else np.nan

    def risks(score):
        """Mean error of the n most certain queries for every n, expected over the orders of equal scores."""
        expected = error.copy()
        for value in np.unique(score):
            expected[score == value] = error[score == value].mean()
        return expected[np.argsort(score, kind="stable")].cumsum() / np.arange(1, n + 1)

    out["aurc"] = risks(uncertainty).mean()
    out["excess_aurc"] = out["aurc"] - risks(error).mean()
    kept = [np.flatnonzero(risks(uncertainty) <= risk + 1e-9) for risk in RISKS]
    out["coverage_at_risk"] = np.array([(rows[-1] + 1) / n if len(rows) else 0 for rows in kept])
    running = np.append(0, risks(uncertainty) * np.arange(1, n + 1))
    shares = np.array(COVERAGES) * n
    out["accuracy_at_coverage"] = 1 - np.interp(shares, np.arange(n + 1), running) / shares
    return out


def confidence_definitions(correct, confidence, width, mass):
    """Every score of the confidence from its definition; `width` and `mass` are the queries' bins."""

    def parts(bin_of):
        return [(bin_of == b, confidence[bin_of == b] - correct[bin_of == b]) for b in np.unique(bin_of)]

    certain = np.clip(confidence, np.finfo(float).eps, 1 - np.finfo(float).eps)
    gaps = [abs(gap.mean()) for _, gap in parts(width)]
    out = {
        "ece": sum(mask.mean() * gap for (mask, _), gap in zip(parts(width), gaps, strict=True)),
        "mce": max(gaps),
        "ece_equal_mass": sum(mask.mean() * abs(gap.mean()) for mask, gap in parts(mass)),
        "brier": np.mean((confidence - correct) ** 2),
        "brier_reliability": sum(mask.mean() * gap.mean() ** 2 for mask, gap in parts(width)),
        "brier_uncertainty": correct.var(),
        "nll": -np.mean(correct * np.log(certain) + (1 - correct) * np.log(1 - certain)),
    }
    # Stephenson et al.: Murphy's resolution, less the variance of the confidence inside bins, plus twice its
    # covariance with correctness there
    resolution = 0.0
    for mask, _ in parts(width):
        within = np.cov(confidence[mask], correct[mask], bias=True)
        resolution += mask.mean() * ((correct[mask].mean() - correct.mean()) ** 2 - within[0, 0] + 2 * within[0, 1])
    out["brier_resolution"] = resolution
    square = sum(
        mask.mean() * (gap.mean() ** 2 - gap.var(ddof=1) / len(gap)) for mask, gap in parts(mass) if len(gap) > 1
    )
    out["ece_debiased"] = np.sqrt(max(square, 0))
    return out


@pytest.mark.parametrize("protocol", bins.PROTOCOLS)
@settings(deadline=None, max_examples=150)
@given(samples(), st.integers(2, 12))
def test_equal_their_definitions_under_any_weights(protocol, sample, levels):
    """Weights mean copies: scoring w copies of each query by the definitions gives the same."""
    correct, uncertainty, confidence, weights = sample
    how = {"levels": levels, "protocol": protocol, "coverages": COVERAGES, "risks": RISKS}
    got = scored(correct, uncertainty, confidence, weights=weights, **how)
    copies = np.repeat(np.arange(len(weights)), weights)
    expected = definitions(correct[copies], uncertainty[copies], levels, protocol)
    bin_of = [np.minimum((confidence * 15).astype(int), 14), bins.assign(confidence, 15)]
    expected |= confidence_definitions(correct[copies], confidence[copies], *(column[copies] for column in bin_of))
    assert set(SCORES) <= set(expected)
    for name, value in expected.items():
        tolerance = 1e-6 if name == "ece_debiased" else 1e-9  # a root, near 0 at times
        assert got[name] == pytest.approx(value, abs=tolerance, nan_ok=True), name
    for name, kind in SCORES.items():
        if np.isfinite(got[name]):
            assert kind.bounds[0] - 1e-12 <= got[name] <= kind.bounds[1] + 1e-12, name
    parts = got["brier_reliability"] - got["brier_resolution"] + got["brier_uncertainty"]
    assert parts == pytest.approx(got["brier"], abs=1e-12)


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


def test_confidence_scores_equal_scikit_learn():
    random = np.random.default_rng(0)
    confidence = random.random(700)
    correct = (random.random(700) < confidence**2).astype(float)
    got = scored(correct, random.random(700), confidence)
    assert got["brier"] == pytest.approx(brier_score_loss(correct, confidence))
    assert got["nll"] == pytest.approx(log_loss(correct, confidence))
    for name, strategy in (("ece", "uniform"), ("ece_equal_mass", "quantile")):
        accuracy, mean = calibration_curve(correct, confidence, n_bins=15, strategy=strategy)
        bin_of = confidence_bin(confidence, 15) if strategy == "uniform" else equal_mass_bin(confidence, 15)
        share = np.bincount(bin_of) / 700
        tolerance = 1e-9 if strategy == "uniform" else 0.01  # its quantiles may put the query at an edge elsewhere
        assert got[name] == pytest.approx((share * np.abs(accuracy - mean)).sum(), abs=tolerance)
    wrong_and_certain = scored([0.0, 1.0], [0, 1], np.array([1.0, 1.0]))
    assert wrong_and_certain["nll"] == pytest.approx(log_loss([0, 1], [1.0, 1.0], labels=[0, 1]))


def test_debiased_ece_is_about_zero_for_a_confidence_that_is_right():
    """The plain one is not: with 20 queries a bin it calls every calibrated model .07 wrong."""
    random = np.random.default_rng(0)
    plain, debiased = [], []
    for _ in range(200):
        confidence = random.random(300)
        got = scored(random.random(300) < confidence, confidence, confidence)
        plain.append(got["ece_equal_mass"])
        debiased.append(got["ece_debiased"])
    assert np.mean(plain) > 0.06
    assert np.median(debiased) < 0.02
    assert 0.3 < np.mean(np.array(debiased) == 0) < 0.7, "its square is centred at 0"
    confidence = random.random(20_000)
    biased = scored(random.random(20_000) < confidence**2, confidence, confidence)
    assert biased["ece_debiased"] == pytest.approx(np.sqrt(1 / 30), abs=0.01), "∫ (c − c²)² = 1/30"


def test_equal_mass_bins_never_tear_equal_confidences_apart():
    confidence = np.array([0.5] * 7 + [0.1, 0.2, 0.9])
    bin_of = equal_mass_bin(confidence, 5)
    assert len(set(bin_of[:7])) == 1
    assert (np.diff(bin_of[np.argsort(confidence)]) >= 0).all()
    assert equal_mass_bin(confidence, 1).tolist() == [0] * 10


def test_coverage_at_risk_counts_whole_queries():
    correct = np.array([1.0, 1, 1, 0, 1, 1, 1, 1, 1, 0])
    got = scored(correct, np.arange(10), risks=(0.01, 0.12, 0.2, 1.0))["coverage_at_risk"]
    assert got.tolist() == [0.3, 0.9, 1.0, 1.0]
    tied = scored(correct, np.zeros(10), risks=(0.19, 0.2))["coverage_at_risk"]
    assert tied.tolist() == [0, 1]
    assert scored([0.0, 0.0], [1, 2], risks=(0.5,))["coverage_at_risk"].tolist() == [0]


def test_perfect_and_reversed_uncertainty():
    correct = np.repeat([1.0, 0.0], [60, 40])
    best = scored(correct, np.arange(100))
    assert best["auroc"] == 1
    assert best["excess_aurc"] == pytest.approx(0, abs=1e-12)
    worst = scored(correct, -np.arange(100))
    assert worst["auroc"] == 0
    assert worst["spearman"] == pytest.approx(-best["spearman"])
    ideal = np.concatenate([np.repeat([1.0, 0.0], [9 - i, i]) for i in range(10)])
    assert scored(ideal, np.repeat(range(10), 9))["r2_identity"] == pytest.approx(1)
    straight = scored(np.concatenate([np.repeat([1.0, 0.0], [10 - i, i]) for i in range(10)]), np.repeat(range(10), 10))
    assert (straight["spearman"], straight["r2"], straight["neg_s_r2"]) == pytest.approx((-1, 1, 1))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_right_or_all_wrong_is_undefined_not_zero(value):
    got = scored(np.full(30, value), np.arange(30), np.full(30, 1.0))
    for name in ("spearman", "pearson", "r2", "r2_identity", "neg_s_r2", "auroc"):
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
    coverage, optimal = queries.curve_coverages, queries.optimal_risk()
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
