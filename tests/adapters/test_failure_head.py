import math

import numpy as np
import pytest
import torch

from grove_adapters.adapters.failure_head import FailureHead, Head, Judged, _groups, failures
from grove_adapters.datasets import synthetic
from grove_adapters.embeddings import Embeddings, Pairs
from grove_adapters.errors import ConfigError, InputError

PAIRS = synthetic.make_pairs(60, dim=8).pairs
QUICK = {"hidden": 16, "layers": 1, "epochs": 3, "batch_size": 16, "folds": 3}
RANDOM = np.random.default_rng(0)


def pairs_of(images, texts, links=None, **more):
    rows = np.repeat(np.arange(len(images))[:, None], 2, 1) if links is None else np.asarray(links)
    return Pairs(Embeddings(images, modality="image"), Embeddings(texts, modality="text"), rows, **more)


def test_failures_are_wrong_top_matches():
    similarity = PAIRS.images.values @ PAIRS.texts.values.T
    for modality, top in (("image", similarity.argmax(1)), ("text", similarity.argmax(0))):
        assert np.array_equal(failures(PAIRS, modality), top != np.arange(60))


def test_positives_and_classes_are_no_failures():
    eye = np.eye(3, dtype=np.float32)
    swapped = eye[[1, 0, 2]]
    assert failures(pairs_of(eye, swapped), "image").tolist() == [True, True, False]
    more = {"positives": np.array([[0, 1]])}
    assert failures(pairs_of(eye, swapped, **more), "image").tolist() == [False, True, False]
    assert failures(pairs_of(eye, swapped, **more), "text").tolist() == [True, False, False]
    same = {"classes": np.array(["a", "a", "b"])}
    for modality in ("image", "text"):
        assert not failures(pairs_of(eye, swapped, **same), modality).any()


def test_every_item_is_judged_inside_its_fold_and_shown_a_reference_of_the_others():
    adapter = FailureHead(**QUICK)
    judged = adapter._judged_by_folds(PAIRS, np.arange(60), 0)
    assert len(judged) == 120
    seen = {modality: [] for modality in ("image", "text")}
    for modality, values, wrong, reference in judged.batches(torch.arange(120)):
        assert len(values) == len(wrong) == 20
        other = PAIRS.texts if modality == "image" else PAIRS.images
        rows = PAIRS.images if modality == "image" else PAIRS.texts
        items = [int((rows.values == value.numpy()).all(1).argmax()) for value in values]
        shown = {int((np.abs(other.values - row.numpy()) < 1e-6).all(1).argmax()) for row in reference}
        assert not shown & set(items), "an item's own match is never in what the head sees of it"
        assert len(shown) == 40
        inside = pairs_of(PAIRS.images.values[sorted(items)], PAIRS.texts.values[sorted(items)])
        expected = failures(inside, modality)
        order = np.argsort(items)
        assert np.array_equal(wrong.numpy()[order], expected)
        seen[modality] += items
    assert all(sorted(items) == list(range(60)) for items in seen.values())


def test_images_that_share_a_text_or_a_class_are_one_group():
    eye = np.eye(5, dtype=np.float32)
    links = [[0, 0], [1, 1], [2, 1], [3, 3], [4, 4]]
    assert _groups(pairs_of(eye, eye, links)).tolist() == [0, 1, 1, 2, 3]
    more = {"positives": np.array([[0, 4]]), "classes": np.array(list("abcbd"))}
    assert _groups(pairs_of(eye, eye, links, **more)).tolist() == [0, 1, 1, 1, 0]


def test_galleries_are_no_larger_than_asked():
    references = [{"image": torch.eye(8), "text": torch.eye(8)}]
    small = Judged(PAIRS, references, [np.arange(60)], 2)
    large = Judged(PAIRS, references, [np.arange(60)], 60)
    assert small.failure_rate("image") < 0.5 * large.failure_rate("image")
    assert large.failure_rate("text") == pytest.approx(failures(PAIRS, "text").mean())


