"""Results: what calls that write, keep or free something report.

All are frozen; :func:`dataclasses.asdict` makes a dictionary for JSON of one.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "EvictedIds",
    "Generation",
    "KeptCheckpoint",
    "SnapshotReport",
    "TierBudgetStats",
    "TierMemberStats",
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
