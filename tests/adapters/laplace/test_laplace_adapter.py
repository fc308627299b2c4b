import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch.nn.functional import normalize

from grove_adapters import EmbeddingStore, similarity
from grove_adapters.adapters import create_adapter, load_adapter
from grove_adapters.adapters.ensemble import Ensemble
from grove_adapters.adapters.laplace import Laplace, LaplaceConfig, likelihoods
from grove_adapters.adapters.laplace.likelihoods import Sigmoid, Softmax
from grove_adapters.adapters.laplace.posterior import KroneckerPosterior
from grove_adapters.adapters.recalibrated import Recalibrated
from grove_adapters.datasets import synthetic, tiny_clip
from grove_adapters.datasets.scenes import Scenes
from grove_adapters.embeddings import Embeddings, Pairs, Projection, Source
from grove_adapters.errors import ConfigError, InputError
from grove_adapters.extract import OpenCLIPExtractor

WORLD = synthetic.make_pairs(120, dim=12)


def pairs_of(features, projections, *, links=None, **source):
    """Pairs whose embeddings are what the projections make of the features."""
    source = Source(model="m", **{"logit_scale": 10.0, **source})
    sides = []
    for modality, rows, projection in zip(("image", "text"), features, projections, strict=True):
        values = projection.apply(torch.tensor(rows))
        values = (normalize(values, dim=1) if source.normalised else values).numpy()
        sides.append(Embeddings(values, modality=modality, source=source, features=rows, projection=projection))
    n = len(sides[0])
    return Pairs(*sides, np.repeat(np.arange(n)[:, None], 2, 1) if links is None else links)


def random_pairs(n=30, dim=4, widths=(6, 5), seed=0, bias=True, **more):
    random = np.random.default_rng(seed)
    features = [random.normal(size=(n, width)).astype(np.float32) for width in widths]
    layers = [Projection(random.normal(size=(dim, w)), random.normal(size=dim) if bias else None) for w in widths]
    return pairs_of(features, layers, **more)


def posteriors(adapter):
    return {name: part for name, part in adapter.module_.named_children() if isinstance(part, KroneckerPosterior)}


def factors(posterior):
    """A and B from their eigenvalues and eigenvectors."""
    for name in ("feature", "output"):
        values, vectors = (getattr(posterior, f"{name}_{kind}").double() for kind in ("values", "vectors"))
        yield vectors @ torch.diag(values) @ vectors.T


@pytest.mark.parametrize("likelihood", [Softmax(10.0), Sigmoid(10.0, -3.0)], ids=str)
def test_the_precision_is_the_dense_gauss_newton_matrix_where_that_is_a_kronecker_product(likelihood):
    """All items share their features and differ by what goes past the layer, so that φφᵀ is the same for all."""
    random = np.random.default_rng(0)
    n, dim, width = 9, 4, 3
    features, layers = [], []
    for _ in range(2):
        shared = np.repeat(random.normal(size=(1, width)), n, 0)
        features.append(np.concatenate([shared, random.normal(size=(n, dim))], 1).astype(np.float32))
        layers.append(Projection(random.normal(size=(dim, width))))
    bias = {"logit_bias": likelihood.bias} if isinstance(likelihood, Sigmoid) else {}
    pairs = pairs_of(features, layers, **bias)
    adapter = Laplace(pseudo_data_count=1.0).fit(pairs)
    for own, other in ((pairs.images, pairs.texts), (pairs.texts, pairs.images)):
        candidates = torch.tensor(other.values, dtype=torch.float64)
        weight = torch.tensor(own.projection.weight, dtype=torch.float64)
        total = torch.zeros(2 * (dim * width,), dtype=torch.float64)
        for row in torch.tensor(own.features, dtype=torch.float64):

            def logits(w, row=row, candidates=candidates):
                g = w @ row[:width] + row[width:]
                return likelihood.scale * candidates @ normalize(g, dim=0) + getattr(likelihood, "bias", 0.0)

            p = logits(weight).softmax(0) if not bias else logits(weight).sigmoid()
            hessian = torch.diag(p) - torch.outer(p, p) if not bias else torch.diag(p * (1 - p))
            jacobian = torch.autograd.functional.jacobian(logits, weight).reshape(n, -1)
            total += jacobian.T @ hessian @ jacobian
        a, b = factors(posteriors(adapter)[own.modality])
        torch.testing.assert_close(n * torch.kron(b, a), total, rtol=1e-4, atol=1e-4 * float(total.abs().max()))


