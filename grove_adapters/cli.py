"""The command line: thin wrappers around the library, each imported only when its command runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import grove_adapters
from grove_adapters.errors import ConfigError, GroveAdaptersError, InputError

if TYPE_CHECKING:
    from grove_adapters.adapters import Adapter
    from grove_adapters.config import Config
    from grove_adapters.extract import Extractor
    from grove_adapters.store import EmbeddingStore

EXIT_CODES = """\
exit codes:
  0    done
  2    wrong usage or input; one sentence on standard error says what was expected and what to do next
  130  interrupted with Ctrl-C; the message says what was kept"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the paragraphs of descriptions and examples, and states the default of every option that has one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = isinstance(action.default, str | int | float) and not isinstance(action.default, bool)
        told = told and action.default != argparse.SUPPRESS and bool(action.option_strings)
        return f"{action.help} (default: %(default)s)" if told else action.help


class _Parser(argparse.ArgumentParser):
    """Wrong usage ends like every other error: one sentence and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; imports nothing heavy."""
    parser = _Parser(
        prog="grove-adapters",
        formatter_class=_Help,
        description="Post-hoc uncertainty for frozen vision-language models: know when to trust a match.\n\n"
        "Embeddings of a frozen model go in; probabilistic embeddings and an honest calibration report\n"
        "come out. `grove-adapters demo` shows the whole path on a bundled model, without a network.",
        epilog="the usual order:\n"
        "  extract or import        images and captions, or arrays you already have, become a store\n"
        "  fit STORE --out DIR      an adapter is fitted on the store's training split\n"
        "  evaluate DIR STORE       retrieval both ways, calibration with intervals\n"
        "  report report.json       one self-contained page\n\n"
        "`grove-adapters COMMAND --help` explains each command.\n\n" + EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"grove-adapters {grove_adapters.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    for add in (_demo, _extract, _import, _info, _verify, _fit, _predict, _evaluate, _report, _list):
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except GroveAdaptersError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print(f"\ngrove-adapters: interrupted; {arguments.kept}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        where = f" for {error.filename}" if error.filename else ""
        return _fail(
            f"expected to read and write files, got {error.strerror or error}{where}; mend that and run it again"
        )
    return 0


def _fail(sentence: str) -> int:
    print(f"grove-adapters: error: {sentence}", file=sys.stderr)
    return 2


def _command(
    commands: Any, name: str, run: Any, summary: str, description: str, example: str, kept: str
) -> argparse.ArgumentParser:
    """A subcommand whose help reads like a page of a manual."""
    parser = commands.add_parser(
        name,
        formatter_class=_Help,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{description}",
        epilog=f"example:\n{_indented(example)}\n\n{EXIT_CODES}",
    )
    parser.set_defaults(run=run, kept=kept)
    return parser


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


# -- demo --------------------------------------------------------------------------------------------------------------


def _demo(commands: Any) -> None:
    parser = _command(
        commands,
        "demo",
        _run_demo,
        "the whole path on a bundled world and a bundled model, offline",
        "Renders scenes whose ambiguity is known, embeds pictures and captions with the bundled tiny CLIP,\n"
        "fits the deterministic baseline, TTDA and GroVE, retrieves both ways and calibrates.\n\n"
        "Writes under --out: store/ (embeddings), adapters/ (fitted), report.json, plots/*.png and\n"
        "report.html, which opens in any browser. A second run uses the store it finds. Takes a few\n"
        "minutes on two cores; --smoke takes seconds and is too small for conclusions.",
        "grove-adapters demo --out grove-demo\n"
        "grove-adapters evaluate grove-demo/adapters/grove grove-demo/store --known ambiguity",
        "finished parts are kept: run the same command again to go on",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder to write to (default: grove-demo, with --smoke grove-demo-smoke)"
    )
    parser.add_argument("--smoke", action="store_true", help="a small world, to see that everything runs")
    _seed(parser)
    _quiet(parser)
    _json(parser)


def _run_demo(arguments: argparse.Namespace) -> None:
    from grove_adapters.pipeline import demo

    out = arguments.out or ("grove-demo-smoke" if arguments.smoke else "grove-demo")
    evaluation = demo(out, seed=arguments.seed, smoke=arguments.smoke, progress=not arguments.quiet)
    _show(evaluation, arguments.json)
    if not arguments.json:
        print(f"\nreport.html, report.json, plots/, adapters/ and store/ are in {out}/")


# -- making a store ----------------------------------------------------------------------------------------------------


def _extract(commands: Any) -> None:
    parser = _command(
        commands,
        "extract",
        _run_extract,
        "embed images and captions with a frozen model into a store",
        "Reads captions (CSV or JSONL beside a folder of images, COCO or Karpathy JSON, HierarCaps, webdataset\n"
        "tar shards), embeds every image and caption once, and writes a store: plain .npy arrays and a manifest\n"
        "with checksums. A killed or interrupted run goes on where it stopped when the same command is run\n"
        "again. A finished store is used again if model, data and settings are the same, and refused by name\n"
        "otherwise. Nothing is downloaded: --pretrained names a checkpoint on disk or one already cached.",
        "grove-adapters extract photos-store --captions captions.csv --images photos/ \\\n"
        "    --model ViT-B-32 --pretrained vit_b_32.safetensors --views 10",
        "rows embedded so far are kept: run the same command again to go on",
    )
    parser.add_argument("store", metavar="STORE", help="folder of the store to write")
    data = parser.add_argument_group("what to embed")
    data.add_argument("--captions", metavar="PATH", required=True, help="captions file, or folder or tar of shards")
    data.add_argument("--images", metavar="DIR", help="folder of the images (not for shards)")
    data.add_argument("--format", default="auto", help="format of the captions; `grove-adapters list` names them")
    _splits(data)
    model = parser.add_argument_group("with which model")
    model.add_argument("--library", choices=("open_clip", "transformers"), default="open_clip", help="who runs it")
    model.add_argument(
        "--model",
        required=True,
        help="open_clip name, transformers folder or name, or grove-tiny-scenes for the bundled model",
    )
    model.add_argument("--pretrained", help="open_clip weights: a file on disk or a tag; without it, random weights")
    model.add_argument(
        "--precision", choices=("fp32", "amp_bf16", "amp_fp16"), default="fp32", help="arithmetic of the encoder"
    )
    model.add_argument("--no-normalise", action="store_true", help="keep the length of the model's vectors")
    _device(model)
    how = parser.add_argument_group("how")
    how.add_argument("--views", type=int, default=0, metavar="K", help="seeded augmentations of each item, for ttda")
    how.add_argument("--features", action="store_true", help="keep what the last linear layers read, for laplace")
    how.add_argument("--batch-size", type=int, default=32, metavar="N", help="images encoded at once")
    how.add_argument("--workers", type=int, metavar="N", help="processes that decode images (default: chosen by cores)")
    how.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="element type on disk")
    how.add_argument(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="unreadable images: stop, or record them in the manifest and go on",
    )
    _seed(parser)
    _quiet(parser)


def _run_extract(arguments: argparse.Namespace) -> None:
    from grove_adapters.extract import read_records
    from grove_adapters.store import EmbeddingStore

    records = read_records(arguments.captions, images=arguments.images, format=arguments.format)
    if arguments.splits:
        records = records.with_splits(arguments.splits, seed=arguments.seed)
    store = EmbeddingStore.build(
        _extractor(arguments),
        records,
        arguments.store,
        views=arguments.views,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
        num_workers=arguments.workers,
        on_error=arguments.on_error,
        dtype=arguments.dtype,
        features=arguments.features,
        progress=not arguments.quiet,
    )
    if store.reused:
        print(f"{store.path} already holds exactly this; nothing was computed")
    print(store.report())


def _extractor(arguments: argparse.Namespace) -> Extractor:
    from grove_adapters.datasets import tiny_clip
    from grove_adapters.extract import HFExtractor, OpenCLIPExtractor

    settings: dict[str, Any] = {
        "device": arguments.device,
        "precision": arguments.precision,
        "normalise": not arguments.no_normalise,
    }
    if arguments.model == tiny_clip.MODEL_NAME:
        model, preprocess, tokenizer = tiny_clip.load_tiny_clip()
        settings |= {"preprocess": preprocess, "tokenizer": tokenizer, "name": tiny_clip.MODEL_NAME}
        return OpenCLIPExtractor(model, **settings)
    if arguments.library == "transformers":
        if arguments.pretrained:
            raise InputError("--pretrained goes with --library open_clip; for transformers --model names the weights")
        return HFExtractor(arguments.model, **settings)
    return OpenCLIPExtractor(arguments.model, arguments.pretrained, seed=arguments.seed, **settings)


def _import(commands: Any) -> None:
    parser = _command(
        commands,
        "import",
        _run_import,
        "make a store from arrays that already exist",
        "Takes .npy, .npz, .safetensors or .parquet arrays (FILE:KEY names one array of several), or a folder:\n"
        "the one clip-retrieval writes, or one with image.npy, text.npy and optional metadata. Without --links\n"
        "and with as many texts as images, row i of one belongs to row i of the other.",
        "grove-adapters import coco --images image.npy --texts text.npy --model ViT-B-16 --pretrained openai\n"
        "grove-adapters import laion --from clip_retrieval_output/",
        "nothing was written; what stood there before is untouched",
    )
    parser.add_argument("store", metavar="STORE", help="folder of the store to write")
    arrays = parser.add_argument_group("what to import")
    arrays.add_argument("--from", dest="folder", metavar="DIR", help="a folder of arrays instead of single files")
    arrays.add_argument("--images", metavar="FILE", help="(N, D) image embeddings")
    arrays.add_argument("--texts", metavar="FILE", help="(T, D) text embeddings")
    arrays.add_argument("--image-ids", metavar="FILE", help="N unique ids")
    arrays.add_argument("--text-ids", metavar="FILE", help="T unique ids")
    arrays.add_argument("--links", metavar="FILE", help="(P, 2) rows (image, text) that belong together")
    arrays.add_argument("--positives", metavar="FILE", help="(R, 2) rows of further true matches")
    arrays.add_argument("--labels", metavar="FILE", help="N class labels of the images")
    arrays.add_argument("--image-views", metavar="FILE", help="(N, K, D) embeddings of augmented images, for ttda")
    arrays.add_argument("--text-views", metavar="FILE", help="(T, K, D) embeddings of augmented texts, for ttda")
    arrays.add_argument("--normalise", action="store_true", help="scale every vector to unit length")
    _splits(arrays)
    source = parser.add_argument_group("where they come from (kept with the store, and compared later)")
    source.add_argument("--model", help="name of the model that made them")
    source.add_argument("--pretrained", default="", help="name of its weights")
    source.add_argument(
        "--logit-scale", type=float, metavar="X", help="the model's multiplier of cosines; needed for confidences"
    )
    _seed(parser)


def _run_import(arguments: argparse.Namespace) -> None:
    from grove_adapters.store import EmbeddingStore

    names = ("image_ids", "text_ids", "links", "positives", "labels", "image_views", "text_views", "splits")
    settings = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    settings |= {"normalise": arguments.normalise, "seed": arguments.seed, "source": _source(arguments)}
    given = {name: value for name in ("images", "texts") if (value := getattr(arguments, name)) is not None}
    if arguments.folder:
        store = EmbeddingStore.from_folder(arguments.store, arguments.folder, **given, **settings)
    elif given:
        store = EmbeddingStore.from_arrays(arguments.store, **given, **settings)
    else:
        raise InputError("import expected --images and --texts, or --from with a folder, got neither; name the arrays")
    print(store.report())


def _source(arguments: argparse.Namespace) -> Any:
    from grove_adapters.embeddings import Source

    if not (arguments.model or arguments.pretrained or arguments.logit_scale):
        return None
    return Source(
        model=arguments.model or "unknown", pretrained=arguments.pretrained, logit_scale=arguments.logit_scale
    )


# -- looking at a store ------------------------------------------------------------------------------------------------


def _info(commands: Any) -> None:
    parser = _command(
        commands,
        "info",
        _run_info,
        "print what a store holds",
        "Model, sizes, splits, columns, skipped images and truncated captions. Reads the manifest only, so it\n"
        "answers at once whatever the size.",
        "grove-adapters info grove-demo/store --json",
        "nothing was changed",
    )
    parser.add_argument("store", metavar="STORE", help="folder of a store")
    _json(parser)


def _run_info(arguments: argparse.Namespace) -> None:
    store = _open(arguments.store)
    print(json.dumps(store.info(), indent=2) if arguments.json else store.report())


def _verify(commands: Any) -> None:
    parser = _command(
        commands,
        "verify",
        _run_verify,
        "compare every file of a store with its checksum",
        "Reads the whole store. Any changed, missing or truncated file is named, and the exit code is 2.",
        "grove-adapters verify grove-demo/store",
        "nothing was changed",
    )
    parser.add_argument("store", metavar="STORE", help="folder of a store")


def _run_verify(arguments: argparse.Namespace) -> None:
    store = _open(arguments.store)
    store.verify()
    print(f"{store.path} is whole: every file has the checksum of its manifest")


# -- adapters ----------------------------------------------------------------------------------------------------------


def _fit(commands: Any) -> None:
    parser = _command(
        commands,
        "fit",
        _run_fit,
        "fit an adapter on the pairs of a store",
        "Writes a folder with adapter.json, weights.safetensors and fit_report.json. An adapter that stands at\n"
        "--out is replaced only when the new one is whole. `grove-adapters list grove` names the settings of\n"
        "an adapter, with their defaults.",
        "grove-adapters fit coco --adapter grove --set latent_dim=10 --set epochs=50 --out coco-grove",
        "nothing was written: --out is as it was",
    )
    parser.add_argument("store", metavar="STORE", help="folder of a store")
    parser.add_argument("--adapter", metavar="NAME", default="grove", help="which; `grove-adapters list` names them")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the fitted adapter")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="NAME=VALUE", help="a setting; may be repeated"
    )
    parser.add_argument("--split", help="pairs to fit on (default: train, or everything where the store has no splits)")
    parser.add_argument("--validation", metavar="SPLIT", help="pairs to choose and stop by (default: part of --split)")
    _seed(parser)
    _device(parser)
    _quiet(parser)


