"""Phases of ``bench big`` on rows that are read by number: fill, train, publish, come to a plan."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierbed.codec import Codec
from tierbed.jagged import KeyedJaggedTensor
from tierbed.serve.snapshot import Snapshot
from tierbed.tables.exporting import export_tables
from tierbed.train.lookahead import lookahead
from tierbed.train.store import Store
from tierbed_bench.big.data import Shape
from tierbed_bench.big.training import PlanTold
from tierbed_bench.big.worker import WINDOW as FORWARD_WINDOW, Job, Phase, memory, open_store

__all__ = ["PHASES"]

CHUNK_ROWS = 65_536
#: A window is read whole before its first step, so a short one suits a short measurement.
WINDOW = 8
CHECKED_ROWS = 1000
#: Between two looks at the disk while rows move.
TICK_S = 0.5


class _Chunks:
    """Rows to fill tables with; every chunk has others, in the same memory."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(shape.seed)
        self._rows = shape.rows
        self._block = torch.rand(CHUNK_ROWS, shape.dim, generator=generator) - 0.5
        self._made = torch.empty_like(self._block)

    def of(self, table: int, first: int) -> Tensor:
        """Returns the rows of a table from ``first`` on, ``[N, D]``, until the next call."""
        made = self._made[: min(CHUNK_ROWS, self._rows - first)]
        factor = 1.0 + (first // CHUNK_ROWS + 17 * table) / 1024
        return torch.mul(self._block[: len(made)], factor, out=made)


def _fill(job: Job) -> None:
    """Writes every row of every table by number, and a checkpoint."""
    shape = job.shape
    chunks = _Chunks(shape)
    with open_store(job) as store:
        bags = shape.bags(store)  # held while its tables are filled
        begun_s, done = time.perf_counter(), 0
        for table, name in enumerate(bags.feature_names()):
            for first in range(0, shape.rows, CHUNK_ROWS):
                rows = chunks.of(table, first)
                store.write_rows(name, first, rows)
                done += len(rows)
                job.told.progress(done, shape.row_count, "rows")
        seconds = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        store.checkpoint("filled", capture_rng=False)
        checkpoint_s = time.perf_counter() - begun_s
        stats = store.stats()
    job.told.row(
        {
            "seconds": seconds,
            "rows": done,
            "rows_per_s": done / (seconds + checkpoint_s),
            "bytes_per_s": shape.table_bytes / (seconds + checkpoint_s),
            "checkpoint_s": checkpoint_s,
            "disk_bytes": stats["disk_bytes"],
            **memory(),
        }
    )


def _window(job: Job) -> None:
    """Trains by windows for ``seconds``, and a checkpoint."""
    shape = job.shape
    begun_s = time.perf_counter()
    with open_store(job) as store:
        bags, grad = shape.bags(store), shape.gradient()
        open_s = time.perf_counter() - begun_s
        before, begun_s, done = store.stats()["store"], time.perf_counter(), 0
        numbers = (shape.ids(number) for number in count())
        restart_s = 0.0
        for batch in lookahead(numbers, bags, WINDOW):
            torch.autograd.backward(bags(batch).values(), grad)
            done += 1
            seconds = time.perf_counter() - begun_s
            restart_s = restart_s or open_s + seconds
            job.told.progress(seconds, float(job.given["seconds"]), "s")
            if seconds >= float(job.given["seconds"]) and done % WINDOW == 0:
                break
        begun_s = time.perf_counter()
        store.checkpoint("trained", capture_rng=False)
        checkpoint_s = time.perf_counter() - begun_s
        stats = store.stats()
    updates = sum(_distinct(shape, number) for number in range(done))
    told: dict[str, Any] = {
        "open_s": open_s,
        "restart_s": restart_s,
        "seconds": seconds,
        "batches": done,
        "samples_per_s": done * shape.batch / seconds,
        "ids_per_s": done * shape.batch_ids / seconds,
        "row_updates": updates,
        "row_updates_per_s": updates / (seconds + checkpoint_s),
        "checkpoint_s": checkpoint_s,
        "disk_bytes": stats["disk_bytes"],
        **memory(),
    }
    after = stats["store"]
    if "pages_read" in after:
        read = after["pages_read"] - before["pages_read"]
        written = after["pages_written"] - before["pages_written"]
        told["pages_read_per_update"] = read / updates
        told["pages_written_per_update"] = written / updates
    job.told.row(told)


@contextmanager
def _ticking(job: Job) -> Iterator[None]:
    """Tells now and then that there is something to look at: how much disk is in use."""
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.wait(TICK_S):
            job.told.moment("tick")

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        yield
    finally:
        is_over.set()
        ticking.join()


def _enter(job: Job) -> None:
    """Makes the plan of an epoch and moves the rows of a store that was filled by number to it."""
    # The name of its folder says how a store is opened: as one that insists on a plan.
    (job.folder / "file").rename(job.folder / "forward")
    batches = PlanTold(job)
    with open_store(job) as store:
        bags = job.shape.bags(store)
        begun_s = time.perf_counter()
        with _ticking(job):
            next(iter(lookahead(batches, bags, FORWARD_WINDOW)))
        ended_s = time.perf_counter()
        order = store.order()
        disk_bytes = store.stats()["disk_bytes"]
    moved_s = ended_s - batches.ended_s
    job.told.row(
        {
            "seconds": ended_s - begun_s,
            "move_s": moved_s,
            "rows": order["rows_moved"],
            "rows_per_s": order["rows_moved"] / moved_s,
            "bytes_per_s": job.shape.table_bytes / moved_s,
            "disk_bytes": disk_bytes,
            **memory(),
        }
    )


def _distinct(shape: Shape, number: int) -> int:
    return sum(len(torch.unique(shape.column(number, table))) for table in range(shape.tables))


def _export(job: Job) -> None:
    """Writes one table into a file of numpy, which is deleted again."""
    shape, path = job.shape, job.folder / "exported.npy"
    with open_store(job) as store:
        begun_s = time.perf_counter()
        export_tables(
            store,
            path,
            shape.names[0],
            progress=lambda done, total: job.told.progress(done, total, "rows"),
        )
        seconds = time.perf_counter() - begun_s
    written = path.stat().st_size
    path.unlink()
    job.told.row(
        {
            "seconds": seconds,
            "rows": shape.rows,
            "rows_per_s": shape.rows / seconds,
            "bytes_per_s": written / seconds,
            "export_bytes": written,
            **memory(),
        }
    )


def _publish(job: Job) -> None:
    """Publishes a snapshot; tells the moment when a tenth is done."""
    shape, given = job.shape, job.given
    target = job.folder / str(given["snapshot"])
    placed = given.get("placement")
    is_under_way = False

    def progress(done: int, total: int) -> None:
        nonlocal is_under_way
        job.told.progress(done, total, "rows")
        if 10 * done >= total and not is_under_way:
            is_under_way = True
            job.told.moment("under way")

    with open_store(job) as store:
        begun_s = time.perf_counter()
        report = store.publish(
            target,
            codec=given["codec"],
            head_rows=given.get("head_rows"),
            placement=None if placed is None else {shape.names[0]: placed},
            progress=progress,
        )
        seconds = time.perf_counter() - begun_s
        peak = memory()
        equal = _are_equal(store, target, str(given["codec"]), shape)
    job.told.row(
        {
            "codec": given["codec"],
            "seconds": seconds,
            "rows": report.row_count,
            "rows_per_s": report.row_count / seconds,
            "snapshot_bytes": _folder_bytes(target),
            "index_bytes_per_row": report.index_bytes / report.row_count,
            "sort_runs": report.sort_run_count,
            "identity": report.identity,
            "sample_rows_equal": equal,
            **peak,
        }
    )


def _are_equal(store: Store, target: Path, codec: str, shape: Shape) -> bool | None:
    """Whether rows of the snapshot are those of the store; not asked in forward order."""
    if store.order()["kind"] == "forward":
        return None
    name = shape.names[-1]
    generator = torch.Generator().manual_seed(shape.seed)
    ids = torch.randint(shape.rows, (CHECKED_ROWS,), generator=generator)
    rows = store.gather_rows(name, ids)
    coder = Codec(codec, shape.dim)
    with Snapshot.open(target, dram_budget="2GiB") as snapshot:
        lengths = torch.ones(len(ids), dtype=torch.int64)
        bags = KeyedJaggedTensor([name], ids, lengths=lengths)
        return torch.equal(snapshot.lookup(bags).values(), coder.decode(coder.encode(rows)))


def _folder_bytes(folder: Path) -> int:
    return sum(os.stat(path).st_blocks * 512 for path in folder.iterdir())


PHASES: dict[str, Phase] = {
    "fill": _fill,
    "window": _window,
    "enter": _enter,
    "export": _export,
    "publish": _publish,
}
