"""What does GroVE cost, against one Gaussian process per dimension and against the arithmetic that it cannot avoid?

Four rows, all on random unit vectors with a smooth mean, D = 512, M = 250, L = 10, on two threads, each in a process of
its own:

* training, both modalities: a minibatch step, per pair, of this package and of a model with one GP per dimension in
  GPyTorch (from `grove_step.py`), at the same batch of 64; and ours at its own batch;
* the same against the matrix products that no implementation avoids (features, means, their gradients, the Cholesky
  factors), timed with `torch.mm` and `torch.linalg.cholesky` at the same shapes;
* embedding new rows: the converged search with its Laplace variance, per row, against the 392 ms on a GPU that the
  GroVE paper prints in Table 10, against 20 Adam steps (as many as the public code takes) of the model with one GP per
  dimension, and against as many of GPyTorch's own idiom with shared inducing points;
* memory: how much of its own the process needs at most for one epoch of `fit` and for `predict`, beyond what it had
  after a first small one, for `--pairs` pairs in memory maps, whose pages the system can take back (Linux counts both
  apart).

    python benchmarks/grove_speed.py            # minutes, 6 GB; writes results/grove_speed.json
    python benchmarks/grove_speed.py --smoke    # small sizes, written nowhere
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grove_step
import numpy as np
import torch

PAPER_MS_PER_ROW = 392.0  # GroVE, Table 10, one query on a GPU


def fastest(action: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest repeat after a first one."""
    action()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def pairs_of(n: int, size: argparse.Namespace, folder: str | None = None) -> object:
    """Pairs on a smooth surface of `latent_dim` dimensions plus noise, in memory or memory maps."""
    from grove_adapters import Embeddings, Pairs

    random = np.random.default_rng(0)
    weights = random.standard_normal((2, size.latent_dim, size.dim)).astype(np.float32) / size.latent_dim**0.5
    sides = []
    for place, modality in enumerate(("image", "text")):
        values = np.empty((n, size.dim), dtype=np.float32)
        if folder is not None:
            values = np.lib.format.open_memmap(
                f"{folder}/{modality}.npy", mode="w+", dtype=np.float32, shape=(n, size.dim)
            )
        for start in range(0, n, 4096):
            stop = min(start + 4096, n)
            hidden = np.random.default_rng([1, start]).standard_normal((stop - start, size.latent_dim))
            noise = np.random.default_rng([2, start, place]).standard_normal((stop - start, size.dim)) * 0.7
            block = np.sin(hidden.astype(np.float32) @ weights[place]) + noise.astype(np.float32)
            values[start:stop] = block / np.linalg.norm(block, axis=1, keepdims=True)
        if folder is not None:
            values.flush()
            values = np.load(f"{folder}/{modality}.npy", mmap_mode="r")
        sides.append(Embeddings(values, [f"{modality}-{row}" for row in range(n)], modality=modality, trusted=True))
    return Pairs(sides[0], sides[1], np.repeat(np.arange(n)[:, None], 2, 1))


def fitted(size: argparse.Namespace) -> object:
    """A GroVE after two epochs."""
    from grove_adapters import create_adapter

    settings = {"latent_dim": size.latent_dim, "n_inducing": size.inducing, "epochs": 2, "validation_share": 0.0}
    return create_adapter("grove", **settings).fit(pairs_of(size.fit_rows, size))


def train_ours(size: argparse.Namespace) -> dict[str, float]:
    """A step at the rival's batch and at our own, per pair."""
    report = {}
    for name, batch in (("rival_batch", size.batch), ("own_batch", size.own_batch)):
        step = grove_step.ours(argparse.Namespace(**{**vars(size), "batch": batch}))
        report[f"us_per_pair_{name}"] = 1e6 * fastest(step, size.repeats) / batch
    return report


def train_rival(size: argparse.Namespace) -> dict[str, float]:
    """A step of one GP per dimension, per pair."""
    return {"us_per_pair": 1e6 * fastest(grove_step.one_gp_per_dimension(size), 2) / size.batch}


def train_floor(size: argparse.Namespace) -> dict[str, float]:
    """The products of a step, forward and backward, of both modalities, at either batch."""
    return {
        f"us_per_pair_{name}": 1e6 * fastest(_products(size, batch), size.repeats) / batch
        for name, batch in (("rival_batch", size.batch), ("own_batch", size.own_batch))
    }


