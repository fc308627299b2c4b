import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import betabinom

from grove_adapters.adapters import create_adapter
from grove_adapters.calibration import Conformal, conformalise
from grove_adapters.calibration.conformal import quantile
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.errors import InputError, InputTypeError, UnreadableError
from grove_adapters.tasks import TaskResult, retrieve

SCORES = ("threshold", "adaptive", "rank")


def result(n, size=12, *, depth=None, seed=0, positives=1, groups=None, matched=True):
    """A retrieval over a gallery, with probabilities that say something and truths drawn independently of them."""
    random = np.random.default_rng(seed)
    logits = 1.5 * random.normal(size=(n, size))
    order = np.argsort(-logits, axis=1)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    truth = np.zeros((n, size), dtype=bool)
    rows = np.arange(n)
    for _ in range(positives):
        noisy = logits + 2 * random.gumbel(size=logits.shape)
        truth[rows, noisy.argmax(1)] = True
    if not matched:
        truth[0] = False
    depth = depth or size
    top = order[:, :depth]
    return TaskResult(
        task="retrieval",
        direction="i2t",
        ids=np.array([f"q{row}" for row in rows]),
        correct=np.take_along_axis(truth, top, 1)[:, 0],
        uncertainty=np.zeros(n),
        groups=groups,
        detail={
            "top": top,
            "top_probabilities": np.take_along_axis(p, top, 1),
            "top_correct": np.take_along_axis(truth, top, 1),
            "n_matches": truth.sum(1),
            "gallery_ids": np.arange(size).astype(str),
        },
        provenance={"similarity": "cosine"},
    )


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 9), max_size=40), st.sampled_from([0.01, 0.05, 0.1, 0.25, 0.5, 0.9]))
def test_the_quantile_is_the_smallest_bound_with_enough_scores_below(scores, alpha):
    """Enough: as many that a further one, exchangeable with them, lies below with probability 1 − alpha."""
    bound = quantile(np.array(scores, dtype=float), alpha)
    needed = (1 - alpha) * (len(scores) + 1) - 1e-9
    enough = [s for s in sorted(scores) if sum(other <= s for other in scores) >= needed]
    assert bound == (enough[0] if enough else math.inf)


@pytest.mark.parametrize(
    ("n", "alpha", "finite"), [(9, 0.1, True), (8, 0.1, False), (19, 0.05, True), (18, 0.05, False)]
)
def test_as_few_scores_as_can_be(n, alpha, finite):
    assert math.isfinite(quantile(np.arange(n), alpha)) == finite
    assert math.isinf(quantile(np.array([]), alpha))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("positives", [1, 3])
@pytest.mark.parametrize("depth", [12, 5])
def test_coverage_over_random_splits_is_that_of_the_theory(score, positives, depth):
    """Without ties, the number of covered queries is exactly beta-binomial; with them (ranks) it is never fewer."""
    whole = result(240, depth=depth, positives=positives)
    n, m, alpha = 80, 160, 0.3
    missed = math.floor((n + 1) * alpha)
    law = betabinom(m, n + 1 - missed, missed)
    random = np.random.default_rng(1)
    counts = []
    for split in range(400):
        order = random.permutation(240)
        rule = conformalise(whole.take(order[:n]), alpha=alpha, score=score, seed=split)
        counts.append(rule.sets(whole.take(order[n:])).covered.sum())
    inside = np.mean((law.ppf(0.05) <= counts) & (counts <= law.ppf(0.95)))
    error = law.std() / np.sqrt(400)
    assert np.mean(counts) > law.mean() - 4 * error
    if score != "rank" and depth == 12:  # an answer not among the first five is tied with others that are not
        assert np.mean(counts) < law.mean() + 4 * error
        assert 0.84 < inside < 0.96


def test_sets_are_those_of_the_definition():
    held_out, others = result(60, seed=1), result(30, seed=2)
    p = np.take_along_axis(others.detail["top_probabilities"], np.argsort(others.detail["top"], 1), 1)
    rule = conformalise(held_out, alpha=0.2)
    best = -np.log(held_out.detail["top_probabilities"])[held_out.detail["top_correct"]]
    assert rule.thresholds == {"": np.sort(best)[math.ceil(61 * 0.8) - 1]}
    sets = rule.sets(others)
    for query in range(30):
        expected = np.flatnonzero(-np.log(p[query]) <= rule.thresholds[""])
        assert sorted(sets.rows(query)) == expected.tolist()
        assert sets.sizes[query] == len(expected)
    by_rank = conformalise(held_out, alpha=0.2, score="rank")
    assert (by_rank.sets(others).sizes == by_rank.thresholds[""]).all()
    places = np.argmax(held_out.detail["top_correct"], 1) + 1
    assert (places <= by_rank.thresholds[""]).mean() >= 0.8 > (places <= by_rank.thresholds[""] - 1).mean()


