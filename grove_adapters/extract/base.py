"""What an extractor is, and the part that every torch encoder shares: precision, device and normalisation."""

from __future__ import annotations

import abc
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image

from grove_adapters import _checks
from grove_adapters.embeddings import Source
from grove_adapters.errors import InputError

Precision = Literal["fp32", "amp_bf16", "amp_fp16"]
AUTOCAST: dict[str, torch.dtype | None] = {"fp32": None, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


@dataclass(frozen=True)
class Tokens:
    """Captions as the text encoder takes them.

    Attributes:
        inputs: Arguments of the encoder, each a (B, L) tensor.
        truncated: (B,) bool, True where the caption was longer than the encoder's context and its end is lost.
    """

    inputs: Mapping[str, torch.Tensor]
    truncated: np.ndarray


@runtime_checkable
class Extractor(Protocol):
    """A frozen image-text model. Anything with these attributes can fill a store."""

    @property
    def source(self) -> Source:
        """The model, its weights, precision and preprocessing."""

    @property
    def device(self) -> torch.device:
        """Where the encoder runs."""

    @property
    def preprocess(self) -> Callable[[Image.Image], torch.Tensor]:
        """RGB picture to (C, H, W) float tensor. Runs in worker processes, so it must not hold the model."""

    @property
    def tokenize(self) -> Callable[[Sequence[str]], Tokens]:
        """Captions to tokens, of a length that does not depend on the batch. Runs in worker processes as well."""

    def embed_images(self, images: torch.Tensor | Sequence[Image.Image]) -> torch.Tensor:
        """(B, D) float32 CPU embeddings of preprocessed (B, C, H, W) pixels or of pictures."""

    def embed_texts(self, texts: Tokens | Sequence[str]) -> torch.Tensor:
        """(B, D) float32 CPU embeddings of tokens or captions."""


class TorchExtractor(abc.ABC):
    """The shared half of the built-in extractors; a subclass says how its model makes features.

    Args:
        model: The encoder; it is moved to `device` and switched to evaluation.
        preprocess: RGB picture to (C, H, W) tensor, without randomness.
        tokenize: Captions to `Tokens`.
        source: The model's description; precision, normalisation and the model's logit scale and bias are added here.
        device: Where the encoder runs.
        precision: ``"fp32"``, or autocast to ``"amp_bf16"`` or ``"amp_fp16"``.
        normalise: Whether to L2-normalise the embeddings.

    Raises:
        InputError: Unknown precision, or a `preprocess` that gives another result each time.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        preprocess: Callable[[Image.Image], torch.Tensor],
        tokenize: Callable[[Sequence[str]], Tokens],
        *,
        source: Source,
        device: str | torch.device,
        precision: Precision,
        normalise: bool,
    ) -> None:
        _checks.choice(precision, tuple(AUTOCAST), what="precision")
        self.device = torch.device(device)
        self.model = model.to(self.device).eval()
        self.preprocess = preprocess
        self.tokenize = tokenize
        self.precision = precision
        pictures = describe_preprocess(preprocess)
        scale, bias = getattr(model, "logit_scale", None), getattr(model, "logit_bias", None)
        self.source = Source(
            model=source.model,
            pretrained=source.pretrained,
            library=source.library,
            preprocess=f"{pictures}; {source.preprocess}",
            precision=precision,
            normalised=normalise,
            logit_scale=None if scale is None else float(scale.detach().exp()),
            logit_bias=None if bias is None else float(bias.detach()),
        )

    @functools.cached_property
    def dim(self) -> int:
        """D, the width of the embeddings."""
        return int(self.embed_texts(["a"]).shape[1])

    def embed_images(self, images: torch.Tensor | Sequence[Image.Image]) -> torch.Tensor:
        """(B, D) float32 CPU embeddings of preprocessed (B, C, H, W) pixels or of pictures."""
        if not isinstance(images, torch.Tensor):
            images = torch.stack([self.preprocess(image.convert("RGB")) for image in images])
        return self._embed(self._image_features, images)

    def embed_texts(self, texts: Tokens | Sequence[str]) -> torch.Tensor:
        """(B, D) float32 CPU embeddings of tokens or captions."""
        tokens = texts if isinstance(texts, Tokens) else self.tokenize(texts)
        moved = {name: value.to(self.device, non_blocking=True) for name, value in tokens.inputs.items()}
        return self._embed(self._text_features, moved)

    def _embed(self, features: Callable[[Any], torch.Tensor], inputs: Any) -> torch.Tensor:
        if isinstance(inputs, torch.Tensor):
            inputs = inputs.to(self.device, non_blocking=True)
        dtype = AUTOCAST[self.precision]
        with torch.no_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            output = features(inputs).float()
        if self.source.normalised:
            output = torch.nn.functional.normalize(output, dim=-1)
        return output.cpu()

    @abc.abstractmethod
    def _image_features(self, pixels: torch.Tensor) -> torch.Tensor:
        """(B, D) features in the joint space, not yet normalised, of (B, C, H, W) pixels on the device."""

    @abc.abstractmethod
    def _text_features(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(B, D) features in the joint space, not yet normalised, of `Tokens.inputs` on the device."""


def describe_preprocess(preprocess: Callable[[Image.Image], torch.Tensor]) -> str:
    """Text that changes whenever the image preprocessing does: what it prints as, and what it makes of a test picture.

    Raises:
        InputError: It is random, like a training transform.
    """
    picture = _test_picture()
    first, second = (preprocess(picture) for _ in range(2))
    if not torch.equal(first, second):
        raise InputError(
            "preprocess expected the same result each time, got two different ones; give the validation transform "
            "(the last that open_clip.create_model_and_transforms returns)"
        )
    printed = re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(repr(preprocess).split()))
    rounded = np.round(first.numpy().astype(np.float64), 3) + 0.0  # no negative zeros
    return f"{printed} #{digest_bytes(np.ascontiguousarray(rounded))}"


def digest_weights(model: torch.nn.Module) -> str:
    """SHA-256 over names and values of every parameter and buffer, as 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:12]


def digest_bytes(content: Any) -> str:
    """SHA-256 of bytes or of a contiguous array, as 12 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:12]


def _test_picture() -> Image.Image:
    """A fixed picture of noise, neither square nor of a usual size, so that resizing and cropping leave their mark."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (83, 61, 3), dtype=np.uint8))
