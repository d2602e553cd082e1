"""What the type of an option says: what it takes, what reads it, its words and its bounds."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, get_origin

from tierbed._util.bytes import parse_bytes
from tierbed._util.durations import parse_seconds
from tierbed.cli.settings import Kind, Reader, numbers, words
from tierbed.config.words import Unit

__all__ = ["choices", "kind_of", "list_of", "mark", "reader", "size_of", "texts"]

Mark = TypeVar("Mark")


def kind_of(hint: Any) -> Kind:
    """Returns what an option of a type takes."""
    unit = mark(hint, Unit)
    if unit is not None:
        return unit.name
    if get_origin(hint) in (list, tuple):
        return "list"
    kinds: dict[Any, Kind] = {bool: "flag", int: "whole", float: "number"}
    if hint in kinds:
        return kinds[hint]
    # Of a union, or of a type with annotations.
    members = () if get_origin(hint) is Literal else get_args(hint)
    found = (kind_of(member) for member in members if isinstance(member, type) or get_args(member))
    return next((kind for kind in found if kind != "text"), "text")


def reader(hint: Any, flag: str) -> Reader:
    """Returns what checks a text that has a unit, and leaves all others as they are."""
    unit = mark(hint, Unit)
    checks: dict[str, Callable[[str, str], Any]] = {
        "size": parse_bytes,
        "seconds": parse_seconds,
    }
    if unit is None or unit.name not in checks:
        return _as_it_is

    def read(text: str | None) -> str | None:
        if text is not None:
            checks[unit.name](text, flag)
        return text

    return read


def texts(kind: type) -> dict[str, str]:
    """Returns what the docstring says of each field, without marks."""
    section = r"^(?:Args|Attributes):\n((?:    .*\n?)+)"
    listed = re.search(section, inspect.getdoc(kind) or "", re.MULTILINE)
    one = r"^    (\w+): (.*(?:\n        .*)*)"
    found = re.findall(one, "" if listed is None else listed[1], re.MULTILINE)
    return {name: " ".join(text.replace("``", "").split()) for name, text in found}


def choices(hint: Any) -> tuple[str, ...]:
    """Returns the words of a ``Literal``, or of one within a type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return next((found for part in get_args(hint) if (found := choices(part))), ())


def mark(hint: Any, kind: type[Mark]) -> Mark | None:
    """Returns what the annotations of a type, or of a member of a union, have of a kind."""
    found = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, kind)]
    if found:
        return found[-1]
    inner = (mark(part, kind) for part in get_args(hint))
    return next((one for one in inner if one is not None), None)


def size_of(flag: str) -> Reader:
    """Returns what reads a size in bytes."""
    return lambda text: parse_bytes(text, flag)


def list_of(kind: type, flag: str) -> Reader:
    """Returns what reads words or numbers with commas between."""
    return words if kind is str else lambda text: numbers(flag, text, kind)


def _as_it_is(value: Any) -> Any:
    return value
