"""Embeddings from the CLIP, SigLIP and BLIP models of Hugging Face transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from grove_adapters import _checks
from grove_adapters.config import nearest
from grove_adapters.embeddings import Source
from grove_adapters.errors import InputError, UnknownNameError, UnreadableError
from grove_adapters.extract.base import Precision, Tokens, TorchExtractor, digest_bytes, digest_weights
from grove_adapters.extract.last_layer import Place

MODEL_CLASSES = {
    "clip": "CLIPModel",
    "siglip": "SiglipModel",
    "blip": "BlipForImageTextRetrieval",
}
"""The transformers class that holds each family's joint space, by `config.model_type`."""

LAST_LAYERS = {
    "clip": {"image": (Place("visual_projection"),), "text": (Place("text_projection"),)},
    "siglip": {
        "image": (Place("vision_model.head.mlp.fc2", "residual"),),
        "text": (Place("text_model.head"),),
    },
    "blip": {"image": (Place("vision_proj"),), "text": (Place("text_proj"),)},
}
"""The linear layers that embeddings come out of; SigLIP's images are pooled by one with a residual connection."""

BLIP_CONTEXT = 35
"""Caption length at which BLIP was trained and is evaluated for retrieval; its text encoder would take 512."""


class HFExtractor(TorchExtractor):
    """A CLIP, SigLIP or BLIP model of transformers, by name, from a local folder, or ready-made.

    For BLIP the embeddings are those of image-text contrast: `vision_proj` of the image's class token and `text_proj`
    of the text's, of a `BlipForImageTextRetrieval`. (`BlipModel`'s own projections were never trained in the published
    weights.)

    Args:
        model: Hub name or local folder with model, image processor and tokenizer; or a ready model.
        image_processor: Left out, the folder's.
        tokenizer: Left out, the folder's.
        name: What to call a ready model.
        context_length: Tokens a caption is padded or cut to. Left out, the model's own; for BLIP `BLIP_CONTEXT`.
        device: Where the encoder runs.
        precision: ``"fp32"``, or autocast to ``"amp_bf16"`` or ``"amp_fp16"``.
        normalise: Whether to L2-normalise the embeddings, as all three losses do.

    Raises:
        UnknownNameError: The model is of another family.
        UnreadableError: The folder is incomplete, or the hub cannot be reached.
        InputError: A ready model comes without processor, tokenizer or name, or the context is too long for it.
    """

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        *,
        image_processor: Callable[..., Any] | None = None,
        tokenizer: Callable[..., Any] | None = None,
        name: str | None = None,
        context_length: int | None = None,
        device: str | torch.device = "cpu",
        precision: Precision = "fp32",
        normalise: bool = True,
    ) -> None:
        if isinstance(model, str | Path):
            location = str(model)
            is_local = Path(location).is_dir()
            name = name or (Path(location).name if is_local else location)
            model, image_processor, tokenizer = _load(location, image_processor, tokenizer)
            weights = f"{'local' if is_local else 'hub'}@{digest_weights(model)}"
        elif image_processor is None or tokenizer is None or name is None:
            raise InputError(
                "a ready model expected image_processor=, tokenizer= and name= beside it; give what "
                "AutoImageProcessor.from_pretrained and AutoTokenizer.from_pretrained returned"
            )
        else:
            weights = f"ready@{digest_weights(model)}"
        config: Any = model.config
        self.family = _family(config.model_type, type(model).__name__)
        self.last_layers = LAST_LAYERS[self.family]
        limit = int(config.text_config.max_position_embeddings)
        length = context_length or (min(limit, BLIP_CONTEXT) if self.family == "blip" else limit)
        if not 2 < _checks.count(length, what="context_length") <= limit:
            raise InputError(f"context_length of {name} expected from 3 to {limit} tokens, got {length}")
        tokenize = HFTokenize(tokenizer, length)
        super().__init__(
            model,
            HFPreprocess(image_processor),
            tokenize,
            source=Source(
                model=name,
                pretrained=weights,
                library="transformers",
                preprocess=tokenize.description,
            ),
            device=device,
            precision=precision,
            normalise=normalise,
        )

    def _encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        if self.family == "blip":
            return model.vision_proj(model.vision_model(pixel_values=pixels).last_hidden_state[:, 0])
        return _pooled(model.get_image_features(pixel_values=pixels))

    def _encode_texts(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        model: Any = self.model
        if self.family == "blip":
            return model.text_proj(model.text_encoder(**inputs).last_hidden_state[:, 0])
        return _pooled(model.get_text_features(**inputs))


class HFPreprocess:
    """An image processor as a function of one picture; prints as its whole configuration."""

    def __init__(self, processor: Callable[..., Any]) -> None:
        self._processor = processor

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """(C, H, W) pixels of an RGB picture."""
        return self._processor(images=image, return_tensors="pt")["pixel_values"][0]

    def __repr__(self) -> str:
        settings = self._processor.to_dict() if hasattr(self._processor, "to_dict") else repr(self._processor)
        return f"{type(self._processor).__name__} {json.dumps(settings, sort_keys=True, default=str)}"


class HFTokenize:
    """A tokenizer at one fixed length, that also says which captions it cut.

    Attributes:
        description: Text that changes whenever the tokenizer does.
    """

    def __init__(self, tokenizer: Any, length: int) -> None:
        self._tokenizer = tokenizer
        self._length = length
        # SigLIP was trained without an attention mask and its tokenizer therefore names none
        self._names = [name for name in ("input_ids", "attention_mask") if name in tokenizer.model_input_names]
        self.description = f"{type(tokenizer).__name__} context {length} #{_digest_tokenizer(tokenizer)}"

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """Tokens of `texts`, each padded or cut to the fixed length, whatever else is in the batch."""
        output = self._tokenizer(
            list(texts),
            padding="max_length",
            truncation=True,
            max_length=self._length,
            return_attention_mask=True,
            return_tensors="pt",
        )
        truncated = output["attention_mask"].all(1).numpy().copy()  # full rows: cut, or of exactly this length
        for row in np.flatnonzero(truncated).tolist():
            whole = self._tokenizer(texts[row], truncation=False, verbose=False)["input_ids"]
            truncated[row] = len(whole) > self._length
        return Tokens({name: output[name] for name in self._names}, truncated)


def _digest_tokenizer(tokenizer: Any) -> str:
    """Digest of a tokenizer's rules, without the padding and truncation that its last call left in them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    facts = {key: value for key, value in rules.items() if key not in ("truncation", "padding")}
    sides = (tokenizer.pad_token, tokenizer.padding_side, tokenizer.truncation_side)
    return digest_bytes(json.dumps([facts, sides], sort_keys=True, default=str).encode())


def _pooled(output: Any) -> torch.Tensor:
    """transformers 5 returns an output object where 4 returned the tensor."""
    return output if isinstance(output, torch.Tensor) else output.pooler_output


def _family(model_type: str, class_name: str) -> str:
    if model_type not in MODEL_CLASSES:
        raise UnknownNameError(f"no extractor for models of type {model_type!r};{nearest(model_type, MODEL_CLASSES)}")
    if class_name != MODEL_CLASSES[model_type]:
        raise InputError(
            f"a {model_type} model expected the class {MODEL_CLASSES[model_type]}, which holds the joint space, got "
            f"{class_name}; load it with {MODEL_CLASSES[model_type]}.from_pretrained"
        )
    return model_type


def _load(location: str, image_processor: Any, tokenizer: Any) -> tuple[torch.nn.Module, Any, Any]:
    import transformers

    try:
        model_type = transformers.AutoConfig.from_pretrained(location).model_type
        if model_type not in MODEL_CLASSES:
            _family(model_type, "")
        model = getattr(transformers, MODEL_CLASSES[model_type]).from_pretrained(location)
        image_processor = image_processor or transformers.AutoImageProcessor.from_pretrained(location)
        tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(location)
    except (OSError, ValueError, KeyError) as error:
        raise UnreadableError(
            f"expected model, image processor and tokenizer at {location}, got "
            f"{' '.join(str(error).split())[:200]!r}; check the network or give a complete local folder"
        ) from error
    return model, image_processor, tokenizer
