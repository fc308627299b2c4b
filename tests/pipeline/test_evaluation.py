import dataclasses
import json

import numpy as np
import pytest

from grove_adapters.calibration import Score
from grove_adapters.errors import InputError, UnreadableError
from grove_adapters.html import Example, Gallery, KnownTruth
from grove_adapters.pipeline import Evaluation


@pytest.fixture(scope="module")
def evaluation(make_report):
    truth = np.linspace(0, 1, 20)
    known = KnownTruth(
        adapter="grove",
        direction="t2i",
        name="ambiguity",
        truth=truth,
        uncertainty=truth**2,
        score=Score(0.9, 0.8, 0.95),
    )
    example = Example(query="a red circle", image=b"\x89PNG\x00\xff", correct=True, uncertainty=0.5, place=0.25)
    return Evaluation(
        reports=[make_report(name, direction) for name in ("ttda", "grove") for direction in ("i2t", "t2i")],
        known=[known],
        galleries=[Gallery(title="Captions", examples=[example, dataclasses.replace(example, image=None)])],
        facts={"split": "test"},
    )


def test_saving_and_loading_keeps_everything(evaluation, tmp_path):
    again = Evaluation.load(evaluation.save(tmp_path / "report.json"))
    assert again.page() == evaluation.page()
    assert again.table() == evaluation.table()
    assert again.labels == evaluation.labels
    assert again.galleries[0].examples[0].image == b"\x89PNG\x00\xff"


def test_a_single_report_is_an_evaluation_too(make_report, tmp_path):
    report = make_report()
    report.save(tmp_path / "one.json")
    loaded = Evaluation.load(tmp_path / "one.json")
    assert loaded.labels == ("grove",)
    assert loaded.rows() == [report.row()]


@pytest.mark.parametrize("content", [{}, {"schema": 99}, {"schema": 1, "reports": [{}]}, {"levels": 3}])
def test_other_json_is_refused(content, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(UnreadableError):
        Evaluation.load(tmp_path / "x.json")


def test_the_table_has_a_block_a_direction_and_a_row_an_adapter(evaluation):
    blocks = evaluation.table(markdown=True).split("\n\n")
    titles = [block for block in blocks if block.endswith(":")]
    assert titles == [
        "Images ask, captions answer: 200 queries, gallery of 77:",
        "Captions ask, images answer: 200 queries, gallery of 77:",
    ]
    first, second = (block.splitlines() for block in blocks if block.startswith("|"))
    assert first[0] == "| adapter | R@1 | S | R² | −S·R² | AUROC | ECE |"
    assert second[0] == "| adapter | R@1 | S | R² | −S·R² | AUROC | ECE | ρ known |"
    assert [row.split(" | ")[0] for row in second[2:]] == ["| ttda", "| grove"]
    assert second[2].endswith(" |  |")
    assert second[3].endswith(" | .900 [.80, .95] |")


def test_rows_carry_the_label_and_what_is_known(evaluation):
    rows = evaluation.rows()
    assert [(row["adapter"], row["direction"]) for row in rows] == [
        ("ttda", "i2t"),
        ("ttda", "t2i"),
        ("grove", "i2t"),
        ("grove", "t2i"),
    ]
    assert [row.get("known") for row in rows] == [None, None, None, 0.9]


def test_join_tells_equal_adapters_apart(evaluation):
    joined = Evaluation.join([evaluation, evaluation], names=["a.json", "b.json"])
    assert joined.labels[:2] == ("ttda (a.json)",) * 2
    assert joined.labels[-1] == "grove (b.json)"
    assert [item.adapter for item in joined.known] == ["grove (a.json)", "grove (b.json)"]
    assert len(joined.galleries) == 2
    assert Evaluation.join([evaluation]).labels == evaluation.labels


def test_labels_of_another_length_are_refused(make_report):
    with pytest.raises(InputError, match="labels"):
        Evaluation(reports=[make_report()], labels=["a", "b"])


def test_plots_are_written_under_their_names(evaluation, tmp_path):
    single = Evaluation(reports=evaluation.reports[:1])
    paths = single.write_plots(tmp_path / "plots")
    assert [path.name for path in paths] == ["i2t-recall.png", "i2t-risk.png", "i2t-reliability-ttda.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert not list(tmp_path.rglob("*.partial"))
