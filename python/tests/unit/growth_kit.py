"""Memory of each part of the table of memory, at one size; a process of its own where it must be.

``python growth_kit.py NAME=SIZE ...`` prints, for each, how many things there are and the bytes of
the part; at this size, and at four times of it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tierbed as tb
from tierbed.data import BatchOrder, Vocabulary
from tierbed.placement import import_tables
from tierbed.serve import ServeOptions, Server
from tierbed.train.lookahead import lookahead

#: Adagrad on 16 weights: these, as many words of state, and a use count.
DIM, RECORD_BYTES, ROWS_PER_PAGE = 16, 132, 30
#: Ids of a query, and rows that are asked for together.
QUERY_IDS, CIRCLE = 8, 64

#: What is measured once before, so that nothing else is counted.
WARM = 64_000

Counted = tuple[int, int]


def used(stats: Any, part: str) -> int:
    return int(stats["budget"]["parts"][part]["used_bytes"])


def resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))


def peak_of(work: Callable[[], Any]) -> int:
    """Returns how much resident memory grows at its peak."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    kept = work()
    grown = resident("VmHWM") - before
    del kept
    return grown


def left_of(work: Callable[[], Any]) -> int:
    """Returns how much resident memory is left of a result."""
    before = resident("VmRSS")
    kept = work()
    grown = resident("VmRSS") - before
    del kept
    return grown


# ---------------------------------------------------------------- inside the budget


def training_part(backend: str, part: str, rows: int, *, writes: bool = False) -> int:
    with tempfile.TemporaryDirectory() as folder:
        place = None if backend == "memory" else f"{folder}/store"
        with tb.Store.open(place, backend=backend, dram_budget="64MiB") as store:
            tables = [tb.EmbeddingBagConfig(rows, DIM, "a")]
            emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.Adagrad(lr=0.1))
            if writes:
                store.write_rows("a", 0, torch.zeros(rows, DIM), torch.zeros(rows, DIM))
                store.checkpoint("all")
            one = torch.ones(1, dtype=torch.int64)
            emb(tb.KeyedJaggedTensor(["a"], one, lengths=one)).values().sum().backward()
            return used(store.stats(), part)


def page_maps(rows: int) -> Counted:
    return rows // ROWS_PER_PAGE, training_part("file", "page maps", rows)


def row_buffer(rows: int) -> Counted:
    return rows, training_part("file", "row buffer", rows) - RECORD_BYTES * rows


def range_maps(rows: int) -> Counted:
    return rows // ROWS_PER_PAGE // 64, training_part("cold", "range maps", rows)


def filters(rows: int) -> Counted:
    return rows, training_part("lsm", "filters", rows, writes=True)


def block_indexes(rows: int) -> Counted:
    blocks = rows // ((4096 - 24) // (RECORD_BYTES + 8))
    return blocks, training_part("lsm", "block indexes", rows, writes=True)


def memory_store(rows: int) -> Counted:
    held = training_part("memory", "memory store", rows, writes=True)
    return rows, held - RECORD_BYTES * rows


def vocabulary_directory(ids: int) -> Counted:
    with (
        tempfile.TemporaryDirectory() as folder,
        tb.Store.open(f"{folder}/store", dram_budget="64MiB") as store,
    ):
        store.add_table(tb.EmbeddingBagConfig(None, 4, "a"), tb.SGD(lr=0.1))
        for first in range(0, ids, 20_000):
            store.assign_ids("a", 7919 * torch.arange(first, min(first + 20_000, ids)))
        return ids, used(store.stats(), "vocabulary directory")


class Epoch:
    """Batches of distinct rows that tell their order."""

    def __init__(self, rows: int, batches: int) -> None:
        self.rows, self.batches = rows, batches

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        yield from self._epoch()
        yield from self._epoch()

    def _epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
        size = self.rows // self.batches
        ones = torch.ones(size, dtype=torch.int64)
        for at in range(self.batches):
            ids = (torch.arange(size) * self.batches + at) * 7919 % self.rows
            yield tb.KeyedJaggedTensor(["a"], ids, lengths=ones)

    def known_order(self) -> BatchOrder:
        return BatchOrder(f"{self.rows}-{self.batches}", self._epoch, 0, self.batches)


def forward(rows: int, batches: int, budget: str, stop: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        tb.Store.open(f"{folder}/store", dram_budget=budget, order="forward") as store,
    ):
        tables = [tb.EmbeddingBagConfig(rows, DIM, "a")]
        emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.Adagrad(lr=0.1))
        for at, bags in enumerate(lookahead(Epoch(rows, batches), emb, window=4)):
            emb(bags).values().sum().backward()
            if at + 1 == stop:
                return dict(store.stats())
    raise AssertionError("the epoch ended first")


def plan_windows(windows: int) -> Counted:
    # Windows of one batch each: the largest rows of a window stay the same.
    stats = forward(100 * windows, windows, "2MiB", 1)
    return stats["order"]["plan"]["window_count"], used(stats, "plan windows")


