import math

import numpy as np
import pytest
import torch

from grove_adapters.adapters.probvlm import LARGEST_SHAPE, SMALLEST_SHAPE, ProbVLM, ResidualNetwork
from grove_adapters.datasets import synthetic
from grove_adapters.embeddings import Embeddings, Pairs
from grove_adapters.errors import ConfigError

PAIRS = synthetic.make_pairs(60, dim=8).pairs
QUICK = {"hidden": 16, "layers": 1, "epochs": 3, "batch_size": 16}
RANDOM = np.random.default_rng(0)


def pairs_of(images, texts):
    rows = np.repeat(np.arange(len(images))[:, None], 2, 1)
    return Pairs(Embeddings(images, modality="image"), Embeddings(texts, modality="text"), rows)


def test_outputs_stay_in_their_bounds_for_any_weights():
    network = ResidualNetwork(4, hidden=8, layers=2, head_hidden=5, dropout=0.1)
    for size in (0.0, 1.0, 1e4):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_().mul_(size)
        _, scale, shape = network(torch.randn(50, 4))
        assert float(scale.detach().min()) > 0
        assert float(shape.detach().min()) >= SMALLEST_SHAPE
        assert float(shape.detach().max()) <= LARGEST_SHAPE
        if size == 0:
            torch.testing.assert_close(shape.detach(), torch.full((50, 4), 2.0))


def test_total_variance_is_the_sum_of_both_parts():
    posterior = ProbVLM(**QUICK).fit(PAIRS).predict(PAIRS.images)
    assert posterior.epistemic is not None
    torch.testing.assert_close(posterior.variance, posterior.aleatoric + posterior.epistemic)
    assert bool((posterior.epistemic > 0).any())
    for without in ({"passes": 0}, {"dropout": 0.0}):
        assert ProbVLM(**QUICK, **without).fit(PAIRS).predict(PAIRS.images).epistemic is None


def test_epistemic_variance_is_over_passes_and_no_business_of_the_neighbours():
    adapter = ProbVLM(**QUICK).fit(PAIRS)
    network, values = adapter.module_["text"], torch.tensor(PAIRS.texts.values)
    posterior = adapter.predict(PAIRS.texts, seed=5)
    alone = adapter.predict(PAIRS.texts.take([7]), seed=5)
    torch.testing.assert_close(alone.epistemic[0], posterior.epistemic[7])
    from grove_adapters import seeding

    with torch.no_grad():
        passes = torch.stack([network.thinned(values, seeding.derive(5, "pass", k)) for k in range(15)])
    torch.testing.assert_close(posterior.epistemic, passes.var(0), rtol=1e-4, atol=1e-9)
    other = adapter.predict(PAIRS.texts, seed=6)
    assert not torch.equal(other.epistemic, posterior.epistemic)
    assert torch.equal(other.location, posterior.location)


def test_a_thinned_network_is_the_network_where_nothing_is_left_out():
    network = ResidualNetwork(6, hidden=8, layers=3, head_hidden=5, dropout=1e-9).eval()
    values = torch.randn(5, 6)
    torch.testing.assert_close(network.thinned(values, 0), network(values)[0])


def test_cross_modal_terms_are_weighted():
    report = ProbVLM(**QUICK, cross_weight=0.25, validation_share=0.0).fit(PAIRS).fit_report_
    for entry in report.history:
        intra, cross = (sum(entry[f"{kind}_{m}"] for m in ("image", "text")) for kind in ("intra", "cross"))
        assert entry["loss"] == pytest.approx(intra + 0.25 * cross, rel=1e-4)


@pytest.mark.parametrize("dim", [1, 4096])
def test_widths_and_half_precision(dim):
    values = RANDOM.normal(size=(6, dim)).astype(np.float16)
    pairs = pairs_of(values, values[::-1])
    assert ProbVLM(**{**QUICK, "epochs": 1, "passes": 2}, head_hidden=8).fit(pairs).predict(
        pairs.images
    ).variance.shape == (6, dim)


def test_constant_embeddings_and_one_pair():
    same = np.full((30, 3), 1 / math.sqrt(3), dtype=np.float32)
    posterior = ProbVLM(**QUICK).fit(pairs_of(same, same)).predict(pairs_of(same, same).texts)
    assert bool(torch.isfinite(posterior.variance).all())
    one = pairs_of(same[:1], same[:1])
    assert len(ProbVLM(**QUICK).fit(one).predict(one.images)) == 1


def test_settings():
    paper = ProbVLM(preset="paper").config
    assert (paper.nll, paper.cross_weight, paper.learning_rate, paper.nll_weight) == ("as_published", 1e-4, 1e-4, 0.05)
    ProbVLM(preset="paper", **{**QUICK, "epochs": 1}).fit(PAIRS)
    for bad in ({"dropout": 1.0}, {"passes": 1}, {"nll_weight": 0.0}, {"layers": 0}, {"nll": "almost"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            ProbVLM(**bad)
