import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from grove_adapters import seeding
from grove_adapters.adapters import create_adapter
from grove_adapters.adapters.variance_heads import Links, MatchingLogit, VarianceHeads, balanced
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.embeddings import Embeddings, Pairs, Source
from grove_adapters.errors import ConfigError

NAMES = ["pcme", "pcmepp", "pfe", "prolip"]
MATCHING = ["pcme", "pcmepp", "prolip"]
SMALL = {"learning_rate": 1e-3, "hidden": 16, "epochs": 3, "batch_size": 32}
PAIRS = make_pairs(80, dim=8).pairs
WORLD = make_pairs(200, dim=16).pairs
CPU = torch.device("cpu")


def pairs_of(images, texts, links=None, **truth):
    rows = np.arange(len(images))
    parts = (
        Embeddings(np.asarray(values, dtype=np.float32), modality=modality, source=Source(model="test"))
        for values, modality in ((images, "image"), (texts, "text"))
    )
    return Pairs(*parts, np.stack([rows, rows], 1) if links is None else links, **truth)


def scaled(pairs, factor):
    parts = {
        side: dataclasses.replace(getattr(pairs, side), values=factor * getattr(pairs, side).values, views=None)
        for side in ("images", "texts")
    }
    return dataclasses.replace(pairs, **parts)


def test_links_mark_every_true_match_of_a_minibatch():
    images, texts = np.eye(3, 4), np.eye(5, 4) + 1
    links = np.array([[0, 0], [0, 1], [1, 2], [2, 3]])
    pairs = pairs_of(images, texts, links, positives=np.array([[1, 3]]), classes=np.array(["a", "b", "a"]))
    labels = Links(pairs, CPU).batch(torch.arange(4)).labels.int()
    expected = [[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 1, 1], [1, 1, 0, 1]]
    assert labels.tolist() == expected  # two captions of an image, a further positive, and one class for two images
    alone = Links(dataclasses.replace(pairs, classes=None, positives=None), CPU).batch(torch.arange(4)).labels.int()
    assert alone.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_constants_close_the_gap_between_modalities_and_set_the_unit():
    heads = VarianceHeads(8, 4, 1, isotropic=False)
    image, text = (torch.as_tensor(part.values) for part in (PAIRS.images, PAIRS.texts))
    heads.start_from(image, text, centred=True)
    moved = {"image": heads.scaled("image", image)[0], "text": heads.scaled("text", text)[0]}
    torch.testing.assert_close(moved["image"].mean(0), moved["text"].mean(0), atol=1e-5, rtol=0)
    square = sum((x - x.mean(0)).square().sum(1).mean() for x in moved.values()) / 2
    assert float(square) == pytest.approx(1, rel=1e-4)
    heads.start_from(image, text, centred=False)
    assert float(heads.of("image").centre.norm()) > 0.1


@pytest.mark.parametrize("isotropic", [False, True])
def test_variances_start_where_they_explain_the_distance_of_links(isotropic):
    heads = VarianceHeads(8, 64, 2, isotropic=isotropic)
    image, text = (torch.as_tensor(part.values) for part in (PAIRS.images, PAIRS.texts))
    heads.start_from(image, text, centred=False)
    variance = heads.image(image)[1].exp().mean() + heads.text(text)[1].exp().mean()
    assert float(variance.detach()) == pytest.approx(float((image - text).square().mean()), rel=0.3)


def test_the_scale_of_a_logit_stays_positive():
    logit = MatchingLogit(2.0, -3.0)
    assert logit.facts() == pytest.approx({"scale": 2.0, "shift": -3.0})
    with torch.no_grad():
        logit.log_scale.fill_(-50.0)
    assert float(logit.scale.detach()) > 0


@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_the_shift_starts_where_as_many_matches_are_expected_as_there_are(gain):
    similarity = torch.randn(20, 20, generator=seeding.generator(0))
    labels = torch.eye(20)
    labels[0, 1] = 1
    logit = MatchingLogit(3.0, None, gain=gain)
    logit.start(similarity, labels)
    weights = balanced(labels)
    expected = torch.sigmoid(gain * (3.0 * similarity + logit.facts()["shift"]))
    assert float((weights * expected).sum()) == pytest.approx(float((weights * labels).sum()), rel=1e-3)
    given = MatchingLogit(3.0, 0.5, gain=gain)
    given.start(similarity, labels)
    assert given.facts()["shift"] == 0.5


