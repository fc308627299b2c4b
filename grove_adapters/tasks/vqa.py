"""Visual question answering with a dual encoder: each candidate answer is a text, the closest to the image wins."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from grove_adapters import _checks
from grove_adapters.errors import InputError
from grove_adapters.posterior import ProbabilisticEmbedding
from grove_adapters.similarity import SIMILARITIES, Gaussians, paired
from grove_adapters.tasks.base import TaskResult
from grove_adapters.tasks.reading import RankBy, check_pair, default_similarity, default_temperature, ranked, rows_by_id

AnswerConfidence = Literal["softmax", "as_published"]
AnswerUncertainty = Literal["one_minus_confidence", "entropy", "image", "answer"]
CandidateUncertainty = Literal["match", "posterior"]

CHUNK = 4096  # candidates compared at once


class AskedAbout(Protocol):
    """A question as `Questions.of` takes it; `datasets.scenes.Question` is one."""

    @property
    def id(self) -> str:
        """Unique name of the question."""

    @property
    def text(self) -> str:
        """The question in words."""

    @property
    def image_id(self) -> str:
        """The image it is asked about."""

    @property
    def candidates(self) -> Sequence[str]:
        """Answers to choose from."""

    @property
    def answers(self) -> Sequence[str]:
        """What annotators answered, ten in VQA v2."""


@dataclass(frozen=True, eq=False)
class Questions:
    """Q questions about images, with C candidate answers in all, written as T different texts.

    Embed `texts` under `text_ids`, and images under ids that hold `image_ids`; `answer` joins them by id.

    Attributes:
        ids: (Q,) unique names.
        image_ids: (Q,) the image each is asked about.
        texts: (T,) the texts to embed, a question with an answer; equal ones stand once.
        candidates: (C, 2) rows (question, text), sorted by question.
        answers: (C,) the answer of each candidate.
        annotations: (Q,) what annotators answered.
    """

    ids: np.ndarray
    image_ids: np.ndarray
    texts: tuple[str, ...]
    candidates: np.ndarray
    answers: np.ndarray
    annotations: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls,
        questions: Iterable[AskedAbout],
        *,
        template: str | Callable[[AskedAbout, str], str] = "{question} {answer}",
    ) -> Questions:
        """Lay out questions and write their candidates.

        Args:
            questions: At least one.
            template: How a question and an answer become a text: a pattern, or a function, which suits models that
                read statements better than questions.

        Raises:
            InputError: No question, duplicate ids, or one without candidates or annotators.
        """
        questions = list(questions)
        if not questions:
            raise InputError("Questions.of expected at least one question, got none")
        write = _pattern(template) if isinstance(template, str) else template
        place: dict[str, int] = {}
        candidates = []
        for row, question in enumerate(questions):
            if not question.candidates or not question.answers:
                lacking = "candidates" if not question.candidates else "annotators' answers"
                raise InputError(f"question {question.id!r} expected {lacking}, got none; leave it out")
            for answer_ in question.candidates:
                candidates.append((row, place.setdefault(write(question, answer_), len(place))))
        return cls(
            ids=_checks.as_ids([question.id for question in questions], len(questions), what="questions"),
            image_ids=np.array([question.image_id for question in questions]),
            texts=tuple(place),
            candidates=np.array(candidates, dtype=np.int64),
            answers=np.array([answer_ for question in questions for answer_ in question.candidates]),
            annotations=tuple(tuple(question.answers) for question in questions),
        )

    def __post_init__(self) -> None:
        if not np.array_equal(np.unique(self.candidates[:, 0]), np.arange(len(self.ids))):
            raise InputError("Questions expected candidates of every question, got questions without; leave them out")
        if (np.diff(self.candidates[:, 0]) < 0).any():
            raise InputError("Questions expected candidates sorted by question, got another order; use Questions.of")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def text_ids(self) -> np.ndarray:
        """(T,) the texts' own words, which are unique."""
        return np.array(self.texts)

    @property
    def starts(self) -> np.ndarray:
        """(Q,) row of each question's first candidate."""
        return np.searchsorted(self.candidates[:, 0], np.arange(len(self)))

    def soft_accuracy(self) -> np.ndarray:
        """(C,) soft accuracy of every candidate; see `soft_accuracy`."""
        said = [Counter(map(plain_answer, annotations)) for annotations in self.annotations]
        agree = [said[row][plain_answer(text)] for row, text in zip(self.candidates[:, 0], self.answers, strict=True)]
        asked = np.array([len(annotations) for annotations in self.annotations])[self.candidates[:, 0]]
        return _leave_one_out(np.array(agree), asked)