def _products(size: argparse.Namespace, batch: int) -> Callable[[], None]:
    dim, inducing = size.dim, size.inducing
    random = torch.Generator().manual_seed(0)
    kernel = torch.randn(inducing, inducing, generator=random, dtype=torch.float64)
    kernel = kernel @ kernel.T + inducing * torch.eye(inducing, dtype=torch.float64)
    features = torch.randn(batch, inducing, generator=random)
    mean, root = (torch.randn(inducing, width, generator=random) for width in (dim, inducing))
    deviation, wide = torch.randn(batch, dim, generator=random), features.double()

    def products() -> None:
        for _ in range(2):
            torch.linalg.cholesky(kernel)  # K, and the curvature of the means
            torch.linalg.cholesky(kernel)
            torch.mm(wide, kernel)  # features by a triangular solve,
            torch.mm(wide, kernel)  # its gradient by k(V, x),
            torch.mm(kernel, kernel)  # and by K
            torch.mm(features, mean)  # the means, and their gradient by
            torch.mm(deviation, mean.T)  # the features
            torch.mm(features.T, deviation)  # and by m
            torch.mm(features, root)  # the variances, and their gradient by
            torch.mm(features, root)  # the features
            torch.mm(features.T, features)  # and by the factor of S
            torch.mm(features.T, features)  # the curvature of the means
            torch.mm(root, mean)  # the natural step

    return products


def embed_ours(size: argparse.Namespace) -> dict[str, float]:
    """Converged rows a second, with Laplace variances, and what else a call costs."""
    from grove_adapters.adapters.grove.inference import LatentInference

    adapter, images = fitted(size), pairs_of(size.rows, size).images
    seconds = fastest(lambda: adapter.predict(images), size.predict_repeats)
    gps, anchors = adapter.module_.gps, adapter.module_.anchors
    found = LatentInference({"image": gps["image"]}, anchors)({"image": torch.as_tensor(images.values)})
    one = images.take(np.arange(1))
    return {
        "rows_per_s": len(images) / seconds,
        "converged_share": float(found.converged.float().mean()),
        "ms_for_one_row": 1e3 * fastest(lambda: adapter.predict(one), 5),
    }


def embed_one_gp_per_dimension(size: argparse.Namespace) -> dict[str, float]:
    """Rows a second of 20 Adam steps on the latents with one GP per dimension: not converged."""
    step = grove_step.one_gp_per_dimension_search(size, rows=64)
    return {"rows_per_s": 64 / (20 * fastest(step, 2))}


def embed_gpytorch(size: argparse.Namespace) -> dict[str, float]:
    """Rows a second of 20 Adam steps on the latents, with shared inducing points and a batched q(u): not converged."""
    gpytorch = grove_step.quiet_gpytorch()
    dims = torch.Size([size.dim])

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            q = gpytorch.variational.CholeskyVariationalDistribution(size.inducing, batch_shape=dims)
            inducing = torch.randn(size.inducing, size.latent_dim)
            super().__init__(
                gpytorch.variational.IndependentMultitaskVariationalStrategy(
                    gpytorch.variational.VariationalStrategy(self, inducing, q), num_tasks=size.dim
                )
            )
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=dims)
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    # in training mode, because evaluation keeps factors that cannot be differentiated twice
    model = Model().requires_grad_(False)
    values = torch.from_numpy(np.ascontiguousarray(pairs_of(64, size).images.values))

    def search() -> None:
        x = torch.zeros(len(values), size.latent_dim, requires_grad=True)
        optimiser = torch.optim.Adam([x], lr=0.1)
        for _ in range(20):
            optimiser.zero_grad()
            output = model(x)
            ((output.mean - values).square() + output.variance).sum().backward()
            optimiser.step()

    return {"rows_per_s": len(values) / fastest(search, 1)}


class OwnMemory:
    """Samples the anonymous memory of this process in the background; `peak_mb` is the largest seen."""

    def __init__(self) -> None:
        self.peak_mb = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> OwnMemory:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.peak_mb = max(self.peak_mb, self._now())

    def _now(self) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def memory(size: argparse.Namespace) -> dict[str, float]:
    """Growth of the process's own memory over an epoch of fit and a prediction."""
    from grove_adapters import create_adapter

    fitted(argparse.Namespace(**{**vars(size), "fit_rows": 1000})).predict(pairs_of(1000, size).images)
    with tempfile.TemporaryDirectory() as folder:
        pairs = pairs_of(size.pairs, size, folder)
        settings = {"latent_dim": size.latent_dim, "n_inducing": size.inducing, "epochs": 1, "batch_size": 1024}
        with OwnMemory() as own:
            before = own.peak_mb
            adapter = create_adapter("grove", **settings, validation_share=0.0).fit(pairs)
            fit_grew = own.peak_mb - before
            for start in range(0, min(size.pairs, 16384), 4096):
                adapter.predict(pairs.images.take(np.arange(start, min(start + 4096, size.pairs))))
    return {"fit_grew_mb": fit_grew, "all_grew_mb": own.peak_mb - before}