@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_the_shift_follows_the_share_of_matches(gain):
    """Bayes: among n candidates instead of N, the odds of a match are (N − 1) / (n − 1) times as large."""
    logit = MatchingLogit(1.0, 0.25, gain=gain)
    assert logit.shift_for(torch.eye(5), torch.ones(5, 5)) is logit.shift  # nothing known about the share
    logit.start(torch.zeros(40, 40), torch.eye(40))
    shift = logit.shift_for(torch.eye(5), torch.ones(5, 5))
    assert float(shift.detach()) == pytest.approx(0.25 + np.log(39 / 4) / gain, rel=1e-4)
    assert bool(torch.isfinite(logit.shift_for(torch.ones(1, 1), torch.ones(1, 1))))


def test_matches_weigh_about_one_for_each_item():
    assert torch.equal(balanced(torch.eye(4)), torch.ones(4, 4))
    labels = torch.eye(4)
    labels[:, 0] = 1  # a text that is true of every image
    weights = balanced(labels)
    torch.testing.assert_close(weights[:, 0], torch.tensor([(1 + 1 / 4) / 2, *3 * [(1 / 2 + 1 / 4) / 2]]))
    assert bool((weights[labels == 0] == 1).all())
    soft = torch.tensor([[0.7, 0.3], [0.3, 0.7]])  # two images mixed with each other
    assert torch.equal(balanced(soft), torch.ones(2, 2))


@pytest.mark.parametrize("name", NAMES)
def test_an_item_has_one_variance_or_one_for_each_dimension(name):
    one = create_adapter(name, **SMALL).fit(PAIRS).predict(PAIRS.images).variance
    assert torch.equal(one, one[:, :1].expand(-1, 8))
    many = create_adapter(name, **SMALL, covariance="diagonal").fit(PAIRS).predict(PAIRS.images).variance
    assert not torch.equal(many, many[:, :1].expand(-1, 8))


@pytest.mark.parametrize("name", NAMES)
def test_few_held_out_links_rank_noise_like_many(name):
    """Held-out links come in smaller minibatches, among which a match is likelier; choosing by them must not care."""
    world = make_pairs(400, dim=16, seed=11)
    adapter = create_adapter(name, hidden=32, epochs=40, batch_size=256, learning_rate=3e-3).fit(world.pairs)
    assert adapter.fit_report_.n_validation == 40
    for part, noise in ((world.pairs.images, world.image_noise), (world.pairs.texts, world.text_noise)):
        assert spearmanr(adapter.predict(part).uncertainty, noise).statistic > 0.4


@pytest.mark.parametrize("name", NAMES)
def test_the_fit_lowers_the_objective_of_held_out_links(name):
    report = create_adapter(name, **{**SMALL, "epochs": 15, "learning_rate": 0.003}).fit(WORLD).fit_report_
    values = [entry["validation"] for entry in report.history]
    assert min(values) < values[0]
    assert report.chosen_by == "validation"
    assert report.n_validation == 20
    assert report.facts["unit"] > 0


@pytest.mark.parametrize("name", MATCHING)
def test_means_are_the_embeddings_up_to_one_constant_each(name):
    adapter = create_adapter(name, **SMALL).fit(PAIRS)
    image, text = adapter.predict(PAIRS.images), adapter.predict(PAIRS.texts)
    offset = image.mean - torch.as_tensor(PAIRS.images.values)
    torch.testing.assert_close(offset, offset[:1].expand_as(offset), atol=1e-6, rtol=0)
    assert float((image.mean.mean(0) - text.mean.mean(0)).norm()) < 0.1
    frozen = create_adapter(name, **SMALL, means="frozen").fit(PAIRS).predict(PAIRS.images)
    np.testing.assert_array_equal(frozen.mean, PAIRS.images.values)


