"""Results: what calls that write, keep or free something report.

All are frozen; :func:`dataclasses.asdict` makes a dictionary for JSON of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Channel",
    "EvictedIds",
    "Generation",
    "KeptCheckpoint",
    "ModelVersion",
    "PrunedVersions",
    "PublisherStats",
    "PulledVersions",
    "PushedVersion",
    "SnapshotReport",
    "TierBudgetStats",
    "TierMemberStats",
    "VersionList",
]


@dataclass(frozen=True, kw_only=True)
class SnapshotReport:
    """What was written into a snapshot, or into a delta of one.

    Attributes:
        identity: What tells the snapshot from every other.
        row_count: Rows stored.
        page_count: Pages written.
        pages_bytes: Bytes of the page file.
        index_bytes: Bytes of the forward index.
        places_bytes: Bytes of the placements' index.
        replica_count: Copies of rows beyond the first, on pages that tables share.
        attachments_bytes: Bytes of all attachments.
        fill_ratio: Bytes of rows, as they are coded, per byte of the page file; None without
            pages.
        sort_run_count: Sorted runs of rows that were spilled to the folder on the way.
        shard_count: Shards that were written, over which all is summed; 0 for one snapshot.
        initial_rows: Rows never trained that shards have all the same.
    """

    identity: str
    row_count: int
    page_count: int
    pages_bytes: int
    index_bytes: int
    places_bytes: int
    replica_count: int
    attachments_bytes: int
    fill_ratio: float | None
    sort_run_count: int
    shard_count: int = 0
    initial_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint that outlives the next one.

    Attributes:
        number: Its number.
        name: The name that it was given.
        file_bytes: Bytes of all its files, shared ones and holes included.
    """

    number: int
    name: str
    file_bytes: int


