"""Embeddings from any open_clip model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from grove_adapters import seeding
from grove_adapters.config import nearest
from grove_adapters.embeddings import Source
from grove_adapters.errors import InputError, UnknownNameError, UnreadableError
from grove_adapters.extract.base import Precision, Tokens, TorchExtractor, digest_bytes, digest_weights
from grove_adapters.extract.last_layer import Place

LAST_LAYERS = {
    "image": (
        Place("visual.proj"),
        Place("visual.attnpool.c_proj", "functional"),
        Place("visual.head.proj"),
        Place("visual.head.mlp.fc2"),
        Place("visual.trunk.head"),
        Place("visual.trunk.attn_pool.mlp.fc2", "residual"),
    ),
    "text": (
        Place("text_projection"),
        Place("text.text_projection"),
        Place("text.proj"),
        Place("text.proj.2"),
    ),
}
"""In order: images of vision transformers, ResNets and timm models (projected, as a classifier, with SigLIP's pooling);
texts of open_clip's own transformer and of Hugging Face's."""


class OpenCLIPExtractor(TorchExtractor):
    """An open_clip model by name, from a local checkpoint, or ready-made.

    Args:
        model: A name that open_clip knows (``"ViT-B-32"``, ``"hf-hub:…"``, ``"local-dir:…"``), or a ready module with
            `encode_image` and `encode_text`.
        pretrained: Weights tag (``"openai"``), the path of a local checkpoint, or None for random weights drawn from
            `seed`. Not used with a ready module.
        preprocess: RGB picture to (C, H, W) tensor. Left out, open_clip's validation transform of the named model.
        tokenizer: Captions to (B, L) tokens. Left out, open_clip's tokenizer of the named model.
        name: What to call a ready module.
        device: Where the encoder runs.
        precision: ``"fp32"``, or autocast to ``"amp_bf16"`` or ``"amp_fp16"``.
        normalise: Whether to L2-normalise the embeddings, as CLIP's loss does.
        seed: Address of random weights.

    Raises:
        UnknownNameError: open_clip knows no such model or tag; the nearest is offered.
        UnreadableError: The weights cannot be fetched or read.
        InputError: A ready module comes without preprocess, tokenizer or name, or the preprocess is random.
    """

    last_layers = LAST_LAYERS

    def __init__(
        self,
        model: str | torch.nn.Module,
        pretrained: str | Path | None = None,
        *,
        preprocess: Callable[[Image.Image], torch.Tensor] | None = None,
        tokenizer: Callable[..., torch.Tensor] | None = None,
        name: str | None = None,
        device: str | torch.device = "cpu",
        precision: Precision = "fp32",
        normalise: bool = True,
        seed: int = 0,
    ) -> None:
        if isinstance(model, str):
            identifier, name = model, name or model
            model, transform, weights = _load_model(identifier, pretrained, seed)
            preprocess = preprocess or transform
            tokenizer = tokenizer or _load_tokenizer(identifier)
        elif preprocess is None or tokenizer is None or name is None or pretrained is not None:
            raise InputError(
                "a ready model expected preprocess=, tokenizer= and name= beside it and no pretrained=; give what "
                "open_clip.create_model_and_transforms and open_clip.get_tokenizer returned"
            )
        else:
            weights = f"ready@{digest_weights(model)}"
        tokenize = OpenCLIPTokenize(tokenizer)
        super().__init__(
            model,
            preprocess,
            tokenize,
            source=Source(
                model=name,
                pretrained=weights,
                library="open_clip",
                preprocess=tokenize.description,
            ),
            device=device,
            precision=precision,
            normalise=normalise,
        )

    def _encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        encode: Any = self.model.encode_image
        return encode(pixels, **_unnormalised(encode))

    def _encode_texts(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        encode: Any = self.model.encode_text
        return encode(inputs["text"], **_unnormalised(encode))


class OpenCLIPTokenize:
    """An open_clip tokenizer that also says which captions it cut, and who it is.

    Args:
        tokenizer: Called with captions, and perhaps `context_length`, gives (B, L) tokens padded at the end.

    Attributes:
        description: Text that changes whenever the tokenizer does.
    """

    def __init__(self, tokenizer: Callable[..., torch.Tensor]) -> None:
        self._tokenizer = tokenizer
        empty = tokenizer([""])[0]
        self._length = len(empty)
        self._padding = int(empty[-1])
        self.description = f"{type(tokenizer).__name__} context {self._length} #{_digest_tokenizer(tokenizer)}"

    def __call__(self, texts: Sequence[str]) -> Tokens:
        """Tokens of `texts`, each padded or cut to the model's context."""
        tokens = self._tokenizer(list(texts))
        truncated = (tokens[:, -1] != self._padding).numpy().copy()  # full rows: cut, or of exactly this length
        for row in np.flatnonzero(truncated).tolist():
            truncated[row] = self._is_longer(texts[row])
        return Tokens({"text": tokens}, truncated)

    def _is_longer(self, text: str) -> bool:
        try:
            longer = self._tokenizer([text], context_length=2 * self._length)[0]
        except TypeError:  # a foreign tokenizer of fixed length: a caption that fills it is taken as cut
            return True
        return bool((longer[self._length :] != self._padding).any())


def _unnormalised(encode: Callable[..., Any]) -> dict[str, bool]:
    """CoCa normalises unless told not to; CLIP does not unless told to; foreign models know no such word."""
    return {"normalize": False} if "normalize" in inspect.signature(encode).parameters else {}


def _load_model(
    identifier: str, pretrained: str | Path | None, seed: int
) -> tuple[torch.nn.Module, Callable[[Image.Image], torch.Tensor], str]:
    """The named model, its validation transform, and the text that identifies its weights."""
    import open_clip

    has_schema = ":" in identifier
    if not has_schema and open_clip.get_model_config(identifier) is None:
        raise UnknownNameError(f"unknown open_clip model {identifier!r};{nearest(identifier, open_clip.list_models())}")
    tags = [] if has_schema else open_clip.list_pretrained_tags_by_model(identifier)
    is_tag = str(pretrained) in tags
    if pretrained is not None and not has_schema and not is_tag and not Path(pretrained).is_file():
        raise UnknownNameError(
            f"open_clip has no weights {str(pretrained)!r} of {identifier}, and no file is there;"
            f"{nearest(str(pretrained), tags)}"
        )
    try:
        with seeding.local(seed):
            model, _, transform = open_clip.create_model_and_transforms(
                identifier, pretrained=None if pretrained is None else str(pretrained)
            )
    except Exception as error:  # downloads, safetensors, pickles and mismatched weights raise almost anything
        raise UnreadableError(
            f"expected the weights {str(pretrained or identifier)!r} of {identifier}, got "
            f"{' '.join(str(error).split())[:200]!r}; check the network or give the path of a local checkpoint"
        ) from error
    if is_tag:
        return model, transform, str(pretrained)
    label = identifier if has_schema else "random" if pretrained is None else Path(pretrained).name
    return model, transform, f"{label}@{digest_weights(model)}"


def _load_tokenizer(identifier: str) -> Callable[..., torch.Tensor]:
    import open_clip

    try:
        return open_clip.get_tokenizer(identifier)
    except (OSError, RuntimeError, ValueError) as error:
        raise UnreadableError(
            f"expected the tokenizer of {identifier}, got {' '.join(str(error).split())[:200]!r}; check the network or "
            "give tokenizer="
        ) from error


def _digest_tokenizer(tokenizer: Callable[..., torch.Tensor]) -> str:
    """Digest of the vocabulary, where one is to be found, and of the tokens of test captions."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # open_clip wraps Hugging Face's
    vocabulary = inner.get_vocab() if hasattr(inner, "get_vocab") else getattr(inner, "encoder", None)
    tokens = tokenizer(list(TEST_CAPTIONS)).tolist()
    return digest_bytes(json.dumps([vocabulary, tokens], sort_keys=True, default=str).encode())


TEST_CAPTIONS = (
    "a photo of a cat",
    "Two   DOGS, running; isn't it 1,234.5 metres?",
    "<b>naïve café</b> 東京 🐈",
    "antidisestablishmentarianism " * 3,
)
