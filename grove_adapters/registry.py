"""Names to classes: built in, registered by hand, or declared by other people's packages."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from grove_adapters.config import nearest
from grove_adapters.errors import ConfigError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A lazy map from names to classes.

    Built-ins are given as ``"module:Class"`` and imported when first asked for, so listing names costs nothing.
    Packages that declare an entry point in `group` appear beside them.

    Args:
        kind: The word for one entry in messages, e.g. ``"adapter"``.
        builtin: Names to ``"module:Class"``.
        group: Entry-point group in which other packages declare theirs.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str], group: str) -> None:
        self.kind = kind
        self.group = group
        self._builtin = dict(builtin)
        self._registered: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Decorator that adds a class under `name`.

        Raises:
            ConfigError: The name is taken.
        """

        def add(entry: type[T]) -> type[T]:
            if name in self and self._registered.get(name) is not entry:
                raise ConfigError(f"{self.kind} name {name!r} is taken; register under another name")
            self._registered[name] = entry
            return entry

        return add

    def get(self, name: str) -> type[T]:
        """The class registered under `name`.

        Raises:
            UnknownNameError: No such name; the nearest valid one is offered.
        """
        if name in self._registered:
            return self._registered[name]
        if name in self._builtin:
            return _load(self._builtin[name])
        for entry in importlib.metadata.entry_points(group=self.group):
            if entry.name == name:
                return entry.load()
        raise UnknownNameError(f"unknown {self.kind} {name!r};{nearest(name, self)}")

    def __contains__(self, name: object) -> bool:
        return name in set(self)

    def __iter__(self) -> Iterator[str]:
        declared = {entry.name for entry in importlib.metadata.entry_points(group=self.group)}
        return iter(sorted({*self._builtin, *self._registered, *declared}))


def _load(address: str) -> type:
    module, _, attribute = address.partition(":")
    return getattr(importlib.import_module(module), attribute)
