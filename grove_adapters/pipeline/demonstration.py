"""The demo: the whole path on the bundled world and the bundled model."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grove_adapters.config import Config
from grove_adapters.pipeline.evaluation import Evaluation
from grove_adapters.pipeline.run import evaluate_store

if TYPE_CHECKING:
    from grove_adapters.datasets.scenes import Scenes


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Config):
    """How large the demo is.

    Attributes:
        scenes: Pictures, cut into `SPLITS`.
        views: Augmentations of each picture and caption, for TTDA.
        adapters: Adapters to compare.
        resamples: Bootstrap resamples behind every interval.
        examples: Queries of the last adapter shown in each direction.
        small_adapters: Whether to fit with the adapters' settings for small data.
    """

    scenes: int = 1500
    views: int = 10
    adapters: tuple[str, ...] = ("deterministic", "ttda", "grove")
    resamples: int = 1000
    examples: int = 12
    small_adapters: bool = False


SPLITS = {"train": 0.45, "validation": 0.1, "test": 0.45}  # as many queries as pairs to fit on: intervals are the point
FULL = DemoConfig()
SMOKE = DemoConfig(scenes=120, views=3, resamples=200, small_adapters=True)


def demo(out: str | Path = "grove-demo", *, seed: int = 0, smoke: bool = False, progress: bool = True) -> Evaluation:
    """The whole path on the bundled world and model: scenes, embeddings, adapters, retrieval, calibration, a page.

    Writes `store/`, `adapters/`, `report.json`, `plots/*.png` and `report.html` under `out`. A store that is already
    there and was made from the same scenes by the same model is used again.

    Args:
        out: Folder to write to.
        seed: Address of every random number.
        smoke: A small world, in seconds instead of minutes.
        progress: Whether to say on standard error what happens, with progress bars.

    Raises:
        StoreError: `out` holds a store of other scenes, or cannot be written.
    """
    with _one_thread():
        return _demo(Path(out), SMOKE if smoke else FULL, seed, progress)


def _demo(out: Path, settings: DemoConfig, seed: int, progress: bool) -> Evaluation:
    from grove_adapters.adapters import ADAPTERS, create_adapter
    from grove_adapters.datasets.scenes import Scenes
    from grove_adapters.datasets.tiny_clip import MODEL_NAME, load_tiny_clip
    from grove_adapters.extract import OpenCLIPExtractor
    from grove_adapters.store import EmbeddingStore

    def say(sentence: str) -> None:
        if progress:
            print(sentence, file=sys.stderr, flush=True)

    say(f"Describing {settings.scenes:,} scenes and what their captions mean")
    scenes = Scenes.generate(settings.scenes, seed=seed, splits=SPLITS)
    model, preprocess, tokenizer = load_tiny_clip()
    extractor = OpenCLIPExtractor(model, preprocess=preprocess, tokenizer=tokenizer, name=MODEL_NAME)
    say(f"Drawing and embedding them with {extractor.source}, {settings.views} views each")
    store = EmbeddingStore.build(
        extractor,
        scenes.records(),
        out / "store",
        views=settings.views,
        seed=seed,
        batch_size=256,
        progress=progress,
    )
    if store.reused:
        say(f"Using the store that is already at {store.path}")
    train, validation = store.pairs("train"), store.pairs("validation")
    parts = []
    for name in settings.adapters:
        adapter = create_adapter(name, **(ADAPTERS.get(name).small_settings() if settings.small_adapters else {}))
        say(f"Fitting {name} on {len(train):,} pairs")
        adapter.fit(train, validation=validation, seed=seed, progress=progress).save(out / "adapters" / name)
        say(f"Retrieving and calibrating with {name}")
        parts.append(
            evaluate_store(
                adapter,
                store,
                "test",
                resamples=settings.resamples,
                seed=seed,
                known="ambiguity",
                examples=settings.examples if name == settings.adapters[-1] else 0,
                picture=lambda image: _picture(scenes, image),
                progress=progress,
            )
        )
    say("Drawing the report")
    facts = {
        "world": f"{settings.scenes:,} scenes",
        "fitted on": f"{len(train):,} pairs",
        "split": "test",
        "seed": seed,
    }
    evaluation = dataclasses.replace(Evaluation.join(parts), facts=facts)
    evaluation.save(out / "report.json")
    evaluation.write_plots(out / "plots")
    evaluation.write_page(out / "report.html")
    return evaluation


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Torch on one thread: the same sums on every machine, and no waiting for a core that other work holds.

    The demo's tensors are small: two threads gain a little on an idle machine and lose tenfold on a busy one.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _picture(scenes: Scenes, name: str, size: int = 160) -> bytes:
    drawn = io.BytesIO()
    scenes.image(scenes.image_ids.index(name), size).save(drawn, "JPEG", quality=88)
    return drawn.getvalue()
