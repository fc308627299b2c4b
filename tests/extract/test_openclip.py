import json
import logging

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from grove_adapters import seeding
from grove_adapters.errors import InputError, UnknownNameError, UnreadableError
from grove_adapters.extract import Extractor, OpenCLIPExtractor
from grove_adapters.extract.openclip import OpenCLIPTokenize

CONFIG = {
    "embed_dim": 12,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def model():
    with seeding.local(0):
        return open_clip.CLIP(**CONFIG)


@pytest.fixture(scope="module")
def tokenizer():
    return open_clip.get_tokenizer("ViT-B-32", context_length=8)


@pytest.fixture(scope="module", autouse=True)
def tiny(tmp_path_factory):
    """The architecture "tiny-test", known to open_clip by name."""
    path = tmp_path_factory.mktemp("configs") / "tiny-test.json"
    path.write_text(json.dumps(CONFIG))
    open_clip.add_model_config(path)


def transform(size=32, **settings):
    return open_clip.image_transform(size, is_train=False, **settings)


def ready(model, tokenizer, **changes):
    given = {"preprocess": transform(), "tokenizer": tokenizer, "name": "tiny", **changes}
    return OpenCLIPExtractor(model, **given)


PICTURES = [Image.fromarray(np.random.default_rng(n).integers(0, 256, (40, 50, 3), dtype=np.uint8)) for n in range(3)]
TEXTS = ["a cat", "two dogs", "rain"]


def test_a_ready_model_gives_what_the_model_gives(model, tokenizer):
    extractor = ready(model, tokenizer)
    assert isinstance(extractor, Extractor)
    with torch.no_grad():
        images = model.encode_image(torch.stack([transform()(picture) for picture in PICTURES]), normalize=True)
        texts = model.encode_text(tokenizer(TEXTS), normalize=True)
    torch.testing.assert_close(extractor.embed_images(PICTURES), images)
    torch.testing.assert_close(extractor.embed_texts(TEXTS), texts)
    pixels = torch.stack([extractor.preprocess(picture) for picture in PICTURES])
    torch.testing.assert_close(extractor.embed_images(pixels), images)
    assert extractor.dim == 12
    raw = ready(model, tokenizer, normalise=False)
    assert not raw.source.normalised
    torch.testing.assert_close(torch.nn.functional.normalize(raw.embed_texts(TEXTS), dim=-1), texts)
    assert (raw.embed_texts(TEXTS).norm(dim=-1) - 1).abs().max() > 1e-3


def test_the_source_says_everything(model, tokenizer):
    source = ready(model, tokenizer).source
    assert (source.model, source.library, source.precision, source.normalised) == ("tiny", "open_clip", "fp32", True)
    assert source.pretrained.startswith("ready@")
    assert source.logit_scale == pytest.approx(1 / 0.07, rel=1e-3)
    assert source.logit_bias is None
    assert "Resize(size=32" in source.preprocess
    assert "SimpleTokenizer context 8" in source.preprocess
    assert source == ready(model, tokenizer).source


def test_every_change_makes_another_source(model, tokenizer):
    with seeding.local(1):
        other_weights = open_clip.CLIP(**CONFIG)
    biased = open_clip.CLIP(**CONFIG, init_logit_bias=-10)
    sources = [
        ready(model, tokenizer),
        ready(model, tokenizer, preprocess=transform(mean=(0, 0, 0))),
        ready(model, tokenizer, preprocess=transform(interpolation="bilinear")),
        ready(model, tokenizer, preprocess=lambda image: transform()(image)),
        ready(model, tokenizer, preprocess=lambda image: 2 * transform()(image)),
        ready(model, open_clip.get_tokenizer("ViT-B-32", context_length=7)),
        ready(model, open_clip.get_tokenizer("ViT-B-32", context_length=8, clean="whitespace")),
        ready(model, tokenizer, precision="amp_bf16"),
        ready(model, tokenizer, normalise=False),
        ready(other_weights, tokenizer),
        ready(biased, tokenizer),
    ]
    assert len({extractor.source.fingerprint for extractor in sources}) == len(sources)
    assert sources[-1].source.logit_bias == -10


def test_autocast_stays_close_and_returns_float32(model, tokenizer):
    rounded = ready(model, tokenizer, precision="amp_bf16").embed_images(PICTURES)
    assert rounded.dtype == torch.float32
    exact = ready(model, tokenizer).embed_images(PICTURES)
    assert 0 < (rounded - exact).abs().max() < 0.05


def test_random_weights_have_an_address_and_leave_the_global_stream_alone(caplog):
    before = torch.get_rng_state()
    with caplog.at_level(logging.ERROR):
        first, again, other = (OpenCLIPExtractor("tiny-test", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert first.source == again.source != other.source
    assert first.source.pretrained.startswith("random@")
    torch.testing.assert_close(first.embed_images(PICTURES), again.embed_images(PICTURES), rtol=0, atol=0)
    assert "context 8" in first.source.preprocess


def test_a_local_checkpoint_is_loaded_and_known_by_its_weights(model, tokenizer, tmp_path):
    torch.save(model.state_dict(), tmp_path / "tiny.pt")
    loaded = OpenCLIPExtractor("tiny-test", tmp_path / "tiny.pt")
    assert loaded.source.pretrained.startswith("tiny.pt@")
    assert loaded.source.model == "tiny-test"
    torch.testing.assert_close(loaded.embed_texts(TEXTS), ready(model, tokenizer).embed_texts(TEXTS))


def test_what_cannot_be_loaded_says_why(tmp_path, model, tokenizer):
    with pytest.raises(UnknownNameError, match="did you mean 'ViT-B-32'"):
        OpenCLIPExtractor("ViT-B-33")
    with pytest.raises(UnknownNameError, match="did you mean 'openai'"):
        OpenCLIPExtractor("ViT-B-32", "openia")
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    with pytest.raises(UnreadableError, match=r"expected the weights .*broken\.safetensors"):
        OpenCLIPExtractor("tiny-test", tmp_path / "broken.safetensors")
    with pytest.raises(UnreadableError, match="local-dir"):
        OpenCLIPExtractor(f"local-dir:{tmp_path}")
    with pytest.raises(InputError, match="preprocess=, tokenizer= and name="):
        OpenCLIPExtractor(model, preprocess=transform(), tokenizer=tokenizer)
    with pytest.raises(InputError, match="precision has no option 'fp61'; did you mean 'fp32'"):
        ready(model, tokenizer, precision="fp61")


def test_a_training_transform_is_refused(model, tokenizer):
    with pytest.raises(InputError, match="validation transform"), seeding.local(0):
        ready(model, tokenizer, preprocess=open_clip.image_transform(32, is_train=True))


def test_truncation_is_noticed_exactly(tokenizer):
    tokenize = OpenCLIPTokenize(tokenizer)  # 8 places: start, 6 words, end
    tokens = tokenize(["a b c d e", "a b c d e f", "a b c d e f g", ""])
    assert tokens.inputs["text"].shape == (4, 8)
    assert tokens.truncated.tolist() == [False, False, True, False]


def test_tokenizers_of_fixed_length_count_full_captions_as_cut():
    class Fixed:
        def __call__(self, texts):
            rows = [([len(word) for word in text.split()] + [0] * 4)[:4] for text in texts]
            return torch.tensor(rows)

    assert OpenCLIPTokenize(Fixed())(["a b c", "a b c d", "a b c d e"]).truncated.tolist() == [False, True, True]
