"""How much memory does an objective hold on a batch of 16,384 × 512, forward and backward, beside its inputs?

Every objective runs in a process of its own. What is counted is by how much the peak of its memory exceeds what it held
when the inputs were made: temporaries, and the gradients of all inputs. Inputs are float32.

    python benchmarks/objectives_memory.py                 # minutes; writes results/objectives_memory.json
    python benchmarks/objectives_memory.py --only csd      # one of them, printed
    python benchmarks/objectives_memory.py --smoke         # 256 × 64, written nowhere
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grove_adapters import _io
from grove_adapters import objectives as o

RESULTS = Path(__file__).resolve().parent / "results"
BATCH, DIM, DRAWS = 16384, 512, 8
LIMIT = 2048  # MiB


def gaussians(rows: int, dim: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two sets of Gaussians with means of about unit length and small variances."""
    return [
        (torch.randn(rows, dim).div_(dim**0.5).requires_grad_(), torch.full((rows, dim), -6.0).requires_grad_())
        for _ in range(2)
    ]


def samples(rows: int, dim: int) -> list[torch.Tensor]:
    """Draws of a few images and of all texts; more images take more time, not more memory."""
    return [torch.randn(n, DRAWS, dim).div_(dim**0.5).requires_grad_() for n in (max(rows // 512, 2), rows)]


def directions(rows: int, dim: int) -> list[torch.Tensor]:
    """Two sets of unit vectors."""
    return [torch.nn.functional.normalize(torch.randn(rows, dim), dim=1).requires_grad_() for _ in range(2)]


OBJECTIVES: dict[str, tuple[Callable[[int, int], Any], Callable[..., torch.Tensor]]] = {
    "mutual_likelihood_loss": (gaussians, o.mutual_likelihood_loss),
    "csd_matching": (gaussians, lambda *x: o.csd_matching(*x, scale=5.0, shift=5.0)),
    "csd_matching, labelled and weighted": (
        gaussians,
        lambda *x: o.csd_matching(
            *x,
            scale=5.0,
            shift=5.0,
            labels=torch.eye(len(x[0][0]), dtype=torch.bool),
            weights=torch.ones(1, 1).expand(len(x[0][0]), len(x[1][0])),
        ),
    ),
    "csd_matching, pseudo-positives": (
        gaussians,
        lambda *x: o.csd_matching(*x, scale=5.0, shift=5.0, pseudo_positives=True),
    ),
    "sigmoid_pairwise": (gaussians, lambda *x: o.sigmoid_pairwise(*x, scale=10.0, shift=-10.0)),
    f"soft_contrastive, {DRAWS} draws": (samples, lambda *x: o.soft_contrastive(*x, scale=4.0, shift=5.0)),
    "inclusion_loss": (gaussians, o.inclusion_loss),
    "bottleneck": (gaussians, lambda one, other: o.bottleneck(one) + o.bottleneck(other)),
    "generalized_gaussian_nll": (
        gaussians,
        lambda one, other: o.generalized_gaussian_nll(one[0] - other[0], one[1].exp(), other[1].exp() + 1).mean(),
    ),
    "symmetric_cross_entropy": (
        directions,
        lambda one, other: o.symmetric_cross_entropy([one], [other], lambda x, y: 20 * x @ y.T),
    ),
}


def measure(name: str, rows: int, dim: int) -> dict[str, Any]:
    """MiB of the inputs and on top of them, and seconds, in this process."""
    make, loss = OBJECTIVES[name]
    empty = peak()
    inputs = make(rows, dim)
    before, start = peak(), time.perf_counter()
    loss(*inputs).backward()
    return {
        "objective": name,
        "inputs_mib": round(before - empty, 1),
        "own_mib": round(peak() - before, 1),
        "seconds": round(time.perf_counter() - start, 1),
    }


def peak() -> float:
    """Largest resident memory of this process so far, in MiB."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes / (1024**2 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small, nothing written")
    parser.add_argument("--only", choices=list(OBJECTIVES), metavar="NAME", help="measure one, in this process")
    arguments = parser.parse_args()
    rows, dim = (256, 64) if arguments.smoke else (BATCH, DIM)
    if arguments.only:
        print(json.dumps(measure(arguments.only, rows, dim)))
        return
    found = []
    for name in OBJECTIVES:
        command = [sys.executable, __file__, "--only", name, *(["--smoke"] if arguments.smoke else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout))
        print(found[-1], flush=True)
    if arguments.smoke:
        return
    content = {"what": __doc__.splitlines()[0], "batch": rows, "dim": dim, "limit_mib": LIMIT, "rows": found}
    content["all_below"] = all(row["own_mib"] < LIMIT for row in found)
    _io.write_json(RESULTS / "objectives_memory.json", content)


if __name__ == "__main__":
    main()
