"""One self-contained report page: no script, no network, everything that came from outside escaped."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any, cast

import numpy as np

import grove_adapters
from grove_adapters import _checks, _io, plots
from grove_adapters.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from grove_adapters.calibration import CalibrationReport, Score


TITLE = "Can this uncertainty be trusted?"


@dataclass(frozen=True, kw_only=True)
class Example:
    """One query to look at.

    Attributes:
        query: The query in words: the caption, or what the image shows.
        image: PNG or JPEG bytes of the image that is the query or the answer, or None.
        answer: The first answer in words, where words say it.
        correct: Whether the first answer is true.
        uncertainty: Of the query.
        place: Share of the queries that are more certain, in [0, 1].
        note: A further line, such as the known ambiguity.
    """

    query: str
    image: bytes | None = None
    answer: str = ""
    correct: bool
    uncertainty: float
    place: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Examples of one adapter and direction, from most to least certain.

    Attributes:
        title: Heading.
        examples: In the order they are shown.
        note: What a card shows.
    """

    title: str
    examples: Sequence[Example]
    note: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class KnownTruth:
    """An ambiguity that is known for every query of a report, beside the uncertainty that was predicted.

    Attributes:
        adapter: Name of the adapter.
        direction: ``"i2t"`` or ``"t2i"``.
        name: What is known, with its unit.
        truth: (Q,) larger = more ambiguous.
        uncertainty: (Q,) predicted.
        score: Their Spearman correlation with its interval.
    """

    adapter: str
    direction: str
    name: str
    truth: np.ndarray = field(repr=False)
    uncertainty: np.ndarray = field(repr=False)
    score: Score


COLUMNS = {
    "recall@1": ("R@1", "share of first answers that are true"),
    "recall@5": ("R@5", "share of queries with a true answer among the first five"),
    "map_at_r": (
        "mAP@R",
        "mean precision over the first R answers, R being how many are true; 1 where those come first",
    ),
    "r_precision": ("R-P", "share of true answers among the first R"),
    "median_rank": ("median rank", "of the first true answer: smaller is better"),
    "spearman": ("S", "Spearman between level and recall: −1 where recall falls from every level to the next"),
    "r2": ("R²", "how straight that fall is: of the line through the levels"),
    "neg_s_r2": ("−S·R²", "both in one number: 1 is best"),
    "auroc": ("AUROC", "chance that a wrong answer is less certain than a right one: .5 is worthless, 1 is best"),
    "aurc": ("AURC", "mean error over all coverages: smaller is better"),
    "ece": ("ECE", "mean gap between the confidence of the first answer and its accuracy: smaller is better"),
}
"""Columns of the table: score → (heading, what it means)."""

Row = tuple[str, "CalibrationReport"]
"""A label and its report: one row of a table."""

KNOWN = ("ρ known", "Spearman between the uncertainty and the ambiguity that is known: 1 is best")


def report_page(
    reports: Sequence[CalibrationReport],
    *,
    labels: Sequence[str] | None = None,
    title: str = TITLE,
    known: Sequence[KnownTruth] = (),
    galleries: Sequence[Gallery] = (),
    facts: Mapping[str, Any] | None = None,
) -> str:
    """One HTML page about the reports; it can be mailed, printed and read without a network.

    Args:
        reports: At least one; those in one direction share a table and plots.
        labels: A name for each report; default its adapter.
        title: Heading of the page.
        known: Known ambiguities, drawn and put into the table.
        galleries: Examples to show.
        facts: Further provenance for the heading, by name.

    Raises:
        InputError: No report.
    """
    rows = _labelled(reports, labels)
    directions = list(dict.fromkeys(report.direction for report in reports))
    sections = [_heading(reports, title, facts or {}), "<h2>The comparison</h2>", _how_to_read_a_cell(reports[0])]
    for direction in directions:
        group = [row for row in rows if row[1].direction == direction]
        sections += [_table(group, known), _in_words(group)]
    sections += [_gallery(gallery) for gallery in galleries]
    drawings = draw(reports, labels, known)
    for direction in directions:
        report = next(report for report in reports if report.direction == direction)
        sections.append(f"<h2>{escape(direction_title(report))}</h2>")
        for kinds, width in ROWS_OF_FIGURES:
            row = [drawing for drawing in drawings if drawing.direction == direction and drawing.kind in kinds]
            sections.append(_figures(row, width))
    sections += [_how_to_read(reports, bool(known)), _provenance(rows)]
    style = resources.files("grove_adapters").joinpath("assets/report.css").read_text(encoding="utf-8")
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + f"\n<footer>Made by grove-adapters {escape(grove_adapters.__version__)}. "
        "The page needs no network and runs no script.</footer>\n</main>\n</body>\n</html>\n"
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # JSON can bring lone surrogates, which no file can hold


