import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from grove_adapters import seeding
from grove_adapters.adapters import create_adapter, load_adapter
from grove_adapters.adapters.grove import GroVE, GroVEConfig
from grove_adapters.adapters.grove.backbone import cross_noise, decoding_share, matching
from grove_adapters.adapters.grove.data import LinkedRows
from grove_adapters.adapters.grove.initialise import inducing_inputs, start
from grove_adapters.adapters.grove.model import Objective
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.embeddings import Embeddings, Pairs
from grove_adapters.errors import ConfigError, InputError, NotFittedError

SMALL = {"latent_dim": 4, "n_inducing": 30, "epochs": 12, "batch_size": 64}


def pairs_of(images, texts):
    n = len(images)
    return Pairs(
        Embeddings(images.astype(np.float32), modality="image"),
        Embeddings(texts.astype(np.float32), modality="text"),
        np.stack([np.arange(n), np.arange(n)], 1),
    )


@pytest.fixture(scope="module")
def world():
    return make_pairs(400, views=0, seed=3)


@pytest.fixture(scope="module")
def fitted(world):
    return GroVE(**SMALL).fit(world.pairs, seed=0)


def test_latents_really_move_and_the_report_says_how_far(fitted):
    facts = fitted.fit_report_.facts
    assert facts["latent_displacement_rms"] > 0.05  # 200 epochs at the published rate: .0019
    assert facts["n_inducing"] == 30
    assert fitted.fit_report_.warnings == []
    for modality in ("image", "text"):
        assert facts[modality]["jitter"] == 1e-6
        assert facts[modality]["noise"] > 0
    last = fitted.fit_report_.history[-1]
    assert {"loss", "log_likelihood", "divergence", "alignment", "validation"} <= set(last)


def test_the_fit_improves_the_objective_and_the_held_out_one(fitted):
    history = fitted.fit_report_.history
    assert history[-1]["loss"] < history[0]["loss"]
    assert min(entry["validation"] for entry in history) < history[0]["validation"]


@pytest.mark.parametrize(("n", "dim"), [(400, 32), (40, 256)])
def test_latents_start_from_the_principal_components_of_the_joint_embeddings(n, dim):
    from sklearn.decomposition import PCA

    pairs = make_pairs(n, dim=dim, views=0, features=False, seed=3).pairs
    begun = start(LinkedRows(pairs, torch.device("cpu")), 3, seed=0)
    sides = [np.asarray(side.values, dtype=np.float64) for side in (pairs.images, pairs.texts)]
    joint = np.concatenate([(side - side.mean(0)) / np.sqrt(side.var(0).mean()) for side in sides], 1)
    expected = PCA(3, whiten=True).fit_transform(joint)
    correlation = np.abs((begun.latents.double().numpy() * expected).mean(0))
    np.testing.assert_allclose(correlation, 1, atol=3 / n)
    np.testing.assert_allclose(begun.latents.var(0, correction=0).numpy(), 1, atol=1e-2)


def test_latents_can_start_at_random_as_published(world):
    data = LinkedRows(world.pairs, torch.device("cpu"))
    first, again = (start(data, 3, seed=5, random=True).latents for _ in range(2))
    assert torch.equal(first, again)
    assert abs(float(first.std()) - 1) < 0.1


def test_inducing_inputs_are_as_many_as_distinct_latents_allow():
    latents = torch.randn(50, 2, generator=seeding.generator(0))
    assert len(inducing_inputs(latents, 20, seed=0)) == 20
    assert len(inducing_inputs(latents[:1].expand(9, 2), 20, seed=0)) == 1


def test_equal_seeds_give_equal_results_and_others_differ(world, fitted):
    again = GroVE(**SMALL).fit(world.pairs, seed=0)
    for name, value in fitted.module_.state_dict().items():
        assert torch.equal(value, again.module_.state_dict()[name]), name
    other = GroVE(**SMALL).fit(world.pairs, seed=1)
    assert not torch.equal(other.module_.image.mean, fitted.module_.image.mean)


def test_the_posterior_is_made_of_the_named_parts(world, fitted):
    posterior = fitted.predict(world.pairs.images)
    noise = fitted.fit_report_.facts["image"]["noise"]
    torch.testing.assert_close(posterior.aleatoric, torch.full_like(posterior.mean, noise), rtol=1e-4, atol=0)
    torch.testing.assert_close(posterior.aleatoric + posterior.epistemic, posterior.variance)
    assert bool((posterior.epistemic > 0).all())


