"""The channel of a publisher: where it left it, and whether it is still there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierbed import _native
from tierbed.errors import InvalidError
from tierbed.results import SnapshotReport
from tierbed.serve.versions import Versions
from tierbed.train.publishing import LocalFolder

__all__ = ["ChannelView", "Cut", "Head", "Target", "newest"]

#: Where a channel is, as the engine tells it; None where it never was anywhere.
Head = dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where versions go.

    Attributes:
        versions: The location.
        channel: The channel that moves.
        keep_s: How long versions stay that nobody needs; None for good.
    """

    versions: Versions
    channel: str
    keep_s: float | None

    def head(self) -> Head:
        """Reads where the channel is."""
        return _native.channel_head(self.versions.location, self.channel)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What was published of a training step, in the local folder.

    Attributes:
        folder: Where it lies.
        report: What was written.
        full_reason: Why it is a whole version; None for a delta.
        at_s: When, by a clock that only goes forward.
        steps: Steps of training before it.
    """

    folder: Path
    report: SnapshotReport
    full_reason: str | None
    at_s: float
    steps: int

    @property
    def identity(self) -> str:
        """What tells it from every other."""
        return self.report.identity

    @property
    def file_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.folder.iterdir())


def newest(head: Head) -> str | None:
    """Returns the identity of what a channel is at."""
    return None if head is None else str(head["chain"][-1]["identity"])


class ChannelView:
    """What a publisher knows of its channel.

    Args:
        target: Where the channel is.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._head: Head = None
        self._is_read = self._is_adopted = False
        self._tried: Cut | None = None
        self._sizes: dict[str, int] = {}
        self._full_at_s = 0.0
        #: Why nothing is pushed any more: somebody else moved the channel.
        self.lost: InvalidError | None = None

    @property
    def chain(self) -> list[tuple[str, int]]:
        """Identity and bytes of each version that serves the channel, a whole one first."""
        links = [] if self._head is None else self._head["chain"]
        return [(link["identity"], self._sizes[link["identity"]]) for link in links]

    @property
    def full_age_s(self) -> float:
        """Seconds since the whole version was written."""
        return time.time() - self._full_at_s

    def bring(self, identity: str, local: LocalFolder) -> None:
        """Pulls a version of the chain that is not in the local folder.

        Args:
            identity: Which one.
            local: The folder.
        """
        assert self._head is not None, "the channel has versions"
        seq = next(link["seq"] for link in self._head["chain"] if link["identity"] == identity)
        local.bring(self._target.versions, int(seq), identity)

    def begin(self, *, takes_over: bool) -> str | dict[str, Any]:
        """Returns where the channel must be for a push, after a look where that is not known.

        Args:
            takes_over: Whether the channel is taken over from whoever moved it.

        Raises:
            InvalidError: Somebody else moved it.
            TierbedError: It cannot be read.
        """
        if takes_over:
            self.lost, self._is_adopted = None, False
            return "anything"
        if self.lost is not None:
            raise self.lost
        if not self._is_read:
            self.see(self._target.head())
        return "nothing" if self._head is None else {"head": self._head}

    def pushing(self, cut: Cut) -> None:
        """Notes what is pushed now: until its end is seen, nothing is known of the channel."""
        self._tried, self._is_read = cut, False

    def see(self, head: Head) -> bool:
        """Takes over where the channel was found.

        Returns:
            Whether it is at what was pushed last.

        Raises:
            InvalidError: Somebody else moved it; nothing is pushed any more.
        """
        tried, self._tried = self._tried, None
        is_ours = tried is not None and newest(head) == tried.identity
        if tried is not None and is_ours:
            self._sizes[tried.identity] = tried.file_bytes
            if tried.full_reason is not None:
                self._full_at_s = time.time()
        elif not self._is_adopted:
            self._measure(head)
        elif head != self._head:
            self.lost = self._lost_to(head)
            raise self.lost
        self._head, self._is_read, self._is_adopted = head, True, True
        return is_ours

    def _measure(self, head: Head) -> None:
        """Learns of the versions that somebody pushed before."""
        if head is None:
            return
        found = {one.version: one for one in self._target.versions.list().versions}
        for link in head["chain"]:
            one = found.get(link["seq"])
            self._sizes[link["identity"]] = 0 if one is None else one.file_bytes
        full = found.get(head["chain"][0]["seq"])
        self._full_at_s = 0.0 if full is None else float(full.written_at_s)

    def _lost_to(self, head: Head) -> InvalidError:
        model = self._target.versions.location.rstrip("/").rsplit("/", 1)[-1]
        name = f"{model}/{self._target.channel}"
        to = "away" if head is None else f"to {head['chain'][-1]['seq']}"
        return InvalidError(
            f"another publisher moved {name} {to}, and this one stopped; end one of both, or take "
            "the channel over with publish_now(full=True)",
            {"channel": name},
        )
