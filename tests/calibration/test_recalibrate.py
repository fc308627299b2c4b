import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit, logit
from sklearn.isotonic import IsotonicRegression

from grove_adapters.adapters import create_adapter, load_adapter
from grove_adapters.calibration import calibrate, recalibrate, with_confidence_none
from grove_adapters.calibration.recalibrate import BINS, SIGNALS, Method, Recalibration
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.errors import InputError, InputTypeError, UnreadableError
from grove_adapters.tasks import TaskResult, retrieve, retrieve_absent

METHODS = get_args(Method)
RISING = ("temperature", "platt", "beta", "isotonic")


def result(correct, confidence, *, task="retrieval", provenance=None, **detail):
    correct = np.asarray(correct, dtype=float)
    return TaskResult(
        task=task,
        direction="i2t",
        ids=np.array([f"q{row}" for row in range(len(correct))]),
        correct=correct,
        uncertainty=np.arange(len(correct)),
        confidence=confidence,
        detail=detail,
        provenance=provenance or {},
    )


def world(chance_of, n=20_000, seed=0):
    """Queries whose confidence is uniform and whose chance of being right is a function of it."""
    random = np.random.default_rng(seed)
    confidence = random.uniform(0.01, 0.99, n)
    return result(random.random(n) < chance_of(confidence), confidence)


def slopes(map_):
    weights = np.array(map_.parameters["weights"]) / map_.parameters["spread"]
    return weights, map_.parameters["intercept"][0] - weights @ map_.parameters["centre"]


def test_each_logistic_map_finds_the_law_that_made_the_data():
    weights, intercept = slopes(recalibrate(world(lambda p: expit(logit(p) / 2.5)), method="temperature"))
    assert 1 / weights[0] == pytest.approx(2.5, rel=0.05)
    assert intercept == 0
    weights, intercept = slopes(recalibrate(world(lambda p: expit(0.5 * logit(p) - 1)), method="platt"))
    assert weights[0] == pytest.approx(0.5, abs=0.03)
    assert intercept == pytest.approx(-1, abs=0.05)
    weights, intercept = slopes(
        recalibrate(world(lambda p: expit(0.4 * np.log(p) - 1.5 * np.log1p(-p) + 0.3)), method="beta")
    )
    np.testing.assert_allclose([*weights, intercept], [0.4, 1.5, 0.3], atol=0.1)


def test_beta_can_leave_a_calibrated_confidence_alone():
    held_out = world(lambda p: p)
    np.testing.assert_allclose(
        recalibrate(held_out, method="beta").probability(held_out), held_out.confidence, atol=0.02
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_distorted_confidence_becomes_calibrated_for_other_queries(method):
    def distorted(p):
        return expit(logit(p) / 4) if method == "temperature" else 0.2 + 0.5 * p**2

    map_ = recalibrate(world(distorted), method=method)
    others = world(distorted, seed=1)
    before, after = (calibrate(r, resamples=0).scores["ece"].value for r in (others, map_.apply(others)))
    assert before > 0.15
    assert after < 0.03


def test_platt_minimises_the_log_loss_of_smoothed_targets():
    held_out = world(lambda p: expit(2 * logit(p) + 0.5), n=300)
    x, y = logit(held_out.confidence), held_out.correct
    target = np.where(y == 1, (y.sum() + 1) / (y.sum() + 2), 1 / ((1 - y).sum() + 2))

    def loss(parameters):
        z = parameters[0] * x + parameters[1]
        return np.logaddexp(0, -z) @ target + np.logaddexp(0, z) @ (1 - target)

    expected = minimize(loss, [1.0, 0.0], tol=1e-10).x
    weights, intercept = slopes(recalibrate(held_out, method="platt"))
    np.testing.assert_allclose([weights[0], intercept], expected, rtol=1e-3)


def test_isotonic_and_histogram_equal_their_definitions():
    held_out, others = world(lambda p: p**2, n=30 * BINS), world(lambda p: p**2, n=200, seed=1)
    model = IsotonicRegression(out_of_bounds="clip").fit(held_out.confidence, held_out.correct)
    by_isotonic = recalibrate(held_out, method="isotonic").probability(others)
    np.testing.assert_allclose(by_isotonic, model.predict(others.confidence), atol=1e-12)
    order = np.argsort(held_out.confidence)
    parts = np.array_split(held_out.correct[order], BINS)
    shares = recalibrate(held_out, method="histogram").parameters["share"]
    np.testing.assert_allclose(shares, [part.mean() for part in parts], atol=1e-12)
    ties = result(np.arange(40) % 4 == 0, np.repeat([0.2, 0.7], 20))
    assert recalibrate(ties, method="histogram").parameters == {"edges": [0.7], "share": [0.25, 0.25]}


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(METHODS),
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 0.3, 1.0])), min_size=1, max_size=40),
)
def test_any_queries_give_probabilities_and_rising_maps_rise(method, rows):
    confidence, correct = (np.array(column) for column in zip(*rows, strict=True))
    map_ = recalibrate(result(correct, confidence), method=method)
    grid = np.linspace(0, 1, 101)
    probability = map_.probability(result(np.zeros(101), grid))
    assert bool(((probability >= 0) & (probability <= 1)).all())
    if method in RISING:
        assert (np.diff(probability) >= -1e-12).all()


