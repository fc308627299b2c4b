import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grove_adapters import similarity
from grove_adapters.embeddings import Source, match_matrix
from grove_adapters.errors import InputError, InputTypeError, SourceMismatchError
from grove_adapters.posterior import GaussianEmbedding
from grove_adapters.tasks import retrieve

SOURCE = Source(model="toy", logit_scale=20.0)


def posterior(n, modality, seed, *, dim=8, near=None, **changes):
    random = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, dim, generator=random)
    if near is not None:
        mean = near + 0.3 * mean
    mean = torch.nn.functional.normalize(mean, dim=1)
    return GaussianEmbedding(
        **{
            "mean": mean,
            "variance": torch.rand(n, dim, generator=random) * 0.02 + 1e-3,
            "modality": modality,
            "source": SOURCE,
            "backbone": (mean + 0.1).numpy(),
            "ids": np.array([f"{modality}{row}" for row in range(n)]),
            "maker": {"adapter": "toy"},
            **changes,
        }
    )


@pytest.fixture
def world():
    """Thirty images, two captions each."""
    images = posterior(30, "image", 0)
    texts = posterior(60, "text", 1, near=images.mean.repeat_interleave(2, 0))
    links = np.stack([np.repeat(np.arange(30), 2), np.arange(60)], 1)
    return images, texts, links


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
@pytest.mark.parametrize("name", ["auto", *similarity.SIMILARITIES])
def test_recall_equals_the_dense_definition(world, direction, name):
    images, texts, links = world
    result = retrieve(images, texts, links=links, direction=direction, similarity=name, k=(1, 3, 200))
    truth = match_matrix(30, 60, links).toarray()
    queries, gallery = (images, texts) if direction == "i2t" else (texts, images)
    truth = truth if direction == "i2t" else truth.T
    observed = gallery.backbone if name == "likelihood" else gallery
    scores = similarity.SIMILARITIES["csd" if name == "auto" else name](queries, observed).numpy()
    order = np.argsort(-scores, axis=1)
    for k in (1, 3):
        expected = np.take_along_axis(truth, order[:, :k], 1).any(1)
        np.testing.assert_array_equal(result.recall_at[k], expected)
    assert result.recall_at[200].all()
    np.testing.assert_array_equal(result.correct, result.recall_at[1])
    assert 0.1 < result.correct.mean() < 1
    assert result.ids.tolist() == queries.ids.tolist()
    np.testing.assert_allclose(result.uncertainty, queries.uncertainty.numpy())
    assert result.provenance["similarity"] == ("csd" if name == "auto" else name)
    assert result.provenance["query_maker"] == {"adapter": "toy"}
    assert result.detail["gallery_ids"].tolist() == gallery.ids.tolist()


def test_the_first_answers_come_with_their_truth_and_probability(world):
    images, texts, links = world
    result = retrieve(images, texts, links=links, similarity="cosine", k=(1, 4))
    truth, top = match_matrix(30, 60, links).toarray(), result.detail["top"]
    np.testing.assert_array_equal(result.detail["top_correct"], np.take_along_axis(truth, top, 1))
    expected = (20 * similarity.cosine(images, texts)).double().softmax(1).numpy()
    np.testing.assert_allclose(result.detail["top_probabilities"], np.take_along_axis(expected, top, 1), rtol=1e-4)
    assert "top_probabilities" not in retrieve(images, texts, links=links, similarity="js").detail


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from(["i2t", "t2i"]))
def test_any_true_match_counts_under_random_many_to_many_truth(seed, direction):
    random = np.random.default_rng(seed)
    n, t = int(random.integers(1, 9)), int(random.integers(1, 9))
    images, texts = posterior(n, "image", seed), posterior(t, "text", seed + 1)
    truth = random.random((n, t)) < 0.3
    links = np.argwhere(truth)
    if not len(links):
        links = np.array([[0, 0]])
        truth[0, 0] = True
    cut = int(random.integers(1, len(links) + 1))
    result = retrieve(
        images,
        texts,
        links=links[:cut],
        positives=links[cut:],
        direction=direction,
        k=[1, 2],
        unmatched="drop",
    )
    queries, gallery = (images, texts) if direction == "i2t" else (texts, images)
    truth = truth if direction == "i2t" else truth.T
    asked = truth.any(1)
    order = np.argsort(-similarity.csd(queries, gallery).double().numpy(), axis=1, kind="stable")
    for k in (1, 2):
        np.testing.assert_array_equal(result.recall_at[k], np.take_along_axis(truth, order[:, :k], 1).any(1)[asked])
    assert result.ids.tolist() == queries.ids[asked].tolist()
    assert result.detail["unmatched"] == (~asked).sum()
    assert result.detail["unmatched_ids"] == queries.ids[~asked].tolist()
    np.testing.assert_array_equal(result.detail["n_matches"], truth.sum(1)[asked])


