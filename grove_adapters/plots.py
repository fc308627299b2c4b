"""Figures of finished reports: every function draws what is already computed and returns a matplotlib `Axes`.

Figures are built without pyplot, so nothing global is touched and nothing has to be closed:

    plots.uncertainty_recall(report).figure.savefig("levels.png", dpi=200)

Colours are the Okabe–Ito palette, which stays apart for colour-blind readers; markers and line styles differ as well,
so that a grey print can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from grove_adapters import _checks
from grove_adapters.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

    from grove_adapters.calibration import CalibrationReport, Score

INK, MUTED, RULE = "#1f2328", "#6a737d", "#dfe3e8"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", (0, (5, 1.5)), (0, (3, 1.2, 1, 1.2)), (0, (1, 1)), (0, (7, 2, 1, 2, 1, 2)), (0, (2, 2)))

DIRECTIONS = {"i2t": "images ask, captions answer", "t2i": "captions ask, images answer"}
"""How a direction is called in titles."""

MANY_POINTS = 1500  # beyond this a scatter hides its own density and a hexagonal histogram shows it


def uncertainty_recall(
    reports: CalibrationReport | Sequence[CalibrationReport],
    *,
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Recall in levels of rising uncertainty: a trustworthy uncertainty makes a falling line.

    Bars (and the band of a single report) are Clopper–Pearson intervals; the number of queries stands under each level.

    Args:
        reports: One report, or several in the same direction.
        labels: Names in the legend; default the adapters' names.
        ax: Where to draw; default a new figure.

    Raises:
        InputError: No report, or another number of labels.
    """
    reports, labels = _several(reports, labels)
    ax = _axes(ax)
    shift = 0.11
    for index, (report, label) in enumerate(zip(reports, labels, strict=True)):
        levels = report.levels
        place = np.arange(1, len(levels) + 1) + shift * (index - (len(reports) - 1) / 2)
        if len(reports) == 1:  # several bands would hide each other
            ax.fill_between(place, levels.recall_low, levels.recall_high, color=_colour(index), alpha=0.13, linewidth=0)
        ax.errorbar(
            place,
            levels.recall,
            yerr=[levels.recall - levels.recall_low, levels.recall_high - levels.recall],
            color=_colour(index),
            marker=_marker(index),
            linestyle=_line(index),
            linewidth=1.6,
            markersize=4.5,
            elinewidth=0.8,
            label=_with_score(label, report, "spearman", "S"),
            zorder=3,
        )
    longest = max(reports, key=lambda report: len(report.levels)).levels
    ax.set_xticks(np.arange(1, len(longest) + 1))
    counts = [report.levels.count for report in reports]
    if all(np.array_equal(count, counts[0]) for count in counts):
        ax.set_xticklabels([f"{level}\n{count}" for level, count in enumerate(counts[0], start=1)])
        ax.set_xlabel("level of uncertainty, from certain to uncertain (queries in the level below)")
    else:
        spread = f"{min(int(count.min()) for count in counts)}–{max(int(count.max()) for count in counts)}"
        ax.set_xlabel(f"level of uncertainty, from certain to uncertain ({spread} queries a level)")
    ax.set_xlim(0.5, len(longest) + 0.5)
    ax.set_ylabel("recall@1")
    ax.set_ylim(-0.02, 1.02)
    _finish(ax, f"Recall by uncertainty: {_direction(reports)}")
    return ax


