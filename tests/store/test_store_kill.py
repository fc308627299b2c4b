import hashlib
import multiprocessing
import time

import numpy as np
import pytest

from grove_adapters import EmbeddingStore
from grove_adapters.store import building


def build(extractor, records, path, features):
    building.COMMIT_SECONDS = 0.0
    settings = {"views": 1, "batch_size": 4, "num_workers": 0, "on_error": "skip", "progress": False}
    settings["features"] = features
    return EmbeddingStore.build(extractor, records, path, **settings)


def slowly(extractor):
    """The same extractor, slow enough to be killed in the middle."""
    for name in ("embed_images", "embed_texts"):
        embed = getattr(extractor, name)
        setattr(extractor, name, lambda batch, embed=embed: (time.sleep(0.01), embed(batch))[1])
    return extractor


@pytest.mark.parametrize(("seed", "features"), [(0, False), (1, True), (2, False), (3, True)])
def test_kill_9_at_random_moments_loses_and_doubles_nothing(
    make_extractor, records, tmp_path, monkeypatch, seed, features
):
    monkeypatch.setattr(building, "COMMIT_SECONDS", 0.0)
    whole = build(make_extractor(), records, tmp_path / "whole", features)
    process = multiprocessing.get_context("fork").Process
    for moment in np.random.default_rng(seed).uniform(0, 0.25, 3):  # one build, killed up to three times
        child = process(target=build, args=(slowly(make_extractor()), records, tmp_path / "store", features))
        child.start()
        child.join(moment)
        child.kill()
        child.join()
    store = build(make_extractor(), records, tmp_path / "store", features)
    sums = [
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}
        for path in (whole.path, store.path)
    ]
    assert sums[0] == sums[1]
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("*.lock"))