@pytest.mark.parametrize(
    ("name", "logits"),
    [
        ("cosine", lambda q, g: 20 * similarity.cosine(q, g)),
        ("csd", lambda q, g: 10 * similarity.csd(q, g)),
        ("wasserstein2", lambda q, g: 10 * similarity.wasserstein2(q, g)),
        ("expected_likelihood", similarity.expected_likelihood),
    ],
)
def test_confidence_is_the_largest_softmax_probability(world, name, logits):
    images, texts, links = world
    result = retrieve(images, texts, links=links, similarity=name)
    expected = logits(images, texts).double().softmax(1).amax(1)
    np.testing.assert_allclose(result.confidence, expected, rtol=1e-4)


def test_confidence_is_none_where_it_means_nothing(world):
    images, texts, links = world
    assert retrieve(images, texts, links=links, similarity="kl").confidence is None
    bare = [dataclasses.replace(side, source=Source(model="toy")) for side in (images, texts)]
    assert retrieve(*bare, links=links).confidence is None


def test_backbone_ranks_by_the_frozen_embeddings(world):
    images, texts, links = world
    result = retrieve(images, texts, links=links, rank_by="backbone")
    scores = similarity.cosine(images.backbone, texts.backbone)
    np.testing.assert_array_equal(result.detail["top"][:, 0], scores.argmax(1))
    np.testing.assert_allclose(result.uncertainty, images.uncertainty)
    assert result.provenance["similarity"] == "cosine"


def test_gallery_aware_posteriors_take_their_uncertainty_from_the_gallery(world):
    images, texts, links = (*(dataclasses.replace(side, gallery_aware=True) for side in world[:2]), world[2])
    nearest = similarity.cosine(images, texts).amax(1)
    result = retrieve(images, texts, links=links)
    assert result.provenance["similarity"] == "cosine"
    assert result.provenance["uncertainty"] == "one_minus_max_similarity"
    np.testing.assert_allclose(result.uncertainty, 1 - nearest, rtol=1e-4)
    by_csd = retrieve(images, texts, links=links, similarity="csd")
    np.testing.assert_allclose(by_csd.uncertainty, 1 - nearest, rtol=1e-4)
    own = retrieve(images, texts, links=links, uncertainty="posterior")
    np.testing.assert_allclose(own.uncertainty, images.uncertainty)
    smaller = retrieve(images, texts.take(np.arange(0, 60, 2)), links=np.stack([np.arange(30)] * 2, 1))
    assert (smaller.uncertainty >= result.uncertainty - 1e-12).all()


def test_true_pair_distance_reads_the_answer(world):
    images, texts, links = world
    result = retrieve(images, texts, links=links, uncertainty="true_pair_distance")
    cosines = similarity.cosine(images, texts).numpy().reshape(30, 30, 2)
    np.testing.assert_allclose(result.uncertainty, 1 - cosines[np.arange(30), np.arange(30)].max(1), atol=1e-6)
    assert result.provenance["uncertainty"] == "true_pair_distance"