def _heading(reports: Sequence[CalibrationReport], title: str, facts: Mapping[str, Any]) -> str:
    first = reports[0]
    source = first.provenance.get("source") or {}
    model = "/".join(str(source[key]) for key in ("model", "pretrained") if source.get(key))
    chips: dict[str, Any] = {"model": model, **facts}
    for direction in dict.fromkeys(report.direction for report in reports):
        report = next(item for item in reports if item.direction == direction)
        size = f"{report.n_queries:,}"
        if report.provenance.get("n_gallery"):
            size += f" against {report.provenance['n_gallery']:,}"
        chips[f"queries {direction}".strip()] = size
    chips["intervals"] = f"{first.interval:.0%}, {first.resamples:,} resamples, seed {first.seed}"
    items = "".join(
        f"<li><span>{escape(str(name))}</span><b>{escape(str(value))}</b></li>"
        for name, value in chips.items()
        if value not in ("", None)
    )
    return (
        f"<header>\n<h1>{escape(title)}</h1>\n"
        '<p class="lead">An uncertainty is worth something if answers that are called uncertain are wrong more often. '
        "This page shows how far that holds, with intervals.</p>\n"
        f'<ul class="facts">{items}</ul>\n</header>'
    )


def _how_to_read_a_cell(report: CalibrationReport) -> str:
    return (
        f'<p class="note">Each cell holds the value and below it its {report.interval:.0%} interval over the queries. '
        "Where the intervals of two adapters overlap widely, the data does not tell them apart. "
        "The columns are explained at the end.</p>"
    )


