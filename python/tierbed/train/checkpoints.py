"""Repair: commits of a store whose last one is lost or damaged.

A store whose ``CURRENT`` (or ``SHARDS``) is lost is not opened: it would begin anew over its own
data. :func:`find_commits` lists what is whole in its folder, :func:`put_in_force` says which commit
counts. Neither removes anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tierbed import _native

__all__ = ["Commit", "CommitTable", "find_commits", "put_in_force"]


@dataclass(frozen=True, kw_only=True)
class CommitTable:
    """A table as of a commit.

    Attributes:
        name: Its name.
        row_count: Its rows, written or not.
        steps: Steps that its optimizer did; None where the commit is damaged.
    """

    name: str
    row_count: int
    steps: int | None


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A commit of a store, in force or not, or a kept checkpoint.

    Attributes:
        number: Its number.
        last_number: Number of the last checkpoint that it gives back; with ``durability="step"``
            the log behind the commit has later ones.
        name: The name that this checkpoint was given.
        is_in_force: Whether the store opens at it now.
        is_kept: Whether it is a kept checkpoint: ``Store.open(path, checkpoint=name)`` goes back
            to it.
        damage: Why it cannot be put in force; None when every checksum of it is right.
        tables: What it gives back.
        attachments: Names of its attachments, ``extra.pt`` and ``rng.pt`` among them.
        pages: Pages that were checked.
    """

    number: int
    last_number: int
    name: str
    is_in_force: bool
    is_kept: bool
    damage: str | None
    tables: tuple[CommitTable, ...]
    attachments: tuple[str, ...]
    pages: int

    @property
    def is_whole(self) -> bool:
        """Whether it may be put in force."""
        return self.damage is None


def find_commits(path: str | os.PathLike[str]) -> list[Commit]:
    """Checks every commit and kept checkpoint that lies in a store's folder; changes nothing.

    Args:
        path: The folder of a store that nobody has open.

    Returns:
        Commits by number, then kept checkpoints by name.

    Raises:
        InvalidError: No commit of a store lies there.
        ClosedError: A process has the store open.
    """
    return [_commit(found) for found in _native.commits(os.fspath(path))]


def put_in_force(path: str | os.PathLike[str], number: int) -> Commit:
    """Lets the store in a folder open at one of its commits; the commit is checked first.

    Nothing is removed here; opening the store removes the files of other commits, as always.

    Args:
        path: The folder of a store that nobody has open.
        number: Of a commit that :func:`find_commits` found whole.

    Raises:
        InvalidError: No such commit lies there.
        CorruptionError: The commit is damaged; nothing has changed.
        ClosedError: A process has the store open.
    """
    return _commit(_native.put_commit_in_force(os.fspath(path), number))


def _commit(found: dict[str, Any]) -> Commit:
    tables = tuple(CommitTable(**table) for table in found["tables"])
    return Commit(**{**found, "tables": tables, "attachments": tuple(found["attachments"])})
