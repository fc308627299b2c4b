import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grove_adapters import similarity
from grove_adapters.errors import InputError, InputTypeError
from grove_adapters.similarity import Gaussians
from grove_adapters.tasks import index, search


def brute_force(name, q, g, k):
    """Every pair in float64, sorted by falling score and then by gallery row."""
    scores = similarity.paired(name, Gaussians(q[0][:, None], q[1][:, None]), Gaussians(g[0][None], g[1][None])).numpy()
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return rows, np.take_along_axis(scores, rows, 1)


def distributions(n, dim, seed, distinct=None):
    """Random Gaussians; with `distinct`, drawn with replacement from so few that copies abound."""
    random = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(distinct or n, dim, generator=random), dim=1)
    variance = torch.rand(distinct or n, dim, generator=random) * 0.01 + 1e-4
    if distinct:
        rows = torch.randint(distinct, (n,), generator=random)
        mean, variance = mean[rows], variance[rows]
    return mean, variance


@pytest.mark.parametrize("name", similarity.SIMILARITIES)
@pytest.mark.parametrize("distinct", [None, 40, 3, 1])
def test_equals_brute_force_copies_included(name, distinct):
    q, g = distributions(13, 24, 0), distributions(230, 24, 1, distinct)
    rows, scores = brute_force(name, q, g, 10)
    found = search(q, g, k=10, similarity=name, query_block=5, gallery_block=64)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-12)
    assert found.log_partition is None


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 6),
    st.integers(1, 70),
    st.integers(1, 12),
    st.integers(1, 7),
    st.integers(1, 70),
    st.integers(0, 1000),
)
def test_tiles_of_any_size_give_the_same_answer_on_a_grid_full_of_ties(n, size, k, query_block, gallery_block, seed):
    random = np.random.default_rng(seed)
    points = [torch.tensor(random.integers(-2, 3, (rows, 2)), dtype=torch.float32) for rows in (n, size)]
    q, g = (points[0], torch.ones(n, 1)), (points[1], torch.ones(size, 1))
    expected, _ = brute_force("csd", (q[0], q[1].expand(n, 2)), (g[0], g[1].expand(size, 2)), k)
    found = search(q, g, k=k, query_block=query_block, gallery_block=gallery_block)
    np.testing.assert_array_equal(found.rows, expected)
    assert found.rows.shape == (n, min(k, size))


def test_float32_tiles_do_not_decide_near_ties():
    """Scores that float32 cannot tell apart come out in the order of float64."""
    random = np.random.default_rng(0)
    base = random.normal(size=64).astype(np.float32)
    g = torch.tensor(base + random.normal(size=(500, 64)).astype(np.float32) * 1e-6)
    q = torch.tensor(base)[None] * 3
    exact = similarity.paired("cosine", Gaussians(q[:, None], None), Gaussians(g[None], None))
    expected = np.argsort(-exact.numpy()[0])
    found = search(q, g, k=20, similarity="cosine", gallery_block=37)
    np.testing.assert_array_equal(found.rows[0], expected[:20])


def test_log_partition_is_that_of_the_whole_gallery():
    q, g = distributions(9, 16, 2), distributions(150, 16, 3)
    found = search(q, g, k=3, similarity="csd", temperature=50.0, query_block=4, gallery_block=31)
    expected = (similarity.csd(q, g).double() * 50).logsumexp(1)
    np.testing.assert_allclose(found.log_partition, expected, rtol=1e-5)


def test_reads_memory_maps_and_never_holds_the_whole_matrix(tmp_path, monkeypatch):
    q, g = distributions(40, 8, 4), distributions(300, 8, 5)
    np.save(tmp_path / "gallery.npy", g[0].numpy().astype(np.float16))
    gallery = np.load(tmp_path / "gallery.npy", mmap_mode="r")
    shapes = []
    cosine = similarity.cosine

    def recorded(left, right):
        table = cosine(left, right)
        shapes.append(tuple(table.shape))
        return table

    monkeypatch.setitem(index.SIMILARITIES, "cosine", recorded)
    found = search(q[0], gallery, k=5, similarity="cosine", query_block=16, gallery_block=50)
    assert max(rows * columns for rows, columns in shapes) <= 16 * 50
    rounded = torch.tensor(np.asarray(gallery)).float()
    rows, _ = brute_force("cosine", (q[0], g[1][:40]), (rounded, g[1]), 5)
    np.testing.assert_array_equal(found.rows, rows)


def test_shows_a_bar_when_asked(capsys):
    q = distributions(5, 4, 6)
    search(q, q, k=1, progress=True)
    assert "searching" in capsys.readouterr().err


def test_bad_input_is_one_sentence():
    q = distributions(5, 4, 7)
    with pytest.raises(InputError, match="did you mean 'wasserstein2'"):
        search(q, q, k=1, similarity="wasserstein")
    with pytest.raises(InputError, match="k expected a whole number"):
        search(q, q, k=0)
    with pytest.raises(InputTypeError, match="query_block"):
        search(q, q, k=1, query_block=2.0)
    with pytest.raises(InputError, match="bare vectors"):
        search(q[0], q[0], k=1, similarity="csd")
    with pytest.raises(InputError, match="4-d embeddings, got 3-d"):
        search(q, distributions(5, 3, 8), k=1)
