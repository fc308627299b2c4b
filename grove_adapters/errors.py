"""The errors this package raises on purpose.

Every leaf also inherits the builtin that people already catch, and its message is one sentence that says what was
expected, what was found and what to do next. Anything else that escapes is a defect of ours.
"""

from __future__ import annotations


class GroveAdaptersError(Exception):
    """Base of every error raised on purpose; the command line turns it into one sentence and exit code 2."""


class InputError(GroveAdaptersError, ValueError):
    """A value, shape or range that cannot be used."""


class InputTypeError(GroveAdaptersError, TypeError):
    """A value of a type that cannot be used."""


class ConfigError(GroveAdaptersError, ValueError):
    """An unknown or impossible setting."""


class UnknownNameError(GroveAdaptersError, LookupError):
    """A name that is in no registry, store or configuration."""


class SourceMismatchError(GroveAdaptersError, ValueError):
    """Embeddings of another model, precision or preprocessing than the ones expected."""


class NotFittedError(GroveAdaptersError, RuntimeError):
    """An adapter asked to predict or to save before it was fitted."""


class MissingExtraError(GroveAdaptersError, ImportError):
    """An optional dependency that is not installed."""


class UnreadableError(GroveAdaptersError, OSError):
    """A file (image, captions, array) that cannot be read as what it claims to be."""


class StoreError(GroveAdaptersError, OSError):
    """An embedding store that is incomplete, edited, damaged or in the way."""


class StoreLockedError(StoreError):
    """An embedding store that another process is writing."""


class NumericalError(GroveAdaptersError, ArithmeticError):
    """A computation that left the range where its result means anything."""