def test_a_constant_mean_decodes_and_a_backbone_mean_stays_at_the_frozen_embedding(world, fitted):
    around_backbone = fitted.predict(world.pairs.images)
    decoding = GroVE(**SMALL, mean="constant").fit(world.pairs, seed=0).predict(world.pairs.images)
    share = fitted.fit_report_.facts["decoding_share"]
    frozen = torch.as_tensor(world.pairs.images.values)
    torch.testing.assert_close(around_backbone.mean, torch.lerp(frozen, decoding.mean, share))
    torch.testing.assert_close(around_backbone.variance, decoding.variance)
    residual, spread = (decoding.mean - frozen).square().sum(1).mean(), frozen.var(0).sum()
    assert 0.05 * float(spread) < float(residual) < 0.7 * float(spread)


def test_decoding_share_is_what_helps_held_out_links_to_match():
    random = np.random.default_rng(0)
    shared = torch.from_numpy(random.normal(size=(60, 16)))
    noisy = {name: shared + torch.from_numpy(random.normal(size=(60, 16))) for name in ("image", "text")}
    matches = torch.eye(60, dtype=torch.bool)
    clean = dict.fromkeys(noisy, shared)
    useless = {name: torch.zeros_like(shared) + 1 for name in noisy}
    assert decoding_share(noisy, clean, matches) > 0.1
    assert decoding_share(noisy, useless, matches) == 0
    assert decoding_share({name: z[:1] for name, z in noisy.items()}, clean, matches[:1, :1]) == 0


def test_held_out_links_match_by_positives_too(world):
    pairs = dataclasses.replace(world.pairs, positives=np.array([[0, 3], [5, 0]]))
    found = matching(pairs, np.array([0, 3, 5]), positives=True)
    expected = torch.eye(3, dtype=torch.bool)
    links = pairs.links[[0, 3, 5]]
    for image, text in pairs.positives:
        expected[np.ix_(links[:, 0] == image, links[:, 1] == text)] = True
    assert torch.equal(found, expected)
    assert int(found.sum()) == 5
    linked = matching(pairs, np.array([0, 3, 5]), positives=False)
    assert torch.equal(linked, torch.eye(3, dtype=torch.bool))


def test_cross_prediction_is_a_gaussian_where_held_out_partners_are():
    world = make_pairs(500, dim=32, views=0, noise=0.2, seed=2)
    train, test = world.pairs.split(0.6, seed=0)
    for mean in ("constant", "backbone"):
        adapter = GroVE(**{**SMALL, "epochs": 25, "n_inducing": 60}, mean=mean).fit(train)
        for given, partner, column in ((test.images, test.texts, 0), (test.texts, test.images, 1)):
            cross = adapter.predict_cross(given.take(test.links[:, column]))
            truth = torch.as_tensor(partner.values[test.links[:, 1 - column]])
            error = (cross.mean - truth).square()
            assert float(error.sum(1).mean()) < 0.6 * float(truth.var(0).sum())
            torch.testing.assert_close(cross.aleatoric + cross.epistemic, cross.variance)
            if mean == "constant":  # a backbone's variance is for matching, see the next test
                assert 0.2 < float((error / cross.variance).mean()) < 2
            assert (cross.modality, cross.ids[0]) == (given.modality, given.ids[test.links[0, column]])


def test_cross_predictions_are_queries_of_the_other_modality():
    from grove_adapters.tasks import retrieve

    world = make_pairs(500, dim=32, views=0, noise=0.3, seed=2)
    train, test = world.pairs.split(0.6, seed=0)
    adapter = GroVE(**{**SMALL, "latent_dim": 8, "n_inducing": 60}).fit(train)
    texts = create_adapter("deterministic").fit(train).predict(test.texts)
    result = retrieve(adapter.predict_cross(test.images), texts, links=test.links, similarity="likelihood")
    assert result.correct.mean() > 10 / len(test.images)
    assert abs(result.confidence.mean() - result.correct.mean()) < 0.2


def test_the_variance_of_cross_predictions_is_what_matches_held_out_queries_best():
    random = torch.Generator().manual_seed(0)
    truth = torch.randn(300, 6, generator=random, dtype=torch.float64)
    vague = torch.arange(300) % 2
    for scale in (0.3, 0.5):
        noise = scale * (1 + 2 * vague[:, None]) * torch.randn(300, 6, generator=random, dtype=torch.float64)
        square = torch.cdist(truth + noise, truth).square()
        level, slope = cross_noise(square, 2.0 * vague - 1, torch.eye(300, dtype=torch.bool), scale**2 * 3)
        sharp, wide = (math.exp(level + slope * side) ** 0.5 for side in (-1, 1))
        assert 0.6 * scale < sharp < 1.5 * scale
        assert 2 < wide / sharp < 4
    easy = 1e4 * (1 - torch.eye(5))  # nothing to learn: stay
    level, slope = cross_noise(easy, torch.zeros(5), torch.eye(5, dtype=torch.bool), 0.01)
    assert (math.exp(level), slope) == (pytest.approx(0.01), 0)


