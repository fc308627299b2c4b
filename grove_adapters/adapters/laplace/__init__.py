"""A Laplace posterior over the last linear layers.

`likelihoods` has the curvature of the contrastive losses, `posterior` the Gaussian over a layer's weights and what it
makes of features, and `adapter` puts them together.
"""

from __future__ import annotations

from grove_adapters.adapters.laplace.adapter import Laplace, LaplaceConfig

__all__ = ["Laplace", "LaplaceConfig"]
