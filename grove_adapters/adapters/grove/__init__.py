"""GroVE: a sparse multi-modal Gaussian process latent variable model.

In the order of the data: `data` (link rows), `initialise` (where to start), `kernels`, `covariances` and `gp` (one
sparse GP), `alignments` and `model` (two GPs on one latent space and their objective), `natural` and `collapsed` (two
ways to train q(u)), `inference` (the latent of a new embedding), `backbone` (how far to leave the frozen one) and
`adapter`.
"""

from __future__ import annotations

from grove_adapters.adapters.grove.adapter import GroVE
from grove_adapters.adapters.grove.config import GroVEConfig

__all__ = ["GroVE", "GroVEConfig"]
