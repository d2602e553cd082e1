"""Settings: options of a command that are keys of a file, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

from tierbed.errors import InvalidError

__all__ = ["Effective", "Key", "Kind", "Reader", "Setting", "numbers", "words"]

Number = TypeVar("Number", int, float)
Kind = Literal["flag", "whole", "number", "text", "size", "seconds", "rows", "list"]
#: Makes what a command takes of what its command line gives.
Reader = Callable[[Any], Any]

_TAKES: dict[Kind, tuple[str, tuple[type, ...]]] = {
    "flag": ("true or false", (bool,)),
    "whole": ("a whole number", (int,)),
    "number": ("a number", (int, float)),
    "text": ("a text", (str,)),
    "size": ('a size, such as "4GiB"', (str, int)),
    "seconds": ('a time, such as "2s"', (str, int, float)),
    "rows": ('a number of rows, or a share such as "5%"', (str, int)),
    "list": ("a text, or a list of texts or numbers", (str, int, float)),
}


@dataclass(frozen=True)
class Key:
    """Which key of a file an option is, as an annotation.

    Args:
        section: Of the file; None: no file sets the option.
        name: The key; by default the option's name.
    """

    section: str | None
    name: str | None = None


@dataclass(frozen=True)
class Effective:
    """Everything that is set. A command with a parameter of this type is given it.

    Args:
        text: As a file that ``--config`` reads, with where each value comes from.
    """

    text: str


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An option that a file can set.

    Args:
        section: Of the file.
        key: Its name there.
        name: The command's parameter.
        flag: Its name on the command line.
        kind: What it takes.
        is_by_comma: A list is one word of the command line, with commas between.
        read: Makes the value for the command.
        text: What it is.
        choices: The words that it takes; none: any.
        least: The least number.
        most: The largest number.
    """

    section: str
    key: str
    name: str
    flag: str
    kind: Kind
    is_by_comma: bool
    read: Reader
    text: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None

    def misfit(self, value: Any) -> str | None:
        """Says what is taken in place of ``value``; None if not by words or bounds."""
        if self.choices:
            near = get_close_matches(str(value), self.choices, 1)
            told = f"must be one of {', '.join(self.choices)}, not {value!r}"
            return f"{told}; did you mean {near[0]}?" if near else told
        if self.least is None:
            return None
        most = "" if self.most is None else f", and at most {self.most:g}"
        return f"must be at least {self.least:g}{most}, not {value}"

    def spoken(self, value: Any) -> Any:
        """Returns a value of a file as the command line would give it.

        Raises:
            InvalidError: It is of another type.
        """
        items = value if self.kind == "list" and isinstance(value, list) else [value]
        takes, types = _TAKES[self.kind]
        for item in items:
            if not isinstance(item, types) or (isinstance(item, bool) and self.kind != "flag"):
                raise InvalidError(f"takes {takes}, not {_shown(item)}")
            if self.is_by_comma and isinstance(value, list) and "," in str(item):
                raise InvalidError(f"a comma divides the words of a list: {item!r}")
        if self.kind == "flag":
            return value
        if self.kind == "list":
            return ",".join(map(str, items)) if self.is_by_comma else [str(item) for item in items]
        return str(value)

    def written(self, value: Any) -> str:
        """Returns a value of the command line as a file has it."""
        if self.kind == "list":
            items = words(value) if self.is_by_comma else value
            return f"[{', '.join(_quoted(item) for item in items)}]"
        if self.kind == "flag":
            return "true" if value else "false"
        return str(value) if self.kind in ("whole", "number") else _quoted(value)


def _quoted(value: str | Path) -> str:
    # Basic strings of TOML escape as those of JSON do, and DEL besides.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    return "a list" if isinstance(value, list) else repr(value)


def words(text: str) -> tuple[str, ...]:
    """Splits at commas; blanks around words and empty words do not count."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Reads numbers with commas between; a text that holds others is an error naming ``option``."""
    try:
        return tuple(kind(word) for word in words(text))
    except ValueError as error:
        raise InvalidError(f"{option} must be numbers with commas between, not {text!r}") from error
