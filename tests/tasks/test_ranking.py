import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grove_adapters import calibrate, similarity
from grove_adapters.calibration import compare
from grove_adapters.embeddings import Source
from grove_adapters.posterior import GaussianEmbedding
from grove_adapters.tasks import retrieve


def posterior(mean, modality):
    mean = torch.as_tensor(mean, dtype=torch.float32)
    variance = 0.05 * torch.rand(mean.shape, generator=torch.Generator().manual_seed(len(mean))) + 1e-3
    return GaussianEmbedding(
        mean=mean, variance=variance, modality=modality, source=Source(model="toy", logit_scale=10.0)
    )


def definitions(order, true):
    """mAP@R, R-Precision and first rank of one query, by their words."""
    r = len(true)
    precision = [sum(item in true for item in order[: place + 1]) / (place + 1) for place in range(r)]
    average = sum(p for p, item in zip(precision, order[:r], strict=False) if item in true) / r
    return average, sum(item in true for item in order[:r]) / r, 1 + min(list(order).index(item) for item in true)


@pytest.mark.parametrize("name", similarity.SIMILARITIES)
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from(["i2t", "t2i"]), st.booleans())
def test_ranking_equals_its_definition(name, seed, direction, copies):
    random = np.random.default_rng(seed)
    n, t, dim = 12, 30, 4
    image, text = random.normal(size=(n, dim)), random.normal(size=(t, dim))
    images, texts = posterior(image, "image"), posterior(text, "text")
    if copies:  # equal captions: the lower row comes first
        rows = random.integers(0, 10, t)
        texts = GaussianEmbedding(
            mean=texts.mean[rows], variance=texts.variance[rows], modality="text", source=texts.source
        )
    links = np.unique(
        np.concatenate(
            [
                np.stack([np.arange(n), random.integers(0, t, n)], 1),
                np.stack([random.integers(0, n, t), np.arange(t)], 1),
                np.stack([random.integers(0, n, 20), random.integers(0, t, 20)], 1),
            ]
        ),
        axis=0,
    )
    result = retrieve(images, texts, links=links, direction=direction, similarity=name, k=1, ranking=True)
    queries, gallery = (images, texts) if direction == "i2t" else (texts, images)
    pairs = links if direction == "i2t" else links[:, ::-1]
    q, g = (similarity.gaussians(side) for side in (queries, gallery))
    exact = [
        similarity.paired(
            name,
            similarity.Gaussians(q.mean[[row]], q.variance[[row]]),
            similarity.Gaussians(g.mean, g.variance),
        ).numpy()
        for row in range(len(queries))
    ]
    for row, scores in enumerate(exact):
        order = np.lexsort((np.arange(len(scores)), -scores)).tolist()
        expected = definitions(order, set(pairs[pairs[:, 0] == row, 1].tolist()))
        got = [result.detail[key][row] for key in ("average_precision_at_r", "r_precision", "first_rank")]
        assert got == pytest.approx(expected)
    np.testing.assert_array_equal(result.detail["first_rank"] == 1, result.correct == 1)


def test_the_rest_of_the_result_stays():
    random = np.random.default_rng(0)
    images, texts = posterior(random.normal(size=(9, 4)), "image"), posterior(random.normal(size=(9, 4)), "text")
    links = np.stack(np.divmod(np.arange(81), 9), 1)[::2]
    plain, deep = (retrieve(images, texts, links=links, k=(1, 2), ranking=ranking) for ranking in (False, True))
    assert plain.detail["top"].shape == deep.detail["top"].shape == (9, 2)
    for name, value in plain.detail.items():
        np.testing.assert_array_equal(value, deep.detail[name])
    np.testing.assert_array_equal(plain.confidence, deep.confidence)
    assert "first_rank" not in plain.detail


def test_queries_without_a_match_come_last():
    random = np.random.default_rng(0)
    images, texts = posterior(random.normal(size=(4, 4)), "image"), posterior(random.normal(size=(7, 4)), "text")
    result = retrieve(images, texts, links=np.array([[1, 2], [1, 3]]), unmatched="keep", ranking=True)
    assert result.detail["first_rank"][[0, 2, 3]].tolist() == [8, 8, 8]
    assert result.detail["r_precision"][0] == result.detail["average_precision_at_r"][0] == 0
    assert 1 <= result.detail["first_rank"][1] <= 6
    dropped = retrieve(images, texts, links=np.array([[1, 2], [1, 3]]), unmatched="drop", ranking=True)
    assert dropped.detail["first_rank"] == result.detail["first_rank"][1]


def test_reports_and_comparisons_hold_the_ranking():
    random = np.random.default_rng(0)
    centre = random.normal(size=(150, 6))
    texts = posterior(centre + 0.5 * random.normal(size=centre.shape), "text")
    links = np.repeat(np.arange(150)[:, None], 2, 1)
    near, far = (
        retrieve(
            posterior(centre + noise * random.normal(size=centre.shape), "image"), texts, links=links, ranking=True
        )
        for noise in (0.2, 2.0)
    )
    report = calibrate(near, resamples=200)
    assert report.ranking["map_at_r"].value == pytest.approx(near.detail["average_precision_at_r"].mean())
    assert report.ranking["r_precision"].value == pytest.approx(near.correct.mean()), "one match: R-Precision is R@1"
    median = report.ranking["median_rank"]
    assert median.value == np.median(near.detail["first_rank"])
    assert median.low <= median.value <= median.high
    assert report.row()["median_rank"] == median.value
    assert type(report).from_json(report.to_json()).ranking["map_at_r"] == report.ranking["map_at_r"]
    comparison = compare(near, far, resamples=200)
    assert comparison.better("median_rank") == comparison.better("map_at_r") == 1
    assert comparison.differences["median_rank"].value < 0
    assert calibrate(dataclasses.replace(near, detail={}), resamples=0).ranking == {}
