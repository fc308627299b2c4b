from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from grove_adapters.datasets.scenes import ScenePrior, caption_chain, matches, phrase, render_image, vocabulary
from grove_adapters.datasets.tiny_clip import (
    WEIGHTS,
    load_tiny_clip,
    tiny_clip_config,
    tiny_clip_tokenizer,
    untrained_tiny_clip,
)
from grove_adapters.datasets.tiny_clip.tokenizer import WordTokenizer

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tiny_clip.json"


@pytest.fixture(scope="module")
def loaded():
    return load_tiny_clip()


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_a_caption_survives_the_round_trip():
    tokenizer = tiny_clip_tokenizer()
    text = "two small red circles and a star at the top left"
    tokens = tokenizer(text)
    assert tokens.shape == (1, tokenizer.context_length)
    assert tokens.dtype == torch.int64
    assert tokenizer.decode(tokens[0].tolist()) == text
    assert tokenizer("Two SMALL red circles, and a star at the top left.").equal(tokens)
    assert tokenizer.count_tokens(text) == 13


def test_unknown_words_are_marked_and_the_end_has_the_largest_id():
    tokenizer = WordTokenizer(("a", "star"), context_length=6)
    assert tokenizer.decode(tokenizer.encode("a zebra star")) == "a <unknown> star"
    assert tokenizer(["a star", ""]).tolist() == [[2, 3, 4, 5, 0, 0], [2, 5, 0, 0, 0, 0]]
    assert tokenizer.vocab_size == 6


def test_long_texts_are_cut_but_keep_their_end():
    tokenizer = WordTokenizer(("a", "star"), context_length=4)
    assert tokenizer.count_tokens("a star a star") == 6
    assert tokenizer(["a star a star"]).tolist() == [[2, 3, 4, 5]]
    assert tokenizer(["a star a star"], context_length=8).tolist() == [[2, 3, 4, 3, 4, 5, 0, 0]]


def test_the_bundled_vocabulary_is_the_one_of_the_captions():
    tokenizer = tiny_clip_tokenizer()
    assert tokenizer.words == vocabulary()
    assert tokenizer.vocab_size == tiny_clip_config()["model_cfg"]["text_cfg"]["vocab_size"]


# --- model -----------------------------------------------------------------------------------------------------------


def test_weights_are_small_float16_and_name_their_model():
    assert WEIGHTS.stat().st_size <= 4 * 2**20
    with safe_open(WEIGHTS, "pt") as file:
        assert file.metadata()["model"] == "grove-tiny-scenes"
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float16}  # noqa: SIM118  not a dict


def test_the_model_loads_ready_to_embed_and_leaves_the_global_state_alone():
    state = torch.get_rng_state()
    model, preprocess, tokenizer = load_tiny_clip()
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    scenes = ScenePrior().draw(3, seed=0)
    images = torch.stack([preprocess(render_image(scene)) for scene in scenes])
    assert images.shape == (3, 3, 64, 64)
    with torch.no_grad():
        image, text = (
            model.encode_image(images, normalize=True),
            model.encode_text(tokenizer(["a star"]), normalize=True),
        )
    assert (image.shape, text.shape) == ((3, 128), (1, 128))
    assert torch.allclose(image.norm(dim=1), torch.ones(3), atol=1e-5)


def test_preprocessing_takes_larger_pictures(loaded):
    _, preprocess, _ = loaded
    scene = ScenePrior().clean().draw(1, seed=1)[0]
    small, large = preprocess(render_image(scene)), preprocess(render_image(scene, 128))
    assert small.shape == large.shape
    assert (small - large).abs().mean() < 0.1


@torch.no_grad()
def test_the_bundled_model_finds_clean_scenes_by_their_full_captions(loaded):
    model, preprocess, tokenizer = loaded
    scenes = ScenePrior().clean().draw(200, seed=11)
    rng = np.random.default_rng(12)
    descriptions = [caption_chain(scene, rng)[3] for scene in scenes]
    images = model.encode_image(torch.stack([preprocess(render_image(scene)) for scene in scenes]), normalize=True)
    texts = model.encode_text(tokenizer([phrase(description, rng) for description in descriptions]), normalize=True)
    similarity = (images @ texts.T).numpy()
    true = matches(descriptions, scenes)
    rows = np.arange(200)
    assert true[similarity.argmax(axis=1), rows].mean() >= 0.9
    assert true[rows, similarity.argmax(axis=0)].mean() >= 0.9


def test_an_untrained_model_is_seeded():
    first, again, other = (untrained_tiny_clip(seed).text_projection for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_measured_results_are_those_of_the_bundled_weights():
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert measured["weights_bytes"] == WEIGHTS.stat().st_size
    for direction in ("image_to_text", "text_to_image"):
        assert measured["clean"][direction]["recall_at_1"] >= 0.9
        hardest = measured["mixed"][direction][-1]
        assert hardest["own"]["interval_95"][1] < 0.3
