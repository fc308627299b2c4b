"""The embedding store: arrays on disk with a manifest that says what they are and whether they are whole.

In order: `manifest` (what a store says about itself), `files` (growing arrays and columns), `lock` and `journal` (one
writer at a time, and where it got to), `finishing` (from arrays in a folder to a store), `plan` and `building` (from an
extractor and records), `arrays` and `importing` (from what people have), `embedding_store` (reading).
"""

from __future__ import annotations

from grove_adapters.store.embedding_store import EmbeddingStore

__all__ = ["EmbeddingStore"]
