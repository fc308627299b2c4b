"""The benchmarks of confidences and conformal sets run, and write nothing, in their fast mode."""

import importlib
import sys
from pathlib import Path

import pytest
from scipy.stats import betabinom

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def written():
    results = (BENCHMARKS / "results").glob("*conf*")
    return {path.name: path.stat().st_mtime_ns for path in results}


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["program", "--smoke"])
    before = written()
    yield importlib.import_module
    assert written() == before


def test_conformal_coverage(program, capsys):
    module = program("conformal_coverage")
    module.main()
    printed = capsys.readouterr().out
    for score in ("threshold", "adaptive", "rank"):
        assert printed.count(f"| {score} |") == 2
    assert "one each" in printed


def test_the_law_of_coverage_is_that_of_the_theory(program):
    law = program("conformal_coverage").law(99, 50, 0.1)
    exact = betabinom(50, 90, 10)
    assert [law.pmf(count) for count in range(51)] == pytest.approx([exact.pmf(count) for count in range(51)])


def test_match_confidence(program, capsys):
    program("match_confidence").main()
    printed = capsys.readouterr().out
    assert printed.count("###") == 4
    for name in ("largest probability", "entropy", "isotonic", "stacked"):
        assert printed.count(f"| {name} |") == 4
