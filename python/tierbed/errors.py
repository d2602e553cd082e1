"""Errors by what the caller can do about them.

One class per kind of the engine's errors. The class says what to do, the message names the
thing and the remedy, ``context`` holds the values. Every class also derives from the built-in
exception that Python programs expect (``ValueError``, ``OSError``, ``NotImplementedError``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

__all__ = [
    "ClosedError",
    "CorruptionError",
    "InvalidError",
    "IoError",
    "NoSpaceError",
    "PoisonedError",
    "TierbedError",
    "UnsupportedError",
    "from_native",
]


class TierbedError(Exception):
    """Base of all errors of this package.

    Args:
        message: What happened, with the values and the remedy.
        context: Name and value of each thing involved (``table``, ``path``, ``page_id``, ...).
        errno: The operating system's error number, which an :class:`IoError` keeps.

    Examples:
        >>> try:
        ...     tb.Store.open(backend="memory", dram_budget="much")
        ... except tb.TierbedError as error:
        ...     error.kind
        'invalid'
    """

    kind: ClassVar[str] = "unknown"

    def __init__(
        self,
        message: str,
        context: Mapping[str, str] | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.context: dict[str, str] = dict(context or {})

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.context, getattr(self, "errno", None))


class InvalidError(TierbedError, ValueError):
    """Fix the call: an argument, a name, a budget, or a file of another format."""

    kind = "invalid"


class CorruptionError(TierbedError):
    """Stop and restore from a checkpoint: bytes on disk are not what was written."""

    kind = "corruption"


class IoError(TierbedError, OSError):
    """The device or the operating system refused; it may be retried.

    Args:
        message: What failed.
        context: Names and values that belong to it.
        errno: The system's number, if it gave one.
    """

    kind = "io"

    def __init__(
        self,
        message: str,
        context: Mapping[str, str] | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, context)
        self.errno = errno


class NoSpaceError(IoError):
    """Free disk space or raise the quota, then reopen."""

    kind = "no_space"


class PoisonedError(TierbedError):
    """An earlier flush, sync or update failed; reopen to continue from the last checkpoint."""

    kind = "poisoned"


class ClosedError(TierbedError):
    """The store is closed, or another process owns it."""

    kind = "closed"


class UnsupportedError(TierbedError, NotImplementedError):
    """This store, device or build cannot do that."""

    kind = "unsupported"


_CLASS_OF_KIND: dict[str, type[TierbedError]] = {
    cls.kind: cls
    for cls in (
        InvalidError,
        CorruptionError,
        IoError,
        NoSpaceError,
        PoisonedError,
        ClosedError,
        UnsupportedError,
    )
}


def from_native(
    kind: str, message: str, context: Mapping[str, str], errno: int | None = None
) -> TierbedError:
    """Builds the exception of an engine error of ``kind``.

    Args:
        kind: The kind of error, as the engine calls it.
        message: What failed.
        context: Names and values that belong to it.
        errno: The system's number, if it gave one.
    """
    return _CLASS_OF_KIND.get(kind, TierbedError)(message, context, errno)