def answer(
    images: ProbabilisticEmbedding,
    texts: ProbabilisticEmbedding,
    *,
    questions: Questions,
    rank_by: RankBy = "posterior",
    similarity: str = "auto",
    choose_by: Literal["similarity", "uncertainty"] = "similarity",
    candidate_uncertainty: CandidateUncertainty = "match",
    confidence: AnswerConfidence = "softmax",
    uncertainty: AnswerUncertainty = "one_minus_confidence",
    temperature: float | None = None,
    k: int | Sequence[int] = (1,),
) -> TaskResult:
    """Answer every question with one of its candidates, and say how sure that is.

    Args:
        images: Posteriors that hold the questions' images by id.
        texts: Posteriors that hold the candidates' texts by id (`Questions.text_ids`).
        questions: The questions.
        rank_by: ``"posterior"``, or ``"backbone"`` for the cosine of the frozen embeddings.
        similarity: A name in `similarity.SIMILARITIES`, or ``"auto"`` as in `retrieve`.
        choose_by: The answer is the candidate most similar to the image, or that of least uncertainty u.
        candidate_uncertainty: u of a candidate: ``"match"``, −temperature · similarity of image and text in nats, or
            ``"posterior"``, the uncertainty of the text's posterior.
        confidence: ``"softmax"``: softmax(−u) over the question's candidates, at the answer. ``"as_published"``:
            1 − softmax(u), which sums to one less than the number of candidates, is at least 1 − 1/C for the least
            uncertain of C, and so says nothing; it is here to reproduce GroVE's Table 4.
        uncertainty: Of the result: ``"one_minus_confidence"``, ``"entropy"`` of softmax(−u) in nats, ``"image"`` or
            ``"answer"``, the uncertainty of the image's or the chosen text's posterior.
        temperature: Multiplier that makes a similarity a logit; default from the source as in `retrieve`. Only
            ``"match"`` needs it.
        k: Depths at which the best soft accuracy among the first k candidates is wanted.

    Returns:
        One row a question. `correct` is the soft accuracy of the answer, and `groups` keeps the questions of one image
        together. `detail` holds (Q,) ``answer`` in words, ``n_candidates``, ``entropy``, ``attainable`` (the best soft
        accuracy among the candidates), ``image_uncertainty`` and ``answer_uncertainty``.

    Raises:
        InputError: Ids that are missing, an unknown setting, no backbone, or no temperature where one is needed.
        InputTypeError: No posteriors.
        SourceMismatchError: Images and texts come from different models.

    Source: GroVE sec. 4.5 for the confidence; Goyal et al. 2017 for the accuracy.
    """
    check_pair(images, texts, task="answer")
    _checks.choice(rank_by, ("posterior", "backbone"), what="rank_by")
    _checks.choice(similarity, ("auto", *SIMILARITIES), what="similarity")
    _checks.choice(choose_by, ("similarity", "uncertainty"), what="choose_by")
    _checks.choice(candidate_uncertainty, ("match", "posterior"), what="candidate_uncertainty")
    _checks.choice(confidence, ("softmax", "as_published"), what="confidence")
    _checks.choice(uncertainty, ("one_minus_confidence", "entropy", "image", "answer"), what="uncertainty")
    depths = sorted({_checks.count(depth, what="k") for depth in ([k] if isinstance(k, int) else k)})
    if similarity == "auto":
        similarity = default_similarity(images, texts, rank_by)
    if temperature is None:
        temperature = default_temperature(similarity, images.source.logit_scale)
    if temperature is None and candidate_uncertainty == "match":
        raise InputError(
            f"candidate_uncertainty='match' expected a temperature, got similarity={similarity!r} of a source whose "
            f"logit_scale is {images.source.logit_scale}; give temperature=, the multiplier that makes it a logit"
        )

    asked, starts = questions.candidates[:, 0], questions.starts
    image_rows = _rows(images, questions.image_ids)
    text_rows = _rows(texts, questions.text_ids)[questions.candidates[:, 1]]
    closeness = _paired(
        similarity,
        ranked(images, rank_by, similarity),
        ranked(texts, rank_by, similarity, gallery=True),
        np.stack([image_rows[asked], text_rows], 1),
    )
    of_images, of_texts = (side.uncertainty.detach().cpu().double().numpy() for side in (images, texts))
    u = of_texts[text_rows] if candidate_uncertainty == "posterior" else -float(temperature or 1) * closeness
    order = np.lexsort((np.arange(len(u)), u if choose_by == "uncertainty" else -closeness, asked))
    chosen = order[starts]
    probability = _softmax(-u, asked, starts)
    sure = probability[chosen] if confidence == "softmax" else 1 - _softmax(u, asked, starts)[chosen]
    accuracy = questions.soft_accuracy()
    surprise = probability * np.log(np.maximum(probability, np.finfo(float).tiny))
    entropy = np.maximum(-np.add.reduceat(surprise, starts), 0)
    uncertain = {
        "one_minus_confidence": 1 - sure,
        "entropy": entropy,
        "image": of_images[image_rows],
        "answer": of_texts[text_rows[chosen]],
    }
    place = np.arange(len(order)) - starts[asked]  # of a candidate among its question's, once they are in order
    return TaskResult(
        task="vqa",
        ids=questions.ids,
        correct=accuracy[chosen],
        uncertainty=uncertain[uncertainty],
        confidence=sure,
        recall_at={depth: np.maximum.reduceat(np.where(place < depth, accuracy[order], 0), starts) for depth in depths},
        groups=image_rows,
        detail={
            "answer": questions.answers[chosen],
            "n_candidates": np.diff(starts, append=len(asked)),
            "entropy": entropy,
            "attainable": np.maximum.reduceat(accuracy, starts),
            "image_uncertainty": uncertain["image"],
            "answer_uncertainty": uncertain["answer"],
        },
        provenance={
            "rank_by": rank_by,
            "similarity": similarity,
            "choose_by": choose_by,
            "candidate_uncertainty": candidate_uncertainty,
            "confidence": confidence,
            "uncertainty": uncertainty,
            "logit_scale": images.source.logit_scale,
            "temperature": temperature,
            "n_queries": len(questions),
            "n_gallery": len(questions.texts),
            "source": images.source.to_dict(),
            "query_maker": images.maker,
            "gallery_maker": texts.maker,
        },
    )


