"""Sizes as people write them: ``"4GiB"``."""

from __future__ import annotations

import re

from tierbed.errors import InvalidError

__all__ = ["format_bytes", "parse_bytes", "parse_limit", "size_text"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[_letter] = 1024**_power


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Reads a size: an integer of bytes, or text such as ``"16MiB"``, ``"4GB"``, ``"512k"``.

    ``KiB MiB GiB TiB`` and the bare letters count in 1024s, ``KB MB GB TB`` in 1000s.

    Raises:
        InvalidError: Not a size, naming ``name``.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise InvalidError(f"{name} must be a number of bytes or a text like '4GiB', not {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise InvalidError(f"{name} must not be negative: {size}", {name: str(size)})
        return size
    match = _SIZE.fullmatch(size)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise InvalidError(
            f"{name} is not a size: {size!r}; write for example 16MiB, 4GiB or 4000000000",
            {name: size},
        )
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_limit(size: int | str | None, name: str) -> int | None:
    """Reads a size as :func:`parse_bytes` does; None is no limit."""
    return None if size is None else parse_bytes(size, name)


def format_bytes(size_bytes: float) -> str:
    """Writes a size for people: ``"1.5 GiB"``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def size_text(size_bytes: int) -> str:
    """Writes a size as :func:`parse_bytes` reads it, in the largest unit that divides it."""
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
    fits = (f"{size_bytes // of}{unit}" for unit, of in units.items() if size_bytes % of == 0)
    return next(fits, str(size_bytes))
