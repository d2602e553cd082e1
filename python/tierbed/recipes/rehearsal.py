"""Rehearsal of a training run: what it will need of memory and disk.

Nothing is computed by a model. The run itself trains on its samples for two epochs in a scratch
folder, with the budget, the order and the engine that it will have, and what the engine counted
is reported. The first epoch shows a new store (rows never written need no read), the second an
old one.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tierbed.errors import InvalidError
from tierbed.recipes.run import TABLES, Run, table_bytes

__all__ = ["EpochUse", "Rehearsal", "disk_bytes", "rehearse"]

# A minimum is named for the part that did not fit; the next part may name a larger one.
NAMINGS_MAX = 16
# Epoch plans of a store, and their copies.
PLAN_FILES = "order-*"


@dataclass(frozen=True, kw_only=True)
class EpochUse:
    """What an epoch did, as means per batch.

    Attributes:
        reads_per_batch: Reads of the device.
        read_bytes_per_batch: Bytes read.
        writes_per_batch: Writes to the device, those of checkpoints within the epoch among them.
        write_bytes_per_batch: Bytes written by these.
        hit_rate: Share of the ids whose rows were in memory; None along a plan, where all are.
    """

    reads_per_batch: float
    read_bytes_per_batch: float
    writes_per_batch: float
    write_bytes_per_batch: float
    hit_rate: float | None


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a run needs, as the engine counted it.

    Attributes:
        batch_count: Batches of an epoch.
        order: ``forward`` or ``window``.
        order_reason: Why it is not ``forward``; None when it is, or was not asked for.
        fits: Whether the budget that was asked about is enough. If not, everything else is that
            of a run with the least budget.
        dram_budget_bytes: Budget of the run that was rehearsed.
        dram_peak_bytes: Most bytes that were used of it.
        dram_part_bytes: The same for every part.
        process_peak_bytes: Most resident memory of the process, what else it did included.
        table_bytes: All rows with their optimizer state, touched or not.
        disk_bytes: Bytes that the store's folder takes behind a checkpoint. Each further one is
            written beside it.
        plan_disk_bytes: Of these, bytes of the epoch plan.
        window_count: Windows of the plan; 0 by window.
        span_windows: Windows whose rows wait together while they are far; 0 when none do.
        checkpoint_read_bytes: Bytes of rows that the checkpoint read.
        checkpoint_write_bytes: Bytes of rows that it wrote.
        first_epoch: Means of the first epoch.
        later_epoch: Means of the second epoch; those behind it are alike.
    """

    batch_count: int
    order: str
    order_reason: str | None
    fits: bool
    dram_budget_bytes: int
    dram_peak_bytes: int
    dram_part_bytes: dict[str, int]
    process_peak_bytes: int
    table_bytes: int
    disk_bytes: int
    plan_disk_bytes: int
    window_count: int
    span_windows: int
    checkpoint_read_bytes: int
    checkpoint_write_bytes: int
    first_epoch: EpochUse
    later_epoch: EpochUse

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, for JSON; those of an epoch have its name in front."""
        fields = asdict(self)
        for epoch in ("first_epoch", "later_epoch"):
            used = fields.pop(epoch)
            fields.update({f"{epoch}_{name}": value for name, value in used.items()})
        return fields


def rehearse(
    folder: Path, open_run: Callable[[Path, int], Run], dram_budget_bytes: int
) -> Rehearsal:
    """Trains for two epochs in scratch folders of ``folder``; they are gone afterwards.

    Args:
        folder: Where there is as much disk as the run will need.
        open_run: Opens the run in a new folder with a budget in bytes; of three epochs at least,
            so that none is its last one.
        dram_budget_bytes: The budget. With one that is too small the least one is rehearsed.

    Raises:
        NoSpaceError: The disk of ``folder``, or the quota, is too small.
        InvalidError: What the run refuses, except for a budget too small.
    """
    budget_bytes = dram_budget_bytes
    for namings_left in reversed(range(NAMINGS_MAX)):
        with TemporaryDirectory(dir=folder, prefix="tierbed-plan-") as scratch:
            try:
                with closing(open_run(Path(scratch) / "run", budget_bytes)) as run:
                    return _rehearsed(run, fits=budget_bytes == dram_budget_bytes)
            except InvalidError as error:
                least = error.context.get("minimum_bytes")
                if least is None or namings_left == 0:
                    raise
                budget_bytes = max(int(least), budget_bytes + 1)
    raise AssertionError("the last try returns or raises")


@dataclass(frozen=True)
class _Counts:
    """Counters of a store at one moment, since it was opened."""

    steps: int = 0
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    write_bytes: int = 0
    hits: int = 0
    misses: int = 0

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> _Counts:
        """Takes them from ``Store.stats()``."""
        store, io, buffer = stats["store"], stats["store"]["io"], stats["buffer"]
        is_planned = stats["order"]["kind"] == "forward"
        return cls(
            stats["steps"],
            io["read_count"],
            io["read_bytes"],
            io["write_count"],
            # Along a plan, checkpoints write the rows in memory past the I/O engine.
            io["write_bytes"] + (store["dump_bytes"] if is_planned else 0),
            0 if is_planned else buffer["hit_count"],
            0 if is_planned else buffer["miss_count"],
        )

    def since(self, before: _Counts) -> EpochUse:
        """Returns the means of the steps between two moments."""
        steps, hits = self.steps - before.steps, self.hits - before.hits
        looked_up = hits + self.misses - before.misses
        return EpochUse(
            reads_per_batch=(self.reads - before.reads) / steps,
            read_bytes_per_batch=(self.read_bytes - before.read_bytes) / steps,
            writes_per_batch=(self.writes - before.writes) / steps,
            write_bytes_per_batch=(self.write_bytes - before.write_bytes) / steps,
            hit_rate=hits / looked_up if looked_up else None,
        )


def disk_bytes(folder: Path, pattern: str = "*") -> int:
    """Returns the bytes that the files of a folder take on disk; holes take none."""
    return sum(512 * file.stat().st_blocks for file in folder.rglob(pattern) if file.is_file())


def _rehearsed(run: Run, *, fits: bool) -> Rehearsal:
    batch_count = -(-run.train_samples // run.options.batch_size)
    run.train(steps_max=batch_count)
    stats = run.store.stats()
    # Later epochs only say that there were rows before.
    order, first = stats["order"], _Counts.of(stats)
    run.train(steps_max=batch_count)
    second = _Counts.of(run.store.stats())
    run.checkpoint()
    stats = run.store.stats()
    budget, behind = stats["budget"], _Counts.of(stats)
    return Rehearsal(
        batch_count=batch_count,
        order=order["kind"],
        order_reason=order.get("reason"),
        fits=fits,
        dram_budget_bytes=budget["limit_bytes"],
        dram_peak_bytes=budget["peak_bytes"],
        dram_part_bytes={name: part["peak_bytes"] for name, part in budget["parts"].items()},
        process_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        disk_bytes=disk_bytes(run.folder / TABLES),
        plan_disk_bytes=disk_bytes(run.folder / TABLES, PLAN_FILES),
        window_count=order.get("plan", {}).get("window_count", 0),
        span_windows=stats["store"].get("span_windows", 0),
        checkpoint_read_bytes=behind.read_bytes - second.read_bytes,
        checkpoint_write_bytes=behind.write_bytes - second.write_bytes,
        first_epoch=first.since(_Counts()),
        later_epoch=second.since(first),
        table_bytes=table_bytes(run.store),
    )
