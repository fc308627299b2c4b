import open_clip
import pytest
import torch
from torch.nn.functional import normalize

from grove_adapters import seeding
from grove_adapters.datasets import tiny_clip
from grove_adapters.errors import InputError
from grove_adapters.extract import FeatureExtractor, OpenCLIPExtractor
from grove_adapters.extract.last_layer import Place, find_last_layer

TEXT = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
PICTURE = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
PIXELS = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = torch.tensor([[60, 5, 63, 0, 0, 0, 0, 0], [60, 7, 8, 63, 0, 0, 0, 0], [60, 63, 0, 0, 0, 0, 0, 0]])
TIMM = {"timm_model_name": "vit_tiny_patch16_224", "timm_model_pretrained": False, "image_size": 224}


def clip(kind=open_clip.CLIP, vision=None, text=None, **settings):
    with seeding.local(0):
        return kind(12, {**PICTURE, **(vision or {})}, {**TEXT, **(text or {})}, **settings)


def extractor(model, **settings):
    def tokenize(texts, context_length=8):
        return torch.nn.functional.pad(TOKENS[: len(texts)], (0, context_length - 8))

    def preprocess(picture):
        return PIXELS[0]

    return OpenCLIPExtractor(model, preprocess=preprocess, tokenizer=tokenize, name="tiny", **settings)


def check(extractor, pixels=PIXELS):
    """Features times the projection are the model's own vectors; with and without them the embeddings agree."""
    assert isinstance(extractor, FeatureExtractor)
    for modality, inputs in (("image", pixels), ("text", ["a", "b c", ""])):
        embed, featured = (getattr(extractor, f"{name}_{modality}s") for name in ("embed", "featured"))
        values, features = featured(inputs)
        assert values.dtype == features.dtype == torch.float32
        torch.testing.assert_close(values, embed(inputs), rtol=1e-5, atol=1e-6)
        projection = extractor.projection(modality)
        assert features.shape[1] in (projection.width, projection.width + projection.dim)
        made = projection.apply(features)
        torch.testing.assert_close(normalize(made, dim=1), values, rtol=1e-4, atol=1e-5)
        assert made.norm(dim=1).std() > 0  # not normalised


def test_vision_transformers_and_the_texts_of_clip():
    check(extractor(clip()))


def test_towers_of_their_own_and_coca():
    model = clip(open_clip.CustomTextCLIP, text={"proj_bias": True}, init_logit_bias=-10)
    check(extractor(model))
    assert extractor(model).projection("text").bias is not None
    assert extractor(model).source.logit_bias == -10


def test_resnets_and_their_attention_pooling():
    model, preprocess, tokenizer = tiny_clip.load_tiny_clip()
    tiny = OpenCLIPExtractor(model, preprocess=preprocess, tokenizer=tokenizer, name="tiny")
    pixels = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    check(tiny, pixels)
    assert tiny.projection("image").bias is not None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tiny.featured_images(pixels)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "head", [{"timm_pool": "map", "timm_proj": "none"}, {"timm_pool": "token", "timm_proj": "linear"}]
)
def test_timm_towers_with_a_residual_and_with_a_plain_head(head):
    width = 192 if head["timm_proj"] == "none" else 12
    with seeding.local(0):
        model = open_clip.CustomTextCLIP(width, {**TIMM, **head}, TEXT)
    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    check(extractor(model), pixels)


def test_half_precision_gives_float32_features_that_fit():
    rounded = extractor(clip(), precision="amp_bf16")
    for modality, inputs in (("image", PIXELS), ("text", ["a", "b c", ""])):
        values, features = getattr(rounded, f"featured_{modality}s")(inputs)
        made = normalize(rounded.projection(modality).apply(features), dim=1)
        assert float((made - values).norm(dim=1).max()) < 0.02


def test_an_encoder_without_a_linear_end_is_refused_by_name():
    model = clip()
    model.visual.proj = None
    with pytest.raises(InputError, match=r"image encoder of tiny.* linear layer.* visual\.proj.*without features"):
        extractor(model).projection("image")
    model = torch.nn.ModuleDict({"last": torch.nn.Linear(4, 3), "after": torch.nn.Tanh()})

    def encode(inputs):
        return model["after"](model["last"](inputs))

    layer = find_last_layer(model, [Place("none.such"), Place("last")], what="the encoder")
    with pytest.raises(InputError, match=r"the encoder expected to end in a linear layer.*last with something after"):
        layer.run(encode, torch.ones(2, 4))
    assert not model["last"]._forward_hooks
