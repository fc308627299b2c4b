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
from typing import TYPE_CHECKING, Any

import numpy as np

from grove_adapters import __version__, _io, plots
from grove_adapters.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from grove_adapters.calibration import CalibrationReport, Score


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
    """

    title: str
    examples: Sequence[Example]


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
    "spearman": ("S", "Spearman between level and recall: −1 where recall falls from every level to the next"),
    "r2": ("R²", "how straight that fall is: of the line through the levels"),
    "neg_s_r2": ("−S·R²", "both in one number: 1 is best"),
    "auroc": ("AUROC", "chance that a wrong answer is less certain than a right one: .5 is worthless, 1 is best"),
    "aurc": ("AURC", "mean error over all coverages: smaller is better"),
    "ece": ("ECE", "mean gap between the confidence of the first answer and its accuracy: smaller is better"),
}
"""Columns of the table: score → (heading, what it means)."""

KNOWN = ("ρ known", "Spearman between the uncertainty and the ambiguity that is known: 1 is best")


def report_page(
    reports: Sequence[CalibrationReport],
    *,
    title: str = "Can this uncertainty be trusted?",
    known: Sequence[KnownTruth] = (),
    galleries: Sequence[Gallery] = (),
    facts: Mapping[str, Any] | None = None,
) -> str:
    """One HTML page about the reports; it can be mailed, printed and read without a network.

    Args:
        reports: At least one; those in one direction share a table and plots.
        title: Heading of the page.
        known: Known ambiguities, drawn and put into the table.
        galleries: Examples to show.
        facts: Further provenance for the heading, by name.

    Raises:
        InputError: No report.
    """
    reports = list(reports)
    if not reports:
        raise InputError("a report page expected at least one report, got none; run grove-adapters evaluate first")
    directions = list(dict.fromkeys(report.direction for report in reports))
    by_direction = {name: [report for report in reports if report.direction == name] for name in directions}
    sections = [_heading(reports, title, facts or {})]
    sections.append("<h2>The comparison</h2>\n" + _how_to_read_a_cell(reports[0]))
    sections += [_table(group, known) + _in_words(group) for group in by_direction.values()]
    sections += [_gallery(gallery) for gallery in galleries]
    for name, group in by_direction.items():
        sections.append(_figures(group, [item for item in known if item.direction == name]))
    sections += [_how_to_read(reports, bool(known)), _provenance(reports)]
    style = resources.files("grove_adapters").joinpath("assets/report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; "
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + f"\n<footer>Made by grove-adapters {escape(__version__)}. The page needs no network and runs no script.</footer>"
        "\n</main>\n</body>\n</html>\n"
    )


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
        f"<li><span>{escape(str(name))}</span><b>{escape(str(value))}</b></li>" for name, value in chips.items() if value
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


def _table(reports: Sequence[CalibrationReport], known: Sequence[KnownTruth]) -> str:
    columns = {name: heading for name, (heading, _) in COLUMNS.items() if any(name in _scores(r) for r in reports)}
    truths = {item.adapter: item for item in known if item.direction == reports[0].direction}
    headings = [*columns.values(), *([KNOWN[0]] if truths else [])]
    rows = []
    for report in reports:
        scores = [_scores(report).get(name) for name in columns]
        if truths:
            scores.append(truths[report.adapter].score if report.adapter in truths else None)
        cells = "".join(_cell(heading, score) for heading, score in zip(headings, scores, strict=True))
        rows.append(f'<tr><th scope="row">{escape(report.adapter or "report")}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    return (
        f"<table>\n<caption>{escape(_direction(reports[0]))}</caption>\n"
        f'<thead><tr><th scope="col">adapter</th>{head}</tr></thead>\n<tbody>\n' + "\n".join(rows) + "\n</tbody>\n</table>"
    )


def _direction(report: CalibrationReport) -> str:
    return plots.DIRECTIONS.get(report.direction, report.direction or report.task).capitalize()


def _scores(report: CalibrationReport) -> dict[str, Score]:
    return {**{f"recall@{k}": score for k, score in report.recall_at.items()}, **report.scores}


def _cell(heading: str, score: Score | None) -> str:
    label = f'data-label="{escape(heading)}"'
    if score is None or math.isnan(score.value):
        word = "–" if score is None else "undefined"
        return f'<td class="none" {label}>{word}</td>'
    interval = "" if math.isnan(score.low) else f"<small>{_number(score.low)} to {_number(score.high)}</small>"
    return f"<td {label}><span>{_number(score.value)}{interval}</span></td>"


def _number(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _in_words(reports: Sequence[CalibrationReport]) -> str:
    """What the risk–coverage curves say about answering only the more certain half."""
    parts = []
    for report in reports:
        curve = report.risk_coverage
        half = int(np.abs(curve.coverage - 0.5).argmin())
        if np.isfinite(curve.risk[[half, -1]]).all():
            all_right, half_right = 1 - curve.risk[-1], 1 - curve.risk[half]
            parts.append(f"with {escape(report.adapter or 'the report')} from {all_right:.0%} to {half_right:.0%}")
    if not parts:
        return ""
    return (
        f'\n<p class="note">Answering only the more certain half of the queries moves the share of true first answers '
        f"{'; '.join(parts)}.</p>"
    )


def _figures(reports: Sequence[CalibrationReport], known: Sequence[KnownTruth]) -> str:
    truths = [
        plots.uncertainty_vs_truth(
            item.uncertainty, item.truth, score=item.score, truth_name=item.name, label=item.adapter
        )
        for item in known
    ]
    diagrams = [plots.reliability(report) for report in reports if report.reliability is not None]
    return f"<h2>{escape(_direction(reports[0]))}</h2>\n" + "\n".join(
        f'<div class="plots {width}">\n' + "\n".join(f"<figure>{svg(ax)}</figure>" for ax in row) + "\n</div>"
        for width, row in (
            ("two", [plots.uncertainty_recall(reports), plots.risk_coverage(reports)]),
            ("three", truths),
            ("three", diagrams),
        )
        if row
    )


def svg(ax: Axes) -> str:
    """The figure of `ax` as inline SVG, whose ink, paper and leading colours follow the page's light or dark theme."""
    import matplotlib

    title = ax.get_title(loc="left")
    drawing = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        ax.figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None})
    text = drawing.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    # ids are local to a drawing, but the page holds several
    text = re.sub(r'((?:id="|href="#|url\(#))', rf"\1{_slug(title)}-", text)
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
        '<div class="scale">certain<i></i>uncertain</div>\n'
        f'<div class="examples">\n{cards}\n</div>'
    )