def test_cross_entropy_weighs_both_answers_alike():
    head = Head(4, 5, hidden=3, layers=1)
    head.failure_rate.fill_(0.2)
    logits = torch.tensor(RANDOM.normal(size=10))
    wrong = torch.tensor([True, True] + 8 * [False])
    ours = head.cross_entropy(logits, wrong).double()
    plain = torch.nn.functional.binary_cross_entropy_with_logits(logits, wrong.double(), reduction="none")
    torch.testing.assert_close(ours.mean(), (plain[:2].mean() + plain[2:].mean()) / 2, rtol=1e-6, atol=0)
    exact = torch.where(wrong, -logits.sigmoid().log(), -(1 - logits.sigmoid()).log())
    torch.testing.assert_close(plain, exact, rtol=1e-8, atol=1e-12)


def test_logits_gradcheck():
    head = Head(3, 6, hidden=4, layers=1).double()
    torch.nn.init.normal_(head.mlp[-1].weight)
    reference = torch.nn.functional.normalize(torch.tensor(RANDOM.normal(size=(6, 3))), dim=1)
    head.start(reference, reference, 5.0, 0.5)
    values = torch.tensor(RANDOM.normal(size=(4, 3)), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: head.logits(x, reference), values)


def test_the_uncertainty_is_a_probability_at_the_failure_rate():
    world = synthetic.make_pairs(300, seed=2)
    adapter = FailureHead(**FailureHead.small_settings()).fit(world.pairs)
    for part in (world.pairs.images, world.pairs.texts):
        posterior = adapter.predict(part)
        rate = adapter.fit_report_.facts[part.modality]["failure_rate"]
        assert float(posterior.uncertainty.mean()) == pytest.approx(rate, abs=0.12)
        assert 0 <= float(posterior.uncertainty.min()) <= float(posterior.uncertainty.max()) <= 1
        spread = float(adapter.module_[part.modality].reference.var(0, correction=0).sum())
        torch.testing.assert_close(posterior.variance.sum(1), posterior.uncertainty * spread, rtol=1e-3, atol=1e-4)


def test_held_out_failures_are_found_better_than_by_chance():
    world = synthetic.make_pairs(800, seed=3, concept_dims=3)
    train, test = world.pairs.split(0.5)
    adapter = FailureHead(**{**FailureHead.small_settings(), "weight_decay": 1.0}).fit(train)
    for part in (test.images, test.texts):
        wrong, score = failures(test, part.modality), adapter.predict(part).uncertainty.numpy()
        auroc = (score[wrong][:, None] > score[~wrong]).mean()
        assert auroc > 0.55


def test_nothing_to_learn_is_said():
    eye = np.eye(12, dtype=np.float32)
    report = FailureHead(**QUICK).fit(pairs_of(eye, eye)).fit_report_
    assert len(report.warnings) == 2
    assert "is right" in report.warnings[0]
    same = np.full((30, 3), 1 / math.sqrt(3), dtype=np.float32)
    posterior = FailureHead(**QUICK).fit(pairs_of(same, same)).predict(pairs_of(same, same).texts)
    assert bool((posterior.variance > 0).all())


def test_one_pair_is_refused():
    with pytest.raises(InputError, match="at least 2 groups"):
        FailureHead(**QUICK).fit(pairs_of(np.ones((1, 3)), np.ones((1, 3))))


@pytest.mark.parametrize("dim", [1, 4096])
def test_widths_and_half_precision(dim):
    values = RANDOM.normal(size=(8, dim)).astype(np.float16)
    pairs = pairs_of(values, values[::-1])
    assert FailureHead(**QUICK).fit(pairs).predict(pairs.images).variance.shape == (8, dim)


def test_several_captions_and_images_without_a_link():
    texts = np.repeat(PAIRS.texts.values, 2, 0)[:80]
    links = np.stack([np.repeat(np.arange(40), 2), np.arange(80)], 1)
    pairs = pairs_of(PAIRS.images.values, texts, links)
    adapter = FailureHead(**QUICK).fit(pairs)
    assert adapter.fit_report_.facts["text"]["judged"] == 2 * adapter.fit_report_.facts["image"]["judged"]


def test_settings_out_of_range_are_refused():
    for bad in ({"folds": 1}, {"gallery_size": 1}, {"hidden": 0}, {"layers": -1}, {"reference_size": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            FailureHead(**bad)
