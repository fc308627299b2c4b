"""Settings as frozen, keyword-only dataclasses that travel as JSON."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from grove_adapters.errors import ConfigError, InputError


def nearest(name: str, valid: Iterable[str]) -> str:
    """The clause of an error message that lists the valid names and offers the closest one."""
    valid = sorted(valid)
    close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    hint = f" did you mean {close[0]!r}?" if close else ""
    return f"{hint} valid names: {', '.join(valid) or 'none'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every configuration: frozen, keyword-only, checked against its annotations, written as JSON.

    Subclasses are declared with ``@dataclass(frozen=True, kw_only=True)`` and may extend `check`.

    Attributes:
        presets: Named settings to start from, beside ``"default"``.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):  # JSON has no tuples
                value = tuple(value)
            if isinstance(value, int) and not isinstance(value, bool) and _accepts_only_float(hints[field.name]):
                value = float(value)
            object.__setattr__(self, field.name, value)
            if not _fits(value, hints[field.name]):
                raise ConfigError(
                    f"{type(self).__name__}.{field.name} expected {_describe(hints[field.name])}, got {value!r}; "
                    "see the class docstring for its meaning and range"
                )
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` where values are of the right type but out of range."""

    def require(self, condition: bool, setting: str, expected: str) -> None:
        """Raise `ConfigError` naming `setting`, its value and what was `expected`, unless `condition` holds."""
        if not condition:
            raise ConfigError(f"{type(self).__name__}.{setting} expected {expected}, got {getattr(self, setting)!r}")

    def replace(self, **changes: Any) -> Self:
        """A copy with some settings changed; unknown names are refused with the nearest valid one."""
        return type(self).from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The settings as a plain dictionary in declaration order."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Build from a mapping, in which ``preset`` names the settings to start from.

        Raises:
            ConfigError: A name is unknown (the nearest valid one is offered) or a value does not fit.
            InputError: No such preset.
        """
        chosen = dict(settings)
        preset, known = chosen.pop("preset", "default"), {"default": {}, **cls.presets}
        if preset not in known:
            raise InputError(f"preset has no option {preset!r};{nearest(preset, known)}")
        valid = [field.name for field in dataclasses.fields(cls)]
        for name in chosen:
            if name not in valid:
                raise ConfigError(f"{cls.__name__} has no setting {name!r};{nearest(name, valid)}")
        return cls(**{**known[preset], **chosen})

    def to_json(self) -> str:
        """The settings as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build from JSON text.

        Raises:
            ConfigError: The text is not a JSON object, or `from_dict` refuses it.
        """
        try:
            settings = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{cls.__name__} expected a JSON object, got text that is not JSON ({error})") from error
        if not isinstance(settings, dict):
            raise ConfigError(f"{cls.__name__} expected a JSON object, got a JSON {type(settings).__name__}")
        return cls.from_dict(settings)


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is typing.Literal:
        return value in arguments and any(type(value) is type(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(_fits(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(_fits(*pair) for pair in zip(value, arguments, strict=True))
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _accepts_only_float(hint: Any) -> bool:
    arguments = typing.get_args(hint) or (hint,)
    return float in arguments and int not in arguments


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(repr(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(argument) for argument in arguments)
    if hint is type(None):
        return "None"
    return str(hint) if origin else getattr(hint, "__name__", str(hint))
