"""Kept checkpoints of a store that belong to files which a framework writes.

A framework writes files of its own: the dense part, loops, random state. Each gets a kept
checkpoint of the store, whose name stands in a :class:`Record` within the file. The checkpoint is
made first: after a kill between both the file before still has its own. To go on from a file the
store is opened at its checkpoint; a store that stands elsewhere is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tierbed.errors import InvalidError, UnsupportedError
from tierbed.train.store import Store

__all__ = ["Record", "check_at", "drop_checkpoints", "drop_unnamed", "keep_checkpoint", "prefix_of"]


@dataclass(frozen=True)
class Record:
    """The checkpoint of a file.

    Args:
        name: Name of the kept checkpoint.
        number: Its number.
        steps: Steps of each table at it.
    """

    name: str
    number: int
    steps: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Record:
        """Reads what :meth:`as_dict` returned."""
        return cls(str(saved["name"]), int(saved["number"]), dict(saved["steps"]))


def prefix_of(path: str | os.PathLike[str]) -> str:
    """Returns what names of checkpoints of the file or folder at ``path`` begin with."""
    parent, base = os.path.split(os.path.abspath(os.fspath(path)))
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", os.path.splitext(base)[0])[:40]
    return f"{stem}{_mark(parent)}{_digest(base)}-"


def _mark(folder: str) -> str:
    return f"-{_digest(folder)}-"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def keep_checkpoint(store: Store, path: str | os.PathLike[str]) -> Record:
    """Checkpoints ``store`` for what will be written to ``path``, and keeps it.

    Raises:
        UnsupportedError: The process is one of several ranks, or the store keeps no checkpoints.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UnsupportedError(
            "each rank has a store of its own, and the framework's file is written by one rank; "
            "save the tables with ShardedEmbeddingBagCollection.save on all ranks"
        )
    if store.path is None:
        raise UnsupportedError(
            "a store in memory keeps no checkpoints to go back to; open the store with a path"
        )
    last = store.last_checkpoint()
    name = f"{prefix_of(path)}{0 if last is None else last[0] + 1}"
    number = store.checkpoint(name, keep=True)
    return Record(name, number, _steps(store))


def drop_checkpoints(store: Store, path: str | os.PathLike[str], but: str | None = None) -> None:
    """Drops those of ``path``, whose file is gone or was written anew, except ``but``."""
    start = prefix_of(path)
    for kept in store.checkpoints():
        if kept.name.startswith(start) and kept.name != but:
            store.drop_checkpoint(kept.name)


def drop_unnamed(store: Store, folder: str | os.PathLike[str], names: Collection[str]) -> None:
    """Drops those of files in ``folder`` that are none of ``names``."""
    mark = _mark(os.path.abspath(os.fspath(folder)))
    for kept in store.checkpoints():
        if mark in kept.name and kept.name not in names:
            store.drop_checkpoint(kept.name)


def check_at(store: Store, saved: Mapping[str, Any] | None, path: object) -> None:
    """Checks that the rows of ``store`` are those of the file at ``path``.

    Raises:
        InvalidError: They are not, or the file knows of no store.
    """
    if saved is None:
        raise InvalidError(
            f"{os.fspath(path) if isinstance(path, os.PathLike) else path} was saved without the "
            "store; save it with this module, or load it without the rows"
        )
    record = Record.of(saved)
    last = store.last_checkpoint()
    if last is None or last[1] != record.name or _steps(store) != record.steps:
        raise InvalidError(
            f"the store does not stand at {record.name!r}, the checkpoint of {path}; close it, and "
            "open it with open_store and this file",
            {"checkpoint": record.name, "stands_at": "" if last is None else last[1]},
        )


def _steps(store: Store) -> dict[str, int]:
    return {table["name"]: store.steps_done(table["name"]) for table in store.tables()}
