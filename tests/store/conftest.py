import numpy as np
import pytest
import torch
from PIL import Image

from grove_adapters.embeddings import Projection, Source
from grove_adapters.extract import Caption, Featured, Record, Records, Tokens


class TinyExtractor:
    """A deterministic model of no library: random projections of pixels and of letter counts."""

    device = torch.device("cpu")

    def __init__(self, dim=6, **source):
        self.source = Source(**{"model": "tiny", "pretrained": "w1", "library": "none", "preprocess": "4x4", **source})
        random = torch.Generator().manual_seed(0)
        self.pixels = torch.randn(48, dim, generator=random)
        self.letters = torch.randn(128, dim, generator=random)
        self.calls = []

    @staticmethod
    def preprocess(image):
        return torch.from_numpy(np.array(image.resize((4, 4)), dtype=np.float32) / 255 + 0.01).permute(2, 0, 1)

    @staticmethod
    def tokenize(texts):
        counts = torch.zeros(len(texts), 128)
        for row, text in enumerate(texts):
            for letter in text[:40]:
                counts[row, ord(letter) % 128] += 1
        return Tokens({"letters": counts}, np.array([len(text) > 40 for text in texts]))

    def embed_images(self, images):
        self.calls.append(("image", len(images)))
        return images.flatten(1) @ self.pixels

    def embed_texts(self, texts):
        tokens = texts if isinstance(texts, Tokens) else self.tokenize(texts)
        self.calls.append(("text", len(tokens.inputs["letters"])))
        return tokens.inputs["letters"] @ self.letters

    def projection(self, modality):
        return Projection((self.pixels if modality == "image" else self.letters).T)

    def featured_images(self, images):
        return Featured(self.embed_images(images), images.flatten(1))

    def featured_texts(self, texts):
        tokens = texts if isinstance(texts, Tokens) else self.tokenize(texts)
        return Featured(self.embed_texts(tokens), tokens.inputs["letters"])


@pytest.fixture
def extractor():
    return TinyExtractor()


@pytest.fixture
def make_extractor():
    return TinyExtractor


@pytest.fixture
def records(tmp_path):
    """12 images, 2 captions each, splits train / test / val mixed up, one long caption, labels and columns."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    rows = []
    for n in range(12):
        colours = np.random.default_rng(n).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(colours).save(folder / f"{n}.png")
        captions = [Caption(f"caption {n}, short", columns={"level": 1}), Caption(f"c {n} " + "long " * (n % 3 * 5))]
        split = ("train", "test", "train", "val")[n % 4]
        rows.append(Record(f"i{n}", folder / f"{n}.png", captions, split, n % 2, {"ambiguity": n / 10}))
    return Records(rows, positives=[[0, 3], [2, 0], [1, 20], [4, 0]])


@pytest.fixture
def arrays():
    """Unit vectors of 10 images and 10 texts."""
    random = np.random.default_rng(0)
    both = random.standard_normal((2, 10, 5)).astype(np.float32)
    return both / np.linalg.norm(both, axis=-1, keepdims=True)