def test_every_uncertainty_has_its_meaning(world, fitted):
    located = fitted._located(fitted.module_, "image", torch.as_tensor(world.pairs.images.values))
    for name in ("mismatch", "latent_entropy", "variance"):
        posterior = GroVE(**SMALL, uncertainty=name).fit(world.pairs, seed=0).predict(world.pairs.images)
        expected = {
            "mismatch": lambda: fitted.module_.mismatch["image"](fitted.module_.image, located.mode),
            "latent_entropy": lambda: located.entropy,
            "variance": lambda p=posterior: p.variance.mean(1),
        }[name]()
        torch.testing.assert_close(posterior.uncertainty.double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_cross_prediction_checks_what_predict_checks(world, fitted):
    with pytest.raises(NotFittedError, match="fit"):
        GroVE().predict_cross(world.pairs.images)
    with pytest.raises(InputError, match="fitted on 32-d"):
        fitted.predict_cross(Embeddings(np.ones((2, 5), dtype=np.float32), modality="image"))
    whole = fitted.predict_cross(world.pairs.images)
    assert torch.equal(fitted.predict_cross(world.pairs.images, batch_size=33).mean, whole.mean)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel": "matern15"},
        {"kernel": "matern25", "ard": True},
        {"kernel": "cosine"},
        {"ard": True},
        {"covariance": "diagonal"},
        {"covariance": "per_dim"},
        {"alignment": "js"},
        {"alignment": "wasserstein2"},
        {"alignment": "harmonization"},
        {"alignment": "none"},
        {"latent_prior": False},
    ],
    ids=str,
)
def test_every_choice_fits_predicts_and_loads(world, tmp_path, settings):
    adapter = GroVE(**{**SMALL, "n_inducing": 15, "epochs": 4}, **settings).fit(world.pairs)
    history = adapter.fit_report_.history
    assert history[-1]["loss"] < history[0]["loss"]
    few = world.pairs.texts.take(np.arange(20))
    posterior = adapter.predict(few)
    assert torch.equal(load_adapter(adapter.save(tmp_path / "grove")).predict(few).variance, posterior.variance)


def test_the_published_uncertainty_is_the_mean_variance(world):
    adapter = GroVE(**SMALL, uncertainty="variance").fit(world.pairs)
    posterior = adapter.predict(world.pairs.texts)
    torch.testing.assert_close(posterior.uncertainty, posterior.variance.mean(1))


def test_latent_entropy_ranks_the_known_noise_of_both_modalities():
    world = make_pairs(900, dim=64, views=0, seed=0)
    train, test = world.pairs.split(0.7, seed=0)
    adapter = GroVE(latent_dim=10, n_inducing=100, epochs=40, batch_size=128).fit(train)
    for part, levels in ((test.images, world.image_noise), (test.texts, world.text_noise)):
        rows = [int(name.split("-")[1]) for name in part.ids]
        assert spearmanr(adapter.predict(part).uncertainty, levels[rows])[0] > 0.7


def test_save_and_load_predict_the_same(world, fitted, tmp_path):
    loaded = load_adapter(fitted.save(tmp_path / "grove"))
    mine, theirs = fitted.predict(world.pairs.texts), loaded.predict(world.pairs.texts)
    assert torch.equal(mine.mean, theirs.mean)
    assert torch.equal(mine.uncertainty, theirs.uncertainty)
    assert loaded.fit_report_.facts == fitted.fit_report_.to_dict()["facts"]


def test_a_batch_of_one_row_gives_the_same_row_bit_for_bit(world, fitted):
    few = world.pairs.images.take(np.arange(6))
    whole, single = fitted.predict(few), fitted.predict(few, batch_size=1)
    for name in ("mean", "variance", "uncertainty"):
        assert torch.equal(getattr(whole, name), getattr(single, name))


def test_many_captions_of_one_image_each_have_a_latent(world):
    links = np.concatenate([world.pairs.links, np.stack([np.arange(50), np.arange(50, 100)], 1)])
    pairs = Pairs(world.pairs.images, world.pairs.texts, links)
    adapter = GroVE(**{**SMALL, "epochs": 1}, validation_share=0.0).fit(pairs)
    assert adapter.fit_report_.n_pairs == 450


