import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from grove_adapters.adapters import create_adapter, load_adapter
from grove_adapters.adapters.recalibrated import Recalibrated, _logistic, _matched, _wrong_matches
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.embeddings import Embeddings, Pairs
from grove_adapters.errors import ConfigError, InputError

WORLD = make_pairs(600, dim=16)
PAIRS = WORLD.pairs
SMALL = {"learning_rate": 1e-3, "hidden": 16, "epochs": 5, "batch_size": 64}


def inner(name="pfe", **settings):
    return create_adapter(name, **SMALL, **settings)


def test_the_order_of_uncertainties_stays_and_they_become_chances():
    adapter = Recalibrated(inner()).fit(PAIRS)
    posterior = adapter.predict(PAIRS.texts)
    before = posterior.variance.mean(1)
    assert spearmanr(before, posterior.uncertainty).statistic > 0.9999
    assert bool(((posterior.uncertainty > 0) & (posterior.uncertainty < 1)).all())


def test_chances_are_right_on_average_for_pairs_not_seen():
    train, test = PAIRS.split(0.5, seed=1)
    fit, validation = train.split(0.5, seed=2)
    adapter = Recalibrated(inner()).fit(fit, validation=validation)
    for part, (rows, wrong) in zip((test.images, test.texts), _wrong_matches(test).values(), strict=True):
        chance = adapter.predict(part).uncertainty.numpy()[rows]
        half = chance > np.median(chance)  # the test gallery is twice as large, so a little more goes wrong
        assert abs(wrong[half].mean() - chance[half].mean()) < 0.25
        assert wrong[half].mean() > wrong[~half].mean()


def test_everything_else_of_the_posterior_stays_as_it_is():
    adapter = Recalibrated(inner()).fit(PAIRS)
    module = adapter.module_.inner
    mean, log_variance = module.image(torch.as_tensor(PAIRS.images.values))
    posterior = adapter.predict(PAIRS.images)
    torch.testing.assert_close(posterior.mean, mean)
    torch.testing.assert_close(posterior.variance, log_variance.exp().expand_as(mean))


def test_the_map_is_fitted_on_pairs_the_wrapped_adapter_has_not_seen():
    report = Recalibrated(inner(), validation_share=0.25).fit(PAIRS).fit_report_
    assert report.n_validation == 150
    assert report.facts["parts"]["inner"]["n_validation"] == 45  # of the 450 that are left
    assert report.facts["image"]["queries"] == report.facts["image"]["candidates"] == 150
    assert 0 < report.facts["image"]["share_wrong"] < 1


@pytest.mark.parametrize("name", ["ttda", "ensemble"])
def test_any_adapter_can_be_wrapped(name, tmp_path):
    wrapped = create_adapter(name, **({"members": [inner(), inner("pcme")]} if name == "ensemble" else {}))
    adapter = Recalibrated(wrapped).fit(PAIRS)
    posterior = adapter.predict(PAIRS.images)
    assert type(posterior) is wrapped.posterior_class
    assert adapter.needs_views == wrapped.needs_views
    again = load_adapter(adapter.save(tmp_path / "recalibrated"))
    assert torch.equal(again.predict(PAIRS.images).uncertainty, posterior.uncertainty)


def test_matches_count_by_link_by_positive_and_by_class():
    parts = [Embeddings(np.eye(3, 4, dtype=np.float32), modality=modality) for modality in ("image", "text")]
    rows = np.arange(3)
    pairs = Pairs(*parts, np.stack([rows, rows], 1))
    other = np.array([1, 2, 0])
    assert _matched(pairs, rows, rows).tolist() == [True] * 3
    assert _matched(pairs, rows, other).tolist() == [False] * 3
    more = dataclasses.replace(pairs, positives=np.array([[0, 1]]))
    assert _matched(more, rows, other).tolist() == [True, False, False]
    classes = dataclasses.replace(pairs, classes=np.array(["a", "b", "a"]))
    assert _matched(classes, rows, other).tolist() == [False, False, True]


def test_a_logistic_regression_finds_the_slope():
    random = np.random.default_rng(0)
    values = random.normal(size=20_000)
    wrong = random.random(20_000) < 1 / (1 + np.exp(-(1.5 * values - 0.5)))
    slope, intercept = _logistic(values, wrong)
    assert slope == pytest.approx(1.5, abs=0.08)
    assert intercept == pytest.approx(-0.5, abs=0.08)


@pytest.mark.parametrize("case", ["never", "always", "backwards"])
def test_the_slope_is_never_zero_or_negative(case):
    values = np.linspace(-2, 2, 100)
    wrong = {"never": values > 9, "always": values > -9, "backwards": values < 0}[case]
    slope, intercept = _logistic(values, wrong)
    assert 0 < slope <= 1e-3
    assert intercept == pytest.approx({"never": -4.6, "always": 4.6, "backwards": 0}[case], abs=0.1)


def test_an_uncertainty_that_says_nothing_is_named():
    random = np.random.default_rng(0)
    values = random.normal(size=(80, 4)).astype(np.float32)
    parts = [Embeddings(values, modality=modality) for modality in ("image", "text")]  # every match is right
    report = Recalibrated(inner()).fit(Pairs(*parts, np.stack([np.arange(80)] * 2, 1))).fit_report_
    assert sum("says nothing about wrong matches" in warning for warning in report.warnings) == 2


def test_too_few_pairs_are_refused_in_words():
    with pytest.raises(InputError, match="at least 20 images"):
        Recalibrated(inner()).fit(make_pairs(10, dim=4).pairs)
    with pytest.raises(ConfigError, match="validation_share"):
        Recalibrated(inner(), validation_share=0.0)
    assert Recalibrated().inner_.name == "pfe"
