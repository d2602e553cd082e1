"""Counts of ``stats()`` under the same names for every kind of store.

Training by window, in forward order, and snapshots count different things. What reports and
``tierbed top`` need of them is here: where rows came from, reads and writes, memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["INITIAL", "MEMORY", "STORAGE", "Counts", "counts_of", "memory_rows", "snapshot_tiers"]

Stats = Mapping[str, Any]

MEMORY = "memory"
STORAGE = "storage"
INITIAL = "initial values"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What was counted since a store or a snapshot was opened.

    Attributes:
        steps: Steps of a training store; lookups of a snapshot.
        ids: Ids looked up; of a snapshot, different rows of each lookup.
        tiers: Where these rows were, the fastest first. What a training store read ahead counts
            where it was before.
        read_count: Reads of the device.
        read_bytes: Bytes read.
        write_bytes: Bytes written.
        used_bytes: Bytes in use of the memory budget.
    """

    steps: int
    ids: int
    tiers: dict[str, int]
    read_count: int
    read_bytes: int
    write_bytes: int
    used_bytes: int

    def columns(self) -> dict[str, int]:
        """Returns all counts by one level of names; those of tiers begin with ``tier:``."""
        plain = {
            "steps": self.steps,
            "ids": self.ids,
            "read_count": self.read_count,
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "used_bytes": self.used_bytes,
        }
        return plain | {f"tier:{name}": rows for name, rows in self.tiers.items()}


def counts_of(stats: Stats, ids: int) -> Counts:
    """Takes the counts from what ``stats()`` returned.

    Args:
        stats: Of a store or a snapshot; several shards have none before their first batch.
        ids: Ids that collections looked up in a store, which does not count them itself.
    """
    if "budget" not in stats:
        return Counts(
            steps=0,
            ids=ids,
            tiers={MEMORY: 0, STORAGE: 0, INITIAL: 0},
            read_count=0,
            read_bytes=0,
            write_bytes=0,
            used_bytes=0,
        )
    used_bytes = stats["budget"]["used_bytes"]
    if "snapshot" in stats:
        of = stats["snapshot"]
        return Counts(
            steps=of["lookup_count"],
            ids=of["lookups"]["row_count"],
            tiers=snapshot_tiers(stats),
            read_count=of["io"]["read_count"],
            read_bytes=of["io"]["read_bytes"],
            write_bytes=0,
            used_bytes=used_bytes,
        )
    rows = stats["store"]
    io = rows["io"]
    is_planned = stats["order"]["kind"] == "forward"
    initial = rows["rows_initialised" if is_planned else "rows_absent"]
    read = rows["rows_read"] - (0 if is_planned else initial)
    # Along a plan, checkpoints write the rows in memory past the I/O engine.
    dumped = rows["dump_bytes"] if is_planned else 0
    return Counts(
        steps=stats["steps"],
        ids=ids,
        tiers={MEMORY: memory_rows(ids, initial + read), STORAGE: read, INITIAL: initial},
        read_count=io["read_count"],
        read_bytes=io["read_bytes"],
        write_bytes=io["write_bytes"] + dumped,
        used_bytes=used_bytes,
    )


def memory_rows(ids: int, brought: int) -> int:
    """Returns the ids whose rows were in memory, of which ``brought`` were not.

    Rows are also brought for other reasons (rows written or read by number), so it may be none.
    """
    return max(0, ids - brought)


def snapshot_tiers(stats: Stats) -> dict[str, int]:
    """Returns the rows that each place of a snapshot answered, named as by the live page."""
    of = stats["snapshot"]
    rows = of["lookups"]
    found = {"resident rows": int(rows["rows_resident"])}
    for tier in of["tiers"]:
        name = f"cache {tier['codec']}, {tier['policy']}"
        while name in found:
            name += "'"
        found[name] = int(tier["hits"])
    behind = {
        "surrogates": "rows_surrogate",
        "default rows": "rows_default",
        INITIAL: "rows_initial",
    }
    found |= {name: int(rows[key]) for name, key in behind.items()}
    used = {name: count for name, count in found.items() if count or name.startswith("cache")}
    return used | {STORAGE: int(rows["rows_read"])}