@pytest.mark.parametrize("damping", ["exact", "factored"])
@pytest.mark.parametrize("normalised", [True, False])
def test_predicted_moments_against_sampling_the_weights(damping, normalised):
    pairs = random_pairs(n=200, dim=24, widths=(30, 28), normalised=normalised)
    adapter = Laplace(pseudo_data_count=4.0, damping=damping).fit(pairs)
    for part in (pairs.images.take(np.arange(6)), pairs.texts.take(np.arange(6))):
        predicted = adapter.predict(part)
        posterior = posteriors(adapter)[part.modality]
        std = posterior.covariances(damping).sqrt().float()
        noise = torch.randn(4000, *std.shape, generator=torch.Generator().manual_seed(0)) * std
        noise = posterior.feature_vectors @ noise @ posterior.output_vectors.T  # (S, F, D) changes of [W b]ᵀ
        g = posterior.inputs(torch.tensor(part.features)) @ noise + posterior.vectors(torch.tensor(part.features))
        draws = normalize(g, dim=2) if normalised else g
        spread = float(predicted.variance.sum(1).max())
        assert 0.001 < spread < (0.5 if normalised else math.inf)
        ratio = draws.var(0) / predicted.variance
        assert float(ratio.log().abs().mean()) < 0.1
        error = (draws.mean(0) - predicted.mean).norm(dim=1) / predicted.variance.sum(1).sqrt()
        assert float(error.max()) < 0.1
        assert torch.equal(predicted.epistemic, predicted.variance)


def test_the_fit_does_not_depend_on_blocks_nor_on_the_order_of_links(monkeypatch):
    pairs = random_pairs(n=40)
    whole = posteriors(Laplace(pseudo_data_count=1.0).fit(pairs))
    monkeypatch.setattr(likelihoods, "BLOCK", 100)
    shuffled = dataclasses.replace(pairs, links=pairs.links[::-1])
    for modality, posterior in posteriors(Laplace(pseudo_data_count=1.0).fit(shuffled, seed=5)).items():
        for one, other in zip(factors(whole[modality]), factors(posterior), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(posterior.prior_precision, whole[modality].prior_precision)


def test_batches_make_the_candidates_and_every_item_counts_once_in_each():
    pairs = random_pairs(n=40)
    adapter = Laplace(pseudo_data_count=1.0, batch_size=10).fit(pairs)
    assert {int(x.items) for x in posteriors(adapter).values()} == {40}
    twice = dataclasses.replace(pairs, links=np.concatenate([pairs.links, pairs.links]))
    once, doubled = (posteriors(Laplace(pseudo_data_count=1.0).fit(x)) for x in (pairs, twice))
    for modality, posterior in doubled.items():
        assert int(posterior.items) == 40
        torch.testing.assert_close(posterior.output_values, once[modality].output_values)
    fewer = posteriors(adapter)["image"].output_values.sum()
    assert fewer != once["image"].output_values.sum()


def test_more_data_leave_less_open():
    totals = [
        float(Laplace(pseudo_data_count=tau).fit(WORLD.pairs).predict(WORLD.pairs.images).variance.sum(1).mean())
        for tau in (0.01, 0.1, 1.0, 10.0, 1000.0)
    ]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] < 1
    looser = Laplace(pseudo_data_count=1.0, prior_precision=0.01).fit(WORLD.pairs).predict(WORLD.pairs.images)
    tighter = Laplace(pseudo_data_count=1.0, prior_precision=100.0).fit(WORLD.pairs).predict(WORLD.pairs.images)
    assert (looser.uncertainty > tighter.uncertainty).all()


def test_the_pseudo_data_count_is_the_one_that_makes_held_out_matches_most_probable():
    adapter = Laplace().fit(WORLD.pairs, seed=1)
    report = adapter.fit_report_
    assert report.n_validation == 12
    assert report.chosen_by == "predictive density of held-out matches"
    best = min(report.facts["surprise"], key=report.facts["surprise"].get)
    assert float(best) == report.facts["image"]["pseudo_data_count"] == report.facts["text"]["pseudo_data_count"]
    assert len(report.facts["surprise"]) == 17
    assert not report.warnings
    held_out = synthetic.make_pairs(200, dim=12).pairs.take_images(np.arange(120, 200))
    given = Laplace().fit(WORLD.pairs, validation=held_out).fit_report_
    assert given.n_validation == 80
    assert given.facts["image"]["items"] == 120
    few = Laplace().fit(random_pairs(n=10)).fit_report_
    assert (few.n_validation, few.facts["image"]["pseudo_data_count"]) == (0, 1.0)


def test_where_variances_do_not_help_to_predict_matches_the_report_says_so():
    """Every match is the nearest, so the most certain posterior is the best."""
    random = np.random.default_rng(0)
    features = random.normal(size=(60, 8)).astype(np.float32)
    pairs = pairs_of([features, features], [Projection(np.eye(8))] * 2, logit_scale=30.0)
    report = Laplace().fit(pairs).fit_report_
    assert report.facts["image"]["pseudo_data_count"] == 10_000
    assert "variances do not help to predict matches" in report.warnings[0]


def test_the_sigmoid_is_taken_where_the_source_has_a_bias():
    softmax, sigmoid = random_pairs(), random_pairs(logit_bias=-3.0)
    values = [
        posteriors(Laplace(pseudo_data_count=1.0, **settings).fit(pairs))["image"].output_values
        for pairs, settings in (
            (softmax, {}),
            (sigmoid, {}),
            (softmax, {"loss": "sigmoid", "logit_bias": -3.0}),
            (sigmoid, {"loss": "softmax"}),
        )
    ]
    torch.testing.assert_close(values[1], values[2])
    torch.testing.assert_close(values[0], values[3])
    assert not torch.allclose(values[0], values[1])


