import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from grove_adapters import similarity
from grove_adapters.errors import InputError
from grove_adapters.posterior import GaussianEmbedding, SampledEmbedding

NEED_VARIANCE = [name for name in similarity.SIMILARITIES if name != "cosine"]


def gaussians(n: int, dim: int, seed: int, *, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, dim, generator=random, dtype=dtype)
    return mean, torch.rand(n, dim, generator=random, dtype=dtype) * 2 + 0.05


def one_dimension(name: str, m1: float, v1: float, m2: float, v2: float) -> float:
    """The definition of a similarity of two 1-d Gaussians, by quadrature where it is an integral."""
    p, q = stats.norm(m1, math.sqrt(v1)), stats.norm(m2, math.sqrt(v2))
    low, high = min(m1, m2) - 12 * math.sqrt(max(v1, v2)), max(m1, m2) + 12 * math.sqrt(max(v1, v2))

    def integral(function):
        return integrate.quad(function, low, high, points=sorted({m1, m2}), limit=400)[0]

    if name == "likelihood":
        return float(p.logpdf(m2))
    if name == "expected_likelihood":
        return math.log(integral(lambda z: p.pdf(z) * q.pdf(z)))
    if name == "kl":
        return -integral(lambda z: p.pdf(z) * (p.logpdf(z) - q.logpdf(z)))
    if name == "bhattacharyya":
        return math.log(integral(lambda z: math.sqrt(p.pdf(z) * q.pdf(z))))
    if name == "js":  # with the Gaussian of the mixture's moments in the place of the mixture
        middle = stats.norm((m1 + m2) / 2, math.sqrt((v1 + v2) / 2 + (m1 - m2) ** 2 / 4))
        return -0.5 * sum(integral(lambda z, r=r: r.pdf(z) * (r.logpdf(z) - middle.logpdf(z))) for r in (p, q))
    if name == "csd":
        return -integral(lambda z: p.pdf(z) * ((z - m2) ** 2 + v2))
    quantiles = lambda t: (p.ppf(t) - q.ppf(t)) ** 2  # noqa: E731  Brenier's map in one dimension
    return -integrate.quad(quantiles, 0, 1, limit=400)[0]


@pytest.mark.parametrize("name", NEED_VARIANCE)
def test_equals_its_definition_summed_over_dimensions(name):
    (q_mean, q_variance), (g_mean, g_variance) = gaussians(2, 3, 0), gaussians(3, 3, 1)
    expected = [
        [
            sum(
                one_dimension(name, *(float(x) for x in moments))
                for moments in zip(q_mean[i], q_variance[i], g_mean[j], g_variance[j], strict=True)
            )
            for j in range(3)
        ]
        for i in range(2)
    ]
    got = similarity.SIMILARITIES[name]((q_mean, q_variance), (g_mean, g_variance))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("name", similarity.SIMILARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrix_products_equal_the_terms_summed_pair_by_pair(name, dtype):
    q, g = gaussians(7, 33, 2, dtype=dtype), gaussians(300, 33, 3, dtype=dtype)
    got = similarity.SIMILARITIES[name](q, g)
    exact = similarity.paired(
        name, similarity.Gaussians(q[0][:, None], q[1][:, None]), similarity.Gaussians(g[0][None], g[1][None])
    )
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-5)


def test_blocks_of_the_coupled_similarities_join(monkeypatch):
    q, g = gaussians(5, 4, 4), gaussians(11, 4, 5)
    whole = similarity.bhattacharyya(q, g)
    monkeypatch.setattr(similarity, "BLOCK", 12)
    torch.testing.assert_close(similarity.bhattacharyya(q, g), whole)
    monkeypatch.setattr(similarity, "BLOCK", 100)
    torch.testing.assert_close(similarity.bhattacharyya(q, g), whole)


@pytest.mark.parametrize("name", ["wasserstein2", "kl", "js", "bhattacharyya"])
def test_a_distribution_is_closest_to_itself_at_zero(name):
    q = gaussians(6, 8, 6)
    table = similarity.SIMILARITIES[name](q, q)
    torch.testing.assert_close(table.diagonal(), torch.zeros(6, dtype=torch.float64), atol=1e-9, rtol=0)
    assert (table.argmax(1) == torch.arange(6)).all()
    assert (table <= 0).all()


