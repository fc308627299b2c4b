"""Every benchmark says what it measures and has a fast mode that runs and writes no result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
NO_MEASUREMENT = {"readme_tables.py"}


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_benchmark_says_what_it_measures_and_has_a_fast_mode(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith('"""')
    assert f"python benchmarks/{path.name}" in text
    assert path.name in NO_MEASUREMENT or '"--smoke"' in text


def test_every_result_belongs_to_a_benchmark():
    named = "".join(path.read_text(encoding="utf-8") for path in BENCHMARKS)
    for result in RESULTS.iterdir():
        assert result.stem in named, f"nothing writes {result.name}"


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in BENCHMARKS if p.name not in NO_MEASUREMENT], ids=lambda path: path.name)
def test_benchmark_runs_with_smoke(path, tmp_path):
    before = {result: result.read_bytes() for result in RESULTS.iterdir()}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(path), "--smoke"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert {result: result.read_bytes() for result in RESULTS.iterdir()} == before
