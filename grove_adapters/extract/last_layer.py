"""The last linear layer of an encoder, and a run of the encoder that tells what this layer read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from grove_adapters.embeddings import Projection
from grove_adapters.errors import InputError


@dataclass(frozen=True)
class Place:
    """Where in a model a last linear layer may be.

    Attributes:
        name: Dotted name of a `torch.nn.Linear`, or of an (F, D) parameter that features are multiplied by.
        how: ``"output"`` for a layer whose output is the embedding, ``"residual"`` for one to whose output something
            that goes past it is added, ``"functional"`` for one whose weights are used without calling it.
    """

    name: str
    how: Literal["output", "residual", "functional"] = "output"


@dataclass(frozen=True)
class LastLayer:
    """A last linear layer that was found.

    Attributes:
        model: The whole model.
        place: Where in it the layer is.
        what: The encoder, for messages.
    """

    model: torch.nn.Module
    place: Place
    what: str

    @property
    def projection(self) -> Projection:
        """Its weights; numbers of their own, so that they outlive the model."""
        weight, bias = self._weights()
        return Projection(_plain(weight), None if bias is None else _plain(bias))

    def run(self, encode: Callable[[Any], torch.Tensor], inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, D) vectors that `encode` makes of `inputs`, and the (B, F) features the layer makes them of.

        Args:
            encode: Runs the encoder that the layer is the last of.
            inputs: Pixels or tokens.

        Raises:
            InputError: Something comes after the layer.
        """
        module = _find(self.model, self.place.name)
        if isinstance(module, torch.nn.Linear) and self.place.how != "functional":
            return self._listen(module, encode, inputs)
        return self._replace(encode, inputs)

    def _listen(
        self, module: torch.nn.Linear, encode: Callable[[Any], torch.Tensor], inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note what goes into the layer and what comes out of it while the encoder runs as always."""
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        handle = module.register_forward_hook(lambda _, given, made: seen.append((given[0], made)))
        try:
            output = encode(inputs)
        finally:
            handle.remove()
        features, made = (tensor.reshape(len(output), -1) for tensor in seen[-1])
        if self.place.how == "residual":
            return output, torch.cat([features, (output - made).to(features)], 1)
        if made.shape != output.shape or not torch.equal(made, output):
            raise _not_last(self.what, f"{self.place.name} with something after it")
        return output, features

    def _replace(self, encode: Callable[[Any], torch.Tensor], inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the encoder multiply by the identity instead, so that its output is the features, and project these."""
        name, linear = self.place.name, isinstance(_find(self.model, self.place.name), torch.nn.Linear)
        weight, bias = self._weights()
        changed = {f"model.{name}.weight" if linear else f"model.{name}": torch.eye(weight.shape[1]).to(weight)}
        if bias is not None:
            changed[f"model.{name}.bias"] = bias.new_zeros(weight.shape[1])
        features = torch.func.functional_call(_Encoding(self.model, encode), changed, (inputs,))
        if features.shape[1:] != weight.shape[1:]:
            raise _not_last(self.what, f"{name} with something after it")
        output = features @ weight.T
        return output if bias is None else output + bias, features

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(D, F) weight and (D,) bias."""
        found = _find(self.model, self.place.name)
        if isinstance(found, torch.nn.Linear):
            return found.weight, found.bias
        assert isinstance(found, torch.nn.Parameter)
        return found.T, None


class _Encoding(torch.nn.Module):
    """A call of an encoder as a module, in which parameters can be replaced."""

    def __init__(self, model: torch.nn.Module, encode: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._encode = encode

    def forward(self, inputs: Any) -> torch.Tensor:
        return self._encode(inputs)


def find_last_layer(model: torch.nn.Module, places: Sequence[Place], *, what: str) -> LastLayer:
    """The last linear layer of an encoder.

    Args:
        model: The whole model.
        places: Where it may be; the first that is there is taken.
        what: The encoder, for messages.

    Raises:
        InputError: There is none in these places.
    """
    for place in places:
        if isinstance(_find(model, place.name), torch.nn.Linear | torch.nn.Parameter):
            return LastLayer(model, place, what)
    raise _not_last(what, f"nothing linear at {', '.join(place.name for place in places)}")


def _find(model: torch.nn.Module, name: str) -> Any:
    """The module or parameter of a dotted name, or None."""
    found: Any = model
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _not_last(what: str, got: str) -> InputError:
    return InputError(
        f"{what} expected to end in a linear layer, whose inputs are the features, got {got}; build without features"
    )


def _plain(weights: torch.Tensor) -> Any:
    return weights.detach().float().cpu().clone().numpy()