ROLES = {
    "training, ours": train_ours,
    "training, one GP per dimension": train_rival,
    "training, matrix products alone": train_floor,
    "embedding, ours": embed_ours,
    "embedding, one GP per dimension": embed_one_gp_per_dimension,
    "embedding, GPyTorch's shared inducing points": embed_gpytorch,
    "memory": memory,
}


def table(found: dict[str, dict[str, float]]) -> list[tuple[str, str, str, str]]:
    """(what, measured, ratio, bar) rows."""
    ours, rival = found["training, ours"], found["training, one GP per dimension"]["us_per_pair"]
    floors, embed = found["training, matrix products alone"], found["embedding, ours"]
    own, same = ours["us_per_pair_own_batch"], ours["us_per_pair_rival_batch"]
    floor, same_floor = floors["us_per_pair_own_batch"], floors["us_per_pair_rival_batch"]
    idiom, rows = found["embedding, GPyTorch's shared inducing points"]["rows_per_s"], embed["rows_per_s"]
    structure = found["embedding, one GP per dimension"]["rows_per_s"]
    paper = rows * PAPER_MS_PER_ROW / 1e3
    return [
        ("a pair, own batch", f"{own:.1f} µs", f"{rival / own:.0f}× one GP per dimension", "≥ 3,000×"),
        ("a pair, its batch", f"{same:.1f} µs", f"{rival / same:.0f}× one GP per dimension", "≥ 1,000×"),
        ("a pair, own batch", f"{own:.1f} µs", f"{own / floor:.2f}× the matrix products alone", "≤ 2.5×"),
        ("a pair, its batch", f"{same:.1f} µs", f"{same / same_floor:.2f}× the matrix products alone", ""),
        ("embedding", f"{rows:.0f} rows/s", f"{paper:.0f}× the paper's", "≥ 5,000 rows/s"),
        ("embedding", f"{rows:.0f} rows/s", f"{rows / structure:.0f}× one GP per dimension", "≥ 5,000×"),
        ("embedding", f"{rows:.0f} rows/s", f"{rows / idiom:.0f}× GPyTorch's own idiom", "≥ 10×"),
        ("memory over the data", f"{found['memory']['all_grew_mb']:.0f} MB", "", "≤ 500 MB"),
    ]


def main() -> None:
    """Measure every role in a process of its own, print the table and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, meaning in (
        ("dim", 512, "D, embedding dimensions"),
        ("inducing", 250, "M, inducing inputs"),
        ("latent-dim", 10, "L, latent dimensions"),
        ("batch", 64, "links a step of the rival"),
        ("own-batch", 1024, "links a step of ours"),
        ("fit-rows", 4000, "links of the fit before embedding"),
        ("rows", 8192, "rows to embed"),
        ("pairs", 150_000, "links of the memory test"),
        ("repeats", 30, "of a step"),
        ("predict-repeats", 3, "of a prediction"),
        ("threads", 2, "of torch"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=meaning)
    parser.add_argument("--smoke", action="store_true", help="small sizes; writes nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "grove_speed.json")
    parser.add_argument("--role", choices=list(ROLES), help=argparse.SUPPRESS)
    size = parser.parse_args()
    if size.smoke:
        small = {"dim": 16, "inducing": 20, "batch": 8, "own_batch": 32, "fit_rows": 300, "rows": 300, "pairs": 2000}
        vars(size).update(small, repeats=3, predict_repeats=1, threads=1, latent_dim=4)
    if size.role:
        torch.set_num_threads(size.threads)
        torch.manual_seed(0)
        print(json.dumps(ROLES[size.role](size)))
        return
    load, found = os.getloadavg()[0], {}
    for role in ROLES:
        run = subprocess.run([sys.executable, *sys.argv, "--role", role], capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"{role} failed:\n{run.stderr}")
        found[role] = json.loads(run.stdout.splitlines()[-1])
    for what, measured, ratio, bar in table(found):
        print(f"{what:>22}: {measured:>14}   {ratio:<36} bar {bar}")
    if not size.smoke:
        machine = {"processor": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
        sizes = {name: value for name, value in vars(size).items() if isinstance(value, int)}
        report = {"sizes": sizes, **found, "table": table(found), "load_before": load, "machine": machine}
        size.out.parent.mkdir(parents=True, exist_ok=True)
        size.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