def _table(rows: Sequence[Row], known: Sequence[KnownTruth]) -> str:
    direction = rows[0][1].direction
    present = _defined([report for _, report in rows])
    columns = {name: heading for name, (heading, _) in COLUMNS.items() if name in present}
    truths = {item.adapter: item.score for item in known if item.direction == direction}
    headings = [*columns.values(), *([KNOWN[0]] if truths else [])]
    lines = []
    for label, report in rows:
        scores = [report.named().get(name) for name in columns] + ([truths.get(label)] if truths else [])
        cells = "".join(_cell(heading, score) for heading, score in zip(headings, scores, strict=True))
        lines.append(f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    return (
        f"<table>\n<caption>{escape(direction_title(rows[0][1]))}</caption>\n"
        f'<thead><tr><th scope="col">adapter</th>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody>\n</table>"
    )


def direction_title(report: CalibrationReport) -> str:
    """How the direction of a report is called in headings."""
    return plots.DIRECTIONS.get(report.direction, report.direction or report.task).capitalize()


def _defined(reports: Sequence[CalibrationReport]) -> set[str]:
    """Scores that have a value in one report at least; the others are worth no column."""
    scores = [item for report in reports for item in report.named().items()]
    return {name for name, score in scores if not math.isnan(score.value)}


def _cell(heading: str, score: Score | None) -> str:
    label = f'data-label="{escape(heading)}"'
    if score is None or math.isnan(score.value):
        word = "–" if score is None else "undefined"
        return f'<td class="none" {label}>{word}</td>'
    interval = "" if math.isnan(score.low) else f"<small>{_number(score.low)} to {_number(score.high)}</small>"
    return f"<td {label}><span>{_number(score.value)}{interval}</span></td>"


def _number(value: float) -> str:
    text = f"{value:.3f}"
    return text.replace("-", "−" if float(text) else "")  # what rounds to zero has no sign


def _in_words(rows: Sequence[Row]) -> str:
    """What the risk–coverage curves say about answering only the more certain half."""
    parts = []
    for label, report in rows:
        curve = report.risk_coverage
        half = int(np.abs(curve.coverage - 0.5).argmin())
        if np.isfinite(curve.risk[[half, -1]]).all():
            parts.append(f"with {escape(label)} from {1 - curve.risk[-1]:.0%} to {1 - curve.risk[half]:.0%}")
    if not parts:
        return ""
    return (
        '<p class="note">Answering only the more certain half of the queries moves the share of true first answers '
        f"{', '.join(parts)}.</p>"
    )


ROWS_OF_FIGURES = ((("recall", "risk"), "two"), (("known",), "three"), (("reliability",), "three"))
"""Which kinds of figures stand side by side on the page, and in how many columns."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """One figure of the page.

    Attributes:
        name: Unique name, fit for a file: direction, kind, and the label where it shows one report only.
        direction: Of the reports it shows.
        kind: ``"recall"``, ``"risk"``, ``"known"`` or ``"reliability"``.
        ax: The axes.
    """

    name: str
    direction: str
    kind: str
    ax: Axes

    @property
    def canvas(self) -> Figure:
        """The figure to save."""
        return cast("Figure", self.ax.figure)


def draw(
    reports: Sequence[CalibrationReport],
    labels: Sequence[str] | None = None,
    known: Sequence[KnownTruth] = (),
) -> list[Drawing]:
    """Every figure of the page.

    Args:
        reports: At least one.
        labels: A name for each report; default its adapter.
        known: Known ambiguities.

    Raises:
        InputError: No report.
    """
    rows = _labelled(reports, labels)
    drawings: list[Drawing] = []

    def add(direction: str, kind: str, label: str, ax: Axes) -> None:
        name = _slug(f"{direction} {kind} {label}")
        twins = sum(drawing.name == name or drawing.name.startswith(f"{name}--") for drawing in drawings)
        drawings.append(Drawing(f"{name}--{twins + 1}" if twins else name, direction, kind, ax))

    for direction in dict.fromkeys(report.direction for report in reports):
        group = [row for row in rows if row[1].direction == direction]
        names, ours = [label for label, _ in group], [report for _, report in group]
        add(direction, "recall", "", plots.uncertainty_recall(ours, labels=names))
        add(direction, "risk", "", plots.risk_coverage(ours, labels=names))
        for item in known:
            if item.direction == direction:
                ax = plots.uncertainty_vs_truth(
                    item.uncertainty, item.truth, score=item.score, truth_name=item.name, label=item.adapter
                )
                add(direction, "known", item.adapter, ax)
        for label, report in group:
            if report.reliability is not None:
                add(direction, "reliability", label, plots.reliability(report, label=label))
    return drawings


def _labelled(reports: Sequence[CalibrationReport], labels: Sequence[str] | None) -> list[Row]:
    if not reports:
        raise InputError("a report page expected at least one report, got none; run grove-adapters evaluate first")
    names = [report.adapter or "report" for report in reports] if labels is None else list(labels)
    _checks.same_rows(len(reports), len(names), what="reports and their labels")
    return list(zip(names, reports, strict=True))


def _figures(drawings: Sequence[Drawing], width: str) -> str:
    figures = "\n".join(f"<figure>{svg(drawing)}</figure>" for drawing in drawings)
    return f'<div class="plots {width}">\n{figures}\n</div>' if drawings else ""


def svg(drawing: Drawing) -> str:
    """A figure as inline SVG, whose ink, paper and leading colours follow the page's light or dark theme."""
    import matplotlib

    title = drawing.ax.get_title(loc="left")
    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawing.name}):
        drawing.canvas.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    # ids are local to a drawing, but the page holds several
    text = re.sub(r'((?:id="|href="#|url\(#))', rf"\1{drawing.name}-", text)
    for colour, name in _THEMED.items():
        text = re.sub(colour, name, text, flags=re.IGNORECASE)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1).strip()