def test_tiny_probabilities_are_told_apart():
    """1 − p is 1 for all of them."""
    whole = result(200)
    tiny = dataclasses.replace(
        whole, detail={**whole.detail, "top_probabilities": whole.detail["top_probabilities"] * 1e-30}
    )
    expected = conformalise(whole).sets(whole)
    np.testing.assert_array_equal(conformalise(tiny).sets(tiny).included, expected.included)


def test_adaptive_sets_grow_with_difficulty():
    whole = result(3000, seed=3)
    rule = conformalise(whole.take(np.arange(1000)), alpha=0.2, score="adaptive")
    others = whole.take(np.arange(1000, 3000))
    sets = rule.sets(others)
    sure = others.detail["top_probabilities"][:, 0] > 0.5
    assert sets.sizes[sure].mean() + 1 < sets.sizes[~sure].mean()
    again = Conformal(**{**vars(rule), "seed": 1}).sets(others)
    assert not np.array_equal(sets.sizes, again.sizes)
    np.testing.assert_array_equal(sets.sizes, rule.sets(others).sizes)


def test_the_best_of_many_true_matches_counts():
    whole = result(400, positives=4, seed=4)
    one, rest = whole.take(np.arange(200)), whole.take(np.arange(200, 400))
    sizes = []
    for truth in (one.detail["top_correct"], _worst_only(one.detail["top_correct"])):
        kept = dataclasses.replace(one, detail={**one.detail, "top_correct": truth})
        sizes.append(conformalise(kept, alpha=0.1).sets(rest).sizes.mean())
    assert sizes[0] < sizes[1]


def _worst_only(truth):
    last = truth.shape[1] - 1 - truth[:, ::-1].argmax(1)
    return np.arange(truth.shape[1]) == last[:, None]


def test_every_category_is_covered_by_its_own_threshold():
    whole = result(4000, seed=5)
    truth = np.take_along_axis(whole.detail["top_correct"], np.argsort(whole.detail["top"], 1), 1).argmax(1)
    gallery = np.where(np.arange(12) < 3, "rare", "common")
    hard = truth < 3  # make one category hard: its answers come last
    probability = whole.detail["top_probabilities"].copy()
    probability[hard] = probability[hard][:, ::-1]
    order = np.argsort(-probability, axis=1)
    detail = {
        **whole.detail,
        **{name: np.take_along_axis(whole.detail[name], order, 1) for name in ("top", "top_correct")},
        "top_probabilities": np.take_along_axis(probability, order, 1),
    }
    whole = dataclasses.replace(whole, detail=detail)
    held_out, others = whole.take(np.arange(2000)), whole.take(np.arange(2000, 4000))
    rule = conformalise(held_out, alpha=0.1, categories=gallery[truth[:2000]])
    sets = rule.sets(others, gallery_categories=gallery)
    marginal = conformalise(held_out, alpha=0.1).sets(others)
    of_others = gallery[truth[2000:]]
    for name in ("rare", "common"):
        n, m = (gallery[truth[:2000]] == name).sum(), (of_others == name).sum()
        missed = math.floor((n + 1) * 0.1)
        low, high = betabinom(m, n + 1 - missed, missed).ppf([0.0005, 0.9995]) / m
        assert low <= sets.covered[of_others == name].mean() <= high
    assert marginal.covered[of_others == "rare"].mean() < low
    by_query = rule.sets(others, query_categories=of_others)
    np.testing.assert_array_equal(
        by_query.included,
        -np.log(others.detail["top_probabilities"]) <= np.array([rule.thresholds[c] for c in of_others])[:, None],
    )
    unseen = rule.sets(others, gallery_categories=np.full(12, "never"))
    assert (unseen.sizes == 12).all()


def test_too_few_queries_need_the_whole_gallery():
    rule = conformalise(result(8, depth=5), alpha=0.1)
    assert math.isinf(rule.thresholds[""])
    sets = rule.sets(result(6, depth=5, seed=1))
    assert sets.unbounded.all()
    assert sets.coverage == 1
    assert (sets.sizes == 12).all()
    assert sorted(sets.rows(0)) == list(range(12))
    assert sets.rows(0)[:5].tolist() == sets.top[0].tolist()
    whole = conformalise(result(8), alpha=0.1).sets(result(6, seed=1))
    assert not whole.unbounded.any()
    assert (whole.sizes == 12).all()