def test_csd_and_match_probability_equal_monte_carlo():
    mean = torch.tensor([[0.3, -0.1]])
    query = GaussianEmbedding(mean=mean, variance=torch.tensor([[0.2, 0.05]]), modality="image")
    gallery = GaussianEmbedding(mean=-mean, variance=torch.tensor([[0.1, 0.4]]), modality="text")
    draws = (query.sample(200_000, seed=1) - gallery.sample(200_000, seed=2))[0].square().sum(1)
    error = float(draws.std() / math.sqrt(len(draws)))
    assert abs(float(similarity.csd(query, gallery)) + float(draws.mean())) < 4 * error
    assert float(similarity.match_probability(query, gallery, scale=2, shift=1)) == pytest.approx(
        1 / (1 + math.exp(-(1 + 2 * float(similarity.csd(query, gallery)))))
    )


def test_sampled_match_probability_converges_and_has_an_address():
    query = GaussianEmbedding(mean=torch.zeros(2, 1), variance=torch.tensor([[0.25], [0.5]]), modality="image")
    gallery = GaussianEmbedding(mean=torch.ones(1, 1), variance=torch.tensor([[0.25]]), modality="text")
    got = similarity.sampled_match_probability(query, gallery, samples=100, seed=3)
    for row, variance in enumerate((0.5, 0.75)):
        density = stats.norm(1, math.sqrt(variance)).pdf
        expected = integrate.quad(lambda z, f=density: f(z) / (1 + math.exp(-5 + 5 * abs(z))), -8, 10)[0]
        assert float(got[row]) == pytest.approx(expected, abs=0.1)
    assert torch.equal(got, similarity.sampled_match_probability(query, gallery, samples=100, seed=3))
    assert not torch.equal(got, similarity.sampled_match_probability(query, gallery, samples=100, seed=4))


def test_js_bounds_the_true_divergence_from_above():
    p, q = stats.norm(0, 1), stats.norm(1.5, 0.6)
    true = 0.0
    for r in (p, q):
        true += (
            0.5
            * integrate.quad(
                lambda z, r=r: r.pdf(z) * (r.logpdf(z) - np.log(0.5 * (p.pdf(z) + q.pdf(z)))), -8, 8, limit=400
            )[0]
        )
    left, right = (torch.zeros(1, 1), torch.ones(1, 1)), (torch.full((1, 1), 1.5), torch.full((1, 1), 0.36))
    got = -float(similarity.js(left, right))
    assert true < got < 1.5 * true


@pytest.mark.parametrize("name", NEED_VARIANCE)
def test_one_variance_for_all_dimensions_stays_a_view_and_changes_nothing(name):
    (q_mean, _), (g_mean, _) = gaussians(4, 16, 7), gaussians(5, 16, 8)
    q_one, g_one = torch.rand(4, 1, dtype=torch.float64) + 0.1, torch.rand(5, 1, dtype=torch.float64) + 0.1
    narrow = similarity.SIMILARITIES[name]((q_mean, q_one), (g_mean, g_one))
    posterior = similarity.SIMILARITIES[name](
        GaussianEmbedding(mean=q_mean, variance=q_one, modality="image"),
        GaussianEmbedding(mean=g_mean, variance=g_one, modality="text"),
    )
    full = similarity.SIMILARITIES[name](
        (q_mean, q_one.repeat(1, 16)), (g_mean, g_one.expand(5, 16))
    )  # one side expanded and the other not
    torch.testing.assert_close(narrow, full)
    torch.testing.assert_close(posterior, full)


@pytest.mark.parametrize("name", ["csd", "wasserstein2"])
def test_the_lift_is_exact_for_both_kinds_of_index(name):
    q, g = gaussians(9, 12, 9), gaussians(20, 12, 10)
    expected = similarity.SIMILARITIES[name](q, g)
    inner = similarity.lift(q, name, side="query") @ similarity.lift(g, name, side="gallery").T
    torch.testing.assert_close(inner, expected)
    left = similarity.lift(q, name, side="query", metric="l2")
    right = similarity.lift(g, name, side="gallery", metric="l2")
    torch.testing.assert_close(-torch.cdist(left, right).square(), expected)
    assert left.shape[1] == right.shape[1]


