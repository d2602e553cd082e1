"""Versions of a served model: pushed to a location, pulled from it, named by channels.

A location is a folder, of this machine or one that machines share, or a bucket. A version is what
:meth:`tierbed.Store.publish` wrote, and never changes. A channel names the version to serve;
moving it is one compare-and-swap.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from tierbed import _native
from tierbed._util.bytes import parse_bytes
from tierbed._util.durations import parse_seconds
from tierbed.errors import InvalidError
from tierbed.results import (
    Channel,
    ModelVersion,
    PrunedVersions,
    PulledVersions,
    PushedVersion,
    VersionList,
)

__all__ = ["Versions", "now_s", "pushed"]

Progress = Callable[[int, int], None]


def now_s() -> int:
    """Returns seconds since 1970."""
    return int(time.time())


def pushed(given: dict[str, Any]) -> PushedVersion:
    """Types what a push reported."""
    return PushedVersion(
        version=given["seq"], file_bytes=given["bytes"], chain=tuple(given["chain"])
    )


class Versions:
    """The versions of one model at a location.

    Nothing is read or made before the first call, and nothing is kept open between calls.

    Args:
        location: A folder, which the first push makes, or a bucket: ``s3://bucket/prefix``,
            ``gs://`` or ``az://``.

    Examples:
        >>> rows = torch.randn(100, 8)
        >>> _ = tb.placement.import_tables({"item": rows}, "snapshot")
        >>> versions = tb.Versions("models/ads")
        >>> versions.push("snapshot", channel="canary").version
        1
        >>> versions.promote("canary", to="stable").chain
        (1,)
        >>> versions.pull("served", channel="stable").folders
        ('served/000001',)
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self._location = os.fspath(location)

    @property
    def location(self) -> str:
        """Where the versions lie."""
        return self._location

    def list(self) -> VersionList:
        """Lists versions and channels. A channel that cannot be read says why.

        Raises:
            IoError: The location refuses.
        """
        found = _native.list_versions(self._location)
        return VersionList(
            versions=tuple(
                ModelVersion(
                    version=one["seq"],
                    state=one["state"],
                    file_bytes=one["bytes"],
                    written_at_s=one["written_at_s"],
                    channels=tuple(one["channels"]),
                    needed_by=tuple(one["needed_by"]),
                    is_pinned=one["is_pinned"],
                )
                for one in found["versions"]
            ),
            channels=tuple(
                Channel(
                    name=one["name"],
                    chain=tuple(one["chain"]),
                    written_at_s=one["written_at_s"],
                    damage=one["damage"],
                )
                for one in found["channels"]
            ),
        )

    def channel(self, name: str) -> Channel | None:
        """Tells where a channel is; None when nothing was ever pushed to it.

        Args:
            name: Name of the channel.

        Raises:
            CorruptionError: It cannot be read.
        """
        head = _native.channel_head(self._location, name)
        return None if head is None else _channel(name, head)

    def push(
        self,
        folder: str | os.PathLike[str],
        *,
        channel: str,
        progress: Progress | None = None,
    ) -> PushedVersion:
        """Makes a published folder the next version, and moves a channel to it.

        Args:
            folder: A snapshot, or a delta on one that the channel has.
            channel: Which channel.
            progress: Called with (bytes done, bytes in all).

        Raises:
            InvalidError: The folder was not published, is a delta on what the channel does not
                have, or another publisher moved the channel meanwhile. It stays where it was.
            NoSpaceError: The location is full.
        """
        done = _native.push_version(
            self._location, os.fspath(folder), channel, "anything", now_s(), progress
        )
        return pushed(done)

    def pull(
        self,
        to: str | os.PathLike[str],
        *,
        channel: str | None = None,
        version: int | None = None,
        bandwidth: int | str | None = None,
        progress: Progress | None = None,
    ) -> PulledVersions:
        """Brings versions into folders of ``to``; what is there already stays.

        All bytes are verified. A pull that was interrupted is gone on with.

        Args:
            to: Gets a folder for each version, named after it.
            channel: Those that serve this channel.
            version: In place of a channel: this one, and what it is a delta on.
            bandwidth: Most bytes per second, as a number or as ``"200MiB"``; None for no limit.
            progress: Called with (bytes done, bytes in all).

        Raises:
            InvalidError: No such channel or version, or both or neither were given.
            CorruptionError: A part is not what was published, however often it is fetched.
            NoSpaceError: The versions do not fit.
            ClosedError: Another pull writes there.
        """
        if (channel is None) == (version is None):
            raise InvalidError("a pull is of a channel or of a version; give one of both")
        want: dict[str, str | int] = {}
        if channel is not None:
            want["channel"] = channel
        if version is not None:
            want["version"] = _number(version)
        limit = 0 if bandwidth is None else parse_bytes(bandwidth, "bandwidth")
        done = _native.pull_versions(self._location, want, os.fspath(to), limit, progress)
        return PulledVersions(
            folders=tuple(done["folders"]),
            parts_fetched=done["parts_fetched"],
            bytes_fetched=done["bytes_fetched"],
        )

    def promote(self, source: str, to: str) -> Channel:
        """Moves the channel ``to`` where ``source`` is.

        Args:
            source: The channel whose version is wanted: ``"canary"``.
            to: The channel that moves: ``"stable"``.

        Raises:
            InvalidError: ``source`` is at no version, or another publisher moved ``to`` meanwhile.
        """
        return _channel(to, _native.promote_channel(self._location, source, to, now_s()))

    def rollback(self, channel: str, *, to: int) -> Channel:
        """Moves a channel to an earlier version. One that cannot be read is mended so.

        Args:
            channel: The channel that moves.
            to: Number of the version.

        Raises:
            InvalidError: No such version, or another publisher moved the channel meanwhile.
        """
        moved = _native.roll_back_channel(self._location, channel, _number(to), now_s())
        return _channel(channel, moved)

    def prune(
        self, keep: float | str = "72h", *, progress: Progress | None = None
    ) -> PrunedVersions:
        """Removes versions that nobody needs.

        A version stays that a channel is at, or was at within ``keep``, or that is younger than
        that; so do pinned ones, and what all these are deltas on.

        Args:
            keep: How long, as a number of seconds or as ``"72h"``.
            progress: Called with (versions done, versions to remove).

        Raises:
            CorruptionError: A channel, or the list of a version's parts, cannot be read; nothing
                is removed then.
        """
        keep_s = int(parse_seconds(keep, "keep"))
        done = _native.prune_versions(self._location, keep_s, now_s(), progress)
        return PrunedVersions(
            removed=tuple(done["removed"]),
            kept=tuple(done["kept"]),
            bytes_removed=done["bytes_removed"],
        )

    def pin(self, version: int) -> None:
        """Keeps a version, and what it is a delta on, until :meth:`unpin`.

        Args:
            version: Its number.

        Raises:
            InvalidError: It is not whole.
        """
        _native.pin_version(self._location, _number(version))

    def unpin(self, version: int) -> bool:
        """Lets a version be pruned again; False when it was not pinned.

        Args:
            version: Its number.
        """
        return _native.unpin_version(self._location, _number(version))

    def __repr__(self) -> str:
        return f"Versions({self._location!r})"


def _channel(name: str, head: dict[str, Any]) -> Channel:
    chain = tuple(link["seq"] for link in head["chain"])
    return Channel(name=name, chain=chain, written_at_s=head["written_at_s"])


def _number(version: int) -> int:
    if isinstance(version, bool) or not isinstance(version, int) or not 0 < version < 1 << 64:
        raise InvalidError(f"a version is a number from 1, not {version!r}")
    return version