def test_one_query_of_each_group_counts():
    copies = np.repeat(np.arange(30), 4)
    alone = result(30, seed=6)
    whole = dataclasses.replace(
        alone,
        ids=np.arange(120).astype(str),
        correct=alone.correct[copies],
        uncertainty=alone.uncertainty[copies],
        groups=copies,
        detail={**alone.detail, **{name: value[copies] for name, value in alone.query_detail.items()}},
    )
    rule = conformalise(whole, alpha=0.1)
    assert rule.thresholds == conformalise(alone, alpha=0.1).thresholds
    assert rule.fitted_on["n_queries"] == 30


def test_deeper_results_are_cut_to_what_was_fitted():
    held_out, deep = result(200, depth=4), result(50, seed=1)
    rule = conformalise(held_out, alpha=0.5, score="rank")
    sets = rule.sets(deep)
    assert sets.top.shape == (50, 4)
    with pytest.raises(InputError, match="the first 4 answers of each query, got 3; retrieve with k=4"):
        rule.sets(result(50, depth=3))
    with pytest.raises(InputError, match="the first 12 answers"):
        conformalise(deep).sets(result(50, depth=4))


@pytest.mark.parametrize("score", SCORES)
def test_a_file_gives_the_same_sets(score, tmp_path):
    held_out, others = result(60), result(30, seed=1)
    categories = np.where(np.arange(60) < 55, "a", "b")
    rule = conformalise(held_out, alpha=0.1, score=score, categories=categories)
    assert math.isinf(rule.thresholds["b"])
    again = Conformal.load(rule.save(tmp_path / "conformal.json"))
    assert dataclasses.asdict(again) == dataclasses.asdict(rule)
    both = [r.sets(others, query_categories=np.repeat(["a", "b"], 15)).included for r in (rule, again)]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("text", ["{}", "{", '{"schema": 1, "conformal": {"thresholds": []}}'])
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UnreadableError):
        Conformal.load(tmp_path / "x.json")


def test_sets_of_a_real_retrieval():
    pairs = make_pairs(400, dim=32).pairs
    adapter = create_adapter("deterministic").fit(pairs)
    held_out, others = (
        retrieve(
            adapter.predict(part.images), adapter.predict(part.texts), links=part.links, temperature=20.0, k=(1, 50)
        )
        for part in pairs.split(0.5, seed=0)
    )
    for score in SCORES:
        sets = conformalise(held_out, alpha=0.3, score=score).sets(others)
        assert 0.6 < sets.coverage < 0.8
        hits = [
            others.detail["top_correct"][row][np.isin(others.detail["top"][row], sets.rows(row))].any()
            for row in range(len(sets))
        ]
        np.testing.assert_array_equal(hits, sets.covered)


def test_bad_input_is_one_sentence():
    held_out = result(40)
    with pytest.raises(InputTypeError, match="got ndarray"):
        conformalise(held_out.correct)
    with pytest.raises(InputError, match="alpha expected a share"):
        conformalise(held_out, alpha=1.0)
    with pytest.raises(InputError, match="score has no option 'ranks'; did you mean 'rank'"):
        conformalise(held_out, score="ranks")
    with pytest.raises(InputError, match=r"got 1 without one \(first: 'q0'\); retrieve with unmatched='drop'"):
        conformalise(result(40, matched=False))
    with pytest.raises(InputError, match="categories: expected 40 rows, got 3"):
        conformalise(held_out, categories=["a", "b", "c"])
    bare = dataclasses.replace(held_out, detail={k: v for k, v in held_out.detail.items() if k != "top_probabilities"})
    conformalise(bare, score="rank")
    with pytest.raises(InputError, match="without top_probabilities; retrieve with a temperature"):
        conformalise(bare)
    rule = conformalise(held_out)
    with pytest.raises(InputError, match="no categories as they were fitted, got 1"):
        rule.sets(held_out, query_categories=np.zeros(40))
    with pytest.raises(InputError, match="similarity 'cosine' as fitted on, got 'csd'"):
        rule.sets(dataclasses.replace(held_out, provenance={"similarity": "csd"}))
    by_category = conformalise(held_out, categories=np.zeros(40))
    with pytest.raises(InputError, match="query_categories or gallery_categories as they were fitted, got 0"):
        by_category.sets(held_out)
    with pytest.raises(InputError, match="got 2 of the two"):
        by_category.sets(held_out, query_categories=np.zeros(40), gallery_categories=np.zeros(12))
    with pytest.raises(InputError, match="query_categories: expected 40 rows"):
        by_category.sets(held_out, query_categories=np.zeros(3))
    shallow = result(40, depth=4)
    with pytest.raises(InputError, match="the first 4 of 12 answers"):
        conformalise(shallow, categories=np.zeros(40)).sets(shallow, gallery_categories=np.zeros(12))
