"""Docstrings of everything public: each argument is described, and each error of ours is named."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_signatures import ROOMS, _members

SECTION = re.compile(r"^(?:Args|Attributes):\n((?:[ ]+\S.*\n?|\n)+)", re.MULTILINE)
RAISED = re.compile(r"raise (\w+Error)\(")


def public() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yields path, function and documentation, with that of the bases, of all that is public."""
    seen = set()
    for room in ROOMS:
        module = importlib.import_module(f"tierbed.{room}".rstrip("."))
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if id(value) in seen or not getattr(value, "__module__", "").startswith("tierbed"):
                continue
            seen.add(id(value))
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value, inspect.getdoc(value) or ""
            elif inspect.isclass(value) and not issubclass(value, enum.Enum):
                yield from _of_class(f"{module.__name__}.{name}", value)


def _of_class(path: str, kind: type) -> Iterator[tuple[str, Callable[..., Any], str]]:
    docs = [inspect.cleandoc(base.__doc__ or "") for base in kind.__mro__]
    made = kind.__dict__.get("__init__")
    if made is not None and made.__module__ == kind.__module__:
        yield path, made, "\n\n".join(docs)
    for name, member in _members(kind).items():
        inner = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if inspect.isfunction(inner):
            every = (getattr(base.__dict__.get(name), "__doc__", "") for base in kind.__mro__)
            yield f"{path}.{name}", inner, "\n\n".join(inspect.cleandoc(doc or "") for doc in every)


EVERY = {path: (function, doc) for path, function, doc in public()}


@pytest.mark.parametrize("path", EVERY)
def test_every_argument_is_described(path: str) -> None:
    function, doc = EVERY[path]
    told = "".join(SECTION.findall(doc + "\n"))
    wanted = [
        name for name in inspect.signature(function).parameters if name not in ("self", "cls")
    ]
    missing = [name for name in wanted if not re.search(rf"^ +\**{name}:", told, re.MULTILINE)]
    assert not missing, f"{path} does not describe {missing} under Args:"


@pytest.mark.parametrize("path", EVERY)
def test_every_error_is_named(path: str) -> None:
    function, doc = EVERY[path]
    try:
        raised = set(RAISED.findall(inspect.getsource(function)))
    except OSError:
        raised = set()  # The generated constructor of a dataclass.
    assert not raised or "Raises:" in doc, f"{path} raises {sorted(raised)} without Raises:"
