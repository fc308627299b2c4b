"""Trains the bundled tiny CLIP on scenes with the open_clip training stack, and measures it.

    python benchmarks/train_tiny_clip.py                 # an hour on one shared core; writes the package's weights
    python benchmarks/train_tiny_clip.py --measure-only  # measures the weights that are there
    python benchmarks/train_tiny_clip.py --smoke         # a few steps, written to a temporary folder

Training is `open_clip_train.train.train_one_epoch` with `open_clip.ClipLoss` and open_clip's cosine schedule. Every
batch is drawn and rendered fresh from a seed of its own, none of which is the seed of a test. The measures go to
`benchmarks/results/tiny_clip.json`: recall@1 in a gallery of 1,000 clean scenes with full captions, and over the
deciles of known ambiguity in the mixed world.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from open_clip import ClipLoss
from open_clip.model import CLIP
from open_clip_train.data import DataInfo
from open_clip_train.params import parse_args as open_clip_args
from open_clip_train.scheduler import cosine_lr
from open_clip_train.train import train_one_epoch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, IterableDataset

from grove_adapters import seeding
from grove_adapters._io import read_json, read_tensors, write_json, write_tensors
from grove_adapters.datasets.scenes import (
    ScenePrior,
    SceneTable,
    caption_chain,
    evidence,
    log_share,
    log_share_shown,
    matches,
    phrase,
    render_all,
)
from grove_adapters.datasets.tiny_clip import (
    MODEL_NAME,
    PRETRAINED,
    WEIGHTS,
    load_tiny_clip,
    tiny_clip_config,
    tiny_clip_tokenizer,
    untrained_tiny_clip,
)

RESULTS = Path(__file__).parent / "results" / "tiny_clip.json"
PRIOR = ScenePrior()
DEGRADED = ScenePrior(**dict.fromkeys(("blur", "noise", "occlusion"), (0.6, 0.16, 0.14, 0.1)))
LEVEL_SHARES = (0.03, 0.06, 0.11, 0.8)
"""Shares of captions of levels 0 to 3 in training: mostly full ones, because they teach most."""
DEGRADED_SHARE = 0.15


@dataclass(frozen=True)
class Stage:
    """One cosine cycle of training; stages are equally long.

    Attributes:
        learning_rate: Peak of the cycle.
        twins: Share of near-identical neighbours in a batch: without them colours alone tell its scenes apart.
        singles: Share of scenes with a single object, interpolated between (progress in the stage, share) points: words
            are learned faster where there is only one thing they can mean.
    """

    learning_rate: float
    twins: float
    singles: tuple[tuple[float, float], ...]


STAGES = (
    Stage(2e-3, twins=0.5, singles=((0.0, 1.0), (0.3, 0.0))),
    Stage(1.5e-3, twins=0.8, singles=((0.0, 0.0),)),
    Stage(1e-3, twins=0.6, singles=((0.0, 0.2),)),
)


def normalise(pictures: np.ndarray) -> torch.Tensor:
    """(N, S, S, 3) uint8 to the model's (N, 3, S, S) input, as its preprocessing does."""
    settings = tiny_clip_config()["preprocess_cfg"]
    mean, std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("mean", "std"))
    return (torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255 - mean) / std


def cycle_length(epochs: int, steps: int) -> int:
    """Steps of each stage."""
    return math.ceil(epochs * steps / len(STAGES))


