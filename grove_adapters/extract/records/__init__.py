"""Records: images and captions as the extractors want them, and the readers of the formats people have them in."""

from __future__ import annotations

from grove_adapters.extract.records.base import Caption, Record, Records, assign_splits
from grove_adapters.extract.records.images import ImageFile, ImageLoader, MemoryImage, TarImage, read_image
from grove_adapters.extract.records.reading import FORMATS, read_records

__all__ = [
    "FORMATS",
    "Caption",
    "ImageFile",
    "ImageLoader",
    "MemoryImage",
    "Record",
    "Records",
    "TarImage",
    "assign_splits",
    "read_image",
    "read_records",
]
