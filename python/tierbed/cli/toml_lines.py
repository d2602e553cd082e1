"""Lines of the keys of a TOML text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["key_lines"]

_PARTS = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{}=\n]"
    r"|[^\"'#\[\]{}=\n]+",
    re.DOTALL,
)


@dataclass
class _Statement:
    """A key with its value, or the head of a table.

    Args:
        line: Where it begins, from 1.
        text: What stands before the value; all of a head.
    """

    line: int
    text: str


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Returns the line of each key and table, by its path.

    Args:
        text: TOML that was read without an error. Tables in one line are known as a whole.
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for one in _statements(text):
        if one.text.startswith("["):
            path = table = _path(one.text)
        else:
            path = table + _path(f"{one.text}= 0")
        for depth in range(1, len(path) + 1):
            lines.setdefault(path[:depth], one.line)
    return lines


def _statements(text: str) -> Iterator[_Statement]:
    """Yields the statements; brackets and texts may go over lines."""
    line, depth, is_value = 1, 0, False
    now = _Statement(line, "")
    for match in _PARTS.finditer(text):
        part = match[0]
        if part == "\n" and depth == 0:
            if now.text.strip():
                yield _Statement(now.line, now.text.strip())
            now, is_value = _Statement(line + 1, ""), False
        elif part == "=" and depth == 0:
            is_value = True
        elif is_value:
            depth += (part in ("[", "{")) - (part in ("]", "}"))
        elif not part.startswith("#"):
            now.text += part
        line += part.count("\n")
    if now.text.strip():
        yield _Statement(now.line, now.text.strip())


def _path(statement: str) -> tuple[str, ...]:
    """Returns the names of a statement that has one path."""
    path: list[str] = []
    found: Any = tomllib.loads(statement)
    while isinstance(found, (dict, list)) and found:
        if isinstance(found, list):
            found = found[0]
            continue
        [(name, found)] = found.items()
        path.append(name)
    return tuple(path)
