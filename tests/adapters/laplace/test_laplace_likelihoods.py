import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize

from grove_adapters.adapters.laplace import likelihoods
from grove_adapters.adapters.laplace.likelihoods import Sigmoid, Softmax

LIKELIHOODS = [Softmax(3.0), Softmax(40.0), Sigmoid(3.0, -1.0), Sigmoid(40.0, -10.0)]


def data(n=7, m=5, dim=6, seed=0):
    random = torch.Generator().manual_seed(seed)
    vectors = torch.randn(n, dim, generator=random, dtype=torch.float64) * 2
    return vectors, normalize(torch.randn(m, dim, generator=random, dtype=torch.float64), dim=1)


def loss(likelihood, logits, match):
    """The loss of one item whose match is the given candidate."""
    if isinstance(likelihood, Softmax):
        return cross_entropy(logits, torch.tensor(match))
    truth = torch.nn.functional.one_hot(torch.tensor(match), len(logits)).to(logits)
    return binary_cross_entropy_with_logits(logits, truth, reduction="sum")


def dense(likelihood, vectors, candidates, match=0):
    """Σ Jᵀ Λ J by automatic differentiation of the loss in the logits and of the logits in the vectors."""
    total = torch.zeros(2 * (vectors.shape[1],), dtype=torch.float64)
    for vector in vectors:

        def logits(g):
            return likelihood.scale * candidates @ normalize(g, dim=0) + getattr(likelihood, "bias", 0.0)

        jacobian = torch.autograd.functional.jacobian(logits, vector)
        hessian = torch.autograd.functional.hessian(lambda z: loss(likelihood, z, match), logits(vector))
        total += jacobian.T @ hessian @ jacobian
    return total


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_curvature_against_automatic_differentiation(likelihood):
    vectors, candidates = data()
    curvature = likelihood.curvature(vectors, candidates)
    torch.testing.assert_close(curvature, dense(likelihood, vectors, candidates), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(curvature, dense(likelihood, vectors, candidates, match=3), rtol=1e-8, atol=1e-10)


@settings(deadline=None, max_examples=40)
@given(
    likelihood=st.sampled_from(LIKELIHOODS),
    n=st.integers(1, 8),
    m=st.integers(1, 8),
    dim=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_curvature_is_symmetric_and_never_negative(likelihood, n, m, dim, seed):
    vectors, candidates = data(n, m, dim, seed)
    curvature = likelihood.curvature(vectors, candidates)
    assert torch.equal(curvature, curvature.T)
    assert float(torch.linalg.eigvalsh(curvature).min()) >= -1e-10 * likelihood.scale**2 * n
    if n == 1:  # the loss does not change with the length of the vector
        along = curvature @ vectors[0]
        assert float(along.norm()) <= 1e-10 * likelihood.scale**2


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=str)
def test_curvature_does_not_depend_on_blocks(likelihood, monkeypatch):
    vectors, candidates = data(n=23)
    whole = likelihood.curvature(vectors, candidates)
    parts = likelihood.curvature(vectors[:9], candidates) + likelihood.curvature(vectors[9:], candidates)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    for block in (1, 11, 60):
        monkeypatch.setattr(likelihoods, "BLOCK", block)
        torch.testing.assert_close(likelihood.curvature(vectors, candidates), whole, rtol=1e-12, atol=1e-12)


def test_a_single_candidate_teaches_a_softmax_nothing_and_a_sigmoid_something():
    vectors, candidates = data(m=1)
    assert float(Softmax(10.0).curvature(vectors, candidates).abs().max()) == 0
    assert float(Sigmoid(10.0, 0.0).curvature(vectors, candidates).trace()) > 0


def test_surprise_without_variance_is_the_loss_of_training():
    random = torch.Generator().manual_seed(0)
    cosines = torch.rand(6, 6, generator=random, dtype=torch.float64) * 2 - 1
    matches, nothing = torch.eye(6, dtype=torch.bool), torch.zeros(6, 6, dtype=torch.float64)
    rows = torch.arange(6)
    both = (cross_entropy(8 * cosines, rows) + cross_entropy(8 * cosines.T, rows)) / 2
    torch.testing.assert_close(Softmax(8.0).surprise(cosines, nothing, matches), both)
    pairs = binary_cross_entropy_with_logits(8 * cosines - 2, matches.double(), reduction="sum") / 6
    torch.testing.assert_close(Sigmoid(8.0, -2.0).surprise(cosines, nothing, matches), pairs)


def test_several_matches_share_their_probability():
    cosines, nothing = torch.tensor([[0.5, 0.2, 0.5]]), torch.zeros(1, 3)
    matches = torch.tensor([[True, False, True]])
    one_way = -math.log(2 * math.exp(5) / (2 * math.exp(5) + math.exp(2)))
    wrong = torch.tensor([[True, True, True]])
    surprise = Softmax(10.0).surprise(cosines, nothing, matches | wrong)
    assert float(surprise) == pytest.approx(0, abs=1e-6)
    rows = torch.cat([cosines, torch.tensor([[-1.0, 1.0, -1.0]])])
    matches = torch.cat([matches, torch.tensor([[False, True, False]])])
    expected = Softmax(10.0).surprise(rows, torch.zeros(2, 3), matches)
    ways = [one_way, -math.log(math.exp(10) / (math.exp(10) + 2 * math.exp(-10)))]
    columns = [math.log1p(math.exp(-15)), math.log1p(math.exp(2 - 10)), math.log1p(math.exp(-15))]
    assert float(expected) == pytest.approx((np.mean(ways) + np.mean(columns)) / 2, rel=1e-4)


def test_the_probability_averaged_over_a_gaussian_logit_is_close():
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    for mean, variance in ((0.3, 0.01), (0.1, 0.05), (-0.2, 0.02), (0.5, 0.2)):
        z = 10 * (mean + math.sqrt(variance) * nodes) - 1
        exact = float(weights @ (1 / (1 + np.exp(-z))) / weights.sum())
        surprise = Sigmoid(10.0, -1.0).surprise(
            torch.tensor([[mean]]), torch.tensor([[variance]]), torch.ones(1, 1, dtype=torch.bool)
        )
        assert math.exp(-float(surprise)) == pytest.approx(exact, abs=0.01)
