"""Test-time data augmentation: how much does the embedding move when the input is perturbed?"""

from __future__ import annotations

import torch

from grove_adapters.adapters.base import Adapter, Batch, FitRun
from grove_adapters.embeddings import Pairs
from grove_adapters.posterior import SampledEmbedding


class TTDA(Adapter):
    """The K stored views of each item as samples of its distribution.

    Nothing is learned: `fit` checks the data and remembers the source. The uncertainty is the unbiased variance over
    views, averaged over dimensions.

    Source: GroVE, Appendix A.2 (ten views; random resized crop and flip for images, words dropped with p = .3 for
    texts). The paper does not say whether its variance is biased; here it is not.
    """

    name = "ttda"
    posterior_class = SampledEmbedding
    needs_views = True

    def _fit(self, pairs: Pairs, validation: Pairs | None, run: FitRun) -> torch.nn.Module:
        return torch.nn.Module()

    def _predict(self, batch: Batch) -> dict[str, torch.Tensor]:
        assert batch.views is not None  # the base class has refused embeddings without views
        return {"samples": batch.views}
