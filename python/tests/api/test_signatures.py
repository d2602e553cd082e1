"""Signatures of everything public, frozen in ``signatures.txt``: a change there is seen by users.

``python python/tests/api/test_signatures.py`` writes the file anew.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

FROZEN = Path(__file__).with_name("signatures.txt")
ROOMS = (
    "",
    "accelerate",
    "adapters.dynamicemb",
    "adapters.graphbolt",
    "backends",
    "codec",
    "config",
    "data",
    "dist",
    "dist.dcp",
    "errors",
    "jagged",
)
ROOMS += (
    "lightning",
    "nn",
    "placement",
    "report",
    "results",
    "serve",
    "sizing",
    "tables",
    "testing",
    "torchrec",
    "train",
)


def lines() -> Iterator[str]:
    """Yields a line per public class, method, property and function, in a stable order."""
    for room in ROOMS:
        path = f"tierbed.{room}".rstrip(".")
        module = importlib.import_module(path)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            known = getattr(importlib.import_module("tierbed"), name, None)
            if room and known is value:
                continue
            yield from _of(f"{path}.{name}", value)


def _of(path: str, value: object) -> Iterator[str]:
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        yield f"{path}: {', '.join(f'{member.name}={member.value!r}' for member in value)}"
    elif inspect.isclass(value):
        yield f"{path}{_signature(value)}"
        for name, member in sorted(_members(value).items()):
            inner = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            if isinstance(inner, property):
                yield f"{path}.{name} (property)"
            elif callable(inner):
                yield f"{path}.{name}{_signature(inner)}"
    elif callable(value):
        yield f"{path}{_signature(value)}"


def _members(cls: type) -> dict[str, object]:
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("tierbed"):
            found.update({name: at for name, at in vars(base).items() if not name.startswith("_")})
    return found


def _signature(value: object) -> str:
    try:
        shown = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r" at 0x[0-9a-f]+", "", shown)


def test_public_signatures_are_those_of_the_file() -> None:
    found, frozen = list(lines()), FROZEN.read_text().splitlines()
    gone, new = sorted(set(frozen) - set(found)), sorted(set(found) - set(frozen))
    message = f"signatures changed; write {FROZEN.name} anew\n- {gone}\n+ {new}"
    assert found == frozen, message


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{line}\n" for line in lines()))
