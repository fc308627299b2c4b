import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from grove_adapters.embeddings import Source
from grove_adapters.errors import InputError, UnreadableError
from grove_adapters.posterior import GaussianEmbedding
from grove_adapters.tasks import read_matches, retrieve

DATA = Path(os.environ.get("GROVE_ADAPTERS_DATA", Path(__file__).parents[3] / "shared" / "data")) / "eccv_caption"
IMAGES, TEXTS = np.array(["9", "7", "8"]), np.array(["71", "72", "81", "91"])


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "truth.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    return write


def test_both_directions_give_rows_of_image_and_text(file):
    path = file({"7": [72, 71], "8": [81, 81, 71]})
    rows = read_matches(path, images=IMAGES, texts=TEXTS, direction="i2t")
    assert rows.tolist() == [[1, 0], [1, 1], [2, 0], [2, 2]]
    path = file({"71": [7, 8], "91": ["9"]})
    rows = read_matches(path, images=IMAGES, texts=TEXTS, direction="t2i")
    assert rows.tolist() == [[0, 3], [1, 0], [2, 0]]
    assert rows.dtype == np.int64


def test_unknown_ids_are_named_or_dropped(file):
    path = file({"7": [71, 99], "5": [71]})
    with pytest.raises(InputError, match=r"got none for 1 of 2 \(first: '5'\)"):
        read_matches(path, images=IMAGES, texts=TEXTS, direction="i2t")
    assert read_matches(path, images=IMAGES, texts=TEXTS, direction="i2t", missing="drop").tolist() == [[1, 0]]
    with pytest.raises(InputError, match="check the direction"):
        read_matches(path, images=IMAGES, texts=TEXTS, direction="t2i", missing="drop")


def test_what_is_no_truth_file_is_refused(file, tmp_path):
    for content in ([1, 2], {"7": 71}):
        with pytest.raises(UnreadableError):
            read_matches(file(content), images=IMAGES, texts=TEXTS, direction="i2t")
    with pytest.raises(UnreadableError, match="check the path"):
        read_matches(tmp_path / "absent.json", images=IMAGES, texts=TEXTS, direction="i2t")
    with pytest.raises(InputError, match="direction"):
        read_matches(file({}), images=IMAGES, texts=TEXTS, direction="i2i")
    with pytest.raises(InputError, match="got none that match"):
        read_matches(file({}), images=IMAGES, texts=TEXTS, direction="i2t")


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no ECCV Caption files in {DATA}; set GROVE_ADAPTERS_DATA")
def test_the_published_files_hold_what_their_paper_counts():
    texts = np.load(DATA / "coco_test_ids.npy").astype(str)
    of_image = json.loads((DATA / "original_image_to_caption.json").read_text())
    images = np.array(list(of_image))
    counts = {}
    for truth in ("original", "cxc", "eccv"):
        for direction, name in (("i2t", "image_to_caption"), ("t2i", "caption_to_image")):
            path = DATA / f"{truth}_{name}.json"
            rows = read_matches(path, images=images, texts=texts, direction=direction, missing="drop")
            content = json.loads(path.read_text())
            pairs = {(q, str(item)) for q, found in content.items() for item in found}
            outside = {item for pair in pairs for item in pair} - {*images.tolist(), *texts.tolist()}
            assert len(outside) == (2 if (truth, direction) == ("eccv", "i2t") else 0)
            assert len(rows) == sum(not outside & {*pair} for pair in pairs)
            queries = rows[:, 0 if direction == "i2t" else 1]
            counts[truth, direction] = len(np.unique(queries)), round(len(rows) / len(np.unique(queries)), 2)
    assert counts["original", "i2t"] == (5000, 5.0)
    assert counts["original", "t2i"] == (25_000, 1.0)
    assert counts["eccv", "i2t"] == (1261, 17.88)
    assert counts["eccv", "t2i"] == (1332, 8.47)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no ECCV Caption files in {DATA}; set GROVE_ADAPTERS_DATA")
def test_an_oracle_is_perfect_on_the_published_files():
    """Captions that stand at the mean of the images they match retrieve them all first."""
    texts = np.load(DATA / "coco_test_ids.npy").astype(str)
    images = np.array(list(json.loads((DATA / "original_image_to_caption.json").read_text())))
    links = read_matches(DATA / "eccv_caption_to_image.json", images=images, texts=texts, direction="t2i")
    asked = np.unique(links[:, 1])
    points = torch.nn.functional.normalize(
        torch.randn(len(images), 512, generator=torch.Generator().manual_seed(0)), dim=1
    )
    mean = torch.zeros(len(asked), 512).index_add_(
        0, torch.as_tensor(np.searchsorted(asked, links[:, 1])), points[links[:, 0]]
    )
    source = Source(model="oracle")
    sides = [
        GaussianEmbedding(mean=values, variance=torch.ones(len(values), 1), ids=ids, modality=modality, source=source)
        for values, ids, modality in ((points, images, "image"), (mean, texts[asked], "text"))
    ]
    rows = np.stack([links[:, 0], np.searchsorted(asked, links[:, 1])], 1)
    result = retrieve(*sides, links=rows, direction="t2i", similarity="cosine", ranking=True)
    assert result.detail["average_precision_at_r"].mean() > 0.95
    assert (result.detail["first_rank"] == 1).mean() > 0.99
    assert (result.detail["average_precision_at_r"] <= result.detail["r_precision"] + 1e-12).all()
