import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from grove_adapters import seeding
from grove_adapters.errors import InputError, UnknownNameError, UnreadableError
from grove_adapters.extract import Extractor, HFExtractor

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "dog", "two", "rain", "red", "blue"]
PICTURES = [Image.fromarray(np.random.default_rng(n).integers(0, 256, (40, 50, 3), dtype=np.uint8)) for n in range(3)]
TEXTS = ["a cat", "two dog", "rain"]
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURE = {"image_size": 16, "patch_size": 8}
TEXT = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


def tokenizer(**settings):
    """A word-level tokenizer, made without any file."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names, **settings)


def make(family):
    """Model, image processor and tokenizer of a family, tiny and random."""
    with seeding.local(0):
        if family == "clip":
            towers = {
                "text_config": {**TOWER, **TEXT, "max_position_embeddings": 6},
                "vision_config": {**TOWER, **PICTURE},
            }
            model = transformers.CLIPModel(transformers.CLIPConfig(**towers, projection_dim=10))
            processor = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16)
        elif family == "siglip":
            towers = {
                "text_config": {**TOWER, **TEXT, "max_position_embeddings": 6, "projection_size": 16},
                "vision_config": {**TOWER, **PICTURE},
            }
            model = transformers.SiglipModel(transformers.SiglipConfig(**towers))
            processor = transformers.SiglipImageProcessor(size={"height": 16, "width": 16})
        else:
            towers = {
                "text_config": {**TOWER, **TEXT, "max_position_embeddings": 60, "encoder_hidden_size": 16},
                "vision_config": {**TOWER, **PICTURE},
            }
            config = transformers.BlipConfig(**towers, image_text_hidden_size=10, projection_dim=7)
            model = transformers.BlipForImageTextRetrieval(config)
            processor = transformers.BlipImageProcessor(size={"height": 16, "width": 16})
    names = ["input_ids"] if family == "siglip" else ["input_ids", "attention_mask"]
    return model.eval(), processor, tokenizer(model_input_names=names)


@pytest.fixture(scope="module", params=["clip", "siglip", "blip"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def parts(family):
    return make(family)


def extract(parts, **settings):
    model, processor, tokenizer = parts
    return HFExtractor(model, **{"image_processor": processor, "tokenizer": tokenizer, "name": "tiny", **settings})


def test_it_gives_what_the_models_own_loss_compares(parts, family):
    """Cosines of the embeddings are the logits of the model's own forward pass, before scale and bias."""
    model, processor, tokenizer = parts
    extractor = extract(parts)
    assert isinstance(extractor, Extractor)
    images, texts = extractor.embed_images(PICTURES), extractor.embed_texts(TEXTS)
    assert images.shape == texts.shape == (3, extractor.dim)
    torch.testing.assert_close(images.norm(dim=-1), torch.ones(3))
    tokens = tokenizer(TEXTS, padding="max_length", max_length=6, return_tensors="pt")
    inputs = {"pixel_values": processor(images=PICTURES, return_tensors="pt")["pixel_values"]}
    inputs |= {name: tokens[name] for name in tokenizer.model_input_names}
    with torch.no_grad():
        if family == "blip":
            logits = model(**inputs, use_itm_head=False).itm_score
        else:
            logits = model(**inputs).logits_per_image
    scale, bias = extractor.source.logit_scale or 1.0, extractor.source.logit_bias or 0.0
    torch.testing.assert_close(images @ texts.T * scale + bias, logits, rtol=1e-4, atol=1e-4)


def test_the_source_says_everything(parts, family):
    source = extract(parts).source
    assert (source.model, source.library, source.normalised) == ("tiny", "transformers", True)
    assert source.pretrained.startswith("ready@")
    assert (source.logit_scale is None) == (family == "blip")
    assert (source.logit_bias is None) == (family != "siglip")
    assert f"context {35 if family == 'blip' else 6}" in source.preprocess
    assert "image_mean" in source.preprocess
    assert source == extract(make(family)).source


def test_every_change_makes_another_source(parts):
    _, processor, tokens = parts
    resized = type(processor)(**{**processor.to_dict(), "image_mean": [0.0, 0.0, 0.0]})
    more = tokenizer(model_input_names=tokens.model_input_names)
    more.add_tokens(["zebra"])
    changed = [{}, {"image_processor": resized}, {"tokenizer": more}, {"context_length": 5}, {"precision": "amp_bf16"}]
    assert len({extract(parts, **change).source.fingerprint for change in changed}) == len(changed)


def test_features_times_the_projection_are_the_vectors(parts, family):
    extractor = extract(parts, normalise=False)
    for modality, inputs in (("image", PICTURES), ("text", TEXTS)):
        values, features = getattr(extractor, f"featured_{modality}s")(inputs)
        torch.testing.assert_close(values, getattr(extractor, f"embed_{modality}s")(inputs))
        projection = extractor.projection(modality)
        torch.testing.assert_close(projection.apply(features), values, rtol=1e-4, atol=1e-6)
        has_residual = (family, modality) == ("siglip", "image")
        assert features.shape == (3, projection.width + (projection.dim if has_residual else 0))
        assert (projection.bias is None) == (family == "clip")


def test_results_do_not_depend_on_what_else_is_in_the_batch(parts):
    extractor = extract(parts)
    together = extractor.embed_texts(["a", "two red cat"])
    torch.testing.assert_close(together[:1], extractor.embed_texts(["a"]))


def test_truncation_is_noticed_exactly(parts, family):
    places = 33 if family == "blip" else 4
    tokens = extract(parts).tokenize([" ".join(["cat"] * n) for n in (1, places, places + 1)])
    assert tokens.truncated.tolist() == [False, False, True]
    assert ("attention_mask" in tokens.inputs) == (family != "siglip")


def test_local_folders(parts, family, tmp_path):
    for part in parts:
        part.save_pretrained(tmp_path / "model")
    loaded = HFExtractor(tmp_path / "model")
    assert loaded.source.model == "model"
    assert loaded.source.pretrained.startswith("local@")
    torch.testing.assert_close(loaded.embed_images(PICTURES), extract(parts).embed_images(PICTURES))
    torch.testing.assert_close(loaded.embed_texts(TEXTS), extract(parts).embed_texts(TEXTS))


def test_what_cannot_be_used_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, processor, tokens = make("clip")
    with pytest.raises(InputError, match="image_processor=, tokenizer= and name="):
        HFExtractor(model, name="tiny")
    with pytest.raises(InputError, match="from 3 to 6 tokens, got 7"):
        extract((model, processor, tokens), context_length=7)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableError, match="complete local folder"):
        HFExtractor(tmp_path / "empty")
    bert = transformers.BertModel(transformers.BertConfig(**TOWER, vocab_size=11))
    with pytest.raises(UnknownNameError, match=r"type 'bert'.*blip, clip, siglip"):
        extract((bert, processor, tokens))
    bert.save_pretrained(tmp_path / "bert")
    with pytest.raises(UnknownNameError, match="type 'bert'"):
        HFExtractor(tmp_path / "bert")


def test_blip_without_its_contrastive_projections_is_refused():
    retrieval, processor, tokens = make("blip")
    with seeding.local(0):
        model = transformers.BlipModel(retrieval.config)
    with pytest.raises(InputError, match=r"load it with BlipForImageTextRetrieval\.from_pretrained"):
        extract((model, processor, tokens))