_THEMED = {
    plots.INK: "var(--ink)",
    plots.MUTED: "var(--muted)",
    plots.RULE: "var(--rule)",
    "#ffffff": "var(--paper)",
    plots.COLOURS[0]: f"var(--c-blue, {plots.COLOURS[0]})",
    plots.COLOURS[1]: f"var(--c-orange, {plots.COLOURS[1]})",
    plots.COLOURS[2]: f"var(--c-green, {plots.COLOURS[2]})",
}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _gallery(gallery: Gallery) -> str:
    cards = "\n".join(_card(example) for example in gallery.examples)
    return (
        f"<h2>{escape(gallery.title)}</h2>\n"
        + (f'<p class="note">{escape(gallery.note)}</p>\n' if gallery.note else "")
        + '<div class="scale">certain<i></i>uncertain</div>\n'
        f'<div class="examples">\n{cards}\n</div>'
    )


def _card(example: Example) -> str:
    picture = f'<img alt="" src="{_data_uri(example.image)}">' if example.image else ""
    verdict = "right" if example.correct else "wrong"
    mark = {"right": "✓", "wrong": "✗"}[verdict]
    answer = f": {escape(example.answer)}" if example.answer else ""
    note = f"<br>{escape(example.note)}" if example.note else ""
    uncertainty = f"{example.uncertainty:.3g}".replace("-", "−")
    # the strip takes the colour of the card's place on the scale above it
    place = f"background: var(--scale); background-size: 2000% 100%; background-position-x: {example.place:.0%}"
    return (
        f'<article class="example"><span class="place" style="{place}"></span>{picture}<div>'
        f'<p class="query">{escape(example.query)}</p>'
        f'<p class="{verdict}">{mark} {verdict}{answer}</p>'
        f'<p class="meta">less certain than {example.place:.0%} of all · uncertainty {uncertainty}{note}</p>'
        "</div></article>"
    )


def _data_uri(image: bytes) -> str:
    kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def _how_to_read(reports: Sequence[CalibrationReport], known: bool) -> str:
    present = _defined(reports)
    entries = [meaning for name, meaning in COLUMNS.items() if name in present] + ([KNOWN] if known else [])
    first = reports[0]
    levels = f"Queries are sorted by uncertainty and put into {first.levels_in_words}; recall is counted in each."
    apart = (
        "<p>To be ambiguous is not to be wrong: where many answers are true, a vague query is easy. So ρ known, which "
        "asks whether ambiguity is seen, and AUROC, which asks whether errors are, can disagree.</p>\n"
    )
    terms = "\n".join(f"<dt>{escape(symbol)}</dt><dd>{escape(meaning)}</dd>" for symbol, meaning in entries)
    return (
        f"<h2>How to read it</h2>\n<p>{escape(levels)} If the uncertainty can be trusted, recall falls from level to "
        "level, leaving out uncertain queries lowers the risk, and AUROC lies well above one half. A number without a "
        "value (“undefined”) cannot be computed from these queries, for instance a correlation where recall "
        f"never changes.</p>\n{apart if known else ''}<dl>\n{terms}\n</dl>"
    )


def _provenance(rows: Sequence[Row]) -> str:
    blocks = "\n".join(
        f"<details><summary>{escape(label)} {escape(report.direction)}</summary>"
        f"<pre>{escape(json.dumps(_io.jsonable(report.provenance), indent=2, ensure_ascii=False))}</pre></details>"
        for label, report in rows
    )
    return f"<h2>Provenance</h2>\n<p>How each result was made, as recorded in its report.</p>\n{blocks}"
