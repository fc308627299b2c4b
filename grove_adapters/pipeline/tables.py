"""Scores with their intervals as text: for a terminal and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grove_adapters.calibration import Score

Row = tuple[str, Sequence["Score | None"]]
"""A label and one score a column; None where a row has none."""


def text_table(title: str, headings: Sequence[str], rows: Sequence[Row]) -> str:
    """A table for a terminal; intervals stand below their values, so that it stays narrow."""
    lines = [list(headings)]
    for label, scores in rows:
        lines.append([label, *(_value(score) for score in scores)])
        lines.append(["", *(_interval(score) for score in scores)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    drawn = [
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])
        for first, *cells in lines
    ]
    return "\n".join([title, "", drawn[0], "─" * len(drawn[0]), *(line.rstrip() for line in drawn[1:])])


def markdown_table(title: str, headings: Sequence[str], rows: Sequence[Row]) -> str:
    """A table for a README; intervals stand beside their values."""
    lines = [f"{title}:", "", f"| {' | '.join(headings)} |", "| --- |" + " ---: |" * (len(headings) - 1)]
    for label, scores in rows:
        cells = [f"{_value(score)} {_interval(score)}".strip() for score in scores]
        lines.append(f"| {' | '.join([label, *cells])} |")
    return "\n".join(lines)


def _value(score: Score | None) -> str:
    if score is None:
        return ""
    return "undefined" if math.isnan(score.value) else short(score.value, 3)


def _interval(score: Score | None) -> str:
    if score is None or math.isnan(score.value) or math.isnan(score.low):
        return ""
    return f"[{short(score.low, 2)}, {short(score.high, 2)}]"


def short(value: float, digits: int) -> str:
    """A number as tables of the field write it: `.731`, `−.98`, `1.00`."""
    text = f"{abs(value):.{digits}f}"
    sign = "−" if value < 0 and float(text) != 0 else ""
    return sign + (text.removeprefix("0") if float(text) < 1 else text)
