import dataclasses

import numpy as np
import pytest
import torch

from grove_adapters.adapters.prolip import ProLIP, ProLIPConfig
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.embeddings import Embeddings
from grove_adapters.errors import ConfigError

PAIRS = make_pairs(120, dim=8).pairs
SMALL = {"learning_rate": 1e-3, "hidden": 16, "epochs": 3, "batch_size": 32}


def with_views(pairs, change):
    """The same pairs whose views are a function of the embeddings."""
    parts = {
        side: Embeddings(
            part.values,
            part.ids,
            modality=part.modality,
            source=part.source,
            views=None if change is None else np.stack([change(part.values)] * 2, 1).astype(np.float32),
        )
        for side, part in (("images", pairs.images), ("texts", pairs.texts))
    }
    return dataclasses.replace(pairs, **parts)


def test_terms_add_up():
    weights = {"inclusion_weight": 0.3, "partial_weight": 0.2, "bottleneck_weight": 0.1}
    history = ProLIP(**SMALL, **weights).fit(PAIRS).fit_report_.history[-1]
    parts = 0.3 * history["text_includes_image"] + 0.2 * history["partial_includes_whole"] + 0.1 * history["bottleneck"]
    assert history["loss"] == pytest.approx(history["match"] + parts, rel=1e-5)
    assert history["partial_includes_whole"] > 0


def test_without_views_the_report_says_what_is_missing():
    report = ProLIP(**SMALL).fit(with_views(PAIRS, None)).fit_report_
    assert len(report.warnings) == 2
    assert "views=10" in report.warnings[0]
    assert report.history[-1]["partial_includes_whole"] == 0
    assert not ProLIP(**SMALL, partial_weight=0.0).fit(with_views(PAIRS, None)).fit_report_.warnings


def test_a_strong_inclusion_loss_makes_partial_views_less_certain():
    """Views that have lost half of their coordinates; the loss asks that they include the whole."""

    def cut(values):
        return np.where(np.arange(values.shape[1]) < 4, values, 0.01)

    pairs = with_views(PAIRS, cut)
    adapter = ProLIP(**{**SMALL, "epochs": 20}, partial_weight=30.0, partial_share=1.0).fit(pairs)
    for part in (pairs.images, pairs.texts):
        view = Embeddings(part.views[:, 0], part.ids, modality=part.modality, source=part.source)
        wider = adapter.predict(view).uncertainty > adapter.predict(part).uncertainty
        assert float(wider.float().mean()) > 0.9


def test_a_strong_inclusion_loss_makes_texts_include_images():
    adapter = ProLIP(**{**SMALL, "epochs": 20}, inclusion_weight=30.0, partial_weight=0.0).fit(PAIRS)
    wider = adapter.predict(PAIRS.texts).uncertainty > adapter.predict(PAIRS.images).uncertainty
    assert float(wider.float().mean()) > 0.9


def test_the_published_settings_go_by_name_and_stay_finite():
    adapter = ProLIP(**{"preset": "paper", **SMALL})
    config = adapter.config
    assert (config.log_epsilon, config.sharpness, config.scale, config.shift) == (-20.0, 1000.0, 10.0, -10.0)
    assert (config.form, config.means, config.partial_weight) == ("as_published", "frozen", 1e-3)
    assert bool(torch.isfinite(adapter.fit(PAIRS).predict(PAIRS.texts).uncertainty).all())


@pytest.mark.parametrize(
    "settings",
    [{"scale": 0.0}, {"sharpness": 0.0}, {"partial_weight": -1.0}, {"partial_share": 0.0}, {"log_epsilon": 1.0}],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ProLIPConfig(**settings)
