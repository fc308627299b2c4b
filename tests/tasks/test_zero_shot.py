import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grove_adapters import calibrate
from grove_adapters.embeddings import Source
from grove_adapters.errors import InputError, InputTypeError, SourceMismatchError
from grove_adapters.posterior import GaussianEmbedding
from grove_adapters.tasks import class_mixtures, classify

SOURCE = Source(model="toy", logit_scale=20.0)


def posterior(mean, modality="text", *, seed=0, **changes):
    random = torch.Generator().manual_seed(seed)
    mean = torch.as_tensor(mean)
    return GaussianEmbedding(
        **{
            "mean": mean,
            "variance": 0.02 * torch.rand(mean.shape, generator=random, dtype=mean.dtype) + 1e-3,
            "modality": modality,
            "source": SOURCE,
            "ids": np.array([f"{modality}{row}" for row in range(len(mean))]),
            "maker": {"adapter": "toy"},
            **changes,
        }
    )


@pytest.fixture
def world():
    """Five classes of four prompts each, in no order; forty images near them."""
    random = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(5, 8, generator=random), dim=1)
    of_prompt = torch.randperm(20, generator=random) % 5
    labels = torch.arange(40) % 5
    near = [
        torch.nn.functional.normalize(centres[rows] + 0.2 * torch.randn(len(rows), 8, generator=random), dim=1)
        for rows in (of_prompt, labels)
    ]
    prompts = posterior(near[0], backbone=(2 * near[0]).numpy())
    images = posterior(near[1], "image", backbone=near[1].numpy())
    names = np.array(["ant", "bee", "cat", "dog", "elk"])
    return images, prompts, names[of_prompt.numpy()], names[labels.numpy()]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 10**6), st.booleans())
def test_a_class_has_the_moments_of_its_mixture(n, n_classes, seed, weighted):
    """Against means and variances of draws from the mixture, by their definitions in float64."""
    random = np.random.default_rng(seed)
    classes = np.concatenate([np.arange(n_classes), random.integers(0, n_classes, n)])
    prompts = posterior(torch.as_tensor(random.normal(size=(len(classes), 3))), seed=seed)
    weights = random.random(len(classes)) + 0.1 if weighted else None
    mixed = class_mixtures(prompts, classes, weights=weights)
    assert mixed.ids.tolist() == [str(number) for number in range(n_classes)]
    for number in range(n_classes):
        rows = np.flatnonzero(classes == number)
        w = np.ones(len(rows)) if weights is None else weights[rows]
        mean, variance = prompts.mean[rows].numpy(), prompts.variance[rows].numpy()
        first = np.average(mean, axis=0, weights=w)
        second = np.average(variance + mean**2, axis=0, weights=w)
        np.testing.assert_allclose(mixed.mean[number], first, atol=1e-12)
        np.testing.assert_allclose(mixed.variance[number], second - first**2, atol=1e-12)


