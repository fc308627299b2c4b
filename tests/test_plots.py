import sys
from dataclasses import replace

import numpy as np
import pytest

from grove_adapters import plots
from grove_adapters.calibration import Score
from grove_adapters.errors import InputError


def texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def line(ax, label):
    return next(item for item in ax.get_lines() if item.get_label() == label)


def test_uncertainty_recall_draws_the_levels_of_the_report(make_report):
    report = make_report()
    ax = plots.uncertainty_recall(report)
    bars = ax.containers[0]
    np.testing.assert_array_equal(bars.lines[0].get_xdata(), np.arange(1, 11))
    np.testing.assert_array_equal(bars.lines[0].get_ydata(), report.levels.recall)
    ends = np.array([segment[:, 1] for segment in bars.lines[2][0].get_segments()])
    np.testing.assert_allclose(ends, np.stack([report.levels.recall_low, report.levels.recall_high], 1), atol=1e-12)
    assert [label.get_text() for label in ax.get_xticklabels()] == [f"{level}\n20" for level in range(1, 11)]
    assert texts(ax) == [f"grove: S {report.scores['spearman']}"]


def test_uncertainty_recall_of_several_reports_keeps_them_apart_without_colour(make_report):
    reports = [make_report(name, seed=seed) for seed, name in enumerate(("a", "b", "c"))]
    ax = plots.uncertainty_recall(reports, labels=["one", "two", "three"])
    lines = [bars.lines[0] for bars in ax.containers]
    assert len({item.get_color() for item in lines}) == len({item.get_marker() for item in lines}) == 3
    assert [text.split(":")[0] for text in texts(ax)] == ["one", "two", "three"]


def test_levels_of_different_sizes_are_named_as_a_range(make_report):
    ax = plots.uncertainty_recall([make_report(queries=100), make_report(queries=200)])
    assert "10–20 queries" in ax.get_xlabel()


def test_reliability_draws_filled_bins_only(make_report):
    report = make_report(queries=30)
    filled = report.reliability.count > 0
    assert not filled.all()
    ax = plots.reliability(report)
    drawn = ax.containers[1].lines[0]
    np.testing.assert_array_equal(drawn.get_xdata(), report.reliability.confidence[filled])
    np.testing.assert_array_equal(drawn.get_ydata(), report.reliability.accuracy[filled])
    counts = [int(text.get_text()) for text in ax.texts]
    assert counts == report.reliability.count[filled].tolist()


def test_reliability_without_confidence_says_what_to_draw_instead(make_report):
    with pytest.raises(InputError, match="uncertainty_recall"):
        plots.reliability(make_report(confidence=False))


def test_risk_coverage_draws_the_curve_the_best_order_and_a_random_one(make_report):
    report = make_report()
    ax = plots.risk_coverage(report)
    curve = line(ax, f"grove: area {report.scores['aurc']}")
    np.testing.assert_array_equal(curve.get_ydata(), report.risk_coverage.risk)
    ydata = [np.asarray(item.get_ydata()) for item in ax.get_lines()]
    assert any(np.array_equal(data, report.risk_coverage.optimal) for data in ydata)
    assert any(np.array_equal(data, [report.risk_coverage.risk[-1]] * 2) for data in ydata)
    assert texts(ax)[1:] == ["best possible order", "random order"]


@pytest.mark.parametrize("queries", [300, plots.MANY_POINTS + 1])
def test_uncertainty_vs_truth_draws_medians_of_equal_count(queries):
    truth = np.arange(queries, dtype=float)
    ax = plots.uncertainty_vs_truth(2 * truth, truth, score=Score(1.0, 0.9, 1.0), bins=3, label="grove")
    middle = line(ax, "median (Spearman 1.000 [0.900, 1.000])")
    expected = [part.mean() for part in np.array_split(truth, 3)]
    np.testing.assert_allclose(middle.get_xdata(), expected, atol=1)
    np.testing.assert_allclose(middle.get_ydata(), 2 * np.asarray(middle.get_xdata()), atol=1)


def test_uncertainty_vs_truth_with_one_truth_has_one_bin():
    ax = plots.uncertainty_vs_truth(np.arange(5.0), np.ones(5))
    assert line(ax, "median").get_ydata().tolist() == [2.0]


def test_arrays_of_different_length_are_refused():
    with pytest.raises(InputError, match="3 rows, got 2"):
        plots.uncertainty_vs_truth(np.zeros(3), np.zeros(2))


def test_no_report_and_wrong_labels_are_refused(make_report):
    with pytest.raises(InputError, match="at least one report"):
        plots.risk_coverage([])
    with pytest.raises(InputError, match="labels"):
        plots.uncertainty_recall([make_report()], labels=["a", "b"])


def test_names_from_outside_are_never_formulas(make_report, tmp_path):
    ax = plots.uncertainty_recall(make_report(), labels=[r"a$\frac{"])
    ax.figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_given_axes_is_drawn_on(make_report):
    from matplotlib.figure import Figure

    figure = Figure()
    ax = figure.add_subplot()
    assert plots.reliability(make_report(), ax=ax) is ax
    assert plots.uncertainty_recall(make_report(), ax=figure.add_subplot()).figure is figure


def test_undefined_scores_are_drawn_as_such(make_report):
    report = make_report()
    report = replace(report, scores={**report.scores, "spearman": Score(np.nan)})
    assert texts(plots.uncertainty_recall(report)) == ["grove: S undefined"]


def test_no_figure_is_left_to_pyplot(make_report):
    plots.risk_coverage(make_report())
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
