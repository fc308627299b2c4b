"""What does the common loop cost, and how fast does every adapter fit and predict?

Each registered adapter is fitted on random linked unit vectors that lie in memory maps. Where it calls the common loop,
that call is timed and compared with a bare one: the same network, objective, optimisers and minibatches, with the data
in memory and nothing counted, checked, cut or remembered. Both run in turns in one process and the fastest of each
counts, because the machine may be shared. The floor is the time that the matrix products of a step alone would take, at
the rate of one large product. Prediction is compared with the adapter's own computation on batches already at hand.

Memory is that of a fit of one epoch beside its data, in a process of its own: how much anonymous memory (the pages of
memory maps are not) it holds at most beyond what it held before, at two numbers of pairs. Reading the data into memory
would show as its own size.

    python benchmarks/adapters_speed.py            # D=512: some minutes; writes results/adapters_speed.json and .md
    python benchmarks/adapters_speed.py --only-memory            # the memory columns of those files alone
    python benchmarks/adapters_speed.py --smoke    # D=16, few pairs; written nowhere
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from grove_adapters import Embeddings, Pairs, Source, _io, seeding
from grove_adapters.adapters import ADAPTERS, Adapter, Batch, create_adapter, list_adapters
from grove_adapters.adapters.loop import LoopConfig, minimise
from grove_adapters.embeddings import MODALITIES, as_float32

RESULTS = Path(__file__).resolve().parent / "results"
WRAPPERS = {"ensemble", "recalibrated"}  # cost what they wrap
BATCH = 256
VIEWS = 4
MEMORY_PAIRS, MEMORY_DIM = (10_000, 100_000), 128
STATUS = Path("/proc/self/status")  # Linux says there what is anonymous


def write_pairs(folder: Path, n: int, dim: int, *, views: int = VIEWS) -> None:
    """Files of `n` linked random unit vectors, each text near its image, and of views near both."""
    random = np.random.default_rng(0)
    concepts = random.standard_normal((n, dim))
    for modality in MODALITIES:
        noise = random.standard_normal((n, 1 + views, dim))
        values = concepts[:, None] + 0.7 * noise
        values = (values / np.linalg.norm(values, axis=-1, keepdims=True)).astype(np.float32)
        for name, array in (("values", values[:, 0]), ("views", values[:, 1:])):
            np.save(folder / f"{modality}-{name}.npy", array)


def open_pairs(folder: Path) -> Pairs:
    """Pairs on what `write_pairs` wrote, as memory maps."""
    sides = []
    for modality in MODALITIES:
        values, views = (np.load(folder / f"{modality}-{name}.npy", mmap_mode="r") for name in ("values", "views"))
        sides.append(
            Embeddings(values, modality=modality, source=Source(model="random", logit_scale=20.0), views=views)
        )
    return Pairs(sides[0], sides[1], np.repeat(np.arange(len(sides[0]))[:, None], 2, 1))


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def product_rate() -> float:
    """Floating-point operations a second of a large float32 matrix product."""
    matrix = torch.randn(1024, 1024)
    return 2 * 1024**3 / min(seconds(lambda: matrix @ matrix) for _ in range(10))


@contextlib.contextmanager
def in_memory(pairs: Pairs) -> Iterator[None]:
    """Read links from tensors instead of memory maps."""
    image, text = as_float32(pairs.images.values[:]), as_float32(pairs.texts.values[:])
    links = torch.from_numpy(pairs.links)

    def read(self: Pairs, rows: Any, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        chosen = links[torch.as_tensor(np.asarray(rows))]
        return image[chosen[:, 0]], text[chosen[:, 1]]

    with mock.patch.object(Pairs, "read", read):
        yield


class Stopwatch:
    """Stands in for `minimise` in every adapter: times it against a bare loop on what it was given.

    Args:
        pairs: What the adapter is fitted on.
        repeats: Turns of each.
    """

    def __init__(self, pairs: Pairs, repeats: int) -> None:
        self._pairs = pairs
        self._repeats = repeats
        self.common = self.bare = math.inf
        self.steps = self.operations = 0

    def __call__(
        self,
        objective: Callable[[torch.Tensor], dict[str, torch.Tensor]],
        module: torch.nn.Module,
        n_rows: int,
        settings: LoopConfig,
        run: Any,
        *,
        groups: Any = None,
        validate: Any = None,
        others: Any = (),
    ) -> None:
        """The signature of `minimise`."""
        start, others = copy.deepcopy(module.state_dict()), list(others)
        groups = [{"params": list(module.parameters())}] if groups is None else list(groups)
        owned = {id(p) for optimiser in others for group in optimiser.param_groups for p in group["params"]}
        dense = [{**group, "params": [p for p in group["params"] if id(p) not in owned]} for group in groups]

        def bare() -> None:
            adam = torch.optim.AdamW(dense, lr=settings.learning_rate, weight_decay=settings.weight_decay)
            module.train()
            generator = seeding.generator(run.seed)
            for _ in range(settings.epochs):
                for rows in torch.randperm(n_rows, generator=generator).split(settings.batch_size):
                    for optimiser in (adam, *others):
                        optimiser.zero_grad(set_to_none=True)
                    objective(rows)["loss"].backward()
                    for optimiser in (adam, *others):
                        optimiser.step()

        def common() -> None:
            own = run.part("timed")
            minimise(objective, module, n_rows, settings, own, groups=dense, others=others)
            self.steps = own.report.steps

        with FlopCounterMode(display=False) as counter:
            objective(torch.arange(min(settings.batch_size, n_rows)))["loss"].backward()
        self.operations = counter.get_total_flops()
        for _ in range(self._repeats):
            module.load_state_dict(start)
            with in_memory(self._pairs):
                self.bare = min(self.bare, seconds(bare))
            module.load_state_dict(start)
            self.common = min(self.common, seconds(common))
        run.report.history = [{"epoch": 1.0, "log_likelihood": 0.0, "divergence": 0.0, "alignment": 0.0}]
        run.report.best_epoch = 1


def fitted(adapter: Adapter, pairs: Pairs, repeats: int) -> tuple[float, Stopwatch]:
    """Fit with every loop timed; the whole time and the stopwatch."""
    watch = Stopwatch(pairs, repeats)
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            inside = name.startswith("grove_adapters.adapters.") and not name.endswith(".loop")
            if inside and getattr(module, "minimise", None) is minimise:
                stack.enter_context(mock.patch.object(module, "minimise", watch))
        return seconds(lambda: adapter.fit(pairs)), watch


def predicted(adapter: Adapter, part: Embeddings, size: int, repeats: int) -> tuple[float, float]:
    """Seconds of `predict`, and of the adapter's own computation on batches at hand."""
    batches = [
        Batch(
            values=as_float32(part.values[start : start + size]),
            views=as_float32(part.views[start : start + size]) if adapter.needs_views else None,
            features=as_float32(part.features[start : start + size]) if adapter.needs_features else None,
            modality=part.modality,
            seed=0,
        )
        for start in range(0, len(part), size)
    ]

    def own() -> None:
        with torch.no_grad():
            for batch in batches:
                adapter._predict(batch)

    whole = core = math.inf
    for _ in range(repeats):
        core = min(core, seconds(own))
        whole = min(whole, seconds(lambda: adapter.predict(part, batch_size=size)))
    return whole, core


