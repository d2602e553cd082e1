"""Memory, disk and reads that a run will need.

The disk follows from the tables' shapes. Reads per batch follow from the data: a sample of its
batches is replayed through a model of the row buffer, an LRU of the bytes the budget leaves. The
first pass shows a new store (rows never written need no read), the second an old one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierbed.config.optim import state_words
from tierbed.jagged import as_kjt

__all__ = ["Prediction", "TableShape", "predict", "rows_per_page"]

PAGE_BYTES = 4096
PAGE_HEADER_BYTES = 24
PAGE_MAP_BYTES = 2
# What the row buffer keeps per row beside the record: index slot, order, counters.
SLOT_OVERHEAD_BYTES = 28
# What an I/O in flight needs beside its page.
IO_OVERHEAD_BYTES = 184
COMMIT_BUFFER_BYTES = 64 << 10
# The engine cuts its work into pieces that fit an eighth of the budget, within bounds. Of one
# table it sorts all uses of a batch at once, at twice 24 bytes a use.
SCRATCH_SHARE = 8
SCRATCH_MIN_BYTES, SCRATCH_MAX_BYTES = 64 << 10, 256 << 20
USE_BYTES = 48


@dataclass(frozen=True)
class TableShape:
    """A table as far as planning goes.

    Args:
        name: Name of the table.
        row_count: Its rows.
        dim: Elements of a row.
        optimizer: That of its rows, by name.
    """

    name: str
    row_count: int
    dim: int
    optimizer: str = "row_wise_adagrad"

    @property
    def record_bytes(self) -> int:
        """Bytes of weights, optimizer state and use count of a row."""
        return 4 * (self.dim + state_words(self.optimizer, self.dim) + 1)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: the least multiple of 4,096 that holds a row."""
        least = PAGE_HEADER_BYTES + 4 + self.record_bytes
        return -(-least // PAGE_BYTES) * PAGE_BYTES

    @property
    def page_count(self) -> int:
        """Pages of the whole table."""
        return -(-self.row_count // rows_per_page(self.record_bytes, self.page_bytes))


def rows_per_page(record_bytes: int, page_bytes: int = PAGE_BYTES) -> int:
    """Returns how many records fit behind a page's header and presence bits."""
    rows = (page_bytes - PAGE_HEADER_BYTES) // record_bytes
    while rows > 1 and PAGE_HEADER_BYTES + 4 * -(-rows // 32) + rows * record_bytes > page_bytes:
        rows -= 1
    return max(1, rows)


@dataclass(frozen=True)
class Prediction:
    """What a run will need. Bytes, and means per batch.

    Args:
        table_bytes: All rows with their state.
        dram_budget_bytes: The budget asked about.
        page_map_bytes: Where pages lie.
        io_buffer_bytes: What is being read and written.
        scratch_bytes: Work arrays.
        row_buffer_bytes: What is left for rows.
        dram_min_bytes: The least budget.
        fits: Whether the budget is enough.
        disk_max_bytes: Most bytes on disk.
        batch_count: Batches looked at.
        ids_per_batch: Ids of a batch.
        unique_rows_per_batch: Different rows of a batch.
        first_pass_reads_per_batch: Rows read, in the first epoch.
        later_pass_reads_per_batch: Rows read, in later epochs.
        first_pass_hit_rate: Share of the rows found in memory, in the first epoch.
        later_pass_hit_rate: The same, in later epochs.
        disk_bytes_after_sample: Bytes on disk after the batches looked at.
    """

    table_bytes: int
    dram_budget_bytes: int
    page_map_bytes: int
    io_buffer_bytes: int
    scratch_bytes: int
    row_buffer_bytes: int
    dram_min_bytes: int
    fits: bool
    disk_max_bytes: int
    batch_count: int
    ids_per_batch: float
    unique_rows_per_batch: float
    first_pass_reads_per_batch: float
    later_pass_reads_per_batch: float
    first_pass_hit_rate: float
    later_pass_hit_rate: float
    disk_bytes_after_sample: int

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, for JSON."""
        return asdict(self)


class _Parts:
    """What a store of ``tables`` reserves under a budget, besides its rows."""

    def __init__(self, tables: Sequence[TableShape], queue_depth: int, most_uses: int) -> None:
        self.page_map = PAGE_MAP_BYTES * sum(shape.page_count for shape in tables)
        self._io_bytes = max(shape.page_bytes for shape in tables) + IO_OVERHEAD_BYTES
        self._queue_depth = queue_depth
        self._uses_bytes = SCRATCH_SHARE * USE_BYTES * most_uses
        self.slot = max(shape.record_bytes for shape in tables) + SLOT_OVERHEAD_BYTES
        self._slots_min = self.slot * len(tables)

    def io_buffer(self, budget: int) -> int:
        """Bytes of I/O buffers; the store chooses a sixteenth of the budget in pages."""
        chosen = min(max(budget // 16 // PAGE_BYTES, 4), 64)
        return (self._queue_depth or chosen) * self._io_bytes + COMMIT_BUFFER_BYTES

    def scratch(self, budget: int) -> int:
        """Bytes of work arrays."""
        return min(max(budget // SCRATCH_SHARE, SCRATCH_MIN_BYTES), SCRATCH_MAX_BYTES)

    def needed(self, budget: int) -> int:
        """Bytes without which a store of this budget does not open or step."""
        parts = self.page_map + self.io_buffer(budget) + self.scratch(budget)
        return max(parts + self._slots_min, self._uses_bytes)

    def least(self) -> int:
        """The smallest budget that suffices: grows from below until nothing is missing."""
        budget = 0
        while (needed := self.needed(budget)) > budget:
            budget = needed
        return budget


def predict(
    tables: Sequence[TableShape],
    feature_tables: Mapping[str, str],
    dram_budget_bytes: int,
    batches: Iterable[Any],
    queue_depth: int = 0,
) -> Prediction:
    """Predicts memory per part, disk, and reads per batch.

    Args:
        tables: All tables.
        feature_tables: Which table each feature reads.
        dram_budget_bytes: The budget.
        batches: A sample of batches: KeyedJaggedTensors.
        queue_depth: I/Os in flight; 0 chooses by the budget, as the store does.
    """
    shapes = {shape.name: (at, shape) for at, shape in enumerate(tables)}
    sample = [unique_rows(batch, shapes, feature_tables) for batch in batches]
    rows = [sum(ids.size for ids in batch.values()) for batch, _ in sample]
    most_uses = max((max(uses.values(), default=0) for _, uses in sample), default=0)
    parts = _Parts(tables, queue_depth, most_uses)
    io_buffer, scratch = parts.io_buffer(dram_budget_bytes), parts.scratch(dram_budget_bytes)
    left = max(0, dram_budget_bytes - parts.page_map - io_buffer - scratch)
    left = min(left, parts.slot * sum(shape.row_count for shape in tables))
    simulated = _Buffer(left // parts.slot, list(tables))
    first = [simulated.run(batch) for batch, _ in sample]
    first_hits = simulated.take_hit_rate()
    disk_after = simulated.disk_bytes()
    later = [simulated.run(batch) for batch, _ in sample]
    return Prediction(
        table_bytes=sum(shape.row_count * shape.record_bytes for shape in tables),
        dram_budget_bytes=dram_budget_bytes,
        page_map_bytes=parts.page_map,
        io_buffer_bytes=io_buffer,
        scratch_bytes=scratch,
        row_buffer_bytes=left,
        dram_min_bytes=parts.least(),
        fits=parts.needed(dram_budget_bytes) <= dram_budget_bytes,
        disk_max_bytes=sum(2 * shape.page_count * shape.page_bytes for shape in tables),
        batch_count=len(sample),
        ids_per_batch=_mean([sum(uses.values()) for _, uses in sample]),
        unique_rows_per_batch=_mean(rows),
        first_pass_reads_per_batch=_mean(first),
        later_pass_reads_per_batch=_mean(later),
        first_pass_hit_rate=first_hits,
        later_pass_hit_rate=simulated.take_hit_rate(),
        disk_bytes_after_sample=disk_after,
    )


UniqueRows = dict[int, NDArray[np.int64]]


def unique_rows(
    batch: Any, shapes: Mapping[str, tuple[int, TableShape]], feature_tables: Mapping[str, str]
) -> tuple[UniqueRows, dict[int, int]]:
    """Returns the distinct rows of a batch, and how many ids it has, both per table."""
    bags = as_kjt(batch)
    stride = bags.stride()
    bounds = bags.offsets()[:: max(1, stride)].tolist()
    values = bags.values().numpy()
    of_table: dict[int, list[NDArray[np.int64]]] = {}
    for at, key in enumerate(bags.keys()):
        if key in feature_tables:
            ids = values[bounds[at] : bounds[at + 1]]
            of_table.setdefault(shapes[feature_tables[key]][0], []).append(ids)
    joined = {table: np.concatenate(ids) for table, ids in of_table.items()}
    uses = {table: int(ids.size) for table, ids in joined.items()}
    return {table: np.unique(ids) for table, ids in joined.items()}, uses


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


class _Buffer:
    """An LRU of rows over pages that exist once a dirty row was written to them."""

    def __init__(self, slot_count: int, tables: list[TableShape]) -> None:
        self._slots = slot_count
        self._tables = tables
        self._rows: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._pages: set[tuple[int, int]] = set()
        self._hits = 0
        self._seen = 0
        self._per_page = [rows_per_page(t.record_bytes, t.page_bytes) for t in tables]

    def run(self, batch: UniqueRows) -> int:
        """Uses the rows of a batch; returns the pages read for it."""
        wanted: set[tuple[int, int]] = set()
        for table, ids in batch.items():
            per_page = self._per_page[table]
            for row in ids.tolist():
                key = (table, row)
                self._seen += 1
                if key in self._rows:
                    self._hits += 1
                    self._rows.move_to_end(key)
                else:
                    self._rows[key] = None
                    wanted.add((table, row // per_page))
        reads = len(wanted & self._pages)
        # Rows leave dirty: their pages are read, changed and written.
        leaving: set[tuple[int, int]] = set()
        while len(self._rows) > self._slots:
            (table, row), _ = self._rows.popitem(last=False)
            leaving.add((table, row // self._per_page[table]))
        reads += len(leaving & self._pages)
        self._pages |= leaving
        return reads

    def take_hit_rate(self) -> float:
        """Returns the hit rate since the last call."""
        rate = self._hits / self._seen if self._seen else 0.0
        self._hits = self._seen = 0
        return rate

    def disk_bytes(self) -> int:
        """Returns the bytes of all pages once every row is written."""
        pages = self._pages | {(table, row // self._per_page[table]) for table, row in self._rows}
        return sum(self._tables[table].page_bytes for table, _ in pages)
