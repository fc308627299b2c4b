"""The rows a fit reads: one for each link, fetched from the stores when asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from grove_adapters.embeddings import Pairs, as_float32

CHUNK = 4096  # rows fetched together in a pass over everything


class LinkedRows:
    """(image, text) embeddings link by link, so that a memory map is never read whole.

    Args:
        pairs: Whose links are the rows.
        device: Where the rows go.
    """

    def __init__(self, pairs: Pairs, device: torch.device) -> None:
        self._pairs = pairs
        self._device = device
        self.dim = pairs.dim

    def __len__(self) -> int:
        return len(self._pairs.links)

    def fetch(self, rows: torch.Tensor | np.ndarray) -> dict[str, torch.Tensor]:
        """(B, D) float32 of both modalities for the given link numbers."""
        links = self._pairs.links[np.asarray(rows)]
        return {
            "image": as_float32(self._pairs.images.values[links[:, 0]], self._device),
            "text": as_float32(self._pairs.texts.values[links[:, 1]], self._device),
        }

    def sweep(self) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """Every link once, in order: link numbers and what `fetch` gives for them."""
        for rows in torch.arange(len(self)).split(CHUNK):
            yield rows, self.fetch(rows)
