"""Every example is a short program that runs as it stands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_with_smoke(path, tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:grove_adapters", str(path), "--smoke"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not list(tmp_path.iterdir()), "an example with --smoke leaves nothing in the folder it runs in"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_is_short_and_says_what_it_is(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    assert lines[0].startswith('"""')
