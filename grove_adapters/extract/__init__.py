"""Extractors: frozen image-text models, the records they embed, and the loop between the two.

In order: `records` (what is to be embedded), `views` (seeded augmentations), `base` (what an extractor is),
`last_layer` (what its last linear layer reads), `openclip` and `huggingface` (the built-in ones), `loop` (batches from
any row on).
"""

from __future__ import annotations

from grove_adapters.extract.base import Extractor, Featured, FeatureExtractor, Tokens, TorchExtractor
from grove_adapters.extract.huggingface import HFExtractor
from grove_adapters.extract.openclip import OpenCLIPExtractor
from grove_adapters.extract.records import Caption, Record, Records, read_records

__all__ = [
    "Caption",
    "Extractor",
    "FeatureExtractor",
    "Featured",
    "HFExtractor",
    "OpenCLIPExtractor",
    "Record",
    "Records",
    "Tokens",
    "TorchExtractor",
    "read_records",
]
