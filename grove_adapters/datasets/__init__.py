"""Data whose uncertainty is known: rendered scenes with a bundled tiny CLIP, and a synthetic toy world.

Import from the rooms themselves (`datasets.scenes`, `datasets.tiny_clip`, `datasets.synthetic`), so that using one does
not load the others.
"""
