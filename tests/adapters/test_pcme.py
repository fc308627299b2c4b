import pytest
import torch

from grove_adapters.adapters.pcme import PCME, PCMEConfig
from grove_adapters.adapters.variance_heads import MatchingLogit
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.errors import ConfigError

PAIRS = make_pairs(64, dim=8).pairs
SMALL = {"learning_rate": 1e-3, "hidden": 16, "epochs": 2, "batch_size": 32, "samples": 3}


def moments(rows=4, level=-30.0):
    mean = torch.eye(rows, 6)
    return mean, torch.full_like(mean, level)


def test_without_variance_the_samples_are_the_means():
    adapter = PCME(**SMALL)
    match = adapter._terms(moments(), moments(), torch.eye(4).bool(), MatchingLogit(5.0, 5.0))["match"]
    distance = torch.cdist(moments()[0], moments()[0])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(5 - 5 * distance, torch.eye(4))
    assert float(match.detach()) == pytest.approx(float(expected), abs=5e-3)  # √(d² + 1e-6)


def test_the_published_form_sums_both_directions_and_sharpens_the_logistic():
    mean_form, published = (
        PCME(**SMALL, **kw)._terms(moments(), moments(), torch.eye(4).bool(), MatchingLogit(scale, scale))["match"]
        for kw, scale in (({}, 10.0), ({"reduction": "sum", "logistic": "as_published"}, 5.0))
    )
    assert float(published.detach()) == pytest.approx(2 * 16 * float(mean_form.detach()), rel=1e-4)


def test_terms_add_up():
    history = PCME(**SMALL, bottleneck_weight=0.5).fit(PAIRS).fit_report_.history[-1]
    assert history["loss"] == pytest.approx(history["match"] + 0.5 * history["bottleneck"], rel=1e-5)


def test_the_published_settings_go_by_name():
    config = PCMEConfig.from_dict({"preset": "paper"})
    assert (config.samples, config.scale, config.logistic, config.reduction) == (7, 15.0, "as_published", "sum")
    assert config.bottleneck_form == "as_coded"


@pytest.mark.parametrize("settings", [{"samples": 0}, {"scale": 0.0}, {"bottleneck_weight": -1.0}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        PCMEConfig(**settings)
