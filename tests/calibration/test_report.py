import dataclasses
import json

import numpy as np
import pytest

from grove_adapters.calibration import CalibrationReport, Score, calibrate
from grove_adapters.errors import InputError, UnreadableError
from grove_adapters.tasks import TaskResult


def report(n=25, *, right=None, seed=0, **settings):
    random = np.random.default_rng(seed)
    uncertainty = random.random(n)
    correct = (random.random(n) > uncertainty).astype(float) if right is None else np.full(n, right)
    row = TaskResult(
        task="retrieval",
        direction="t2i",
        ids=[f"q{number}" for number in range(n)],
        correct=correct,
        uncertainty=uncertainty,
        confidence=None if right is not None else 1 - uncertainty,
        recall_at={1: correct},
        provenance={"query_maker": {"adapter": "grove"}, "k": [1]},
    )
    return calibrate(row, resamples=20, **settings)


@pytest.mark.parametrize("right", [None, 1.0])
def test_json_round_trip_keeps_nan_and_every_digit(right, tmp_path):
    before = report(right=right, levels=40)
    content = json.loads(before.to_json())
    assert "NaN" not in before.to_json()
    assert None in content["levels"]["recall"], "an empty level is null"
    after = CalibrationReport.load(before.save(tmp_path / "report.json"))
    assert after.to_json() == before.to_json()
    for part in ("levels", "reliability", "risk_coverage"):
        mine, theirs = getattr(before, part), getattr(after, part)
        if mine is None:
            assert theirs is None
            continue
        assert len(mine) == len(theirs)
        for item in dataclasses.fields(mine):
            np.testing.assert_array_equal(getattr(mine, item.name), getattr(theirs, item.name))
    assert after.levels.count.dtype == np.int64
    assert list(after.recall_at) == [1]
    assert list(after.accuracy_at_coverage) == [0.5, 0.8, 0.9]
    assert list(after.coverage_at_risk) == [0.01, 0.05, 0.1]
    assert str(after.scores["auroc"]) == str(before.scores["auroc"])


def test_row_is_flat():
    row = report().row()
    assert row["adapter"] == "grove"
    assert (row["direction"], row["protocol"], row["levels"], row["queries"]) == ("t2i", "equal_count", 10, 25)
    assert row["queries_per_level"] == 2
    for name in ("recall@1", "spearman", "neg_s_r2", "auroc", "aurc", "ece", "accuracy@0.8", "coverage@0.05"):
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
    assert 0 < row["auroc_p"] <= 1
    assert "ece_p" not in row
    assert all(isinstance(value, str | int | float) for value in row.values())


def test_levels_say_how_they_were_made():
    assert report().levels_in_words == "10 levels (equal count) of 2 to 3 queries"
    assert report(20, levels=5).levels_in_words == "5 levels (equal count) of 4 queries"
    assert report(protocol="cumulative_width").levels_in_words == "10 levels (cumulative width) of 1 to 25 queries"


def test_score_reads_like_a_table_cell():
    assert str(Score(0.5, 0.25, 0.75)) == "0.500 [0.250, 0.750]"
    assert str(Score(0.5)) == "0.500"
    assert str(Score(float("nan"))) == "undefined"


def test_compare_needs_the_same_queries_and_levels():
    first, second = report(seed=0), report(seed=1)
    difference = first.compare(second)
    assert difference["auroc"] == first.scores["auroc"].value - second.scores["auroc"].value
    assert np.isnan(first.compare(report(right=1.0))["auroc"])
    with pytest.raises(InputError, match="same queries"):
        first.compare(report(24))
    with pytest.raises(InputError, match="same number of levels, got 10 and 5"):
        first.compare(report(levels=5))
    with pytest.raises(InputError, match="same protocol"):
        first.compare(report(protocol="equal_width"))


def test_what_is_no_report_is_refused(tmp_path):
    good = json.loads(report().to_json())
    for text in ("", "[]", "{}", json.dumps(good | {"schema": 99}), json.dumps(good | {"colour": 1})):
        with pytest.raises(UnreadableError, match="calibration report"):
            CalibrationReport.from_json(text)
    with pytest.raises(UnreadableError, match="check the path"):
        CalibrationReport.load(tmp_path / "absent.json")
