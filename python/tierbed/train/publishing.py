"""What a publisher publishes next, and the folder where it keeps what deltas are made against."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierbed import _native
from tierbed.errors import ClosedError, TierbedError
from tierbed.serve.versions import Versions

__all__ = ["DELTAS_MAX", "Against", "Full", "Link", "LocalFolder", "Rules", "choose"]

#: Deltas that a server answers from at the same time.
DELTAS_MAX = 8
#: Bytes of deltas, for each byte of the snapshot below them, that are not too many.
DELTA_SHARE_MAX = 0.25


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a publisher publishes what.

    Attributes:
        delta_every_s: Seconds from one version to the next; None for whole ones only.
        full_every_s: Seconds from one whole version to the next; None for no such rule.
    """

    delta_every_s: float | None
    full_every_s: float | None

    @property
    def every_s(self) -> float | None:
        """Seconds from one version to the next."""
        return self.full_every_s if self.delta_every_s is None else self.delta_every_s


@dataclass(frozen=True, kw_only=True)
class Link:
    """A version of a channel.

    Attributes:
        identity: What tells it from every other.
        file_bytes: Bytes of its files.
        folder: Where it lies here; None where it does not.
        is_noted: Whether the store knows which rows changed since.
    """

    identity: str
    file_bytes: int
    folder: Path | None
    is_noted: bool

    @property
    def is_known(self) -> bool:
        """Whether a delta against it costs what changed."""
        return self.folder is not None and self.is_noted


@dataclass(frozen=True, kw_only=True)
class Full:
    """A whole version comes next.

    Attributes:
        reason: Why.
    """

    reason: str


@dataclass(frozen=True, kw_only=True)
class Against:
    """A delta comes next.

    Attributes:
        at: The place in the channel's chain that it is made against; what comes behind it there
            leaves the chain.
    """

    at: int


def choose(rules: Rules, chain: Sequence[Link], full_age_s: float) -> Full | Against:
    """Decides what comes next.

    A delta is made against the newest version that can be built on. So it costs what changed
    since that one. At most eight lie upon a snapshot: then one against the snapshot takes their
    place, and so when together they have a quarter of its bytes, which leaves out what changed
    twice. If that one alone has as many, a whole version follows.

    Args:
        rules: When what is due.
        chain: The channel's versions, a whole one first; empty where it has none.
        full_age_s: Seconds since the whole one was published.
    """
    if not chain:
        return Full(reason="the channel has no version yet")
    if rules.delta_every_s is None:
        return Full(reason="whole versions were asked for")
    if rules.full_every_s is not None and full_age_s >= rules.full_every_s:
        return Full(reason="the last whole version is old enough")
    below, deltas = chain[0], chain[1:]
    delta_bytes = sum(delta.file_bytes for delta in deltas)
    is_heavy = delta_bytes >= DELTA_SHARE_MAX * below.file_bytes
    if is_heavy and len(deltas) == 1:
        return Full(reason="the delta has become too large for its snapshot")
    if below.folder is None:
        return Full(reason="the channel's snapshot is not in the local folder")
    joins = is_heavy or len(deltas) == DELTAS_MAX
    for at in reversed(range(1 if joins else len(chain))):
        is_here = all(link.folder is not None for link in chain[: at + 1])
        if is_here and chain[at].is_noted:
            return Against(at=at)
    return Full(reason="the store does not know what changed since the channel's versions")


#: Folders that publishers of this process have.
_TAKEN: set[str] = set()


class LocalFolder:
    """The folder of a publisher: versions under their identities, and the one being written.

    Args:
        path: The folder, which is made.

    Raises:
        ClosedError: Another publisher has it.
    """

    WRITING = "writing"

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._name = os.path.realpath(path)
        self._lock = (path / "LOCK").open("a")
        if self._name in _TAKEN or not _locked(self._lock.fileno()):
            self._lock.close()
            raise ClosedError(
                f"another publisher works in {path}; close it, or give local another folder",
                {"path": str(path)},
            )
        _TAKEN.add(self._name)
        self.drop(self.writing)

    @property
    def writing(self) -> Path:
        """The version that is being written."""
        return self.path / self.WRITING

    def find(self, identity: str) -> Path | None:
        """Returns the folder of a version; None when it is not here, or is another."""
        folder = self.path / identity
        if not folder.is_dir():
            return None
        try:
            found = _native.published_identity(str(folder))["identity"]
        except TierbedError:
            found = None
        return folder if found == identity else None

    def keep(self, identity: str) -> Path:
        """Keeps what was written under its identity."""
        folder = self.path / identity
        self.drop(folder)
        self.writing.rename(folder)
        return folder

    def bring(self, versions: Versions, version: int, identity: str) -> Path:
        """Pulls a version that is not here."""
        pulled = self.path / "pulled"
        source = Path(versions.pull(pulled, version=version).folders[-1])
        folder = self.path / identity
        self.drop(folder)
        source.rename(folder)
        return folder

    def leave_only(self, identities: Sequence[str]) -> None:
        """Removes all other versions."""
        for entry in self.path.iterdir():
            if entry.is_dir() and entry.name not in identities:
                self.drop(entry)

    @staticmethod
    def drop(folder: Path) -> None:
        """Removes a folder, if it is there."""
        if folder.exists():
            shutil.rmtree(folder)

    def close(self) -> None:
        """Lets another publisher have the folder."""
        if not self._lock.closed:
            self._lock.close()
            _TAKEN.discard(self._name)


def _locked(file: int) -> bool:
    with contextlib.suppress(OSError):
        # Of the process: a forked child has no part in it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