def test_a_stacked_map_reads_several_signals_and_reorders():
    random = np.random.default_rng(0)
    n = 4000
    confidence, hubness = random.uniform(0.05, 0.95, n), random.normal(size=n)
    correct = random.random(n) < expit(logit(confidence) - 2 * hubness)
    noise = random.normal(size=n) * 1e6
    table = result(correct, confidence, answer_hubness=hubness, query_uncertainty=noise, top_scores=np.ones((n, 3)))
    held_out, others = table.take(np.arange(2000)), table.take(np.arange(2000, n))
    map_ = recalibrate(held_out)
    assert map_.signals == ("confidence", "answer_hubness", "top_scores", "query_uncertainty")
    weights, _ = slopes(map_)
    np.testing.assert_allclose(weights[:2], [1, -2], rtol=0.15)
    alone, stacked = (
        calibrate(recalibrate(held_out, **how).apply(others, uncertainty=True), resamples=0).scores
        for how in ({"method": "platt"}, {})
    )
    assert stacked["auroc"].value > alone["auroc"].value + 0.1
    assert stacked["ece"].value < 0.04
    only = recalibrate(held_out, signals=["answer_hubness"])
    assert only.signals == ("answer_hubness",)
    without_confidence = dataclasses.replace(held_out, confidence=None)
    assert recalibrate(without_confidence).signals[0] == "answer_hubness"


def test_one_extraordinary_query_does_not_spoil_a_stacked_map():
    random = np.random.default_rng(1)
    signal = random.normal(size=1000)
    correct = random.random(1000) < expit(signal)
    signal[0] = 1e9
    map_ = recalibrate(result(correct, None, match_kl=signal))
    assert 0 < map_.probability(result([1.0], None, match_kl=np.array([1e12])))[0] < 1


def test_apply_changes_confidence_and_on_demand_uncertainty():
    before = world(lambda p: p**2, n=100)
    map_ = recalibrate(before, method="platt")
    after = map_.apply(before)
    np.testing.assert_array_equal(after.confidence, map_.probability(before))
    np.testing.assert_array_equal(after.uncertainty, before.uncertainty)
    assert after.provenance["recalibration"] == "platt"
    both = map_.apply(before, uncertainty=True)
    np.testing.assert_array_equal(both.uncertainty, 1 - both.confidence)


@pytest.mark.parametrize("method", METHODS)
def test_a_file_gives_the_same_map(method, tmp_path):
    held_out = world(lambda p: p**2, n=200)
    map_ = recalibrate(held_out, method=method)
    again = Recalibration.load(map_.save(tmp_path / "recalibration.json"))
    assert dataclasses.asdict(again) == dataclasses.asdict(map_)
    np.testing.assert_array_equal(again.probability(held_out), map_.probability(held_out))


@pytest.mark.parametrize("text", ["{}", "{", "[1]", '{"schema": 2}', '{"schema": 1, "recalibration": {"method": "x"}}'])
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "recalibration.json"
    path.write_text(text)
    with pytest.raises(UnreadableError):
        Recalibration.load(path)


