"""Embed images and captions once, into a store that everything else opens in no time.

python examples/01_cache_embeddings.py --records photos/ --model ViT-B-32 --pretrained openai --out photos-vitb32
python examples/01_cache_embeddings.py --smoke
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import grove_adapters as ga
from grove_adapters.datasets import Scenes, load_tiny_clip
from grove_adapters.extract import OpenCLIPExtractor, read_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", help="pictures with captions: a folder, COCO JSON or tar shards (default: scenes)")
    parser.add_argument("--images", help="folder of the pictures, where it is another one")
    parser.add_argument("--model", default="ViT-B-32", help="open_clip model for --records")
    parser.add_argument("--pretrained", default="openai", help="its weights: a tag or a local checkpoint")
    parser.add_argument("--out", help="the store (default: a temporary one)")
    parser.add_argument("--smoke", action="store_true", help="a few scenes")
    arguments = parser.parse_args()
    out = Path(arguments.out or tempfile.mkdtemp()) / "store" if not arguments.out else Path(arguments.out)

    if arguments.records:
        records = read_records(arguments.records, images=arguments.images)
        if not records.splits.any():
            records = records.with_splits({"train": 0.8, "test": 0.2}, seed=0)
        extractor = OpenCLIPExtractor(arguments.model, arguments.pretrained)
    else:
        records = Scenes.generate(40 if arguments.smoke else 1000, seed=0).records()
        model, preprocess, tokenizer = load_tiny_clip()
        extractor = OpenCLIPExtractor(model, preprocess=preprocess, tokenizer=tokenizer, name="tiny-clip")

    # Ctrl-C, a full disk or a power cut only interrupt this: the same call continues where it stopped.
    store = ga.EmbeddingStore.build(extractor, records, out, views=2, on_error="skip")
    print(store.report())
    store.verify()

    # Memory maps: opening costs nothing, rows are read when they are used.
    train = ga.EmbeddingStore.open(out).pairs("train")
    first_image, first_text = train.links[0]
    print(train.images.ids[first_image], "↔", store.column("text", "text", "train")[first_text])


if __name__ == "__main__":
    main()