def test_the_published_settings_have_a_name():
    config = Laplace(preset="paper", loss="sigmoid").config
    assert (config.batch_size, config.damping, config.loss) == (32_768, "factored", "sigmoid")
    Laplace(preset="paper").fit(random_pairs())


def test_what_it_cannot_use_is_said_in_one_sentence():
    pairs = random_pairs()
    plain = dataclasses.replace(pairs.texts, features=None, projection=None)
    with pytest.raises(InputError, match=r"features of the text encoder.*features=True .*--features"):
        Laplace().fit(dataclasses.replace(pairs, texts=plain))
    adapter = Laplace().fit(pairs)
    with pytest.raises(InputError, match="features of the text encoder"):
        adapter.predict(plain)
    other = random_pairs(widths=(8, 8)).texts
    with pytest.raises(InputError, match="fitted on 5 features of every text but predict got 8"):
        adapter.predict(other)
    with pytest.raises(InputError, match=r"logit scale.*logit_scale=100"):
        Laplace().fit(random_pairs(logit_scale=None))
    with pytest.raises(InputError, match="a flat one, as a single pair or equal embeddings"):
        Laplace().fit(random_pairs(n=1))
    same = random_pairs(n=5)
    same = pairs_of([np.repeat(part.features[:1], 5, 0) for part in (same.images, same.texts)],
                    [part.projection for part in (same.images, same.texts)])  # fmt: skip
    with pytest.raises(InputError, match="a flat one"):
        Laplace().fit(same)
    broken = np.array(pairs.images.features)
    broken[3, 2] = np.nan
    planted = dataclasses.replace(pairs.images, features=broken, trusted=True)
    for call in (lambda: adapter.predict(planted), lambda: Laplace().fit(dataclasses.replace(pairs, images=planted))):
        with pytest.raises(InputError, match=r"features of images.*row 3"):
            call()
    for settings in ({"batch_size": 1}, {"pseudo_data_count": 0}, {"prior_precision": math.inf}, {"damping": "none"}):
        with pytest.raises(ConfigError):
            LaplaceConfig(**settings)


@pytest.mark.parametrize("dim", [1, 2, 300])
def test_extreme_widths(dim):
    pairs = random_pairs(n=25, dim=dim, widths=(dim + 1, dim + 2))
    if dim == 1:  # a direction on a line cannot move
        with pytest.raises(InputError, match="a flat one"):
            Laplace().fit(pairs)
        return
    predicted = Laplace().fit(pairs).predict(pairs.images)
    assert (predicted.variance > 0).all()
    assert torch.isfinite(predicted.uncertainty).all()


def test_half_precision_stays_close():
    halved = [
        dataclasses.replace(part, values=part.values.astype(np.float16), features=part.features.astype(np.float16))
        for part in (WORLD.pairs.images, WORLD.pairs.texts)
    ]
    halved = dataclasses.replace(WORLD.pairs, images=halved[0], texts=halved[1])
    settings = {"pseudo_data_count": 1.0}
    rounded, exact = (Laplace(**settings).fit(pairs).predict(pairs.texts) for pairs in (halved, WORLD.pairs))
    torch.testing.assert_close(rounded.uncertainty, exact.uncertainty, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("wrap", [Recalibrated, lambda inner: Ensemble([inner, create_adapter("deterministic")])])
def test_wrappers_hand_features_on(wrap, tmp_path):
    adapter = wrap(create_adapter("laplace", pseudo_data_count=1.0)).fit(WORLD.pairs)
    posterior = adapter.predict(WORLD.pairs.images)
    again = load_adapter(adapter.save(tmp_path / "adapter")).predict(WORLD.pairs.images)
    assert torch.equal(posterior.uncertainty, again.uncertainty)
    assert spearmanr(posterior.uncertainty, WORLD.image_noise).statistic > 0.3


def test_from_pictures_and_captions_to_cosines_with_variances(tmp_path):
    model, preprocess, tokenizer = tiny_clip.load_tiny_clip()
    extractor = OpenCLIPExtractor(model, preprocess=preprocess, tokenizer=tokenizer, name=tiny_clip.MODEL_NAME)
    records = Scenes.generate(24, seed=0).records()
    settings = {"features": True, "num_workers": 0, "progress": False}
    store = EmbeddingStore.build(extractor, records, tmp_path / "store", **settings)
    pairs = store.pairs()
    adapter = Laplace().fit(pairs, seed=0)
    assert adapter.fit_report_.facts["image"]["parameters"] == 128 * (pairs.images.projection.width + 1)
    images, texts = adapter.predict(pairs.images), adapter.predict(pairs.texts)
    frozen = torch.tensor(np.asarray(pairs.images.values))
    assert float((normalize(images.mean, dim=1) * frozen).sum(1).min()) > 1 - 1e-5
    mean, variance = similarity.cosine_moments(images, texts)
    assert mean.shape == variance.shape == (len(images), len(texts))
    assert (variance > 0).all()
    assert (mean.abs() <= 1).all()
    again = load_adapter(adapter.save(tmp_path / "adapter")).predict(pairs.texts)
    assert torch.equal(again.variance, texts.variance)
