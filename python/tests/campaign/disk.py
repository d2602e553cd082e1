"""What may lie on a disk after a power loss, given all that a process did to a folder?

A write is kept block by block or not, until its file is synced. Names change in the order in
which they were changed, cut anywhere behind the last sync that made them durable: that of the
folder (strict POSIX), or of any file (ext4, whose journal takes all names along).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from .traced import Event

BLOCK = 4096


@dataclass(kw_only=True)
class _Change:
    """One change of a file's bytes: a write (``bytes``), a new length, or a hole."""

    kind: str
    offset: int
    length: int
    content: bytes = b""


@dataclass(kw_only=True)
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[_Change] = field(default_factory=list)


class Disk:
    """Follows events, and makes folders as a power loss would leave them.

    Args:
        folder: What was recorded; paths are told below it.
        is_strict: Names are durable by a sync of their folder alone.
    """

    def __init__(self, folder: Path, is_strict: bool) -> None:
        self._folder, self._is_strict = str(folder), is_strict
        self._files: list[_File] = []
        self._of_inode: dict[int, int] = {}
        self._live: dict[str, int | None] = {}
        self._durable: dict[str, int | None] = {}
        self._names: list[tuple[str, str, int | None, str]] = []

    def follow(self, event: Event) -> None:
        """Takes one event in."""
        a, b, c = event.numbers
        if event.what == "O":
            self._opened(self._name(event.path), a, bool(b))
        elif event.what == "W":
            change = _Change(kind="write", offset=b, length=c, content=event.one)
            self._change(a, event.path, change)
        elif event.what == "T":
            self._change(a, event.path, _Change(kind="size", offset=c, length=0))
        elif event.what == "P":
            self._change(a, event.path, _Change(kind="hole", offset=b, length=c))
        elif event.what == "A":
            self._change(a, event.path, _Change(kind="grow", offset=b, length=c))
        elif event.what == "S":
            self._sync(a, bool(b))
        elif event.what in "RLXYD":
            self._rename(event)

    def _name(self, path: str) -> str:
        # What was unlinked while it was open has no name any more.
        return path.removesuffix(" (deleted)")[len(self._folder) :].strip("/")

    def _opened(self, name: str, inode: int, is_cut: bool) -> None:
        at = self._live.get(name)
        if at is None or self._of_inode.get(inode) != at:
            self._files.append(_File())
            at = self._of_inode[inode] = len(self._files) - 1
            self._put("put", name, at)
        if is_cut:
            self._files[at].pending.append(_Change(kind="size", offset=0, length=0))

    def _file(self, inode: int, path: str) -> _File:
        if inode not in self._of_inode:
            self._opened(self._name(path), inode, False)
        return self._files[self._of_inode[inode]]

    def _change(self, inode: int, path: str, change: _Change) -> None:
        self._file(inode, path).pending.append(change)

    def _put(self, what: str, name: str, file: int | None, other: str = "") -> None:
        self._names.append((what, name, file, other))
        _apply_name(self._live, (what, name, file, other))

    def _rename(self, event: Event) -> None:
        one = self._name(event.one.decode())
        if event.what == "D":
            self._put("put", one + "/", None)
        elif event.what == "Y":
            self._put("drop", one + "/", None)
        elif event.what == "X":
            self._put("drop", one, None)
        elif event.what == "L":
            self._put("put", self._name(event.two.decode()), self._live[one])
        else:
            self._put("move", one, None, self._name(event.two.decode()))

    def _sync(self, inode: int, is_folder: bool) -> None:
        if not is_folder and inode in self._of_inode:
            file = self._files[self._of_inode[inode]]
            for change in file.pending:
                _apply(file.durable, change)
            file.pending = []
        if is_folder or not self._is_strict:
            for name in self._names:
                _apply_name(self._durable, name)
            self._names = []

    def leave(self, target: Path, luck: random.Random) -> None:
        """Writes into ``target`` what a power loss now might leave."""
        names = dict(self._durable)
        kept = luck.choice([0, len(self._names), luck.randint(0, len(self._names))])
        for name in self._names[:kept]:
            _apply_name(names, name)
        # All, none, or each block by itself: the ends are as likely as the middle.
        share = luck.choice([0.0, 1.0, luck.random()])
        made: dict[int, Path] = {}
        target.mkdir(parents=True)
        for name, at in sorted(names.items()):
            path = target / name
            if at is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if at in made:
                path.hardlink_to(made[at])
                continue
            made[at] = path
            _write_sparse(path, self._left_of(self._files[at], share, luck))

    @staticmethod
    def _left_of(file: _File, share: float, luck: random.Random) -> bytearray:
        content = bytearray(file.durable)
        for change in file.pending:
            if change.kind != "write":
                if luck.random() < share:
                    _apply(content, change)
                continue
            at = change.offset
            while at < change.offset + change.length:
                end = min(change.offset + change.length, (at // BLOCK + 1) * BLOCK)
                if luck.random() < share:
                    part = change.content[at - change.offset : end - change.offset]
                    _apply(
                        content,
                        _Change(kind="write", offset=at, length=len(part), content=part),
                    )
                at = end
        return content


def _apply(content: bytearray, change: _Change) -> None:
    end = change.offset + change.length
    if change.kind == "size":
        if len(content) > change.offset:
            del content[change.offset :]
        else:
            content.extend(bytes(change.offset - len(content)))
        return
    if change.kind == "hole":
        inside = max(0, min(end, len(content)) - change.offset)
        content[change.offset : change.offset + inside] = bytes(inside)
        return
    if end > len(content):
        content.extend(bytes(end - len(content)))
    if change.kind == "write":
        content[change.offset : end] = change.content


def _apply_name(names: dict[str, int | None], change: tuple[str, str, int | None, str]) -> None:
    what, name, file, other = change
    if what == "put":
        names[name] = file
    elif what == "drop":
        names.pop(name, None)
    elif name in names:
        names[other] = names.pop(name)
    elif name + "/" in names:
        for old in [at for at in names if at.startswith(name + "/")]:
            names[other + old[len(name) :]] = names.pop(old)


def _write_sparse(path: Path, content: bytearray) -> None:
    with path.open("wb") as file:
        for at in range(0, len(content), BLOCK):
            part = content[at : at + BLOCK]
            if any(part):
                file.seek(at)
                file.write(part)
        file.truncate(len(content))
