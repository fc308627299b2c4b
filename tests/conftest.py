"""Fixtures that several rooms share."""

import os

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests are small: a second thread only spins where the machine is busy


@pytest.fixture(scope="session")
def make_result():
    """A retrieval result with an uncertainty of chosen worth, without any model."""
    from grove_adapters.tasks import TaskResult

    def make(adapter="grove", direction="i2t", *, queries=200, worth=2.0, confidence=True, seed=0, prefix="query"):
        random = np.random.default_rng(seed)
        difficulty = random.normal(size=queries)
        chance = 1 / (1 + np.exp(worth * difficulty - 1))
        correct = (random.random(queries) < chance).astype(float)
        return TaskResult(
            task="retrieval",
            direction=direction,
            ids=np.array([f"{prefix}-{row}" for row in range(queries)]),
            correct=correct,
            uncertainty=difficulty,
            confidence=chance if confidence else None,
            recall_at={1: correct, 5: np.maximum(correct, random.random(queries) < 0.5)},
            groups=np.arange(queries) // 2,
            provenance={
                "query_maker": {"adapter": adapter, "config": {"note": "</pre><script>"}},
                "source": {"model": "ViT-B-32", "pretrained": "openai"},
                "n_gallery": 77,
            },
        )

    return make


@pytest.fixture(scope="session")
def make_report(make_result):
    """A calibration report of such a result."""
    from grove_adapters.calibration import calibrate

    def make(*args, **settings):
        return calibrate(make_result(*args, **settings), resamples=20)

    return make
