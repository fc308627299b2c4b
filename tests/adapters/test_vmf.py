import math

import numpy as np
import pytest
import torch

from grove_adapters.adapters.vmf import Head, PowerSpherical, VonMisesFisher
from grove_adapters.datasets import synthetic
from grove_adapters.embeddings import Embeddings, Pairs
from grove_adapters.errors import ConfigError, InputError
from grove_adapters.posterior import PowerSphericalEmbedding, VonMisesFisherEmbedding

PAIRS = synthetic.make_pairs(60, dim=8).pairs
QUICK = {"hidden": 16, "layers": 1, "epochs": 3, "batch_size": 16}
RANDOM = np.random.default_rng(0)
BOTH = pytest.mark.parametrize("kind", [VonMisesFisher, PowerSpherical])


def pairs_of(images, texts):
    rows = np.repeat(np.arange(len(images))[:, None], 2, 1)
    return Pairs(Embeddings(images, modality="image"), Embeddings(texts, modality="text"), rows)


@BOTH
def test_other_true_matches_of_a_minibatch_are_right_answers_too(kind):
    links = np.stack([np.arange(60), np.arange(60)], 1)
    all_true = np.stack(np.meshgrid(np.arange(60), np.arange(60)), -1).reshape(-1, 2)
    with_everything = Pairs(PAIRS.images, PAIRS.texts, links, positives=all_true)
    for pairs in (with_everything, Pairs(PAIRS.images, PAIRS.texts, links, classes=np.zeros(60))):
        history = kind(**QUICK, validation_share=0.0).fit(pairs).fit_report_.history
        assert history[0]["loss"] == pytest.approx(0, abs=1e-5)


def test_the_head_bounds_its_concentration_and_gradients_stay_finite():
    head = Head(4, hidden=8, layers=1)
    with torch.no_grad():
        head.mlp[-1].weight.zero_()
        head.mlp[-1].bias.zero_()
    direction, concentration = head(torch.randn(3, 4))
    (direction.sum() + concentration.log().sum()).backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in head.parameters() if p.grad is not None)
    with torch.no_grad():
        head.mlp[-1].bias.fill_(1e7)
    assert float(head(torch.randn(3, 4))[1].detach().max()) <= 1e5 * (1 + 1e-5)


@BOTH
def test_a_side_without_a_head_is_a_point(kind):
    adapter = kind(sides="text", **QUICK).fit(PAIRS)
    images, texts = adapter.predict(PAIRS.images), adapter.predict(PAIRS.texts)
    assert len(images.uncertainty.unique()) == 1
    assert float(images.uncertainty[0]) < float(texts.uncertainty.min())
    torch.testing.assert_close(images.direction, torch.tensor(PAIRS.images.values))
    assert len(texts.uncertainty.unique()) == 60
    assert list(adapter.fit_report_.facts) == ["text"]
    other = kind(sides="image", **QUICK).fit(PAIRS)
    assert len(other.predict(PAIRS.texts).uncertainty.unique()) == 1


def test_the_posterior_is_that_of_the_law():
    assert isinstance(VonMisesFisher(**QUICK).fit(PAIRS).predict(PAIRS.texts), VonMisesFisherEmbedding)
    assert isinstance(PowerSpherical(**QUICK).fit(PAIRS).predict(PAIRS.texts), PowerSphericalEmbedding)


@BOTH
def test_fitting_lowers_the_held_out_loss(kind):
    report = (
        kind(**{**QUICK, "epochs": 15, "learning_rate": 0.01}).fit(synthetic.make_pairs(200, dim=8).pairs).fit_report_
    )
    assert report.n_validation == 20
    assert report.history[report.best_epoch - 1]["validation"] < 0.8 * report.history[0]["validation"]


@BOTH
def test_one_dimension_is_refused(kind):
    with pytest.raises(InputError, match="at least 2 dimensions"):
        kind(**QUICK).fit(pairs_of(np.ones((3, 1)), np.ones((3, 1))))


@BOTH
def test_constant_embeddings_one_pair_and_wide_half_precision_ones(kind):
    same = np.full((30, 3), 1 / math.sqrt(3), dtype=np.float32)
    posterior = kind(**QUICK).fit(pairs_of(same, same)).predict(pairs_of(same, same).texts)
    assert bool(torch.isfinite(posterior.variance).all())
    one = pairs_of(same[:1], same[:1])
    assert len(kind(**QUICK).fit(one).predict(one.images)) == 1
    wide = RANDOM.normal(size=(6, 4096)).astype(np.float16)
    pairs = pairs_of(wide, wide[::-1])
    assert kind(**QUICK).fit(pairs).predict(pairs.images).variance.shape == (6, 4096)


def test_settings():
    paper = VonMisesFisher(preset="paper").config
    assert (paper.sides, paper.layers, paper.hidden, paper.epochs) == ("text", 3, 1024, 200)
    for bad in ({"hidden": 0}, {"layers": -1}, {"sides": "none"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            VonMisesFisher(**bad)
