"""What the README shows is run, and what it claims is compared with the results it comes from."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.fixture(scope="module")
def demo_store(tmp_path_factory):
    """A small store where the README expects the demo's."""
    from grove_adapters.datasets.scenes import Scenes
    from grove_adapters.datasets.tiny_clip import MODEL_NAME, load_tiny_clip
    from grove_adapters.extract import OpenCLIPExtractor
    from grove_adapters.store import EmbeddingStore

    folder = tmp_path_factory.mktemp("readme")
    model, preprocess, tokenizer = load_tiny_clip()
    extractor = OpenCLIPExtractor(model, preprocess=preprocess, tokenizer=tokenizer, name=MODEL_NAME)
    records = Scenes.generate(150, seed=0).records()
    EmbeddingStore.build(extractor, records, folder / "grove-demo" / "store", num_workers=0, progress=False)
    return folder


def test_the_python_block_runs_as_it_stands(demo_store, monkeypatch, capsys):
    monkeypatch.chdir(demo_store)
    (block,) = blocks("python")
    exec(compile(block, "README.md", "exec"), {})
    assert (demo_store / "reliability.png").stat().st_size > 1000
    assert re.search(r"[\d.]+ \[[\d.]+, [\d.]+\]|undefined", capsys.readouterr().out)


def test_every_command_of_the_readme_is_one_the_parser_takes():
    from grove_adapters.cli import build_parser

    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    commands = re.findall(r"(?:^|\s|/)(grove-adapters (?!--)[^\n#]+)", text)
    assert len(commands) >= 5
    for command in commands:
        build_parser().parse_args(shlex.split(command.split("&&")[0])[1:])


def test_the_first_screen_holds_the_two_commands():
    first, second = blocks("bash")[:2]
    assert "grove-adapters demo" in first
    assert "pytest" in second
    assert README.index(second) < 2500


def test_tables_are_those_of_the_results():
    program = ROOT / "benchmarks" / "readme_tables.py"
    done = subprocess.run([sys.executable, str(program), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