def measure(name: str, pairs: Pairs, arguments: argparse.Namespace, rate: float) -> dict[str, Any]:
    """One row of the table."""
    iterates = issubclass(ADAPTERS.get(name).config_class, LoopConfig)
    loop = {"epochs": arguments.epochs, "batch_size": BATCH, "validation_share": 0.0} if iterates else {}
    settings = {**(ADAPTERS.get(name).small_settings() if arguments.smoke else {}), **loop}
    adapter = create_adapter(name, **settings)
    total, watch = fitted(adapter, pairs, arguments.repeats)
    row: dict[str, Any] = {"adapter": name}
    if watch.steps:
        step = watch.common / watch.steps
        row["fit_seconds_per_million_pairs_and_epoch"] = watch.common / arguments.epochs / len(pairs) * 1e6
        row["milliseconds_a_step"] = 1e3 * step
        row["against_bare_loop"] = watch.common / watch.bare
        row["against_matrix_products"] = step / (watch.operations / rate) if watch.operations else None
    else:
        row["fit_seconds_once"] = total
    whole, core = predicted(adapter, pairs.images, 4096, arguments.repeats)
    row["predicted_a_second"] = len(pairs.images) / whole
    if core > whole / 100:  # adapters that compute nothing have nothing to be compared with
        row["predict_against_bare"] = whole / core
    return row