def _card(example: Example) -> str:
    picture = f'<img alt="" src="{_data_uri(example.image)}">' if example.image else ""
    verdict = "right" if example.correct else "wrong"
    mark = {"right": "✓", "wrong": "✗"}[verdict]
    answer = f": {escape(example.answer)}" if example.answer else ""
    note = f"<br>{escape(example.note)}" if example.note else ""
    # the strip takes the colour of the card's place on the scale above it
    place = f"background: var(--scale); background-size: 2000% 100%; background-position-x: {example.place:.0%}"
    return (
        f'<article class="example"><span class="place" style="{place}"></span>{picture}<div>'
        f'<p class="query">{escape(example.query)}</p>'
        f'<p class="{verdict}">{mark} {verdict}{answer}</p>'
        f'<p class="meta">less certain than {example.place:.0%} · uncertainty {example.uncertainty:.3g}{note}</p>'
        "</div></article>"
    )


def _data_uri(image: bytes) -> str:
    kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def _how_to_read(reports: Sequence[CalibrationReport], known: bool) -> str:
    present = {name for report in reports for name in _scores(report)}
    entries = [meaning for name, meaning in COLUMNS.items() if name in present] + ([KNOWN] if known else [])
    first = reports[0]
    levels = (
        f"Queries are sorted by uncertainty and cut into {len(first.levels)} levels "
        f"({first.protocol.replace('_', ' ')}); recall is counted in each."
    )
    terms = "\n".join(f"<dt>{escape(symbol)}</dt><dd>{escape(meaning)}</dd>" for symbol, meaning in entries)
    return (
        f"<h2>How to read it</h2>\n<p>{escape(levels)} If the uncertainty can be trusted, recall falls from level to "
        "level, leaving out uncertain queries lowers the risk, and AUROC lies well above one half. A number without a "
        "value (“undefined”) cannot be computed from these queries, for instance a correlation where recall "
        f"never changes.</p>\n<dl>\n{terms}\n</dl>"
    )


def _provenance(reports: Sequence[CalibrationReport]) -> str:
    blocks = "\n".join(
        f"<details><summary>{escape(report.adapter or 'report')} {escape(report.direction)}</summary>"
        f"<pre>{escape(json.dumps(_io.jsonable(report.provenance), indent=2, ensure_ascii=False))}</pre></details>"
        for report in reports
    )
    return f"<h2>Provenance</h2>\n<p>How each result was made, as recorded in its report.</p>\n{blocks}"
