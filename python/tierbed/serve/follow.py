"""A channel that a server follows: the version that it is at is what answers."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass

from tierbed._native import NativeFollowing
from tierbed._util.bytes import parse_bytes
from tierbed._util.durations import parse_seconds
from tierbed.config.io import IoOptions
from tierbed.config.words import MissMode, SnapshotBackend
from tierbed.serve.cache import CacheOptions
from tierbed.serve.snapshot import snapshot_options

__all__ = ["Follow"]


@dataclass(frozen=True)
class Follow:
    """A channel of a location, for :class:`tierbed.serve.Server`.

    The server pulls the versions that the channel moves to into ``local``, and answers from each
    as soon as it is here: from deltas upon the snapshot that answers, or from another snapshot,
    which takes over while requests go on. An answer is of one version. Where the channel goes back,
    so does the server. What fails is counted, told by ``/health`` and tried again; what answered
    goes on. A server starts from what is in ``local`` when the location cannot be reached.

    Args:
        location: As of :class:`tierbed.Versions`: a folder, or a bucket.
        local: The folder of this machine that versions come to; each server has its own.
        channel: The channel.
        poll: From one look at the channel to the next, as a number of seconds or as ``"2s"``.
        sync_bandwidth: Most bytes per second that are fetched, such as ``"200MiB"``; None for a
            fifth of what the disk of ``local`` takes, which is measured at the start.
        swap_share: Part of the memory for rows that a new snapshot has until it answers alone.
        dram_budget: Memory for everything that is kept, of the old and the new snapshot together.
        backend: As of :meth:`tierbed.Snapshot.open`.
        cache: As of :meth:`tierbed.Snapshot.open`.
        misses: As of :meth:`tierbed.Snapshot.open`.
        readers: As of :meth:`tierbed.Snapshot.open`.
        io: As of :meth:`tierbed.Snapshot.open`.

    Examples:
        >>> from tierbed.serve import Server
        >>> rows = torch.arange(8000.0).view(1000, 8)
        >>> _ = tb.placement.import_tables({"item": rows}, "snapshot")
        >>> _ = tb.Versions("models/ads").push("snapshot", channel="stable")
        >>> follow = tb.Follow("models/ads", local="here", sync_bandwidth="1GiB")
        >>> with Server(follow, "127.0.0.1:0") as server:
        ...     server.predicts
        False
    """

    location: str | os.PathLike[str]
    _: KW_ONLY
    local: str | os.PathLike[str]
    channel: str = "stable"
    poll: float | str = "2s"
    sync_bandwidth: int | str | None = None
    swap_share: float = 0.1
    dram_budget: int | str = "256MiB"
    backend: SnapshotBackend = "direct"
    cache: CacheOptions | str = "lru"
    misses: MissMode = "read"
    readers: int | None = None
    io: IoOptions | None = None

    def begin(self) -> NativeFollowing:
        """Brings the channel's version here and opens it; a server goes on from there.

        Raises:
            InvalidError: Options out of range, or a channel at no version, with none in ``local``.
            IoError: The location cannot be reached, and no version is in ``local``.
            ClosedError: Another server has ``local``.
        """
        tiers = CacheOptions(tiers=self.cache) if isinstance(self.cache, str) else self.cache
        options = snapshot_options(
            dram_budget=self.dram_budget,
            backend=self.backend,
            tiers=tiers,
            misses=self.misses,
            readers=self.readers,
            io=self.io or IoOptions(),
        )
        limit = self.sync_bandwidth
        return NativeFollowing(
            {
                "location": os.fspath(self.location),
                "channel": self.channel,
                "local": os.fspath(self.local),
                "poll_s": parse_seconds(self.poll, "poll"),
                "sync_bytes_per_s": None if limit is None else parse_bytes(limit, "sync_bandwidth"),
                "swap_share": self.swap_share,
            },
            options,
            None if tiers.budget is None else tiers.budget.native,
        )