def test_images_without_captions_are_no_obstacle(world):
    pairs = Pairs(world.pairs.images, world.pairs.texts, world.pairs.links[:30])
    adapter = GroVE(**{**SMALL, "epochs": 1}).fit(pairs)
    assert adapter.fit_report_.n_validation == 3


def test_validation_pairs_of_the_caller_are_used(world):
    train, validation = world.pairs.split(0.8, seed=0)
    adapter = GroVE(**{**SMALL, "epochs": 2}).fit(train, validation=validation)
    assert (adapter.fit_report_.n_pairs, len(train)) == (320, 320)
    assert adapter.fit_report_.n_validation == len(validation)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_handful_of_pairs_is_enough(n):
    random = np.random.default_rng(0)
    pairs = pairs_of(random.normal(size=(n, 8)), random.normal(size=(n, 8)))
    if n == 1:
        with pytest.raises(InputError, match="expected image embeddings that differ"):
            GroVE(epochs=2).fit(pairs)
        return
    adapter = GroVE(epochs=2).fit(pairs)
    posterior = adapter.predict(pairs.images)
    assert adapter.fit_report_.facts["n_inducing"] <= n
    assert bool(torch.isfinite(posterior.uncertainty).all())


def test_one_dimension_works():
    random = np.random.default_rng(0)
    images = random.normal(size=(40, 1))
    adapter = GroVE(**{**SMALL, "epochs": 3}).fit(pairs_of(images, images + 0.1 * random.normal(size=(40, 1))))
    assert adapter.predict(Embeddings(images, modality="image")).mean.shape == (40, 1)


@pytest.mark.parametrize("constant", ["image", "text"])
def test_constant_embeddings_are_refused_in_words(constant):
    values = {
        "image": np.random.default_rng(0).normal(size=(30, 6)),
        "text": np.random.default_rng(1).normal(size=(30, 6)),
    }
    values[constant] = np.ones((30, 6))
    with pytest.raises(InputError, match=f"expected {constant} embeddings that differ, got 27 links to equal ones"):
        GroVE(**SMALL).fit(pairs_of(values["image"], values["text"]))


def test_duplicated_rows_are_no_obstacle():
    random = np.random.default_rng(0)
    few = np.repeat(random.normal(size=(5, 6)), 20, 0)
    adapter = GroVE(**{**SMALL, "epochs": 3}).fit(pairs_of(few, few[:, ::-1]))
    assert adapter.fit_report_.facts["n_inducing"] == 5


def test_the_published_settings_go_by_name():
    config = create_adapter("grove", preset="paper", epochs=3).config
    assert (config.learning_rate, config.latent_learning_rate, config.batch_size) == (1e-5, 1e-5, 64)
    assert (config.reconstruction_weight, config.alignment_weight, config.epochs) == (0.01, 400.0, 3)
    assert (config.latent_init, config.uncertainty) == ("random", "variance")
    assert GroVEConfig.from_dict(config.to_dict()) == config
    with pytest.raises(InputError, match="preset has no option 'papr'; did you mean 'paper'"):
        create_adapter("grove", preset="papr")


def test_the_published_settings_do_not_move_the_latents(world):
    adapter = create_adapter("grove", preset="paper", epochs=2, n_inducing=20).fit(world.pairs)
    assert adapter.fit_report_.facts["latent_displacement_rms"] < 1e-3
    assert "raise latent_learning_rate" in adapter.fit_report_.warnings[0]
    assert bool(torch.isfinite(adapter.predict(world.pairs.images).uncertainty).all())


@pytest.mark.parametrize(
    "settings",
    [
        {"latent_dim": 0},
        {"n_inducing": 0},
        {"alignment_weight": -1.0},
        {"natural_rate": 0.0},
        {"restarts": 0},
        {"ard": True, "kernel": "cosine"},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        GroVEConfig(**settings)


@pytest.mark.parametrize("training", ["minibatch", "collapsed"])
def test_a_fit_that_was_interrupted_goes_on_to_the_same_numbers(world, tmp_path, monkeypatch, training):
    settings = {**SMALL, "epochs": 4, "training": training}
    undisturbed = GroVE(**settings).fit(world.pairs)
    held_out, calls = Objective.held_out, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return held_out(*arguments)

    monkeypatch.setattr(Objective, "held_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        GroVE(**settings).fit(world.pairs, checkpoint=tmp_path / "state")
    monkeypatch.setattr(Objective, "held_out", held_out)
    resumed = GroVE(**settings).fit(world.pairs, checkpoint=tmp_path / "state")
    assert resumed.fit_report_.epochs == 4
    for name, value in undisturbed.module_.state_dict().items():
        assert torch.equal(value, resumed.module_.state_dict()[name]), name
