"""What does one training step of GroVE cost, against one Gaussian process per dimension in plain GPyTorch?

Both make the same optimisation step of the same objective (forward, backward and update of both modalities, alignment
included) on random unit vectors. The rival has the public code's structure: D latent GPs a modality, each with inducing
inputs, length scale and q(u) of its own, mixed by a dense D×D matrix, and Adam. Each runs in a process of its own, so
that peak memory can be told apart; the fastest of the repeats counts, because the machine may be shared.

    python benchmarks/grove_step.py            # D=512, M=250, B=64, L=10: about a minute, 5 GB
    python benchmarks/grove_step.py --smoke    # D=16, M=20
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

N_LINKS = 2000
ALIGNMENT = 0.1  # λ₂ / λ₁ of both


def unit_vectors(n: int, dim: int, seed: int) -> np.ndarray:
    """(n, dim) random unit vectors."""
    values = np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def ours(size: argparse.Namespace) -> Callable[[], None]:
    """One step of the package's own fit."""
    from grove_adapters import Embeddings, Pairs
    from grove_adapters.adapters.grove.alignments import SymmetricKL
    from grove_adapters.adapters.grove.data import LinkedRows
    from grove_adapters.adapters.grove.model import Decoders, Objective
    from grove_adapters.adapters.grove.natural import NaturalGradient

    sides = [Embeddings(unit_vectors(N_LINKS, size.dim, seed), modality=m) for seed, m in enumerate(("image", "text"))]
    pairs = Pairs(sides[0], sides[1], np.repeat(np.arange(N_LINKS)[:, None], 2, 1))
    decoders = Decoders(size.inducing, size.latent_dim, size.dim, 1)
    latents = torch.nn.Embedding(N_LINKS, size.latent_dim, sparse=True)
    with torch.no_grad():
        for gp in decoders.gps.values():
            gp.inducing.normal_()
            gp.kernel.start((2 * size.latent_dim) ** 0.5)
    natural = NaturalGradient(decoders.processes, N_LINKS, size.dim, 0.1)
    objective = Objective(
        decoders,
        latents,
        LinkedRows(pairs, torch.device("cpu")),
        alignment=SymmetricKL(),
        weight=ALIGNMENT,
        align_constants=True,
        prior=False,
        natural=natural,
    )
    owned = {id(parameter) for group in natural.param_groups for parameter in group["params"]}
    rest = [parameter for parameter in decoders.parameters() if id(parameter) not in owned]
    optimisers = [natural, torch.optim.AdamW(rest, lr=0.01), torch.optim.SparseAdam(latents.parameters(), lr=0.01)]

    def step() -> None:
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
        objective(torch.randint(N_LINKS, (size.batch,)))["loss"].backward()
        for optimiser in optimisers:
            optimiser.step()

    return step