def test_the_moments_are_those_of_draws():
    prompts = posterior(torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    mixed = class_mixtures(prompts, ["a", "a"], weights=[3, 1])
    draws = prompts.sample(200_000, seed=0)
    joined = torch.cat([draws[0, :150_000], draws[1, :50_000]])
    torch.testing.assert_close(mixed.mean[0], joined.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(mixed.variance[0], joined.var(0), atol=0.01, rtol=0)


def test_one_prompt_is_its_own_class(world):
    _, prompts, _, _ = world
    mixed = class_mixtures(prompts, prompts.ids)
    torch.testing.assert_close(mixed.mean, prompts.mean)
    torch.testing.assert_close(mixed.variance, prompts.variance)
    assert mixed.ids.tolist() == prompts.ids.tolist()


@pytest.mark.parametrize("similarity", ["csd", "wasserstein2", "cosine"])
def test_classes_compete_by_their_distance(world, similarity):
    images, prompts, of_prompt, labels = world
    result = classify(images, prompts, prompt_classes=of_prompt, labels=labels, similarity=similarity, k=(1, 2))
    mixed = class_mixtures(prompts, of_prompt)
    mean, variance = mixed.mean.double(), mixed.variance.double()
    if similarity == "cosine":
        logits = 20 * torch.nn.functional.normalize(images.mean.double(), dim=1) @ torch.nn.functional.normalize(mean).T
    else:
        square = torch.cdist(images.mean.double(), mean).square()
        if similarity == "csd":
            square = square + images.variance.double().sum(1)[:, None] + variance.sum(1)
        else:
            square = square + torch.cdist(images.variance.double().sqrt(), variance.sqrt()).square()
        logits = -10 * square
    chosen = logits.argmax(1).numpy()
    assert result.detail["predicted"].tolist() == mixed.ids[chosen].tolist()
    np.testing.assert_array_equal(result.correct, result.detail["predicted"] == labels)
    np.testing.assert_allclose(result.confidence, logits.softmax(1).amax(1), atol=1e-5)
    top = mixed.ids[logits.topk(2).indices.numpy()]
    np.testing.assert_array_equal(result.recall_at[2], (top == labels[:, None]).any(1))
    assert (result.task, result.direction, len(result)) == ("classification", "", 40)
    assert result.detail["gallery_ids"].tolist() == mixed.ids.tolist()
    assert result.provenance["n_prompts"] == 20
    assert calibrate(result, resamples=10).scores["recall"].value == result.correct.mean()
    assert result.to_frame()["label"].tolist() == labels.tolist()


def test_the_backbone_recipe_averages_normalised_prompts(world):
    images, prompts, of_prompt, labels = world
    result = classify(images, prompts, prompt_classes=of_prompt, labels=labels, rank_by="backbone")
    names = list(dict.fromkeys(of_prompt.tolist()))
    weights = np.stack([prompts.backbone[of_prompt == name].mean(0) for name in names])
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    logits = 20 * images.backbone @ weights.T
    assert result.detail["predicted"].tolist() == [names[column] for column in logits.argmax(1)]
    exact = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(result.confidence, exact.max(1) / exact.sum(1), atol=1e-5)


def test_numbers_serve_as_classes_and_further_classes_count(world):
    images, prompts, of_prompt, labels = world
    names = sorted(set(labels))
    by_number = classify(
        images,
        prompts,
        prompt_classes=[names.index(name) for name in of_prompt],
        labels=np.array([names.index(name) for name in labels]),
    )
    by_name = classify(images, prompts, prompt_classes=of_prompt, labels=labels)
    np.testing.assert_array_equal(by_number.correct, by_name.correct)
    everything = np.stack(np.divmod(np.arange(200), 5), 1)
    assert classify(images, prompts, prompt_classes=of_prompt, labels=labels, positives=everything).correct.all()
    deep = classify(images, prompts, prompt_classes=of_prompt, labels=labels, k=50)
    assert deep.recall_at[50].all()


def test_bad_input_is_one_sentence(world):
    images, prompts, of_prompt, labels = world
    with pytest.raises(InputError, match="got 'fox' without one"):
        classify(images, prompts, prompt_classes=of_prompt, labels=np.where(labels == "ant", "fox", labels))
    with pytest.raises(InputError, match="labels of the images: expected 40 rows, got 3"):
        classify(images, prompts, prompt_classes=of_prompt, labels=labels[:3])
    with pytest.raises(InputError, match="prompt_classes: expected 20 rows"):
        classify(images, prompts, prompt_classes=of_prompt[:3], labels=labels)
    with pytest.raises(InputError, match=r"weights of prompts expected numbers > 0, got 0"):
        class_mixtures(prompts, of_prompt, weights=np.zeros(20))
    with pytest.raises(InputError, match=r"classify\(images, texts"):
        classify(prompts, images, prompt_classes=of_prompt, labels=labels)
    with pytest.raises(InputTypeError, match="classify expected a posterior of texts"):
        classify(images, of_prompt, prompt_classes=of_prompt, labels=labels)
    other = posterior(prompts.mean, source=Source(model="other"))
    with pytest.raises(SourceMismatchError, match="one model"):
        classify(images, other, prompt_classes=of_prompt, labels=labels)
