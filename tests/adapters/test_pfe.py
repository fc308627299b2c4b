import dataclasses

import numpy as np
import pytest
import torch

from grove_adapters import objectives
from grove_adapters.adapters.pfe import PFE
from grove_adapters.datasets.synthetic import make_pairs

WORLD = make_pairs(200, dim=8)
SMALL = {"learning_rate": 1e-3, "hidden": 16, "epochs": 3, "batch_size": 64}


def test_means_stay_frozen():
    posterior = PFE(**SMALL).fit(WORLD.pairs).predict(WORLD.pairs.texts)
    np.testing.assert_array_equal(posterior.mean, WORLD.pairs.texts.values)


def test_fitted_variances_explain_the_distance_of_links():
    """At the optimum of a Gaussian likelihood the expected square over its variance is 1."""
    adapter = PFE(learning_rate=1e-3, hidden=32, epochs=60, batch_size=64, validation_share=0.0).fit(WORLD.pairs)
    image, text = adapter.predict(WORLD.pairs.images), adapter.predict(WORLD.pairs.texts)
    ratio = (image.mean - text.mean).square() / (image.variance + text.variance)
    assert float(ratio.mean()) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("form", ["exact", "as_published"])
def test_the_reported_loss_is_the_objective_of_all_true_pairs(form):
    classes = np.arange(200) // 2  # every pair of images shares a class, and so do their texts
    pairs = dataclasses.replace(WORLD.pairs, classes=classes)
    settings = {**SMALL, "epochs": 1, "batch_size": 200, "validation_share": 0.0, "form": form, "learning_rate": 1e-12}
    adapter = PFE(**settings).fit(pairs)
    image, text = ((x.mean, x.variance.log()) for x in map(adapter.predict, (pairs.images, pairs.texts)))
    i, j = np.nonzero(classes[:, None] == classes)
    loss = objectives.mutual_likelihood_loss((image[0][i], image[1][i]), (text[0][j], text[1][j]), form=form)
    assert adapter.fit_report_.history[0]["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert len(i) == 400
    assert bool(torch.isfinite(loss))
