import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from grove_adapters import html
from grove_adapters.calibration import Score
from grove_adapters.errors import InputError

HOSTILE = '<script>alert("x")</script><img src=http://evil.example/x.png onerror=alert(1)>\'"&'
PIXEL = b"\x89PNG\r\n\x1a\nrest"
VOID = {"meta", "img", "br", "i"}


class Tags(HTMLParser):
    """Every tag with its attributes, the visible text, and whether tags are closed in order."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID - {"i"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def reports(make_report):
    return [make_report(name, direction) for direction in ("i2t", "t2i") for name in ("ttda", "grove")]


@pytest.fixture(scope="module")
def known():
    truth = np.linspace(0, 1, 50)
    return [
        html.KnownTruth(
            adapter="grove",
            direction="t2i",
            name="ambiguity",
            truth=truth,
            uncertainty=truth**2,
            score=Score(0.912, 0.8, 0.95),
        )
    ]


@pytest.fixture(scope="module")
def page(reports, known):
    example = html.Example(query="a red circle", image=PIXEL, correct=True, uncertainty=0.5, place=0.25, note="note 1")
    return html.report_page(reports, known=known, galleries=[html.Gallery(title="Captions", examples=[example])])


def test_the_page_is_well_formed_and_loads_nothing(page):
    parsed = Tags(page)
    assert parsed.open == []
    names = {tag for tag, _ in parsed.tags}
    assert not names & {"script", "iframe", "link", "object", "embed", "form", "foreignobject"}
    for tag, attributes in parsed.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert (value or "").startswith(("data:image/", "#")), (tag, name, value)
    assert "@import" not in page
    assert set(re.findall(r"url\(([^)]{0,5})", page)) <= {"#i2t-", "#t2i-"}


def test_the_page_shows_every_score_with_its_interval(page, reports):
    text = " ".join(Tags(page).text)
    for report in reports:
        for name in ("recall", "spearman", "auroc"):
            value = f"{report.scores[name].value:.3f}".replace("-", "−")
            assert value in text, (report.adapter, report.direction, name)
    assert "0.912" in text
    assert "0.800 to 0.950" in text
    assert "ViT-B-32/openai" in text


def test_ids_are_unique_and_every_reference_finds_its_own(page):
    ids = [attributes["id"] for _, attributes in Tags(page).tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert references
    assert references <= set(ids)


def test_figures_follow_the_theme(page):
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert "var(--ink)" in drawings
    assert "#1f2328" not in drawings.lower()
    assert "<text" in drawings  # words stay words


def test_the_page_is_the_same_every_time(reports):
    assert html.report_page(reports[:1]) == html.report_page(reports[:1])


def test_everything_from_outside_is_escaped(reports):
    example = html.Example(
        query=HOSTILE, image=None, answer=HOSTILE, correct=False, uncertainty=1.0, place=1.0, note=HOSTILE
    )
    report = replace(
        reports[0],
        provenance={
            "query_maker": {"adapter": HOSTILE, "config": {HOSTILE: HOSTILE}},
            "source": {"model": HOSTILE, "pretrained": HOSTILE},
        },
        direction=HOSTILE,
    )
    truth = html.KnownTruth(
        adapter=HOSTILE, direction=HOSTILE, name=HOSTILE, truth=np.arange(9), uncertainty=np.arange(9), score=Score(1.0)
    )
    page = html.report_page(
        [report],
        title=HOSTILE,
        known=[truth],
        galleries=[html.Gallery(title=HOSTILE, examples=[example])],
        facts={HOSTILE: HOSTILE},
    )
    parsed = Tags(page)
    assert parsed.open == []
    assert not {tag for tag, _ in parsed.tags} & {"script"}
    assert not [attributes for tag, attributes in parsed.tags if tag == "img"]
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)


def test_lone_surrogates_can_be_written(reports):
    assert html.report_page(reports[:1], title="\ud800").encode("utf-8")


def test_undefined_scores_are_said_to_be_undefined(reports):
    report = replace(reports[0], scores={**reports[0].scores, "spearman": Score(math.nan)})
    assert "undefined</td>" in html.report_page([report, reports[1]])
    alone = html.report_page([report])
    assert "undefined</td>" not in alone  # a column without any value is left out
    assert 'data-label="S"' not in alone


def test_labels_replace_adapter_names_and_equal_names_keep_their_figures(reports):
    drawings = html.draw([reports[0], reports[0]], labels=["a b", "a-b"])
    names = [drawing.name for drawing in drawings]
    assert names == ["i2t-recall", "i2t-risk", "i2t-reliability-a-b", "i2t-reliability-a-b--2"]
    text = " ".join(Tags(html.report_page(reports[:2], labels=["first", "second"])).text)
    assert "first" in text
    assert "ttda:" not in text


def test_reports_without_confidence_have_no_diagram(make_report):
    kinds = {drawing.kind for drawing in html.draw([make_report(confidence=False)])}
    assert kinds == {"recall", "risk"}


def test_no_report_is_refused():
    with pytest.raises(InputError, match="at least one report"):
        html.report_page([])


def test_numbers_have_a_minus_and_zero_has_no_sign():
    assert [html._number(value) for value in (-0.5, -0.0004, 0.0, 0.25)] == ["−0.500", "0.000", "0.000", "0.250"]
