"""What does the common loop cost, and how fast does every adapter fit and predict?

Each registered adapter is fitted on random linked unit vectors that lie in memory maps. Where it calls the common loop,
that call is timed and compared with a bare one: the same network, objective, optimisers and minibatches, with the data
in memory and nothing counted, checked, cut or remembered. Both run in turns in one process and the fastest of each
counts, because the machine may be shared. The floor is the time that the matrix products of a step alone would take, at
the rate of one large product. Prediction is compared with the adapter's own computation on batches already at hand.

    python benchmarks/adapters_speed.py            # D=512: some minutes; writes results/adapters_speed.json and .md
    python benchmarks/adapters_speed.py --smoke    # D=16, few pairs; written nowhere
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import platform
import sys
import tempfile
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
from grove_adapters.embeddings import as_float32

RESULTS = Path(__file__).resolve().parent / "results"
WRAPPERS = {"ensemble", "recalibrated"}  # cost what they wrap
BATCH = 256
VIEWS = 4


def make_pairs(folder: Path, n: int, dim: int) -> Pairs:
    """`n` linked random unit vectors, each text near its image, and views near both, in memory maps."""
    random = np.random.default_rng(0)
    concepts = random.standard_normal((n, dim))
    sides = []
    for modality in ("image", "text"):
        noise = random.standard_normal((n, 1 + VIEWS, dim))
        values = concepts[:, None] + 0.7 * noise
        values = (values / np.linalg.norm(values, axis=-1, keepdims=True)).astype(np.float32)
        arrays = {}
        for name, array in (("values", values[:, 0]), ("views", values[:, 1:])):
            path = folder / f"{modality}-{name}.npy"
            np.save(path, array)
            arrays[name] = np.load(path, mmap_mode="r")
        source = Source(model="random", logit_scale=20.0)
        sides.append(Embeddings(arrays["values"], modality=modality, source=source, views=arrays["views"]))
    return Pairs(sides[0], sides[1], np.repeat(np.arange(n)[:, None], 2, 1))


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


HEADINGS = {
    "adapter": "adapter",
    "fit_seconds_per_million_pairs_and_epoch": "fit, s / 10⁶ pairs / epoch",
    "milliseconds_a_step": f"ms / step of {BATCH}",
    "against_bare_loop": "× bare loop",
    "against_matrix_products": "× matrix products",
    "fit_seconds_once": "fit without a loop, s",
    "predicted_a_second": "predicted / s",
    "predict_against_bare": "× bare prediction",
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
    bare = [name for name in list_adapters() if name not in WRAPPERS]
    parser.add_argument("--adapters", nargs="*", default=bare, metavar="NAME")
    parser.add_argument("--pairs", type=int, default=4096, metavar="N")
    parser.add_argument("--dim", type=int, default=512, metavar="D")
    parser.add_argument("--epochs", type=int, default=1, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.pairs, arguments.dim, arguments.repeats = 512, 16, 1

    rate, rows = product_rate(), []
    with tempfile.TemporaryDirectory() as folder:
        pairs = make_pairs(Path(folder), arguments.pairs, arguments.dim)
        for name in arguments.adapters:
            rows.append(measure(name, pairs, arguments, rate))
            print(
                {key: value if isinstance(value, str | None) else round(value, 3) for key, value in rows[-1].items()},
                flush=True,
            )
    print(f"\n{table(rows)}")
    if arguments.smoke:
        return
    content = {
        "what": __doc__.splitlines()[0],
        "pairs": arguments.pairs,
        "dim": arguments.dim,
        "batch_size": BATCH,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "product_gflops": rate / 1e9,
        "rows": rows,
    }
    _io.write_json(RESULTS / "adapters_speed.json", content)
    _io.write_text(RESULTS / "adapters_speed.md", table(rows) + "\n")


if __name__ == "__main__":
    main()
