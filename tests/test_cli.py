import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from grove_adapters import cli
from grove_adapters.adapters import list_adapters, load_adapter
from grove_adapters.datasets.synthetic import make_pairs
from grove_adapters.pipeline import Evaluation
from grove_adapters.posterior import ProbabilisticEmbedding

COMMANDS = ("demo", "extract", "import", "info", "verify", "fit", "predict", "evaluate", "report", "list")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(capsys):
    """Run one command in this process and give exit code, standard output and standard error."""

    def call(*words):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def assert_one_sentence(code, err, *fragments):
    assert code == 2
    assert re.fullmatch(r"grove-adapters[a-z ]*: error: [^\n]+\n", err), err
    for fragment in fragments:
        assert fragment in err


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arrays")
    pairs = make_pairs(150, dim=16, seed=3).pairs
    np.save(folder / "image.npy", pairs.images.values)
    np.save(folder / "text.npy", pairs.texts.values)
    return folder


@pytest.fixture(scope="module")
def store(arrays):
    path = arrays / "store"
    words = ["import", path, "--images", arrays / "image.npy", "--texts", arrays / "text.npy", "--logit-scale", "20"]
    assert cli.main([*map(str, words), "--model", "toy", "--splits", "train=0.6,test=0.4", "--seed", "1"]) == 0
    return path


@pytest.fixture(scope="module")
def adapter(store):
    folder = store.parent / "baseline"
    assert cli.main(["fit", str(store), "--adapter", "deterministic", "--out", str(folder), "--quiet"]) == 0
    return folder


# -- help --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_is_a_page_of_a_manual(command, run):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"usage: grove-adapters {command}" in out
    assert re.search(rf"example:\n  grove-adapters {command}\b", out)
    assert "exit codes:" in out
    assert len(out.split("\n\n")[1:3]) == 2
    for line in out.splitlines():
        assert len(line) <= 110, line


def test_examples_in_the_help_parse():
    parser = cli.build_parser()
    for command in COMMANDS:
        text = cli.build_parser()._subparsers._group_actions[0].choices[command].epilog
        block = text.partition("\n\n")[0].removeprefix("example:\n").replace("\\\n", " ")
        for line in block.splitlines():
            words = line.split()
            assert words[0] == "grove-adapters"
            assert parser.parse_args(words[1:]).run