def quiet_gpytorch() -> ModuleType:
    """GPyTorch, without the warning of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import gpytorch

    return gpytorch


def one_modality(size: argparse.Namespace) -> torch.nn.Module:
    """D latent GPs, each with inducing inputs, length scale and q(u) of its own, mixed by a dense D×D matrix."""
    gpytorch = quiet_gpytorch()
    dims = torch.Size([size.dim])

    class Modality(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            q = gpytorch.variational.CholeskyVariationalDistribution(size.inducing, batch_shape=dims)
            inducing = torch.randn(size.dim, size.inducing, size.latent_dim)
            each = gpytorch.variational.VariationalStrategy(self, inducing, q, learn_inducing_locations=True)
            super().__init__(
                gpytorch.variational.LMCVariationalStrategy(
                    each, num_tasks=size.dim, num_latents=size.dim, latent_dim=-1
                )
            )
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=dims)
            self.covar_module = gpytorch.kernels.ScaleKernel(
                gpytorch.kernels.RBFKernel(batch_shape=dims), batch_shape=dims
            )
            self.covar_module.base_kernel.lengthscale = np.sqrt(2 * size.latent_dim)

        def forward(self, x: torch.Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    return Modality()


def one_gp_per_dimension(size: argparse.Namespace) -> Callable[[], None]:
    """The same step with D latent GPs a modality."""
    gpytorch = quiet_gpytorch()
    targets = [torch.from_numpy(unit_vectors(N_LINKS, size.dim, seed)) for seed in (0, 1)]
    latents = torch.nn.Parameter(torch.randn(N_LINKS, size.latent_dim))
    models = torch.nn.ModuleList(one_modality(size) for _ in targets)
    likelihoods = torch.nn.ModuleList(
        gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=size.dim) for _ in targets
    )
    bounds = [
        gpytorch.mlls.VariationalELBO(likelihood, model, num_data=N_LINKS)
        for likelihood, model in zip(likelihoods, models, strict=True)
    ]
    optimiser = torch.optim.Adam([latents, *models.parameters(), *likelihoods.parameters()], lr=1e-5)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        rows = torch.randint(N_LINKS, (size.batch,))
        outputs = [model(latents[rows]) for model in models]
        loss = -sum(bound(output, z[rows]).sum() for bound, output, z in zip(bounds, outputs, targets, strict=True))
        (mean_i, v_i), (mean_t, v_t) = ((output.mean, output.variance) for output in outputs)
        square = (mean_i - mean_t).square()
        alignment = 0.25 * ((v_i + square) / v_t + (v_t + square) / v_i - 2).sum(1).mean()
        (loss + ALIGNMENT * alignment).backward()
        optimiser.step()

    return step


def one_gp_per_dimension_search(size: argparse.Namespace, *, rows: int) -> Callable[[], None]:
    """An Adam step on the latents of new rows of one modality, the model frozen; every step factorises anew."""
    model = one_modality(size).requires_grad_(False)  # in training mode: the factors kept in evaluation hold a graph
    values = torch.from_numpy(unit_vectors(rows, size.dim, 2))
    x = torch.zeros(rows, size.latent_dim, requires_grad=True)
    optimiser = torch.optim.Adam([x], lr=0.1)

    def step() -> None:
        optimiser.zero_grad()
        output = model(x)
        ((output.mean - values).square() + output.variance).sum().backward()
        optimiser.step()

    return step


ROLES = {"ours": ours, "one_gp_per_dimension": one_gp_per_dimension}


def measure(role: str, size: argparse.Namespace) -> dict[str, float]:
    """Seconds of the steps after a first one, and this process's peak memory, of which imports take a share."""
    torch.set_num_threads(size.threads)
    torch.manual_seed(0)
    step = ROLES[role](size)
    before = peak_memory_mb()
    repeats = size.repeats if role == "ours" else size.rival_repeats
    seconds = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return {
        "fastest_s": min(seconds[1:]),
        "median_s": float(np.median(seconds[1:])),
        "repeats": repeats,
        "peak_memory_mb": peak_memory_mb(),
        "before_the_first_step_mb": before,
    }


def peak_memory_mb() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure both, print the comparison and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=512, help="D, embedding dimensions")
    parser.add_argument("--inducing", type=int, default=250, help="M, inducing inputs")
    parser.add_argument("--batch", type=int, default=64, help="B, links a step")
    parser.add_argument("--latent-dim", type=int, default=10, help="L, latent dimensions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=100, help="steps of ours")
    parser.add_argument("--rival-repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="small sizes; writes nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "grove_step.json")
    parser.add_argument("--role", choices=list(ROLES), help=argparse.SUPPRESS)
    size = parser.parse_args()
    if size.smoke:
        size.dim, size.inducing, size.batch, size.repeats, size.rival_repeats = 16, 20, 8, 5, 2
    if size.role:
        print(json.dumps(measure(size.role, size)))
        return
    results = {}
    for role in ROLES:
        run = subprocess.run([sys.executable, *sys.argv, "--role", role], check=True, capture_output=True, text=True)
        results[role] = json.loads(run.stdout.splitlines()[-1])
        print(
            f"{role:>22}: {results[role]['fastest_s']:.4f} s a step, {results[role]['peak_memory_mb']:.0f} MB at peak"
        )
    ratio = results["one_gp_per_dimension"]["fastest_s"] / results["ours"]["fastest_s"]
    print(f"{'times faster':>22}: {ratio:.0f}")
    if not size.smoke:
        sizes = {name: getattr(size, name) for name in ("dim", "inducing", "batch", "latent_dim", "threads")}
        machine = {"processor": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
        report = {"sizes": sizes, **results, "times_faster": ratio, "machine": machine}
        size.out.parent.mkdir(parents=True, exist_ok=True)
        size.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
