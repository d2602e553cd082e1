"""What ``Store.stats`` and ``Store.order`` return, as types: plain dictionaries at run time.

Not every engine has every field: rows that are read by number have a buffer, the forward order has
a plan. A type names the fields that there may be.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

__all__ = [
    "BudgetPart",
    "BudgetStats",
    "BufferStats",
    "ChangeStats",
    "EngineStats",
    "IoStats",
    "OrderState",
    "PlanStats",
    "StoreStats",
    "VocabularyStats",
]


class BudgetPart(TypedDict):
    """What a part of the store has of the memory budget."""

    used_bytes: int
    peak_bytes: int


class BudgetStats(TypedDict):
    """The memory budget; its parts by name."""

    limit_bytes: int
    used_bytes: int
    peak_bytes: int
    parts: dict[str, BudgetPart]


class BufferStats(TypedDict, total=False):
    """The row buffer; empty in forward order."""

    evicted_count: int
    hit_count: int
    miss_count: int
    row_capacity: int
    row_count: int
    written_back_count: int


class ChangeStats(TypedDict):
    """Rows changed since snapshots were published, for deltas upon them."""

    base_count: int
    base_pages_read: int
    bases: list[Any]
    deltas_compared: int
    deltas_tracked: int
    reason: str | None
    row_count: int
    set_bytes: int
    sets_dropped: int


class IoStats(TypedDict):
    """Reads and writes of the store's files."""

    engine: str | None
    fallback_reason: str | None
    read_bytes: int
    read_count: int
    submit_count: int
    write_bytes: int
    write_count: int


class EngineStats(TypedDict, total=False):
    """How rows are kept: the first fields by window, those behind ``io`` in forward order."""

    commit_count: int
    disk_bytes: int
    pages_read: int
    pages_written: int
    rows_absent: int
    rows_written: int
    own: dict[str, int]
    rows_read: int
    io: IoStats
    arena_bytes: int
    checkpoint_count: int
    chunks_written: int
    dump_bytes: int
    file_bytes: int
    ids_checked: int
    quarantined_bytes: int
    row_update_count: int
    rows_flushed: int
    rows_initialised: int
    span_windows: int
    step_count: int
    used_disk_bytes: int
    wait_count: int
    window_count: int


class PlanStats(TypedDict):
    """The plan of the forward order."""

    batch_count: int
    entry_count: int
    file_bytes: int
    index_count: int
    window_count: int


class OrderState(TypedDict, total=False):
    """The order that training follows, and where it stands in the forward order."""

    kind: Literal["forward", "window"]
    reason: str | None
    fallback_count: int
    plan_damage: str | None
    replan_count: int
    rows_moved: int
    epoch: int
    batch: int
    plan: PlanStats
    unplanned_scan_count: int
    unplanned_search_count: int


class VocabularyStats(TypedDict):
    """Index pages of open vocabularies, and :meth:`Store.vocabularies` as a list."""

    pages_asked: int
    pages_read: int
    tables: list[dict[str, Any]]


class StoreStats(TypedDict, total=False):
    """What :meth:`Store.stats` returns; of several shards also that of each."""

    budget: BudgetStats
    buffer: BufferStats
    changes: ChangeStats
    disk_bytes: int
    isa: str
    order: OrderState
    steps: int
    store: EngineStats
    vocabularies: VocabularyStats
    shards: list[dict[str, Any]]