def test_csd_separates_what_wasserstein_does_not():
    """PCME++ Fig. A.1: two certain neighbours against two confusing ones at the same distance of means."""
    means = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    certain, confusing = torch.full((2, 1), 0.01), torch.full((2, 1), 0.5)
    near, far = (means[:1], certain[:1]), (means[:1], confusing[:1])
    assert similarity.csd(near, (means[1:], certain[1:])) > similarity.csd(far, (means[1:], confusing[1:]))
    torch.testing.assert_close(
        similarity.wasserstein2(near, (means[1:], certain[1:])),
        similarity.wasserstein2(far, (means[1:], confusing[1:])),
    )


def test_kl_is_not_symmetric():
    sharp, vague = (torch.zeros(1, 2), torch.full((1, 2), 0.1)), (torch.zeros(1, 2), torch.ones(1, 2))
    assert similarity.kl(sharp, vague) > similarity.kl(vague, sharp)


def test_kl_of_tiny_variances_survives_float32():
    mean = torch.nn.functional.normalize(torch.randn(3, 512, generator=torch.Generator().manual_seed(0)), dim=1)
    variance = torch.full((3, 1), 1e-5)
    expected = -(mean[:, None].double() - mean.double()).square().sum(2) / 2e-5
    torch.testing.assert_close(
        similarity.kl((mean, variance), (mean, variance)).double(), expected, rtol=1e-4, atol=1e-3
    )


def test_takes_samples_float16_and_arrays_and_changes_no_input():
    samples = SampledEmbedding(samples=torch.randn(3, 4, 5), modality="image")
    assert similarity.csd(samples, samples).shape == (3, 3)
    half = torch.randn(3, 5).half()
    assert similarity.cosine(half, half.numpy()).dtype == torch.float32
    assert similarity.cosine([[1.0, 0.0]], [[0.0, 2.0], [3.0, 0.0]]).tolist() == [[0.0, 1.0]]
    q = gaussians(3, 5, 11)
    before = [tensor.clone() for tensor in q]
    for function in similarity.SIMILARITIES.values():
        function(q, q)
    assert all(torch.equal(now, then) for now, then in zip(q, before, strict=True))


def test_bad_input_is_one_sentence():
    q = gaussians(3, 5, 12)
    with pytest.raises(InputError, match="expected distributions, got bare vectors"):
        similarity.csd(q[0], q)
    with pytest.raises(InputError, match=r"5-d embeddings, got 4-d"):
        similarity.csd(q, gaussians(3, 4, 13))
    with pytest.raises(InputError, match="variances of shape"):
        similarity.csd((q[0], q[1][:2]), q)
    with pytest.raises(InputError, match="σ², not log σ²"):
        similarity.csd((q[0], -q[1]), q)
    with pytest.raises(InputError, match=r"\(N, D\) means"):
        similarity.cosine(q[0][0], q[0])
    with pytest.raises(InputError, match="did you mean 'csd'"):
        similarity.lift(q, "cds", side="query")
    with pytest.raises(InputError, match="side has no option"):
        similarity.lift(q, "csd", side="queries")


def test_cosine_moments_against_sampling():
    q, g = (gaussians(n, 200, seed) for n, seed in ((3, 20), (4, 21)))
    q, g = ((3 * mean, variance) for mean, variance in (q, g))
    moments = similarity.cosine_moments(q, g)
    random = torch.Generator().manual_seed(0)
    draws = [
        torch.nn.functional.normalize(x[0] + x[1].sqrt() * torch.randn(4_000, *x[0].shape, generator=random), dim=2)
        for x in (q, g)
    ]
    cosines = draws[0] @ draws[1].transpose(1, 2)
    torch.testing.assert_close(cosines.mean(0).to(moments.mean), moments.mean, rtol=0, atol=5e-3)
    torch.testing.assert_close(cosines.var(0).to(moments.variance), moments.variance, rtol=0.1, atol=0)


def test_cosine_moments_without_variance_are_cosines():
    q, g = ((mean, torch.full_like(mean, 1e-14)) for mean, _ in (gaussians(3, 8, 22), gaussians(4, 8, 23)))
    moments = similarity.cosine_moments(q, g)
    torch.testing.assert_close(moments.mean, similarity.cosine(q, g))
    assert 0 < float(moments.variance.max()) < 1e-12
    with pytest.raises(InputError, match="expected distributions"):
        similarity.cosine_moments(q[0], g)