def soft_accuracy(answer: str, annotations: Sequence[str]) -> float:
    """Accuracy of an answer against n annotators: mean over all n − 1 of them of min(how many agree / 3, 1).

    Answers are compared as `plain_answer` writes them, so "Two." agrees with "2". With ten annotators of whom 0, 1, 2,
    3 or more agree it is 0, .3, .6, .9 or 1.

    Source: the VQA v2 evaluation (Goyal et al. 2017).
    """
    agree = [plain_answer(other) for other in annotations].count(plain_answer(answer))
    return float(_leave_one_out(np.array(agree), np.array(len(annotations))))


def _leave_one_out(agree: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Mean of min(agreeing / 3, 1) over the n ways to leave one of n annotators out; of a single one, agreement."""
    without_one_of_them, without_another = np.minimum((agree - 1) / 3, 1), np.minimum(agree / 3, 1)
    mean = (agree * without_one_of_them + (n - agree) * without_another) / n
    return np.where(n == 1, agree.astype(np.float64), mean)


_NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    )
} | {"none": "0"}


@functools.lru_cache(maxsize=1 << 16)
def plain_answer(answer: str) -> str:
    """An answer as answers are compared: lower case, digits for number words, no articles and no punctuation.

    Source: the rules of the VQA evaluation. Theirs put apostrophes into contractions; here they are taken out, which
    makes the same answers equal.
    """
    words = re.sub(r"(?<=\d),(?=\d)|['’]", "", answer.lower())
    words = re.sub(r"(?<!\d)\.|\.(?!\d)|[^\w\s.]|_", " ", words)
    kept = [_NUMBERS.get(word, word) for word in words.split()]
    return " ".join(word for word in kept if word not in ("a", "an", "the"))


def _pattern(template: str) -> Callable[[AskedAbout, str], str]:
    return lambda question, answer: template.format(question=question.text, answer=answer)


def _rows(side: ProbabilisticEmbedding, ids: np.ndarray) -> np.ndarray:
    rows, there = rows_by_id(side.ids, ids)
    if not there.all():
        raise InputError(
            f"answer expected {side.modality} posteriors with the ids of the questions, got none for "
            f"{str(ids[there.argmin()])!r}; embed the {side.modality}s under those ids"
        )
    return rows


def _paired(similarity: str, images: Gaussians, texts: Gaussians, pairs: np.ndarray) -> np.ndarray:
    """(C,) similarities of (C, 2) rows (image, text)."""
    chunks = [pairs[start : start + CHUNK] for start in range(0, len(pairs), CHUNK)]
    scores = [paired(similarity, images.rows(chunk[:, 0]), texts.rows(chunk[:, 1])).cpu().numpy() for chunk in chunks]
    return np.concatenate(scores)


def _softmax(logits: np.ndarray, asked: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(C,) softmax among the candidates of each question."""
    raised: Any = np.exp(logits - np.maximum.reduceat(logits, starts)[asked])
    return raised / np.add.reduceat(raised, starts)[asked]
