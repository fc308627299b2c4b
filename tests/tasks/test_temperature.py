import dataclasses

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from grove_adapters import similarity
from grove_adapters.embeddings import Source, match_matrix
from grove_adapters.errors import InputError, InputTypeError
from grove_adapters.posterior import GaussianEmbedding
from grove_adapters.tasks import fit_temperature, retrieve

SOURCE = Source(model="toy", logit_scale=100.0)


def posterior(n, modality, seed, **changes):
    random = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(n, 8, generator=random, dtype=torch.float64), dim=1)
    variance = torch.rand(n, 8, generator=random, dtype=torch.float64) * 0.02 + 1e-3
    return GaussianEmbedding(**{"mean": mean, "variance": variance, "modality": modality, "source": SOURCE} | changes)


def drawn(images, texts, temperature, name="cosine", seed=0):
    """One true match a query, drawn from the softmax itself."""
    p = (temperature * similarity.SIMILARITIES[name](images, texts)).softmax(1).numpy()
    random = np.random.default_rng(seed)
    return np.array([[row, random.choice(len(texts), p=p[row])] for row in range(len(images))])


@pytest.mark.parametrize(("name", "temperature"), [("cosine", 12.0), ("csd", 5.0), ("kl", 0.02)])
def test_finds_the_temperature_matches_were_drawn_with(name, temperature):
    images, texts = posterior(3000, "image", 0), posterior(60, "text", 1)
    links = drawn(images, texts, temperature, name)
    assert fit_temperature(images, texts, links=links, similarity=name) == pytest.approx(temperature, rel=0.1)


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
def test_minimises_the_dense_loss_of_many_positives(direction):
    images, texts = posterior(40, "image", 2), posterior(70, "text", 3)
    links, positives = drawn(images, texts, 10.0), drawn(images, texts, 10.0, seed=1)
    truth = match_matrix(40, 70, np.concatenate([links, positives])).toarray() > 0
    scores = similarity.csd(images, texts).numpy()
    if direction == "t2i":
        truth, scores = truth.T, scores.T
    asked = truth.any(1)

    def loss(log_temperature):
        logits = np.exp(log_temperature) * scores[asked]
        return (logsumexp(logits, axis=1) - logsumexp(np.where(truth[asked], logits, -np.inf), axis=1)).mean()

    expected = np.exp(minimize_scalar(loss, bounds=(-3, 8), method="bounded", options={"xatol": 1e-6}).x)
    got = fit_temperature(images, texts, links=links, positives=positives, direction=direction)
    assert got == pytest.approx(expected, rel=3e-3)
    unscaled = [dataclasses.replace(side, source=Source(model="toy")) for side in (images, texts)]
    again = fit_temperature(*unscaled, links=links, positives=positives, direction=direction)
    assert again == pytest.approx(expected, rel=3e-3)


def test_makes_the_confidence_of_others_honest():
    images, texts = posterior(4000, "image", 4), posterior(60, "text", 5)
    links = drawn(images, texts, 10.0)
    fitted = fit_temperature(images.take(np.arange(2000)), texts, links=links[:2000], similarity="cosine")
    result = retrieve(
        images.take(np.arange(2000, 4000)),
        texts,
        links=links[2000:] - np.array([2000, 0]),
        similarity="cosine",
        temperature=fitted,
    )
    assert result.confidence.mean() == pytest.approx(result.correct.mean(), abs=0.03)


def test_where_every_answer_is_right_the_largest_is_returned():
    images = posterior(10, "image", 6)
    texts = dataclasses.replace(images, modality="text")
    links = np.stack([np.arange(10)] * 2, 1)
    assert fit_temperature(images, texts, links=links, similarity="cosine") > 1000


def test_bad_input_is_one_sentence():
    images, texts = posterior(4, "image", 7), posterior(4, "text", 8)
    with pytest.raises(InputError, match="expected queries with a true match, got none"):
        fit_temperature(images, texts, links=np.empty((0, 2), dtype=int))
    with pytest.raises(InputError, match="similarity has no option"):
        fit_temperature(images, texts, links=np.array([[0, 0]]), similarity="l2")
    with pytest.raises(InputTypeError, match="fit_temperature expected a posterior"):
        fit_temperature(images.mean, texts, links=np.array([[0, 0]]))