@pytest.mark.parametrize("name", NAMES)
def test_results_follow_the_unit_of_the_embeddings(name):
    """Ten times longer embeddings have a hundred times larger variances; settings need no change."""
    settings = {**SMALL, "means": "centred"}
    plain, longer = scaled(PAIRS, 1), scaled(PAIRS, 10)
    one = create_adapter(name, **settings).fit(plain).predict(plain.images).variance
    other = create_adapter(name, **settings).fit(longer).predict(longer.images).variance
    torch.testing.assert_close(other / 100, one, rtol=0.05, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_published_rates_go_by_name_and_train_nothing(name):
    adapter = create_adapter(name, preset="paper", epochs=2)
    assert adapter.config.means == "frozen"
    if name != "prolip":  # its own paper names a rate
        assert (adapter.config.learning_rate, adapter.config.batch_size) == (1e-8, 64)
        untrained = create_adapter(name, preset="paper", epochs=1, learning_rate=1e-12).fit(PAIRS).predict(PAIRS.texts)
        trained = adapter.fit(PAIRS).predict(PAIRS.texts)
        torch.testing.assert_close(trained.variance, untrained.variance, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", MATCHING)
def test_scale_and_shift_are_learned_on_request(name):
    kept = create_adapter(name, **SMALL).fit(PAIRS)
    assert kept.fit_report_.facts["scale"] == pytest.approx(kept.config.scale)
    given = create_adapter(name, **SMALL, shift=1.5).fit(PAIRS).fit_report_.facts
    assert given["shift"] == pytest.approx(1.5)
    learned = (
        create_adapter(name, **SMALL, shift=1.5, scale_rate=0.1, validation_share=0.0).fit(PAIRS).fit_report_.facts
    )
    assert learned["scale"] != pytest.approx(kept.config.scale, abs=1e-3)
    assert learned["shift"] != pytest.approx(1.5, abs=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_fit_ends_like_an_undisturbed_one(name, tmp_path, monkeypatch):
    adapter = create_adapter(name, **SMALL)
    whole = adapter.fit(PAIRS, seed=1).predict(PAIRS.images)
    history = adapter.fit_report_.history
    read, calls = Links.batch, 0

    def dies(self, rows):
        nonlocal calls
        calls += 1
        if calls == 8:  # in the third epoch
            raise KeyboardInterrupt
        return read(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Links, "batch", dies)
        with pytest.raises(KeyboardInterrupt):
            create_adapter(name, **SMALL).fit(PAIRS, seed=1, checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").is_dir()
    resumed = create_adapter(name, **SMALL).fit(PAIRS, seed=1, checkpoint=tmp_path / "fit")
    assert torch.equal(resumed.predict(PAIRS.images).variance, whole.variance)
    assert resumed.fit_report_.history == history
    assert not (tmp_path / "fit").exists()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["one pair", "D = 1", "D = 4096", "constant", "one class", "equal"])
def test_hard_data_are_handled(name, case):
    random = np.random.default_rng(0)
    shape = {"one pair": (1, 6), "D = 1": (30, 1), "D = 4096": (24, 4096)}.get(case, (30, 6))
    images, texts = random.normal(size=shape), random.normal(size=shape)
    if case == "constant":
        images, texts = np.ones(shape), np.full(shape, 0.5)
    if case == "equal":
        texts = images
    classes = np.zeros(len(images)) if case == "one class" else None
    pairs = pairs_of(images, texts, classes=classes)
    adapter = create_adapter(name, **{**SMALL, "epochs": 2}).fit(pairs)
    for part in (pairs.images, pairs.texts):
        posterior = adapter.predict(part)
        assert bool((posterior.variance > 0).all())
        assert bool(torch.isfinite(posterior.uncertainty).all())


@pytest.mark.parametrize(
    "settings", [{"hidden": 0}, {"layers": -1}, {"scale_rate": -1.0}, {"means": "other"}, {"learning_rate": 0.0}]
)
def test_settings_out_of_range_are_refused(settings):
    for name in NAMES:
        with pytest.raises(ConfigError, match=next(iter(settings))):
            create_adapter(name, **settings)