class OwnMemory:
    """The largest anonymous memory of this process while it is open, beyond that at the start, in MiB."""

    def __enter__(self) -> OwnMemory:
        self._done = threading.Event()
        self._start = self._most = self._now()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    @property
    def mebibytes(self) -> float:
        """What was found."""
        return (self._most - self._start) / 1024

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self._most = max(self._most, self._now())

    def _now(self) -> int:
        (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
        return int(line.split()[1])


def own_memory(name: str, folder: Path) -> float:
    """MiB that fitting an adapter on pairs in memory maps takes beside them."""
    iterates = issubclass(ADAPTERS.get(name).config_class, LoopConfig)
    settings = {"epochs": 1, "batch_size": BATCH} if iterates else {}
    pairs = open_pairs(folder)
    create_adapter(name, **settings).fit(pairs.take_images(np.arange(1000)))  # what is loaded and kept once
    with OwnMemory() as memory:
        create_adapter(name, **settings).fit(pairs)
    return memory.mebibytes


def measure_memory(names: list[str], numbers: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Adapter → MiB at each number of pairs, each in a process of its own; the features of encoders are not at hand."""
    found: dict[str, dict[str, float]] = {name: {} for name in names if not ADAPTERS.get(name).needs_features}
    for n in numbers:
        with tempfile.TemporaryDirectory() as folder:
            write_pairs(Path(folder), n, MEMORY_DIM, views=2)
            for name, row in found.items():
                command = [sys.executable, __file__, "--memory", name, folder]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                row[f"own_mib_at_{n}_pairs"] = round(json.loads(done.stdout), 1)
                print(f"{name}, {n:,} pairs: {json.loads(done.stdout):.1f} MiB", flush=True)
    return found


HEADINGS = {
    "adapter": "adapter",
    "fit_seconds_per_million_pairs_and_epoch": "fit, s / 10⁶ pairs / epoch",
    "milliseconds_a_step": f"ms / step of {BATCH}",
    "against_bare_loop": "× bare loop",
    "against_matrix_products": "× matrix products",
    "fit_seconds_once": "fit without a loop, s",
    "predicted_a_second": "predicted / s",
    "predict_against_bare": "× bare prediction",
    **{f"own_mib_at_{n}_pairs": f"own MiB, fit on {n:,} pairs" for n in MEMORY_PAIRS},
}


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = [f"| {' | '.join(HEADINGS.values())} |", f"|{' --- |' * len(HEADINGS)}"]
    for row in rows:
        cells = [row.get(name) for name in HEADINGS]
        lines.append(f"| {' | '.join('' if x is None else x if isinstance(x, str) else f'{x:.3g}' for x in cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small and fast, nothing written")
    bare = [name for name in list_adapters() if name not in WRAPPERS and not ADAPTERS.get(name).needs_features]
    parser.add_argument("--adapters", nargs="*", default=bare, metavar="NAME")
    parser.add_argument("--pairs", type=int, default=4096, metavar="N")
    parser.add_argument("--dim", type=int, default=512, metavar="D")
    parser.add_argument("--epochs", type=int, default=1, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--only-memory", action="store_true", help="measure memory, keep the written timings")
    parser.add_argument("--memory", nargs=2, metavar=("NAME", "FOLDER"), help="MiB of one fit, in this process")
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps(own_memory(arguments.memory[0], Path(arguments.memory[1]))))
        return
    if arguments.only_memory:
        content = _io.read_json(RESULTS / "adapters_speed.json")
        write(content | with_memory(content["rows"], measure_memory(arguments.adapters, MEMORY_PAIRS)))
        return
    if arguments.smoke:
        arguments.pairs, arguments.dim, arguments.repeats = 512, 16, 1

    rate, rows = product_rate(), []
    with tempfile.TemporaryDirectory() as folder:
        write_pairs(Path(folder), arguments.pairs, arguments.dim)
        pairs = open_pairs(Path(folder))
        for name in arguments.adapters:
            rows.append(measure(name, pairs, arguments, rate))
            print(
                {key: value if isinstance(value, str | None) else round(value, 3) for key, value in rows[-1].items()},
                flush=True,
            )
    if arguments.smoke:
        print(f"\n{table(rows)}\n\n{measure_memory(arguments.adapters[:1], (1000,))}")
        return
    found = with_memory(rows, measure_memory(arguments.adapters, MEMORY_PAIRS))
    content = {
        "what": __doc__.splitlines()[0],
        "pairs": arguments.pairs,
        "dim": arguments.dim,
        "batch_size": BATCH,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "product_gflops": rate / 1e9,
        **found,
    }
    write(content)


def with_memory(rows: list[dict[str, Any]], memory: dict[str, dict[str, float]]) -> dict[str, Any]:
    """What is written of both: rows with their memory, and the size of the data on which that was measured."""
    return {
        "memory_dim": MEMORY_DIM,
        "memory_data_mib": {str(n): round(2 * n * MEMORY_DIM * 4 / 2**20, 1) for n in MEMORY_PAIRS},
        "rows": [{**row, **memory.get(row["adapter"], {})} for row in rows],
    }


def write(content: dict[str, Any]) -> None:
    """Both result files."""
    _io.write_json(RESULTS / "adapters_speed.json", content)
    _io.write_text(RESULTS / "adapters_speed.md", table(content["rows"]) + "\n")


if __name__ == "__main__":
    main()