def test_help_states_defaults(run):
    _, out, _ = run("evaluate", "--help")
    help_text = re.sub(r"\s+", " ", out)
    assert "bootstrap resamples (default: 1000)" in help_text
    assert "address of every random number (default: 0)" in help_text
    assert "(default: False)" not in out
    assert "(default: None)" not in out


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom grove_adapters.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print('LOADED', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = out.partition("LOADED")[2].split()
    assert "grove_adapters" in loaded
    assert not set(loaded) & {"torch", "numpy", "matplotlib", "scipy", "pandas", "tqdm", "PIL"}


def test_version(run):
    import grove_adapters

    code, out, _ = run("--version")
    assert (code, out) == (0, f"grove-adapters {grove_adapters.__version__}\n")


# -- the usual path ----------------------------------------------------------------------------------------------------


def test_info_and_verify(store, run):
    code, out, _ = run("info", store, "--json")
    assert code == 0
    info = json.loads(out)
    assert (info["n_images"], info["dim"]) == (150, 16)
    code, out, _ = run("info", store)
    assert code == 0
    assert "toy" in out
    code, out, _ = run("verify", store)
    assert code == 0
    assert "whole" in out


def test_verify_names_a_damaged_file(arrays, run, tmp_path):
    path = tmp_path / "store"
    assert run("import", path, "--images", arrays / "image.npy", "--texts", arrays / "text.npy")[0] == 0
    victim = path / "text.npy"
    damaged = bytearray(victim.read_bytes())
    damaged[-1] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(damaged)
    code, _, err = run("verify", path)
    assert_one_sentence(code, err, "text.npy")


def test_import_takes_a_folder(arrays, run, tmp_path):
    code, out, _ = run("import", tmp_path / "store", "--from", arrays)
    assert code == 0
    assert "150" in out


def test_fit_predict_evaluate_report(store, adapter, run, tmp_path):
    assert load_adapter(adapter).name == "deterministic"
    assert load_adapter(adapter).fit_report_.n_pairs == 90

    code, out, _ = run("predict", adapter, store, "--split", "test", "--out", tmp_path / "posteriors", "--quiet")
    assert code == 0
    assert "60 images and 60 texts" in out
    images = ProbabilisticEmbedding.load(tmp_path / "posteriors" / "images.safetensors")
    rows = (tmp_path / "posteriors" / "uncertainty.csv").read_text().splitlines()
    assert rows[0] == "modality,id,uncertainty"
    assert len(rows) == 121
    assert rows[1] == f"image,{images.ids[0]},{images.uncertainty[0].item()!r}"

    report = tmp_path / "report.json"
    words = ["evaluate", adapter, store, "--out", report, "--resamples", "20", "--levels", "5", "--quiet"]
    code, out, _ = run(*words)
    assert code == 0
    assert "Images ask, captions answer: 60 queries, gallery of 60" in out
    assert "deterministic" in out
    first = report.read_bytes()
    assert run(*words, "--json")[0] == 0
    assert report.read_bytes() == first

    page = tmp_path / "report.html"
    code, out, _ = run("report", report, report, "--out", page, "--plots", tmp_path / "plots", "--title", "A <title>")
    assert code == 0
    assert "4 reports" in out
    assert "<title>A &lt;title&gt;</title>" in page.read_text()
    assert (tmp_path / "plots" / "i2t-recall.png").is_file()


def test_evaluate_prints_json_rows(store, adapter, run, tmp_path):
    code, out, _ = run(
        "evaluate", adapter, store, "--out", tmp_path / "r.json", "--direction", "t2i", "--json", "--quiet",
        "--resamples", "10", "--rank-by", "backbone",
    )  # fmt: skip
    assert code == 0
    (row,) = json.loads(out)
    assert (row["adapter"], row["direction"], row["queries"]) == ("deterministic", "t2i", 60)
    assert Evaluation.load(tmp_path / "r.json").reports[0].provenance["rank_by"] == "backbone"


def test_evaluating_without_splits_warns(arrays, adapter, run, tmp_path):
    path = tmp_path / "store"
    words = ["--images", arrays / "image.npy", "--texts", arrays / "text.npy", "--logit-scale", "20", "--model", "toy"]
    assert run("import", path, *words)[0] == 0
    code, _, err = run("evaluate", adapter, path, "--out", tmp_path / "r.json", "--resamples", "5", "--quiet")
    assert code == 0
    assert "warning: the store has no splits" in err


def test_extract_embeds_a_folder_with_the_bundled_model(run, tmp_path):
    from PIL import Image

    lines = ["image,caption"]
    for number in range(6):
        Image.new("RGB", (80, 60), (40 * number, 0, 0)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,a red circle {number}")
    (tmp_path / "captions.csv").write_text("\n".join(lines) + "\n")
    words = ["extract", tmp_path / "store", "--captions", tmp_path / "captions.csv", "--images", tmp_path]
    words += ["--model", "grove-tiny-scenes", "--splits", "train=0.5,test=0.5", "--workers", "0", "--quiet"]
    words += ["--features"]
    code, out, _ = run(*words)
    assert code == 0
    assert "grove-tiny-scenes" in out
    assert "of each image, 128 of each text" in out
    code, out, _ = run(*words)
    assert code == 0
    assert "nothing was computed" in out


def test_list(run):
    code, out, _ = run("list")
    assert code == 0
    for name in ("grove", "ttda", "deterministic", "csd", "karpathy"):
        assert name in out
    code, out, _ = run("list", "--json")
    assert json.loads(out)["adapters"] == list_adapters()
    code, out, _ = run("list", "deterministic")
    assert "reference_size=2048  (int)\n      Embeddings of each modality kept as the reference" in out
    code, out, _ = run("list", "grove", "--json")
    assert json.loads(out)["latent_dim"] == 10
    assert "no settings" in run("list", "ttda")[1]


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_wrong_usage_is_one_sentence(run):
    assert_one_sentence(*run("fit")[::2], "the following arguments are required", "grove-adapters fit --help")
    assert_one_sentence(*run("no-such")[::2], "invalid choice")
    assert_one_sentence(*run("import", "x", "--splits", "train")[::2], "train=0.8,test=0.2")


def test_unknown_names_offer_the_nearest(store, run, tmp_path):
    code, _, err = run("fit", store, "--adapter", "grov", "--out", tmp_path / "a")
    assert_one_sentence(code, err, "did you mean 'grove'")
    code, _, err = run("fit", store, "--set", "latent_dims=3", "--out", tmp_path / "a")
    assert_one_sentence(code, err, "did you mean 'latent_dim'")
    code, _, err = run("fit", store, "--split", "tran", "--out", tmp_path / "a")
    assert_one_sentence(code, err, "train")
    code, _, err = run("list", "deterministik")
    assert_one_sentence(code, err, "did you mean 'deterministic'")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("assignment", ["latent_dim", "latent_dim=ten", "latent_dim=1.5", "latent_init=pcs"])
def test_settings_of_the_wrong_type_are_refused(assignment, store, run, tmp_path):
    code, _, err = run("fit", store, "--set", assignment, "--out", tmp_path / "a")
    assert_one_sentence(code, err, "latent" if "=" in assignment else "NAME=VALUE")


def test_settings_take_the_types_of_their_annotations():
    from dataclasses import dataclass
    from typing import Literal

    from grove_adapters.config import Config

    @dataclass(frozen=True, kw_only=True)
    class Example(Config):
        whole: int = 1
        number: float = 1.0
        flag: bool = False
        word: str = ""
        maybe: int | None = 1
        kind: Literal["a", "b"] = "a"
        sizes: tuple[int, ...] = ()

    words = ["whole=3", "number=1e-3", "flag=True", "word=3", "maybe=none", "kind=b", "sizes=[1, 2]"]
    settings = cli._settings(Example, words)
    assert Example.from_dict(settings) == Example(
        whole=3, number=1e-3, flag=True, word="3", maybe=None, kind="b", sizes=(1, 2)
    )


def test_missing_and_wrong_files_are_one_sentence(adapter, store, run, tmp_path):
    assert_one_sentence(*run("info", tmp_path / "none")[::2], "none")
    assert_one_sentence(*run("evaluate", tmp_path, store)[::2], "adapter.json")
    assert_one_sentence(*run("report", tmp_path / "none.json", "--out", tmp_path / "x.html")[::2], "none.json")
    (tmp_path / "bad.json").write_text("{")
    assert_one_sentence(*run("report", tmp_path / "bad.json", "--out", tmp_path / "x.html")[::2], "bad.json")
    assert_one_sentence(*run("import", tmp_path / "s")[::2], "--images and --texts")
    assert not (tmp_path / "x.html").exists()


def test_another_models_store_is_refused(arrays, adapter, run, tmp_path):
    path = tmp_path / "store"
    words = ["--images", arrays / "image.npy", "--texts", arrays / "text.npy", "--model", "other"]
    assert run("import", path, *words)[0] == 0
    code, _, err = run("evaluate", adapter, path, "--out", tmp_path / "r.json", "--quiet")
    assert_one_sentence(code, err.splitlines(keepends=True)[-1], "toy", "other")


def test_a_place_that_cannot_be_written_is_one_sentence(store, adapter, run, tmp_path):
    (tmp_path / "file").write_text("kept")
    code, _, err = run("predict", adapter, store, "--out", tmp_path / "file" / "below", "--quiet")
    assert_one_sentence(code, err)
    assert (tmp_path / "file").read_text() == "kept"


def test_errors_of_the_system_are_one_sentence(monkeypatch, run):
    def full(_):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(cli, "_open", full)
    assert_one_sentence(*run("info", "x")[::2], "No space left on device", "somewhere")


def test_control_c_says_what_is_kept(monkeypatch, run):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_open", interrupted)
    code, _, err = run("fit", "x", "--adapter", "deterministic", "--out", "y")
    assert code == 130
    assert err == "\ngrove-adapters: interrupted; nothing was written: --out is as it was\n"


def test_a_broken_pipe_is_quiet():
    script = "import sys; from grove_adapters.cli import main; sys.exit(main(['list']))"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run([sys.executable, "-c", script], stdout=closed, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 141
    assert done.stderr == ""


# -- the demo ----------------------------------------------------------------------------------------------------------


def test_the_demo_runs_and_reuses_its_store(run, tmp_path):
    out = tmp_path / "demo"
    code, table, said = run("demo", "--smoke", "--out", out, "--seed", "1")
    assert code == 0
    assert "Captions ask, images answer" in table
    assert "ρ known" in table
    for name in ("deterministic", "ttda", "grove"):
        assert f"\n{name} " in table
        assert load_adapter(out / "adapters" / name).name == name
    assert "Using the store" not in said
    evaluation = Evaluation.load(out / "report.json")
    assert len(evaluation.reports) == len(evaluation.known) == 6
    assert all(example.image for gallery in evaluation.galleries for example in gallery.examples)
    assert (out / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert len(list((out / "plots").glob("*.png"))) == 16
    before = {path: path.stat().st_mtime_ns for path in Path(out / "store").iterdir()}
    report = (out / "report.json").read_bytes()
    code, _, said = run("demo", "--smoke", "--out", out, "--seed", "1")
    assert code == 0
    assert "Using the store that is already at" in said
    assert {path: path.stat().st_mtime_ns for path in Path(out / "store").iterdir()} == before
    assert (out / "report.json").read_bytes() == report
    code, _, err = run("demo", "--smoke", "--out", out, "--seed", "2", "--quiet")
    assert_one_sentence(code, err)
    assert (out / "report.json").read_bytes() == report
