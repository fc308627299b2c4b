"""What an extractor is, and the part that every torch encoder shares: precision, device and normalisation."""

from __future__ import annotations

import abc
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image

from grove_adapters import _checks
from grove_adapters.embeddings import MODALITIES, Modality, Projection, Source
from grove_adapters.errors import InputError
from grove_adapters.extract.last_layer import LastLayer, Place, find_last_layer

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


class Featured(NamedTuple):
    """Embeddings with what the encoder's last linear layer made them of.

    Attributes:
        values: (B, D) float32 CPU embeddings.
        features: (B, F) float32 CPU features, as `Projection.apply` takes them.
    """

    values: torch.Tensor
    features: torch.Tensor


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


@runtime_checkable
class FeatureExtractor(Extractor, Protocol):
    """An extractor that can also give the inputs of its last linear layers, for adapters that reason about these."""

    def projection(self, modality: Modality) -> Projection:
        """The last linear layer of one modality's encoder."""

    def featured_images(self, images: torch.Tensor | Sequence[Image.Image]) -> Featured:
        """What `embed_images` gives, and its features."""

    def featured_texts(self, texts: Tokens | Sequence[str]) -> Featured:
        """What `embed_texts` gives, and its features."""


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

    Attributes:
        last_layers: By modality, where the model's last linear layer may be; the first that is there is it.

    Raises:
        InputError: Unknown precision, or a `preprocess` that gives another result each time.
    """

    last_layers: Mapping[str, Sequence[Place]]

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
        return self._embedded(self._encoded(self._encode_images, self._pixels(images)))

    def embed_texts(self, texts: Tokens | Sequence[str]) -> torch.Tensor:
        """(B, D) float32 CPU embeddings of tokens or captions."""
        return self._embedded(self._encoded(self._encode_texts, self._tokens(texts)))

    def featured_images(self, images: torch.Tensor | Sequence[Image.Image]) -> Featured:
        """What `embed_images` gives, up to rounding, and the inputs of the image encoder's last linear layer.

        Raises:
            InputError: The encoder does not end in a linear layer.
        """
        return self._featured("image", self._encode_images, self._pixels(images))

    def featured_texts(self, texts: Tokens | Sequence[str]) -> Featured:
        """What `embed_texts` gives, up to rounding, and the inputs of the text encoder's last linear layer.

        Raises:
            InputError: The encoder does not end in a linear layer.
        """
        return self._featured("text", self._encode_texts, self._tokens(texts))

    def projection(self, modality: Modality) -> Projection:
        """The last linear layer of one modality's encoder.

        Raises:
            InputError: The encoder does not end in a linear layer.
        """
        return self._last_layer(_checks.choice(modality, MODALITIES, what="modality")).projection

    def _featured(self, modality: str, encode: Callable[[Any], torch.Tensor], inputs: Any) -> Featured:
        layer = self._last_layer(modality)
        values, features = self._encoded(functools.partial(layer.run, encode), inputs)
        return Featured(self._embedded(values), features.float().cpu())

    def _pixels(self, images: torch.Tensor | Sequence[Image.Image]) -> torch.Tensor:
        if not isinstance(images, torch.Tensor):
            images = torch.stack([self.preprocess(image.convert("RGB")) for image in images])
        return images.to(self.device, non_blocking=True)

    def _tokens(self, texts: Tokens | Sequence[str]) -> Mapping[str, torch.Tensor]:
        tokens = texts if isinstance(texts, Tokens) else self.tokenize(texts)
        return {name: value.to(self.device, non_blocking=True) for name, value in tokens.inputs.items()}

    def _encoded(self, encode: Callable[[Any], Any], inputs: Any) -> Any:
        dtype = AUTOCAST[self.precision]
        with torch.no_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            return encode(inputs)

    def _embedded(self, output: torch.Tensor) -> torch.Tensor:
        output = output.float()
        if self.source.normalised:
            output = torch.nn.functional.normalize(output, dim=-1)
        return output.cpu()

    def _last_layer(self, modality: str) -> LastLayer:
        return find_last_layer(self.model, self.last_layers[modality], what=f"the {modality} encoder of {self.source}")

    @abc.abstractmethod
    def _encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """(B, D) vectors in the joint space, not yet normalised, of (B, C, H, W) pixels on the device."""

    @abc.abstractmethod
    def _encode_texts(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(B, D) vectors in the joint space, not yet normalised, of `Tokens.inputs` on the device."""


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