def _run_fit(arguments: argparse.Namespace) -> None:
    from grove_adapters.adapters import ADAPTERS

    kind = ADAPTERS.get(arguments.adapter)
    adapter = kind(**_settings(kind.config_class, arguments.settings))
    store = _open(arguments.store)
    pairs = store.pairs(_split(store, arguments.split, "train"))
    validation = store.pairs(arguments.validation) if arguments.validation else None
    adapter.fit(
        pairs,
        validation=validation,
        seed=arguments.seed,
        device=arguments.device,
        progress=not arguments.quiet,
    )
    folder = adapter.save(arguments.out)
    report = adapter.fit_report_
    for warning in report.warnings:
        print(f"grove-adapters: warning: {warning}", file=sys.stderr)
    print(
        f"{report.adapter} fitted on {report.n_pairs:,} pairs in {report.seconds:.1f} s "
        f"({report.stopped}, {report.epochs} epochs); saved in {folder}"
    )


def _settings(config: type[Config], assignments: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` words as settings of the types `config` declares."""
    import dataclasses
    import typing

    from grove_adapters.config import nearest

    hints = typing.get_type_hints(config)
    names = [field.name for field in dataclasses.fields(config)]
    settings = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set expected NAME=VALUE, got {assignment!r}; write for example --set epochs=50")
        if name not in names:
            raise ConfigError(f"{config.__name__} has no setting {name!r};{nearest(name, names)}")
        settings[name] = _typed(text, hints[name])
    return settings


def _typed(text: str, hint: Any) -> Any:
    """`text` as JSON where that is what the annotation asks for, else as it stands; `Config` judges the result."""
    if hint is str:
        return text
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _predict(commands: Any) -> None:
    parser = _command(
        commands,
        "predict",
        _run_predict,
        "write the probabilistic embeddings of a store",
        "Writes under --out: images.safetensors and texts.safetensors (read them with\n"
        "ProbabilisticEmbedding.load) and uncertainty.csv with one row an item: modality, id, uncertainty.\n"
        "A larger uncertainty is less certain, for every adapter.",
        "grove-adapters predict coco-grove coco --split test --out coco-posteriors",
        "files that are already in --out are whole; the others were not written",
    )
    _adapter_and_store(parser)
    parser.add_argument("--split", help="rows to predict (default: everything)")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to write to")
    _seed(parser)
    _device(parser)
    _quiet(parser)


def _run_predict(arguments: argparse.Namespace) -> None:
    import csv
    from pathlib import Path

    from grove_adapters import _io
    from grove_adapters.adapters import load_adapter
    from grove_adapters.pipeline import predict_both

    adapter, store = load_adapter(arguments.adapter), _open(arguments.store)
    posteriors = predict_both(
        adapter,
        store.pairs(arguments.split),
        seed=arguments.seed,
        device=arguments.device,
        progress=not arguments.quiet,
    )
    out = Path(arguments.out)
    for posterior in posteriors:
        posterior.save(out / f"{posterior.modality}s.safetensors")
    with (
        _io.written_whole(out / "uncertainty.csv") as partial,
        partial.open("w", newline="", encoding="utf-8") as handle,
    ):
        table = csv.writer(handle)
        table.writerow(["modality", "id", "uncertainty"])
        for posterior in posteriors:
            rows = zip(posterior.ids.tolist(), posterior.uncertainty.tolist(), strict=True)
            table.writerows([posterior.modality, name, repr(value)] for name, value in rows)
    print(f"{' and '.join(f'{len(p):,} {p.modality}s' for p in posteriors)} written to {out}")


# -- judging -----------------------------------------------------------------------------------------------------------


def _evaluate(commands: Any) -> None:
    parser = _command(
        commands,
        "evaluate",
        _run_evaluate,
        "retrieve with fitted adapters and calibrate their uncertainty",
        "Images ask for captions and captions for images; any true match counts. The queries are cut into levels\n"
        "of rising uncertainty, and every score comes with a bootstrap interval. Prints a table and writes one\n"
        "JSON file that `grove-adapters report` turns into a page. Evaluate on pairs no adapter was fitted on.",
        "grove-adapters evaluate coco-grove coco-baseline coco --split test --out report.json",
        "--out is as it was",
    )
    parser.add_argument("adapters", metavar="ADAPTER", nargs="+", help="folders of fitted adapters")
    parser.add_argument("store", metavar="STORE", help="folder of a store")
    parser.add_argument("--split", help="pairs to ask about (default: test, or everything without splits)")
    parser.add_argument("--out", metavar="FILE", default="report.json", help="file to write")
    parser.add_argument("--direction", choices=("i2t", "t2i", "both"), default="both", help="who asks whom")
    parser.add_argument(
        "--rank-by",
        choices=("posterior", "backbone"),
        default="posterior",
        help="rank by the posterior, or by the frozen embeddings, which leaves every recall as it was",
    )
    parser.add_argument("--similarity", default="auto", help="`grove-adapters list` names them")
    parser.add_argument("--levels", type=int, default=10, metavar="N", help="levels of uncertainty")
    parser.add_argument("--resamples", type=int, default=1000, metavar="N", help="bootstrap resamples")
    parser.add_argument(
        "--known", metavar="COLUMN", help="column of the store that holds a known ambiguity of the asking side"
    )
    parser.add_argument(
        "--examples", type=int, default=0, metavar="N", help="queries to show on the page, with their pictures"
    )
    parser.add_argument("--drop-unmatched", action="store_true", help="leave out queries without any true match")
    _seed(parser)
    _device(parser)
    _quiet(parser)
    _json(parser)


def _run_evaluate(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from grove_adapters.adapters import load_adapter
    from grove_adapters.pipeline import DIRECTIONS, Evaluation, evaluate_store

    store = _open(arguments.store)
    split = _split(store, arguments.split, "test")
    if split is None:
        print(
            "grove-adapters: warning: the store has no splits, so everything is asked about, also what an adapter was "
            "fitted on; make the store with --splits",
            file=sys.stderr,
        )
    folders = [Path(folder) for folder in arguments.adapters]
    adapters = [load_adapter(folder) for folder in folders]
    parts = [
        evaluate_store(
            adapter,
            store,
            split,
            directions=DIRECTIONS if arguments.direction == "both" else (arguments.direction,),
            levels=arguments.levels,
            resamples=arguments.resamples,
            seed=arguments.seed,
            device=arguments.device,
            known=arguments.known,
            examples=arguments.examples,
            progress=not arguments.quiet,
            rank_by=arguments.rank_by,
            similarity=arguments.similarity,
            unmatched="drop" if arguments.drop_unmatched else "raise",
        )
        for adapter in adapters
    ]
    evaluation = Evaluation.join(parts, names=[folder.name for folder in folders])
    evaluation.save(arguments.out)
    _show(evaluation, arguments.json)
    if not arguments.json:
        print(f"\nwritten to {arguments.out}; `grove-adapters report {arguments.out}` makes a page of it")


def _report(commands: Any) -> None:
    parser = _command(
        commands,
        "report",
        _run_report,
        "one self-contained HTML page from reports",
        "Tables with intervals, figures, examples and provenance in one file without scripts or links, which can\n"
        "be mailed, printed and read anywhere. Reports in one direction share a table.",
        "grove-adapters report report.json other/report.json --out report.html --plots plots",
        "--out is as it was",
    )
    parser.add_argument("reports", metavar="REPORT.json", nargs="+", help="files that evaluate or demo wrote")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="page to write")
    parser.add_argument("--plots", metavar="DIR", help="also write every figure there as a PNG for print")
    parser.add_argument("--title", default="Can this uncertainty be trusted?", help="heading of the page")


def _run_report(arguments: argparse.Namespace) -> None:
    from grove_adapters.pipeline import Evaluation

    parts = [Evaluation.load(path) for path in arguments.reports]
    evaluation = Evaluation.join(parts, names=arguments.reports)
    evaluation.write_page(arguments.out, title=arguments.title)
    if arguments.plots:
        evaluation.write_plots(arguments.plots)
    print(f"{len(evaluation.reports)} reports on one page: {arguments.out}")


def _list(commands: Any) -> None:
    parser = _command(
        commands,
        "list",
        _run_list,
        "names of adapters, similarities and formats, or the settings of one adapter",
        "With the name of an adapter, prints its settings with types and defaults, as --set takes them.",
        "grove-adapters list\ngrove-adapters list grove",
        "nothing was changed",
    )
    parser.add_argument("adapter", metavar="ADAPTER", nargs="?", help="adapter whose settings to print")
    _json(parser)


def _run_list(arguments: argparse.Namespace) -> None:
    from grove_adapters.adapters import ADAPTERS

    if arguments.adapter:
        adapter = ADAPTERS.get(arguments.adapter)
        _print_settings(adapter, arguments.json)
        return
    from grove_adapters.extract.records import FORMATS
    from grove_adapters.similarity import SIMILARITIES

    names = {"adapters": list(ADAPTERS), "similarities": list(SIMILARITIES), "formats": list(FORMATS)}
    if arguments.json:
        print(json.dumps(names, indent=2))
        return
    print("adapters (`grove-adapters list NAME` prints their settings)")
    width = max(map(len, names["adapters"]))
    for name in names["adapters"]:
        print(f"  {name:<{width}}  {_first_line(ADAPTERS.get(name))}")
    print(f"similarities\n  {', '.join(names['similarities'])}\nformats of captions\n  {', '.join(names['formats'])}")


def _print_settings(adapter: type[Adapter], as_json: bool) -> None:
    import dataclasses
    import textwrap
    import typing

    hints = typing.get_type_hints(adapter.config_class)
    fields = dataclasses.fields(adapter.config_class)
    if as_json:
        print(json.dumps({field.name: field.default for field in fields}, indent=2))
        return
    print(f"{adapter.name}: {_first_line(adapter)}")
    meanings = _meanings(adapter.config_class)
    for field in fields:
        kind = hints[field.name].__name__ if isinstance(hints[field.name], type) else str(hints[field.name])
        print(f"\n  {field.name}={field.default}  ({kind.replace('typing.', '')})")
        print(textwrap.fill(meanings.get(field.name, ""), 96, initial_indent="      ", subsequent_indent="      "))
    if not fields:
        print("  no settings")


def _meanings(config: type[Config]) -> dict[str, str]:
    """What the docstrings of a configuration and its bases say about each setting."""
    import inspect
    import re

    meanings: dict[str, str] = {}
    for base in reversed(config.__mro__):
        entries = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for entry in re.finditer(r"^    (\w+): (.*(?:\n      +.*)*)", entries, re.MULTILINE):
            meanings[entry[1]] = re.sub(r"\s+", " ", entry[2])
    return meanings


def _first_line(entry: type) -> str:
    return (entry.__doc__ or "").strip().partition("\n")[0]


# -- shared by several commands ----------------------------------------------------------------------------------------


def _adapter_and_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", metavar="ADAPTER", help="folder of a fitted adapter")
    parser.add_argument("store", metavar="STORE", help="folder of a store")


def _seed(parser: Any) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="address of every random number")


def _device(parser: Any) -> None:
    parser.add_argument("--device", default="cpu", help="where to compute, e.g. cpu or cuda")


def _quiet(parser: Any) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def _json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _splits(parser: Any) -> None:
    parser.add_argument(
        "--splits",
        type=_shares,
        metavar="NAME=SHARE,…",
        help="cut the images at random where the data brings no splits, e.g. train=0.8,test=0.2",
    )


def _shares(text: str) -> dict[str, float]:
    try:
        return {name: float(share) for name, share in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected for example train=0.8,test=0.2, got {text!r}") from None


def _open(path: str) -> EmbeddingStore:
    from grove_adapters.store import EmbeddingStore

    return EmbeddingStore.open(path)


def _split(store: EmbeddingStore, asked: str | None, usual: str) -> str | None:
    """The split asked for; else the usual one, or None (everything) where the store has no splits at all."""
    return asked if asked is not None else (usual if store.splits else None)


def _show(evaluation: Any, as_json: bool) -> None:
    from grove_adapters import _io

    print(json.dumps(_io.jsonable(evaluation.rows()), indent=2) if as_json else evaluation.table())


if __name__ == "__main__":
    sys.exit(main())
