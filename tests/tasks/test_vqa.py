from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grove_adapters import calibrate
from grove_adapters.embeddings import Source
from grove_adapters.errors import InputError, InputTypeError
from grove_adapters.posterior import GaussianEmbedding
from grove_adapters.tasks import Questions, answer, soft_accuracy
from grove_adapters.tasks.vqa import plain_answer

SOURCE = Source(model="toy", logit_scale=20.0)


@dataclass
class Asked:
    id: str
    text: str
    image_id: str
    candidates: tuple
    answers: tuple


def posterior(ids, modality, seed, **changes):
    random = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(len(ids), 6, generator=random), dim=1)
    return GaussianEmbedding(
        **{
            "mean": mean,
            "variance": torch.rand(len(ids), 6, generator=random) * 0.02 + 1e-3,
            "modality": modality,
            "source": SOURCE,
            "backbone": mean.flip(1).numpy(),
            "ids": np.array(ids),
            "maker": {"adapter": "toy"},
            **changes,
        }
    )


@pytest.fixture
def world():
    """Forty questions about twenty images with two to five candidates, some of them shared."""
    random = np.random.default_rng(0)
    colours = ["red", "green", "blue", "grey", "pink"]
    asked = []
    for row in range(40):
        candidates = tuple(colours[: 2 + row % 4])
        answers = tuple(random.choice(candidates, 10))
        asked.append(Asked(f"q{row}", f"What colour is thing {row % 3}?", f"image{row // 2}", candidates, answers))
    questions = Questions.of(asked)
    images = posterior([f"image{row}" for row in random.permutation(25)], "image", 1)
    texts = posterior(random.permutation(questions.text_ids), "text", 2)
    return images, texts, questions, asked


@settings(deadline=None)
@given(st.integers(0, 10), st.integers(2, 12))
def test_soft_accuracy_is_the_mean_over_leave_one_out_subsets(agree, n):
    agree = min(agree, n)
    annotations = ["yes"] * agree + [f"other {number}" for number in range(n - agree)]
    subsets = [sum(said == "yes" for said in subset) for subset in combinations(annotations, n - 1)]
    expected = np.mean([min(count / 3, 1) for count in subsets])
    assert soft_accuracy("Yes.", annotations) == pytest.approx(expected)


def test_soft_accuracy_of_ten_annotators():
    got = [soft_accuracy("a", ["a"] * agree + list("bcdefghijk")[: 10 - agree]) for agree in range(11)]
    assert got == pytest.approx([0, 0.3, 0.6, 0.9, *[1] * 7])
    assert soft_accuracy("a", ["a"]) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Two", "2"),
        ("none", "0"),
        ("The dog.", "dog"),
        ("don't", "dont"),
        ("1,000", "1000"),
        ("black-and-white", "black and white"),
        ("  on   top ", "on top"),
    ],
)
def test_answers_that_mean_the_same_are_equal(one, other):
    assert plain_answer(one) == plain_answer(other)


def test_answers_that_differ_stay_different():
    assert plain_answer("2.5") != plain_answer("25")
    assert plain_answer("another") == "another"
    assert plain_answer("tone") == "tone"


def test_candidates_are_texts_and_equal_ones_stand_once(world):
    _, _, questions, asked = world
    assert len(questions) == 40
    assert len(set(questions.texts)) == len(questions.texts) == 15
    assert questions.texts[0] == "What colour is thing 0? red"
    for (row, text), said in zip(questions.candidates, questions.answers, strict=True):
        assert questions.texts[text] == f"{asked[row].text} {said}"
    assert np.diff(questions.starts, append=len(questions.answers)).tolist() == [len(q.candidates) for q in asked]
    statement = Questions.of(asked, template=lambda question, said: f"something {said}")
    assert statement.texts == tuple(f"something {said}" for said in ("red", "green", "blue", "grey", "pink"))


@pytest.mark.parametrize("confidence", ["softmax", "as_published"])
@pytest.mark.parametrize("candidate_uncertainty", ["match", "posterior"])
@pytest.mark.parametrize("choose_by", ["similarity", "uncertainty"])
def test_answers_follow_their_definition(world, confidence, candidate_uncertainty, choose_by):
    images, texts, questions, asked = world
    how = {"confidence": confidence, "candidate_uncertainty": candidate_uncertainty, "choose_by": choose_by}
    result = answer(images, texts, questions=questions, k=(1, 2), **how)
    of_image = dict(zip(images.ids.tolist(), range(25), strict=True))
    of_text = dict(zip(texts.ids.tolist(), range(15), strict=True))
    for row, question in enumerate(asked):
        i = of_image[question.image_id]
        t = [of_text[f"{question.text} {said}"] for said in question.candidates]
        distance = (
            (images.mean[i] - texts.mean[t]).square().sum(1) + images.variance[i].sum() + texts.variance[t].sum(1)
        )
        u = 10 * distance.double() if candidate_uncertainty == "match" else texts.uncertainty[t].double()
        order = torch.argsort(distance if choose_by == "similarity" else u)
        best = int(order[0])
        assert result.detail["answer"][row] == question.candidates[best]
        accuracy = [soft_accuracy(said, question.answers) for said in question.candidates]
        assert result.correct[row] == pytest.approx(accuracy[best])
        assert result.recall_at[2][row] == pytest.approx(max(accuracy[best], accuracy[int(order[1])]))
        assert result.detail["attainable"][row] == pytest.approx(max(accuracy))
        published, sane = 1 - u.softmax(0), (-u).softmax(0)
        expected = published if confidence == "as_published" else sane
        assert result.confidence[row] == pytest.approx(float(expected[best]), abs=1e-5)
        assert result.detail["entropy"][row] == pytest.approx(float(-(sane * sane.log()).sum()), abs=1e-5)
        assert result.detail["answer_uncertainty"][row] == pytest.approx(float(texts.uncertainty[t[best]]))
        if confidence == "as_published" and choose_by == "uncertainty":
            assert result.confidence[row] >= 1 - 1 / len(t) - 1e-9, "as published, the answer is always sure"
    np.testing.assert_allclose(result.uncertainty, 1 - result.confidence)
    assert result.groups.tolist() == [of_image[question.image_id] for question in asked]
    report = calibrate(result, resamples=10)
    assert (report.task, report.n_groups) == ("vqa", 20)