@dataclass(frozen=True, kw_only=True)
class EvictedIds:
    """What an eviction took from a table of open vocabulary.

    Attributes:
        id_count: Ids whose rows were freed.
        waiting_count: Ids forgotten that had no row yet.
    """

    id_count: int
    waiting_count: int


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a server answers from: a snapshot and the deltas upon it.

    Attributes:
        number: Deltas applied since the snapshot was opened.
        identity: What tells it from every other: that of the newest delta, or of the snapshot.
        delta_count: Deltas that lie upon the snapshot.
        delta_rows: Their rows.
        delta_pages_bytes: Bytes of their pages, on disk.
        delta_memory_bytes: Bytes of what is in memory of them.
        rows_replaced: Rows of the cache that got new weights in place, over all deltas.
    """

    number: int
    identity: str
    delta_count: int
    delta_rows: int
    delta_pages_bytes: int
    delta_memory_bytes: int
    rows_replaced: int


@dataclass(frozen=True, kw_only=True)
class TierMemberStats:
    """What a snapshot has of a :class:`tierbed.TierBudget`.

    Attributes:
        name: Its folder.
        floor_bytes: Bytes that it always has.
        capacity_bytes: Bytes that it may use now.
        used_bytes: Bytes that it uses: rows and metadata.
        rows_asked: Rows asked for.
        rows_hit: Of these, rows that needed no read.
        row_count: Rows in its tiers now.
        evictions: Rows that left its tiers.
    """

    name: str
    floor_bytes: int
    capacity_bytes: int
    used_bytes: int
    rows_asked: int
    rows_hit: int
    row_count: int
    evictions: int


@dataclass(frozen=True, kw_only=True)
class TierBudgetStats:
    """What was counted of a :class:`tierbed.TierBudget`.

    Attributes:
        limit_bytes: The budget.
        used_bytes: Bytes of all rows and metadata.
        division_count: Divisions so far that changed something.
        bytes_moved: Bytes that changed hands in them.
        members: The snapshots, in the order in which they joined.
    """

    limit_bytes: int
    used_bytes: int
    division_count: int
    bytes_moved: int
    members: tuple[TierMemberStats, ...]


@dataclass(frozen=True, kw_only=True)
class ModelVersion:
    """A version of a model at a location.

    Attributes:
        version: Its number; a later one is larger.
        state: ``"whole"`` when it can be served, ``"unfinished"`` while it is pushed or when its
            publisher ended before, ``"leaving"`` while it is pruned.
        file_bytes: Bytes of all its files.
        written_at_s: When the last of them was written, in seconds since 1970.
        channels: Channels that are at it.
        needed_by: Channels that are at it, or at a delta on it.
        is_pinned: Whether it is pinned.
    """

    version: int
    state: Literal["whole", "unfinished", "leaving"]
    file_bytes: int
    written_at_s: int
    channels: tuple[str, ...]
    needed_by: tuple[str, ...]
    is_pinned: bool


@dataclass(frozen=True, kw_only=True)
class Channel:
    """Where a channel is.

    Attributes:
        name: Its name.
        chain: The versions that serve it: a whole one, then deltas, the one it is at last. None
            when it cannot be read.
        written_at_s: When it was moved there, in seconds since 1970; None when it cannot be read.
        damage: Why it cannot be read.
    """

    name: str
    chain: tuple[int, ...]
    written_at_s: int | None
    damage: str | None = None

    @property
    def version(self) -> int | None:
        """The version that it is at; None when it cannot be read."""
        return self.chain[-1] if self.chain else None


@dataclass(frozen=True, kw_only=True)
class VersionList:
    """What lies at a location.

    Attributes:
        versions: The versions, oldest first.
        channels: The channels, by name.
    """

    versions: tuple[ModelVersion, ...]
    channels: tuple[Channel, ...]


@dataclass(frozen=True, kw_only=True)
class PushedVersion:
    """A version that was pushed.

    Attributes:
        version: Its number.
        file_bytes: Bytes of its files.
        chain: All versions that serve the channel now, this one last.
    """

    version: int
    file_bytes: int
    chain: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PulledVersions:
    """Versions that were brought to this machine.

    Attributes:
        folders: The folder of the version that was wanted, last; before it those that it is a
            delta on.
        parts_fetched: Parts that were fetched now.
        bytes_fetched: Bytes that were fetched now.
    """

    folders: tuple[str, ...]
    parts_fetched: int
    bytes_fetched: int


@dataclass(frozen=True, kw_only=True)
class PrunedVersions:
    """What was pruned.

    Attributes:
        removed: Versions that are gone.
        kept: Versions that are left.
        bytes_removed: Bytes of all files that are gone.
    """

    removed: tuple[int, ...]
    kept: tuple[int, ...]
    bytes_removed: int


@dataclass(frozen=True, kw_only=True)
class PublisherStats:
    """What a :class:`tierbed.Publisher` did.

    Attributes:
        version: The version that it pushed last; None before the first.
        report: What was written into that one.
        full_count: Whole versions pushed.
        delta_count: Deltas pushed.
        failure_count: Publishes and pushes that failed.
        bytes_pushed: Bytes of all versions pushed.
        pause_s: How long training stood still for the last publish, in seconds: until the version
            was written, or until it could be beside training.
        pause_s_max: The longest of these pauses.
        pause_s_sum: All of them together.
        upload_s: How long the last push took, beside training, in seconds.
        freshness_s: Seconds since the step whose rows and model the channel has; None before the
            first version is there.
        steps_behind: Steps since that one.
        is_writing: Whether a version is being written while training goes on.
        is_uploading: Whether a version is on its way.
        full_reason: Why the last whole version was one.
        foreground_reason: Why training stood still until the last version was written, where it
            need not by the publisher's options; None where it did not.
        last_error: Why the last publish or push failed; None once one has succeeded since.
    """

    version: int | None
    report: SnapshotReport | None
    full_count: int
    delta_count: int
    failure_count: int
    bytes_pushed: int
    pause_s: float
    pause_s_max: float
    pause_s_sum: float
    upload_s: float
    freshness_s: float | None
    steps_behind: int
    is_writing: bool
    is_uploading: bool
    full_reason: str | None
    foreground_reason: str | None
    last_error: str | None