def reliability(report: CalibrationReport, *, label: str | None = None, ax: Axes | None = None) -> Axes:
    """Accuracy against the confidence of the task's own softmax; the diagonal is perfect calibration.

    Bars are Clopper–Pearson intervals; the strip below shows how many queries each bin holds.

    Args:
        report: A report whose result had a confidence.
        label: Name in the title; default the adapter's name.
        ax: Where to draw; default a new figure.

    Raises:
        InputError: The result had no confidence, so there is nothing to draw.
    """
    bins = report.reliability
    if bins is None:
        raise InputError(
            "a reliability diagram expected a result with confidences, got one without; "
            "draw uncertainty_recall or risk_coverage instead"
        )
    ax = _axes(ax)
    filled = bins.count > 0
    strip = 0.16  # height of the columns, in units of accuracy, below zero
    height = strip * bins.count / max(int(bins.count.max()), 1)
    ax.bar(bins.low, height, bins.high - bins.low, -strip, align="edge", color=RULE, edgecolor=MUTED, linewidth=0.4)
    for middle, top, count in zip((bins.low + bins.high)[filled] / 2, height[filled], bins.count[filled], strict=True):
        ax.annotate(
            f"{count}",
            (middle, top - strip),
            xytext=(0, 1.5),
            textcoords="offset points",
            ha="center",
            fontsize=6.5,
            color=MUTED,
        )
    ax.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="perfectly calibrated", zorder=2)
    ax.errorbar(
        bins.confidence[filled],
        bins.accuracy[filled],
        yerr=[
            (bins.accuracy - bins.accuracy_low)[filled],
            (bins.accuracy_high - bins.accuracy)[filled],
        ],
        color=_colour(0),
        marker=_marker(0),
        linewidth=1.6,
        markersize=4.5,
        elinewidth=0.8,
        label=_with_score("accuracy", report, "ece", "ECE"),
        zorder=3,
    )
    ax.set_xlim(0, 1)
    ax.set_ylim(-strip, 1.02)
    ax.set_yticks(np.linspace(0, 1, 6))
    ax.set_xlabel("confidence of the first answer (below: queries in each bin)")
    ax.set_ylabel("share of first answers that are true")
    name = label if label is not None else report.adapter
    _finish(ax, f"Reliability{f' of {name}' if name else ''}: {_direction([report])}")
    return ax