class FreshBatches(IterableDataset):
    """Training batches, all fresh; batch i of a training of given length depends on the seed and on i alone."""

    priors = (replace(PRIOR.clean(), count=(1.0, 0.0, 0.0, 0.0)), DEGRADED, PRIOR.clean())

    def __init__(self, seed: int, batch_size: int, epochs: int, steps_per_epoch: int) -> None:
        self.seed, self.batch_size, self.epochs, self.steps = seed, batch_size, epochs, steps_per_epoch
        self.epoch = 0
        self.tokenizer = tiny_clip_tokenizer()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for step in range(self.epoch * self.steps, (self.epoch + 1) * self.steps):
            yield self.batch(step)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = seeding.derive(self.seed, "train", step)
        rng = np.random.default_rng(seed)
        cycle = cycle_length(self.epochs, self.steps)
        stage = STAGES[step // cycle]
        single = float(np.interp(step % cycle / cycle, *zip(*stage.singles, strict=True)))
        shares = single, (1 - single) * DEGRADED_SHARE, (1 - single) * (1 - DEGRADED_SHARE)
        sizes = rng.multinomial(self.batch_size, shares)
        scenes = SceneTable.concatenate(
            [
                prior.draw(int(size), seed=seeding.derive(seed, part), twins=stage.twins)
                for part, (prior, size) in enumerate(zip(self.priors, sizes, strict=True))
            ]
        )
        levels = rng.choice(len(LEVEL_SHARES), len(scenes), p=LEVEL_SHARES)
        texts = [phrase(caption_chain(scene, rng)[level], rng) for scene, level in zip(scenes, levels, strict=True)]
        return normalise(render_all(scenes)), self.tokenizer(texts)


def train(
    *, seed: int, epochs: int, steps: int, batch_size: int, gallery: int, weights: Path, resume: bool = False
) -> float:
    """Trains and writes float16 weights after every epoch; resumed, only Adam's moments start anew. Returns seconds."""
    args = open_clip_args(["--precision", "amp_bf16", "--grad-clip-norm", "1.0", "--log-every-n-steps", "50"])
    vars(args).update(batch_size=batch_size, device="cpu", rank=0, world_size=1, distributed=False)
    vars(args).update(distill=False, wandb=False)
    model = untrained_tiny_clip(seed)
    model.output_dict = True
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=STAGES[0].learning_rate, betas=(0.9, 0.98), eps=1e-6)
    cycle = cycle_length(epochs, steps)
    cycles = [cosine_lr(optimizer, stage.learning_rate, min(50, cycle), cycle) for stage in STAGES]

    def scheduler(step: int) -> None:
        cycles[step // cycle](step % cycle)

    batches = FreshBatches(seed, batch_size, epochs, steps)
    loader = DataLoader(batches, batch_size=None)
    loader.num_batches, loader.num_samples = steps, steps * batch_size
    data = {"train": DataInfo(loader, shared_epoch=_Epoch(batches))}
    first, before = 0, 0.0
    if resume:
        tensors, facts = read_tensors(weights)
        model.load_state_dict(tensors)
        first, before = int(facts["epochs"]), float(facts["seconds"])
    start = time.monotonic()
    for epoch in range(first, epochs):
        if epoch * steps % cycle == 0:
            optimizer.state.clear()  # a stage starts with fresh moments, so it may as well be resumed from its weights
        # With so few tokens plain attention is faster on a CPU than the fused kernel's backward pass.
        with sdpa_kernel(SDPBackend.MATH):
            train_one_epoch(model, data, ClipLoss(), epoch, optimizer, None, scheduler, None, args)
        state = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
        seconds = before + time.monotonic() - start
        facts = {"model": MODEL_NAME, "pretrained": PRETRAINED, "seed": seed, "epochs": epoch + 1, "seconds": seconds}
        write_tensors(weights, state, {name: str(fact) for name, fact in facts.items()})
        recall = clean_recall(model, seed=seed, n=gallery, samples=0, part="validation")
        logging.info("epoch %d of %d: %s", epoch + 1, epochs, {k: v["recall_at_1"] for k, v in recall.items()})
    return seconds


class _Epoch:
    """What open_clip's `DataInfo.set_epoch` calls."""

    def __init__(self, batches: FreshBatches) -> None:
        self.set_value = batches.set_epoch


@torch.no_grad()
def embed(model: CLIP, scenes: SceneTable, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Unit embeddings (N, D) of pictures and (T, D) of texts."""
    model.eval()
    tokenizer = tiny_clip_tokenizer()
    images = [
        model.encode_image(normalise(render_all(scenes.rows(slice(i, i + 250)))), normalize=True)
        for i in range(0, len(scenes), 250)
    ]
    encoded = [model.encode_text(tokenizer(texts[i : i + 500]), normalize=True) for i in range(0, len(texts), 500)]
    return torch.cat(images).numpy(), torch.cat(encoded).numpy()


def interval(correct: np.ndarray, samples: int, seed: int) -> dict[str, Any]:
    """Mean of a 0/1 array with a 95 % bootstrap interval over queries."""
    rng = np.random.default_rng(seed)
    means = [correct[rng.integers(len(correct), size=len(correct))].mean() for _ in range(samples)]
    bounds = np.quantile(means, [0.025, 0.975]).tolist() if samples else None
    return {"recall_at_1": float(correct.mean()), "interval_95": bounds, "queries": len(correct)}


def clean_recall(model: CLIP, *, seed: int, n: int, samples: int, part: str) -> dict[str, Any]:
    """Recall@1 in a gallery of n clean scenes with one full caption each; every true answer counts as right."""
    scenes = PRIOR.clean().draw(n, seed=seeding.derive(seed, part))
    rng = np.random.default_rng(seeding.derive(seed, part, "captions"))
    descriptions = [caption_chain(scene, rng)[3] for scene in scenes]
    images, texts = embed(model, scenes, [phrase(description, rng) for description in descriptions])
    true = matches(descriptions, scenes)
    best_text, best_image = (images @ texts.T).argmax(axis=1), (images @ texts.T).argmax(axis=0)
    rows = np.arange(n)
    return {
        "image_to_text": interval(true[best_text, rows], samples, seed),
        "text_to_image": interval(true[rows, best_image], samples, seed),
    }


def mixed_recall(model: CLIP, *, seed: int, n: int, samples: int) -> dict[str, Any]:
    """Recall@1 over deciles of known ambiguity, n scenes of the mixed world with four captions each.

    `own` asks for the very caption or picture that belongs to the query; `true` accepts every true answer.
    """
    scenes = PRIOR.draw(n, seed=seeding.derive(seed, "mixed"), twins=0.2)
    rng = np.random.default_rng(seeding.derive(seed, "mixed", "captions"))
    descriptions = [description for scene in scenes for description in caption_chain(scene, rng)]
    images, texts = embed(model, scenes, [phrase(description, rng) for description in descriptions])
    owner = np.arange(len(texts)) // 4
    true = matches(descriptions, scenes)
    similarity = images @ texts.T
    best_text, best_image = similarity.argmax(axis=1), similarity.argmax(axis=0)
    image_ambiguity = np.array([log_share_shown(evidence(scene), PRIOR) for scene in scenes])
    text_ambiguity = np.array([log_share(description, PRIOR) for description in descriptions])

    def deciles(ambiguity: np.ndarray, own: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
        groups = np.array_split(np.lexsort((rng.random(len(ambiguity)), ambiguity)), 10)
        return [
            {
                "ambiguity": [float(ambiguity[rows].min()), float(ambiguity[rows].max())],
                "own": interval(own[rows], samples, seed),
                "true": interval(right[rows], samples, seed),
            }
            for rows in groups
        ]

    return {
        "image_to_text": deciles(image_ambiguity, owner[best_text] == np.arange(n), true[best_text, np.arange(n)]),
        "text_to_image": deciles(text_ambiguity, best_image == owner, true[np.arange(len(texts)), best_image]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps, nothing in the package is touched")
    parser.add_argument("--measure-only", action="store_true", help="measure the bundled weights")
    parser.add_argument("--resume", action="store_true", help="continue after the last epoch written to --weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=42)
    parser.add_argument("--steps", type=int, default=100, help="steps per epoch")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if args.smoke:
        args.epochs, args.steps, args.batch_size = 1, 3, 32
        args.weights = Path(tempfile.mkdtemp()) / "weights.safetensors"
    gallery, samples = (100, 20) if args.smoke else (1000, 1000)
    minutes = None
    if not args.measure_only:
        seconds = train(
            seed=args.seed,
            epochs=args.epochs,
            steps=args.steps,
            batch_size=args.batch_size,
            gallery=gallery,
            weights=args.weights,
            resume=args.resume,
        )
        minutes = round(seconds / 60, 1)
    model, _, _ = load_tiny_clip(args.weights)
    result = {
        "model": MODEL_NAME,
        "pretrained": PRETRAINED,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_bytes": args.weights.stat().st_size,
        "seed": args.seed,
        "training": {
            "steps": args.epochs * args.steps,
            "batch_size": args.batch_size,
            "minutes": minutes,
            "cores": torch.get_num_threads(),
        },
        "clean": {"gallery": gallery, **clean_recall(model, seed=args.seed, n=gallery, samples=samples, part="test")},
        "mixed": {"gallery": gallery, **mixed_recall(model, seed=args.seed, n=gallery, samples=samples)},
    }
    if args.measure_only and RESULTS.exists():
        result["training"] = read_json(RESULTS)["training"]
    target = args.weights.parent / "tiny_clip.json" if args.smoke else RESULTS
    write_json(target, result)
    report(result)
    print(f"written to {target}")


def report(result: dict[str, Any]) -> None:
    """The measures as a small table."""

    def cell(measure: dict[str, Any]) -> str:
        low, high = measure["interval_95"]
        return f"{measure['recall_at_1']:.3f} [{low:.3f}, {high:.3f}]"

    gallery = result["clean"]["gallery"]
    print(f"R@1, {gallery} clean scenes with full captions")
    for direction in ("image_to_text", "text_to_image"):
        print(f"  {direction}: {cell(result['clean'][direction])}")
    print(f"R@1 over deciles of known ambiguity, {gallery} scenes of the mixed world with four captions each")
    for direction in ("image_to_text", "text_to_image"):
        for row in result["mixed"][direction]:
            low, high = row["ambiguity"]
            recalls = f"own {cell(row['own'])}   true {cell(row['true'])}"
            print(f"  {direction}  log share {low:6.1f} to {high:6.1f}   {recalls}")


if __name__ == "__main__":
    main()
