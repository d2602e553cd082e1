"""Phases of ``bench big`` that serve: a placement by a log, lookups in little memory, checks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.placement.build import QueryLog, place, rows_per_page_of
from tierbed.serve.snapshot import Snapshot
from tierbed_bench.big.data import Shape
from tierbed_bench.big.worker import Job, Phase, memory
from tierbed_bench.common import percentile, zipf_ranks

__all__ = ["PHASES"]

#: Rows of the placed table that a request asks for; of each other table it asks for one.
PLACED_IDS = 16
#: Rows that are asked for together more often than others.
GROUP = 16
BATCH = 256
_SKEW = 1.05
_MIX = 2_654_435_761


def _queries(shape: Shape, number: int, count: int) -> Tensor:
    """Returns queries of the placed table, ``[count, 16]`` i64: half a group, half popular rows."""
    generator = torch.Generator().manual_seed(shape.seed * 7_919 + number)
    groups = max(1, shape.rows // GROUP)
    anchors = zipf_ranks(torch.rand(count, generator=generator, dtype=torch.float64), groups, _SKEW)
    members = torch.rand(count, GROUP, generator=generator).argsort(1)[:, : PLACED_IDS // 2]
    uniform = torch.rand(count, PLACED_IDS // 2, generator=generator, dtype=torch.float64)
    popular = zipf_ranks(uniform, shape.rows, _SKEW)
    ranks = torch.cat([anchors[:, None] * GROUP + members, popular], 1)
    return ranks % shape.rows * _MIX % shape.rows


def _request(shape: Shape, number: int, count: int) -> KeyedJaggedTensor:
    """Returns requests of all tables: a query of the first, a popular row of each other one."""
    generator = torch.Generator().manual_seed(shape.seed * 104_729 + number)
    uniform = torch.rand(shape.tables - 1, count, generator=generator, dtype=torch.float64)
    others = zipf_ranks(uniform, shape.rows, _SKEW) * _MIX % shape.rows
    lengths = torch.ones(shape.tables, count, dtype=torch.int64)
    lengths[0] = PLACED_IDS
    ids = torch.cat([_queries(shape, number, count).view(-1), others.view(-1)])
    return KeyedJaggedTensor(shape.names, ids, lengths=lengths.view(-1), stride=count)


def _place(job: Job) -> None:
    """Places the rows of the first table by a generated log."""
    shape, given = job.shape, job.given
    queries, block = int(given["queries"]), 4096

    def log() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(-(-queries // block)):
            rows = _queries(shape, number, min(block, queries - number * block))
            yield rows.view(-1), torch.arange(len(rows) + 1) * PLACED_IDS

    begun_s = time.perf_counter()
    read = QueryLog.from_batches(shape.rows, log())
    log_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    placed = place(
        read,
        rows_per_page=rows_per_page_of(shape.dim, given["codec"]),
        threads=len(os.sched_getaffinity(0)),
        seed=shape.seed,
        progress=lambda done, total: job.told.progress(done, total, "steps"),
    )
    seconds = time.perf_counter() - begun_s
    placed.write(job.folder / "placement")
    peak = memory()
    job.told.row(
        {
            "seconds": seconds,
            "log_s": log_s,
            "rows": shape.rows,
            "pins": read.pin_count,
            "pins_per_s": read.pin_count / seconds,
            "placement_bytes": (job.folder / "placement").stat().st_size,
            **peak,
        }
    )


def _serve(job: Job) -> None:
    """Looks up single requests, then batches, in a share of the tables' memory."""
    shape, seconds = job.shape, float(job.given["seconds"])
    begun_s = time.perf_counter()
    snapshot, budget_bytes, reason = _opened(job)
    open_s = time.perf_counter() - begun_s
    with snapshot:
        number = 1 << 20  # requests that were not in the log
        warm_s = time.perf_counter()
        while time.perf_counter() - warm_s < seconds / 2:
            snapshot.lookup(_request(shape, number, BATCH))
            number += 1
        waits: list[float] = []
        while sum(waits) < seconds / 4:
            request = _request(shape, number, 1)
            number += 1
            begun_s = time.perf_counter()
            snapshot.lookup(request)
            waits.append(time.perf_counter() - begun_s)
        before = snapshot.stats()["snapshot"]["lookups"]
        batches: list[float] = []
        while sum(batches) < seconds / 4:
            request = _request(shape, number, BATCH)
            number += 1
            begun_s = time.perf_counter()
            snapshot.lookup(request)
            batches.append(time.perf_counter() - begun_s)
            job.told.progress(sum(batches), seconds / 4, "s")
        after = snapshot.stats()["snapshot"]["lookups"]
    rows = len(batches) * BATCH * (PLACED_IDS + shape.tables - 1)
    job.told.row(
        {
            "budget_bytes": budget_bytes,
            "share": budget_bytes / shape.table_bytes,
            "refused_at_one_percent": reason,
            "open_s": open_s,
            "request_us_p50": 1e6 * percentile(waits, 0.5),
            "request_us_p99": 1e6 * percentile(waits, 0.99),
            "batch_ms_p99": 1e3 * percentile(batches, 0.99),
            "rows_per_s": rows / sum(batches),
            "rows_read_share": (after["rows_read"] - before["rows_read"]) / rows,
            "pages_read_per_row": (after["pages_read"] - before["pages_read"]) / rows,
            **memory(),
        }
    )


def _opened(job: Job) -> tuple[Snapshot, int, str | None]:
    """Opens the snapshot at 1 % memory, or at the first doubling of it that is accepted."""
    budget_bytes = max(1 << 20, job.shape.table_bytes // 100)
    reason: str | None = None
    while True:
        try:
            snapshot = Snapshot.open(job.folder / "snapshot", dram_budget=budget_bytes)
        except InvalidError as error:
            reason = reason or str(error)
            if budget_bytes > 4 * job.shape.table_bytes + (64 << 20):
                raise
            budget_bytes *= 2
        else:
            return snapshot, budget_bytes, reason


def _verify_snapshot(job: Job) -> None:
    """Checks every checksum of the snapshot."""
    folder = job.folder / "snapshot"
    stored = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    with Snapshot.open(folder, dram_budget=job.budget_bytes) as snapshot:
        begun_s = time.perf_counter()
        pages = snapshot.verify()
        seconds = time.perf_counter() - begun_s
    job.told.row({"seconds": seconds, "pages": pages, "bytes_per_s": stored / seconds, **memory()})


PHASES: dict[str, Phase] = {
    "place": _place,
    "serve": _serve,
    "verify_snapshot": _verify_snapshot,
}