def risk_coverage(
    reports: CalibrationReport | Sequence[CalibrationReport],
    *,
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Error among the queries that are answered, when the most uncertain ones are left out.

    Each curve ends at the error of answering everything. A dotted line of the same colour is the best possible order
    of the same answers, and the dashed horizontal one is a random order.

    Args:
        reports: One report, or several in the same direction.
        labels: Names in the legend; default the adapters' names.
        ax: Where to draw; default a new figure.

    Raises:
        InputError: No report, or another number of labels.
    """
    reports, labels = _several(reports, labels)
    ax = _axes(ax)
    for index, (report, label) in enumerate(zip(reports, labels, strict=True)):
        curve, colour = report.risk_coverage, _colour(index)
        ax.fill_between(curve.coverage, curve.risk_low, curve.risk_high, color=colour, alpha=0.13, linewidth=0)
        ax.plot(
            curve.coverage,
            curve.risk,
            color=colour,
            linestyle=_line(index),
            linewidth=1.8,
            label=_with_score(label, report, "aurc", "area"),
            zorder=3,
        )
        ax.plot(curve.coverage, curve.optimal, color=colour, linestyle=":", linewidth=1.1, alpha=0.9, zorder=2)
        ax.plot([0, 1], [curve.risk[-1]] * 2, color=colour, linestyle=(0, (6, 4)), linewidth=0.8, alpha=0.6, zorder=2)
    ax.plot([], [], color=MUTED, linestyle=":", linewidth=1.1, label="best possible order")
    ax.plot([], [], color=MUTED, linestyle=(0, (6, 4)), linewidth=0.8, label="random order")
    highest = max(float(np.nanmax(report.risk_coverage.risk_high, initial=0.0)) for report in reports)
    ends = max(float(report.risk_coverage.risk[-1]) for report in reports)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, min(1.0, max(1.35 * ends, min(highest, 2 * ends), 0.05)))
    ax.set_xlabel("coverage: share of the queries answered, most certain first")
    ax.set_ylabel("risk: share of wrong answers among them")
    _finish(ax, f"Risk and coverage: {_direction(reports)}")
    return ax


def uncertainty_vs_truth(
    uncertainty: np.ndarray,
    truth: np.ndarray,
    *,
    score: Score | None = None,
    bins: int = 10,
    truth_name: str = "known ambiguity (nats)",
    label: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Predicted uncertainty against an ambiguity that is known, with the median in bins of equal count.

    Args:
        uncertainty: (Q,) predicted, larger = less certain.
        truth: (Q,) known, larger = more ambiguous.
        score: Their rank correlation, for the legend.
        bins: Number of bins of the median line, at most.
        truth_name: What the horizontal axis shows.
        label: What the title names, usually an adapter and a direction.
        ax: Where to draw; default a new figure.

    Raises:
        InputError: Arrays of different length.
    """
    uncertainty, truth = np.asarray(uncertainty, dtype=float), np.asarray(truth, dtype=float)
    _checks.same_rows(len(uncertainty), len(truth), what="uncertainty and known truth")
    ax = _axes(ax)
    if len(truth) > MANY_POINTS:
        ax.hexbin(truth, uncertainty, gridsize=36, bins="log", mincnt=1, cmap=_density(), linewidths=0.1, zorder=1)
    else:
        ax.scatter(truth, uncertainty, s=11, color=_colour(0), alpha=0.45, linewidths=0, zorder=1)
    place, low, middle, high = _binned(truth, uncertainty, bins)
    ax.fill_between(place, low, high, color=_colour(1), alpha=0.18, linewidth=0, label="middle half", zorder=2)
    name = "median" if score is None else f"median (Spearman {score})"
    ax.plot(place, middle, color=_colour(1), marker="s", markersize=4, linewidth=1.8, label=name, zorder=3)
    ax.set_xlabel(truth_name)
    ax.set_ylabel("predicted uncertainty")
    _finish(ax, "Uncertainty and known ambiguity" + (f": {label}" if label else ""))
    return ax


def _binned(truth: np.ndarray, uncertainty: np.ndarray, bins: int) -> tuple[np.ndarray, ...]:
    """Mean truth and quartiles of uncertainty in bins of equal count; equal truths are never torn apart."""
    edges = np.unique(np.quantile(truth, np.linspace(0, 1, bins + 1)))
    part = np.clip(np.searchsorted(edges, truth, side="right") - 1, 0, max(len(edges) - 2, 0))
    members = [np.flatnonzero(part == index) for index in np.unique(part)]
    place = np.array([truth[rows].mean() for rows in members])
    quartiles = np.array([np.quantile(uncertainty[rows], [0.25, 0.5, 0.75]) for rows in members])
    return place, *quartiles.T


def _several(
    reports: CalibrationReport | Sequence[CalibrationReport], labels: Sequence[str] | None
) -> tuple[list[CalibrationReport], list[str]]:
    from grove_adapters.calibration import CalibrationReport

    reports = [reports] if isinstance(reports, CalibrationReport) else list(reports)
    if not reports:
        raise InputError("a plot expected at least one report, got none; calibrate a result first")
    names = [report.adapter or f"report {index}" for index, report in enumerate(reports, start=1)]
    names = names if labels is None else list(labels)
    _checks.same_rows(len(reports), len(names), what="reports and labels of a plot")
    return reports, names


def _axes(ax: Axes | None) -> Axes:
    """`ax`, or the axes of a new figure, in the common style."""
    if ax is None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.6, 3.9), dpi=150, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        ax = figure.add_subplot()
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(MUTED)
        ax.spines[side].set_linewidth(0.8)
    ax.tick_params(colors=INK, labelsize=8, width=0.8, length=3, color=MUTED)
    ax.grid(True, color=RULE, linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def _finish(ax: Axes, title: str) -> None:
    heading = ax.set_title(title, fontsize=10, color=INK, loc="left", pad=9, fontweight="bold")
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set(fontsize=8.5, color=INK)
    legend = ax.legend(fontsize=8, framealpha=0.85, edgecolor="none", facecolor="white", labelcolor=INK)
    for text in (heading, ax.xaxis.label, ax.yaxis.label, *legend.get_texts()):
        text.set_parse_math(False)  # names come from outside, and a "$" in one is no formula


def _with_score(label: str, report: CalibrationReport, name: str, symbol: str) -> str:
    return f"{label}: {symbol} {report.scores[name]}" if name in report.scores else label


def _direction(reports: Sequence[CalibrationReport]) -> str:
    names = {DIRECTIONS.get(report.direction, report.direction or report.task) for report in reports}
    return ", ".join(sorted(names))


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def _line(index: int) -> str | tuple[float, tuple[float, ...]]:
    return LINES[index % len(LINES)]


def _density() -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("density", ["#d6e6f2", COLOURS[0], "#00253d"])