def test_captions_of_an_image_form_a_group(world):
    images, texts, links = world
    result = retrieve(images, texts, links=links, direction="t2i", positives=np.array([[0, 59], [29, 0]]))
    assert result.groups.tolist() == np.repeat(np.arange(30), 2).tolist()
    assert retrieve(images, texts, links=links).groups is None


def test_a_caption_with_positives_only_belongs_to_its_first_true_image(world):
    images, texts, links = world
    result = retrieve(images, texts, links=links[:-1], positives=np.array([[7, 59], [9, 59]]), direction="t2i", k=1)
    assert result.groups[-2:].tolist() == [29, 7]


def test_queries_without_a_match_are_refused_by_default(world):
    images, texts, links = world
    with pytest.raises(InputError, match=r"got 2 of 30 images without one \(first: 'image28'\)"):
        retrieve(images, texts, links=links[:56])
    dropped = retrieve(images, texts, links=links[:56], unmatched="drop")
    assert len(dropped) == 28
    assert dropped.detail["unmatched_ids"] == ["image28", "image29"]
    kept = retrieve(images, texts, links=links[:56], unmatched="keep")
    assert len(kept) == 30
    assert kept.correct[28:].tolist() == [0, 0]
    np.testing.assert_array_equal(kept.correct[:28], dropped.correct)
    assert kept.detail["unmatched_ids"] == ["image28", "image29"]
    assert kept.detail["n_matches"][28:].tolist() == [0, 0]
    captions = retrieve(images, texts, links=links[:56], direction="t2i", unmatched="keep")
    assert len(set(captions.groups)) == 28 + 4  # captions without an image stand alone
    with pytest.raises(InputError, match="'true_pair_distance' expected queries with a true match"):
        retrieve(images, texts, links=links[:56], unmatched="keep", uncertainty="true_pair_distance")
    with pytest.raises(InputError, match="30 of 30"):
        retrieve(images, texts, links=links[:0], unmatched="drop")


def test_bad_input_is_one_sentence(world):
    images, texts, links = world
    with pytest.raises(InputError, match=r"retrieve\(images, texts"):
        retrieve(texts, images, links=links)
    with pytest.raises(InputTypeError, match="create_adapter"):
        retrieve(images.mean, texts, links=links)
    other = dataclasses.replace(texts, source=Source(model="toy", precision="amp_bf16", logit_scale=20.0))
    with pytest.raises(SourceMismatchError, match=r"precision 'fp32' ≠ 'amp_bf16'"):
        retrieve(images, other, links=links)
    with pytest.raises(InputError, match="expected rows from 0 to 29, got 30"):
        retrieve(images, texts, links=links + np.array([1, 0]))
    with pytest.raises(InputError, match="text column of positives"):
        retrieve(images, texts, links=links, positives=np.array([[0, 60]]))
    with pytest.raises(InputError, match=r"\(P, 2\) whole numbers"):
        retrieve(images, texts, links=links.astype(float))
    with pytest.raises(InputError, match="did you mean 'cosine'"):
        retrieve(images, texts, links=links, similarity="cosin")
    with pytest.raises(InputError, match="similarity='cosine', got 'csd'"):
        retrieve(images, texts, links=links, rank_by="backbone", similarity="csd")
    with pytest.raises(InputError, match="frozen embeddings, got none"):
        retrieve(dataclasses.replace(images, backbone=None), texts, links=links, rank_by="backbone")
    with pytest.raises(InputError, match="at least one depth"):
        retrieve(images, texts, links=links, k=())
    with pytest.raises(InputError, match="8-d embeddings, got 4-d"):
        retrieve(images, posterior(60, "text", 1, dim=4), links=links)
    for setting in ("direction", "rank_by", "uncertainty", "unmatched"):
        with pytest.raises(InputError, match=f"{setting} has no option 'x'"):
            retrieve(images, texts, links=links, **{setting: "x"})