def test_a_map_is_for_results_made_the_same_way(tmp_path):
    made = {"similarity": "csd", "temperature": 50.0, "query_maker": {"adapter": "pfe"}, "source": {"fingerprint": "a"}}
    held_out = result([1, 0, 1], [0.9, 0.2, 0.8], provenance=made)
    map_ = Recalibration.load(recalibrate(held_out, method="platt").save(tmp_path / "map.json"))
    map_.apply(held_out)
    for changed, name in (
        ({"similarity": "cosine"}, "similarity 'csd'"),
        ({"temperature": 100.0}, r"temperature 50\.0"),
        ({"query_maker": {"adapter": "grove"}}, "adapters"),
        ({"source": {"fingerprint": "b"}}, "source 'a'"),
    ):
        with pytest.raises(InputError, match=f"{name}.*fit anew with recalibrate"):
            map_.apply(result([1, 0], [0.9, 0.2], provenance=made | changed))
    with pytest.raises(InputError, match="direction 'i2t'"):
        map_.apply(dataclasses.replace(held_out, direction="t2i"))
    with pytest.raises(InputError, match="of task 'retrieval', got 'vqa'"):
        map_.apply(dataclasses.replace(held_out, task="vqa"))


def test_bad_input_is_one_sentence():
    held_out = world(lambda p: p, n=10)
    with pytest.raises(InputTypeError, match="got ndarray; run a task first"):
        recalibrate(held_out.correct)
    with pytest.raises(InputError, match="method has no option 'plat'; did you mean 'platt'"):
        recalibrate(held_out, method="plat")
    with pytest.raises(InputError, match="without one; run the task with a temperature"):
        recalibrate(dataclasses.replace(held_out, confidence=None), method="platt")
    with pytest.raises(InputError, match="at least one of the signals"):
        recalibrate(dataclasses.replace(held_out, confidence=None))
    with pytest.raises(InputError, match="signals expected method='stacked'"):
        recalibrate(held_out, method="beta", signals=["confidence"])
    with pytest.raises(InputError, match="signals has no option 'entropy'"):
        recalibrate(held_out, signals=["entropy"])
    with pytest.raises(InputError, match="the signal 'match_kl'"):
        recalibrate(held_out, signals=["match_kl"])


@pytest.fixture(scope="module")
def halves():
    """Posteriors of two halves of the synthetic world, with a logit scale."""
    pairs = make_pairs(800, dim=64).pairs
    adapter = create_adapter("deterministic").fit(pairs)
    return [
        (adapter.predict(part.images), adapter.predict(part.texts), part.links) for part in pairs.split(0.5, seed=0)
    ]


def test_every_signal_is_one_that_retrieve_gives(halves):
    images, texts, links = halves[0]
    found = retrieve(images, texts, links=links, temperature=20.0, marginal="empirical")
    assert recalibrate(found).signals == tuple(SIGNALS)


def test_confidence_none_tells_when_the_gallery_does_not_hold_it(halves):
    held_out, others = (retrieve_absent(i, t, links=links, temperature=20.0) for i, t, links in halves)
    presence = recalibrate(held_out)
    judged = calibrate(presence.apply(others, uncertainty=True), resamples=0).scores
    assert judged["auroc"].value > 0.6
    assert judged["ece"].value < 0.06
    images, texts, links = halves[1]
    found = retrieve(images, texts, links=links, temperature=20.0)
    with_none = with_confidence_none(found, presence)
    np.testing.assert_allclose(with_none.detail["confidence_none"], 1 - presence.probability(found), atol=1e-3)
    np.testing.assert_array_equal(with_none.confidence, found.confidence)
    rare = with_confidence_none(found, presence, absent_share=0.01).detail["confidence_none"]
    odds = logit(with_none.detail["confidence_none"]) - logit(rare)
    np.testing.assert_allclose(odds, -logit(0.01), atol=1e-6)
    correct = recalibrate(found)
    with pytest.raises(InputError, match="fitted on task 'presence', got 'retrieval'"):
        with_confidence_none(found, correct)
    with pytest.raises(InputError, match="see with_confidence_none"):
        presence.apply(found)
    with pytest.raises(InputError, match="absent_share expected a share"):
        with_confidence_none(found, presence, absent_share=1.0)


def test_a_map_lies_in_the_folder_of_its_adapter(tmp_path):
    pairs = make_pairs(120, dim=8).pairs
    adapter = create_adapter("deterministic").fit(pairs)

    def found(by):
        return retrieve(by.predict(pairs.images), by.predict(pairs.texts), links=pairs.links, temperature=20.0)

    map_ = recalibrate(found(adapter), method="platt")
    folder = adapter.save(tmp_path / "adapter")
    map_.save(folder / "recalibration.json")
    again = Recalibration.load(folder / "recalibration.json").apply(found(load_adapter(folder)))
    np.testing.assert_array_equal(again.confidence, map_.apply(found(adapter)).confidence)