def chunk_lists(rows: int) -> Counted:
    stats = forward(rows, rows // 500, "2MiB", rows // 500)
    return stats["store"]["chunks_written"], used(stats, "chunk lists")


def snapshot_part(part: str, rows: int, **options: Any) -> int:
    with tempfile.TemporaryDirectory() as folder:
        import_tables({"a": torch.zeros(rows, DIM)}, f"{folder}/snapshot", **options)
        with tb.Snapshot.open(f"{folder}/snapshot", dram_budget="32MiB") as snapshot:
            return used(snapshot.stats(), part)


def forward_index(rows: int) -> Counted:
    return rows, snapshot_part("forward_index", rows)


def index_of_tails(rows: int) -> Counted:
    return rows, snapshot_part("forward_index", rows, head_rows="5%")


def placed(rows: int, ratio: float) -> Counted:
    """Replicas of a placement of full pages, and the bytes of its index."""
    log = queries(rows, 4 * rows)
    method: Any = "maxembed" if ratio else "by_frequency"
    placement = tb.place(log, method=method, rows_per_page=32, ratio=ratio)
    with tempfile.TemporaryDirectory() as folder:
        placement.write(f"{folder}/placement")
        held = snapshot_part("placement_index", rows, placement=f"{folder}/placement")
    return placement.info().replica_count, held


def placement_of_rows(rows: int) -> Counted:
    return rows, placed(rows, 0.0)[1]


def placement_of_replicas(count: int) -> Counted:
    return placed(20_000, count / 20_000)


def delta(rows: int) -> Counted:
    with (
        tempfile.TemporaryDirectory() as folder,
        tb.Store.open(f"{folder}/store", dram_budget="32MiB") as store,
    ):
        store.add_table(tb.EmbeddingBagConfig(200_000, 4, "a"), tb.SGD(lr=0.1))
        store.write_rows("a", 0, torch.zeros(200_000, 4))
        store.publish(f"{folder}/base")
        store.write_rows("a", 0, torch.ones(rows, 4))
        store.publish(f"{folder}/delta", base=f"{folder}/base")
        options = ServeOptions(deltas=Path(folder), log_level="off")
        with (
            tb.Snapshot.open(f"{folder}/base", dram_budget="32MiB") as snapshot,
            Server(snapshot, "127.0.0.1:0", options=options) as server,
        ):
            return rows, server.apply(f"{folder}/delta").delta_memory_bytes


# ---------------------------------------------------------------- beside the budget


def plan_arrays(rows: int) -> Counted:
    store = tb.Store.open(tempfile.mkdtemp(), dram_budget="512MiB", order="forward")
    tables = [tb.EmbeddingBagConfig(rows, DIM, "a")]
    emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.Adagrad(lr=0.1))

    class Few(Epoch):
        def _epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
            ones = torch.ones(100, dtype=torch.int64)
            for at in range(self.batches):
                yield tb.KeyedJaggedTensor(["a"], torch.arange(100) + at, lengths=ones)

    return rows, peak_of(lambda: next(iter(lookahead(Few(rows, 20), emb, window=4))))


def tokens(count: int) -> Counted:
    from tierbed.data.vocabulary import finish_builder, new_builder

    path = Path(tempfile.mkdtemp()) / "vocabulary"
    builder = new_builder(["a"], path, 1 << 26, 1)
    for first in range(0, count, 50_000):
        builder.add_column(0, [b"%d" % token for token in range(first, first + 50_000)])
    builder.note_samples(count)
    finish_builder(builder, path, count, 0)
    return count, left_of(lambda: Vocabulary(path))


def queries(rows: int, ids: int, per: int = QUERY_IDS) -> tb.QueryLog:
    """Queries of rows near each other, some ids in all."""
    generator = torch.Generator().manual_seed(1)
    step = 10_000

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first in range(0, ids // per, step):
            size = min(step, ids // per - first)
            circle = torch.randint(0, rows // CIRCLE, (size, 1), generator=generator) * CIRCLE
            # Distinct within a query, which keeps each row once.
            within = torch.rand(size, CIRCLE, generator=generator).topk(per).indices
            yield (circle + within).flatten(), torch.arange(0, size * per + 1, per)

    return tb.QueryLog.from_batches(rows, batches())


def log_ids(ids: int) -> Counted:
    return ids, left_of(lambda: queries(6400, ids, CIRCLE))


def log_queries(count: int) -> Counted:
    return count, left_of(lambda: queries(6400, count, 1)) - 4 * count


def bisected_ids(ids: int) -> Counted:
    log = queries(64_000, ids)
    return ids, peak_of(lambda: tb.place(log, method="shp", ratio=0.0))


def bisected_rows(rows: int) -> Counted:
    log = queries(rows, 2_000_000)
    return rows, peak_of(lambda: tb.place(log, method="shp", ratio=0.0))


def grown_ids(ids: int) -> Counted:
    log = queries(6400, ids)
    return ids, peak_of(lambda: tb.place(log, method="grown", ratio=0.0))


def placement(rows: int) -> Counted:
    log = tb.QueryLog.from_batches(rows, [(torch.arange(QUERY_IDS), torch.tensor([0, QUERY_IDS]))])
    return rows, left_of(lambda: tb.place(log, method="shp", ratio=0.0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for given in sys.argv[1:]:
        name, _, size = given.partition("=")
        measure = globals()[name]
        measure(WARM)
        print(*measure(int(size)), *measure(4 * int(size)), flush=True)