def test_the_other_uncertainties_and_the_backbone(world):
    images, texts, questions, _ = world
    by_entropy = answer(images, texts, questions=questions, uncertainty="entropy")
    np.testing.assert_array_equal(by_entropy.uncertainty, by_entropy.detail["entropy"])
    for name in ("image", "answer"):
        result = answer(images, texts, questions=questions, uncertainty=name)
        np.testing.assert_array_equal(result.uncertainty, result.detail[f"{name}_uncertainty"])
    frozen = answer(images, texts, questions=questions, rank_by="backbone")
    assert frozen.provenance["similarity"] == "cosine"
    image = torch.as_tensor(images.backbone)[[images.ids.tolist().index(name) for name in questions.image_ids]]
    text = torch.as_tensor(texts.backbone)[[texts.ids.tolist().index(name) for name in questions.text_ids]]
    cosine = (image[questions.candidates[:, 0]] * text[questions.candidates[:, 1]]).sum(1).numpy()
    stops = [*questions.starts[1:], len(cosine)]
    best = [start + cosine[start:stop].argmax() for start, stop in zip(questions.starts, stops, strict=True)]
    assert frozen.detail["answer"].tolist() == questions.answers[best].tolist()


def test_far_apart_candidates_do_not_overflow(world):
    images, texts, questions, _ = world
    sure = answer(images, texts, questions=questions, temperature=1e6)
    assert sure.confidence.min() > 0.99
    assert np.isfinite(sure.detail["entropy"]).all()


def test_bad_input_is_one_sentence(world):
    images, texts, questions, asked = world
    with pytest.raises(InputError, match="got none for 'image"):
        answer(images.take(np.arange(5)), texts, questions=questions)
    with pytest.raises(InputError, match="text posteriors with the ids"):
        answer(images, texts.take(np.arange(5)), questions=questions)
    with pytest.raises(InputError, match="expected a temperature"):
        answer(images, texts, questions=questions, similarity="kl")
    with pytest.raises(InputError, match="did you mean 'as_published'"):
        answer(images, texts, questions=questions, confidence="as_publised")
    with pytest.raises(InputTypeError, match="answer expected a posterior of images"):
        answer(images.mean, texts, questions=questions)
    with pytest.raises(InputError, match="at least one question"):
        Questions.of([])
    with pytest.raises(InputError, match="expected candidates, got none"):
        Questions.of([Asked("q", "?", "i", (), ("yes",))])
    with pytest.raises(InputError, match="annotators' answers, got none"):
        Questions.of([Asked("q", "?", "i", ("yes",), ())])
    with pytest.raises(InputError, match="unique ids"):
        Questions.of([asked[0], asked[0]])


def statement(question, said):
    """What the answer says about the picture, as its captions would."""
    if question.kind == "background":
        return f"some shapes on a {said} background"
    if question.kind == "colour":
        return f"a {said} shape {question.text.removeprefix('What colour is the shape ').removesuffix('?')}"
    return {"one": "one shape"}.get(said, f"{said} shapes")


def test_the_bundled_model_answers_questions_about_scenes():
    from grove_adapters import Embeddings, Pairs, create_adapter
    from grove_adapters.datasets.scenes import Scenes
    from grove_adapters.datasets.scenes.world import ScenePrior
    from grove_adapters.datasets.tiny_clip import load_tiny_clip

    scenes = Scenes.generate(60, seed=5, prior=ScenePrior().clean())
    kinds = ("background", "colour", "count")
    asked = [question for question in scenes.questions(7) if question.kind in kinds]
    questions = Questions.of(asked, template=statement)
    model, preprocess, tokenizer = load_tiny_clip()
    with torch.no_grad():
        pixels = torch.stack([preprocess(scenes.image(row)) for row in range(len(scenes))])
        sides = [model.encode_image(pixels), model.encode_text(tokenizer(list(questions.texts)))]
    source = Source(model="tiny", logit_scale=float(model.logit_scale.detach().exp()))
    images, texts = (
        Embeddings(torch.nn.functional.normalize(x, dim=1), ids, modality=modality, source=source)
        for x, ids, modality in zip(sides, (scenes.image_ids, questions.text_ids), ("image", "text"), strict=True)
    )
    adapter = create_adapter("deterministic").fit(Pairs(images, texts, np.zeros((1, 2), dtype=int)))
    result = answer(adapter.predict(images), adapter.predict(texts), questions=questions)
    kind = np.array([question.kind for question in asked])
    of_candidate, sizes = questions.soft_accuracy(), np.diff(questions.starts, append=len(questions.answers))
    chance = np.mean(np.add.reduceat(of_candidate, questions.starts) / sizes)
    assert result.correct.mean() > chance + 0.15
    assert result.correct[kind == "background"].mean() > 0.6
    report = calibrate(result, resamples=200)
    assert report.scores["auroc"].value > 0.55
    published = answer(adapter.predict(images), adapter.predict(texts), questions=questions, confidence="as_published")
    assert calibrate(published, resamples=0).scores["ece"].value > report.scores["ece"].value
