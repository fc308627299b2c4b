"""Randomness with an address: every random number comes from a seed the caller gave, and nothing leaks out."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def derive(seed: int, *address: str | int) -> int:
    """A child seed for one named place, so that two users of the same seed never share a stream.

    Args:
        seed: The seed the caller gave.
        address: Names and numbers that say what the stream is for, e.g. ``("latents", "restart", 3)``.

    Returns:
        An integer in [0, 2^63), the same on every platform and run.
    """
    digest = hashlib.sha256(repr((int(seed), *address)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator on `device`, seeded and independent of the global one."""
    return torch.Generator(device=device).manual_seed(int(seed))


@contextlib.contextmanager
def local(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and torch inside the block and give the caller's random state back after it."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002  libraries we call still read the global stream
    cuda_devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=cuda_devices):
        torch.manual_seed(int(seed))
        random.seed(int(seed))
        np.random.seed(int(seed) % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
