"""What a run over all samples needs, from rehearsals over the first half of some and over all.

Rows are counted: those that more samples use follow from how their number grew so far, table by
table. Disk follows the rows. Bytes of a batch change little once the rows are several times the
memory, because what is kept is what comes again soon. Along a plan they follow the share of the
rows that the memory holds; by window what they still grew by is continued with less for each
doubling. Where the rehearsal fits the memory there is nothing to continue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from tierbed.data.source import Source
from tierbed.recipes.rehearsal import Rehearsal

__all__ = ["FullSize", "TableUse", "at_full_size", "count_used_rows", "rows_at"]

COUNT_BATCH = 4096
#: What bytes of a batch grow by falls to this share with each doubling of the samples.
DOUBLING_SHARE = 0.6
#: Of the rows that are new in the first epoch along a plan, so many would be read in a later one.
NEW_SHARE = 0.9
#: Of the rows, what the memory holds at most where there is something to continue.
SHARE_MAX = 0.9
#: Bytes on disk along a plan, of each byte of rows, where lists of windows are long.
LONG_LISTS_RATIO = 1.1
PAGE_BYTES, PAGE_HEAD_BYTES = 4096, 24


@dataclass(frozen=True)
class TableUse:
    """Rows of a table that samples use.

    Args:
        rows: Rows of the table.
        used: Distinct rows of a quarter, of half and of all samples of a rehearsal.
        is_open: Whether more samples make the table larger, as a vocabulary does.
    """

    rows: int
    used: tuple[int, int, int]
    is_open: bool = False


@dataclass(frozen=True, kw_only=True)
class FullSize:
    """What a run over so many samples needs, computed.

    Attributes:
        samples: The samples, those to evaluate on among them.
        batch_count: Batches of an epoch.
        used_rows: Distinct rows of its samples.
        table_bytes: All rows with their optimizer state, touched or not.
        disk_bytes: Bytes that the store's folder takes behind a checkpoint.
        dram_peak_bytes: Most bytes of the budget.
        process_peak_bytes: Most resident memory of the process.
        first_epoch_read_bytes_per_batch: Bytes read by a batch of a new store; None where the
            rehearsal fits the memory, as in the following.
        first_epoch_write_bytes_per_batch: Bytes written by it.
        later_epoch_read_bytes_per_batch: Bytes read by a batch of an old store.
        later_epoch_write_bytes_per_batch: Bytes written by it.
    """

    samples: int
    batch_count: int
    used_rows: int
    table_bytes: int
    disk_bytes: int
    dram_peak_bytes: int
    process_peak_bytes: int
    first_epoch_read_bytes_per_batch: float | None
    first_epoch_write_bytes_per_batch: float | None
    later_epoch_read_bytes_per_batch: float | None
    later_epoch_write_bytes_per_batch: float | None

    def to_dict(self) -> dict[str, float | None]:
        """Returns all fields for JSON, with ``full_`` in front."""
        return {f"full_{name}": value for name, value in asdict(self).items()}


def count_used_rows(source: Source, half: Source) -> list[TableUse]:
    """Counts the distinct rows of training samples, in one pass; a byte for each row of a table.

    Args:
        source: The samples.
        half: The first half of them, as a source of their own.
    """
    sizes, samples = source.table_sizes, source.train_samples
    seen = {name: torch.zeros(rows, dtype=torch.bool, device="cpu") for name, rows in sizes.items()}
    ends, counts, first = (samples // 4, samples // 2, samples), list[list[int]](), 0
    for end in ends:
        for batch in source.batches(first, end, COUNT_BATCH):
            for name, mark in seen.items():
                mark[batch.sparse[name].values()] = True
        first = end
        counts.append([int(mark.sum()) for mark in seen.values()])
    quarter_half_all = zip(*counts, strict=True)
    return [
        TableUse(rows, (used[0], used[1], used[2]), is_open=half.table_sizes[name] < rows)
        for (name, rows), used in zip(sizes.items(), quarter_half_all, strict=True)
    ]


def rows_at(use: TableUse, times: float) -> float:
    """Returns the distinct rows of ``times`` as many samples.

    Their growth for each doubling falls by as much as it fell between the doublings counted.

    Args:
        use: What was counted.
        times: At least 1.
    """
    quarter, half, whole = (max(count, 1) for count in use.used)
    slope = math.log2(whole / half)
    bend = max(0.0, math.log2(half / quarter) - slope)
    doublings = math.log2(times)
    if bend > 0.0:
        # From where the slope is zero on, nothing grows.
        doublings = min(doublings, slope / bend)
    grown = whole * math.pow(2.0, slope * doublings - bend * doublings * doublings / 2.0)
    return grown if use.is_open else min(grown, float(use.rows))


def at_full_size(
    half: Rehearsal, whole: Rehearsal, tables: Sequence[TableUse], rehearsed: int, samples: int
) -> FullSize:
    """Computes the needs of a run over ``samples``.

    Args:
        half: The rehearsal over the first half of the rehearsed samples.
        whole: The rehearsal over all of them.
        tables: The rows that they use.
        rehearsed: How many were rehearsed.
        samples: How many there are.
    """
    times = samples / rehearsed
    used = [rows_at(use, times) for use in tables]
    row_bytes = whole.table_bytes / sum(use.rows for use in tables)
    new = _Batches(half, whole, times)
    spared, unwritten = new.spared_bytes, new.unwritten_bytes
    later_read = new.at(lambda one: one.later_epoch.read_bytes_per_batch)
    later_write = new.at(lambda one: one.later_epoch.write_bytes_per_batch)
    if whole.order == "forward":
        used_now = sum(use.used[2] for use in tables)
        share = sum(used) / used_now
        later_read = new.along_a_plan(row_bytes * used_now, row_bytes * sum(used))
        spared = max(NEW_SHARE * row_bytes * sum(used) * new.moves, spared)
        # In later epochs all that is read was written in the epoch before.
        later_write = later_read
        # A new row is not written to a span first.
        unwritten += NEW_SHARE * row_bytes * sum(used) * (new.moves - 1)
    else:
        per_page = max(1, int((PAGE_BYTES - PAGE_HEAD_BYTES) / row_bytes))
        now = _pages([(use.rows, float(use.used[2])) for use in tables], per_page)
        both = [(use.rows, rows) for use, rows in zip(tables, used, strict=True)]
        share = _pages(both, per_page) / now
        spared *= share
    all_rows = (max(float(use.rows), rows) for use, rows in zip(tables, used, strict=True))
    rows_disk_bytes = (whole.disk_bytes - whole.plan_disk_bytes) * share
    if new.moves > 1:
        # Lists that are longer again leave less of their last pages empty.
        rows_disk_bytes = (rows_disk_bytes + LONG_LISTS_RATIO * row_bytes * sum(used)) / 2
    return FullSize(
        samples=samples,
        batch_count=new.batch_count,
        used_rows=round(sum(used)),
        table_bytes=round(row_bytes * sum(all_rows)),
        disk_bytes=round(rows_disk_bytes + whole.plan_disk_bytes * times),
        dram_peak_bytes=whole.dram_peak_bytes,
        process_peak_bytes=whole.process_peak_bytes,
        first_epoch_read_bytes_per_batch=new.without(later_read, spared),
        first_epoch_write_bytes_per_batch=new.without(later_write, unwritten),
        later_epoch_read_bytes_per_batch=later_read,
        later_epoch_write_bytes_per_batch=later_write,
    )


class _Batches:
    """What batches of more samples move.

    Args:
        half: The rehearsal over half of the samples.
        whole: The rehearsal over all of them.
        times: How many times as many samples there are.
    """

    def __init__(self, half: Rehearsal, whole: Rehearsal, times: float) -> None:
        self._half, self._whole = half, whole
        self._doublings = math.log2(times)
        self.batch_count = max(1, round(whole.batch_count * times))
        self._has_reads = half.later_epoch.read_bytes_per_batch > 0.0
        # Where lists of windows become short, far windows share one, and rows move twice.
        is_planned = whole.order == "forward"
        self._waiting_bytes = whole.dram_part_bytes["waiting rows"] if is_planned else 0
        has_spans = self._waiting_bytes < PAGE_BYTES * whole.window_count * times
        self.moves = 2 if has_spans and not whole.span_windows else 1

    @property
    def spared_bytes(self) -> float:
        """Bytes that the first epoch of the rehearsal did not read, because rows were new."""
        one = self._whole
        spared = one.later_epoch.read_bytes_per_batch - one.first_epoch.read_bytes_per_batch
        return max(0.0, spared) * one.batch_count

    @property
    def unwritten_bytes(self) -> float:
        """Bytes that its first epoch did not write, because the memory was still filling."""
        one = self._whole
        spared = one.later_epoch.write_bytes_per_batch - one.first_epoch.write_bytes_per_batch
        return spared * one.batch_count

    def without(self, later: float | None, spared_bytes: float) -> float | None:
        """Returns what a batch of the first epoch moves, when all spare so many bytes."""
        return None if later is None else max(0.0, later - spared_bytes / self.batch_count)

    def along_a_plan(self, used_now_bytes: float, used_bytes: float) -> float | None:
        """Continues what later epochs read; None where the first half fits the memory.

        Rows that come again soonest stay in memory, so what the memory spares falls with the square
        of its share of the rows: found on rehearsals of 1 to 18 times the memory.
        """
        if not self._has_reads:
            return None

        def moved_share(rows_bytes: float) -> float:
            return 1.0 - min(SHARE_MAX, self._waiting_bytes / rows_bytes) ** 2

        read = self._whole.later_epoch.read_bytes_per_batch
        return self.moves * read * moved_share(used_bytes) / moved_share(used_now_bytes)

    def at(self, value: Callable[[Rehearsal], float]) -> float | None:
        """Continues a value of the rehearsals; None where the first half fits the memory."""
        if not self._has_reads:
            return None
        before, now = value(self._half), value(self._whole)
        # A sum of a geometric series, of a part of a doubling, too.
        left = math.pow(DOUBLING_SHARE, self._doublings)
        steps = DOUBLING_SHARE * (1.0 - left) / (1.0 - DOUBLING_SHARE)
        return max(0.0, now + (now - before) * steps) * self.moves


def _pages(tables: Sequence[tuple[int, float]], rows_per_page: int) -> float:
    """Returns the pages that rows drawn from tables touch."""
    touched = 0.0
    for rows, used in tables:
        pages = -(-rows // rows_per_page)
        # A page stays untouched if none of its rows is among those used.
        untouched = max(0.0, 1.0 - used / rows) ** min(rows_per_page, rows)
        touched += pages * (1.0 - untouched)
    return max(touched, 1.0)
