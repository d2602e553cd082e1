"""Folders that are open, for errors of those who open them again.

In a notebook, mostly, the same cell did, a moment ago: its store lives on because a collection, a
model, or a name that was bound anew keeps it. Then the error says so, and what to close.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from tierbed.errors import ClosedError

if TYPE_CHECKING:
    from tierbed.train.store import Store

__all__ = ["explained", "find", "note"]

_OPENED: weakref.WeakSet[Store] = weakref.WeakSet()
# Those that only read: they do not hold the folder.
_READERS: weakref.WeakSet[Store] = weakref.WeakSet()


def note(store: Store, *, only_reads: bool) -> None:
    """Remembers a store while it lives."""
    (_READERS if only_reads else _OPENED).add(store)


def find(folder: str) -> Store | None:
    """Returns the store of this process that has ``folder`` open; the owner before readers."""
    found = [store for store in (*_OPENED, *_READERS) if _is_at(store, folder)]
    return found[0] if found else None


def explained(error: ClosedError, folder: str) -> ClosedError:
    """Returns ``error``, in more words when a store of this very process has ``folder``."""
    if error.context.get("holder_pid") != str(os.getpid()):
        return error
    found = [store for store in _OPENED if _is_at(store, folder)]
    if not found:
        return error
    held = [text for store in found for text in _holders(store)]
    by = ", ".join(held) if held else "no name of the main program"
    remedy = (
        "go on with that store, or call its close(); del does not close it while a collection "
        "or a model has it"
    )
    return ClosedError(
        f"folder is open in this process already (path: {folder}, held by: {by}, remedy: {remedy})",
        {**error.context, "held_by": by, "remedy": remedy},
    )


def _is_at(store: Store, folder: str) -> bool:
    path = store.path
    return path is not None and store.is_open and os.path.realpath(path) == os.path.realpath(folder)


def _holders(store: Store) -> list[str]:
    """Names what keeps a store: collections, and what the main program calls them."""
    kept = [store, *store.collections()]
    main = vars(sys.modules["__main__"])
    names = {
        name: value
        for name, value in list(main.items())
        if not name.startswith("__") and _has(value, kept)
    }
    told = [f"{name} ({type(value).__name__})" for name, value in names.items()]
    unnamed = [one for one in kept[1:] if not any(_has(value, [one]) for value in names.values())]
    return told + [f"a {type(one).__name__}" for one in unnamed]


def _has(value: Any, kept: list[Any]) -> bool:
    parts = list(value.modules()) if isinstance(value, Module) else [value]
    # Copies of collections are over a kept store, too.
    return any(one in (part, getattr(part, "_store", None)) for part in parts for one in kept)
