import numpy as np
import pytest
from PIL import Image


def photograph(seed, width=48, height=40):
    """A smooth coloured picture, so that JPEG keeps it nearly as it is."""
    corners = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def photographs(tmp_path):
    """A folder with a.jpg, b.png, c.jpg of different sizes."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    for seed, name in enumerate(("a.jpg", "b.png", "c.jpg")):
        photograph(seed, 40 + 8 * seed, 56 - 8 * seed).save(folder / name)
    return folder
