"""Phases of ``bench big`` that train in forward order: plan, epochs, restarts, scans, checks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from tierbed.jagged import KeyedJaggedTensor
from tierbed.train.lookahead import lookahead
from tierbed.train.store import Store
from tierbed_bench.big.data import Batches, Sample, Shape
from tierbed_bench.big.worker import WINDOW, Job, Phase, memory, open_store
from tierbed_bench.common import percentile

__all__ = ["PHASES", "PlanTold"]

#: Points of a curve of an epoch.
POINTS = 60
#: Rows of a table that a scan hands on at once; it collects as many of each table.
CHUNK_ROWS = 4096
#: So many rows are read that were not planned, this often.
FEW_ROWS = (1, 10, 100)
FEW_TIMES = 10
MANY_TIMES = 3


def _plan(job: Job) -> None:
    """Makes the store and its plan, and checkpoints before the first step."""
    with open_store(job) as store:
        bags = job.shape.bags(store)
        begun_s = time.perf_counter()
        batches = PlanTold(job)
        next(iter(lookahead(batches, bags, WINDOW)))
        plan_s = time.perf_counter() - begun_s
        plan = store.order()["plan"]
        begun_s = time.perf_counter()
        store.checkpoint("planned", capture_rng=False)
        job.told.row(
            {
                "seconds": plan_s,
                "ids": plan["index_count"],
                "ids_per_s": plan["index_count"] / plan_s,
                "windows": plan["window_count"],
                "bytes_per_id": _plan_bytes(job) / plan["index_count"],
                "checkpoint_s": time.perf_counter() - begun_s,
                "disk_bytes": _disk_bytes(store),
                **memory(),
            }
        )


class PlanTold(Batches):
    """Batches that tell how far their plan is.

    Args:
        job: What they are for.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job.shape)
        self._job = job
        #: When the plan had all batches.
        self.ended_s = 0.0

    def known_order(self) -> Any:
        """Promises the order of :class:`Batches`, under the same fingerprint."""
        order = super().known_order()
        made = order.batches

        def told() -> Iterator[KeyedJaggedTensor]:
            for at, batch in enumerate(made()):
                self._job.told.progress(at, order.batch_count or 0, "batches")
                yield batch
            self.ended_s = time.perf_counter()

        return type(order)(order.fingerprint, told, order.start, order.batch_count)


def _plan_bytes(job: Job) -> int:
    folder = job.folder / str(job.given.get("store", "forward"))
    return sum(path.stat().st_size for path in folder.iterdir() if ".plan" in path.name)


def _disk_bytes(store: Store) -> int:
    return int(store.stats()["disk_bytes"])


@dataclass
class _Run:
    """Batches of an epoch, and what they took."""

    steps_s: list[float] = field(default_factory=list)
    ahead_s: float = 0.0
    checkpoints_s: list[float] = field(default_factory=list)
    checkpoints_bytes: list[int] = field(default_factory=list)
    curve: list[list[float]] = field(default_factory=list)

    def columns(self, shape: Shape) -> dict[str, Any]:
        """Returns the columns of times."""
        told: dict[str, Any] = {
            "batches": len(self.steps_s),
            "step_ms_p50": 1e3 * median(self.steps_s),
            "step_ms_p99": 1e3 * percentile(self.steps_s, 0.99),
            "step_ms_max": 1e3 * max(self.steps_s),
            "ahead_share": self.ahead_s / sum(self.steps_s),
            "ids": len(self.steps_s) * shape.batch_ids,
        }
        if self.checkpoints_s:
            told["checkpoint_s"] = median(self.checkpoints_s)
            told["checkpoint_s_max"] = max(self.checkpoints_s)
            told["checkpoint_bytes"] = max(self.checkpoints_bytes)
        return told


def _epoch(job: Job) -> None:
    """Trains from where the store stands to the end of its epoch, or up to batch ``until``."""
    shape, given = job.shape, job.given
    begun_s = time.perf_counter()
    with open_store(job) as store:
        bags, grad = shape.bags(store), shape.gradient()
        start = int(store.order().get("batch", 0))
        epoch = int(store.order().get("epoch", 0))
        open_s = time.perf_counter() - begun_s
        until = int(given.get("until") or shape.batch_count)
        loader = Batches(shape, start)
        run = _Run()
        before = store.stats()["store"]
        begun_s = time.perf_counter()
        _train(job, store, lookahead(loader, bags, WINDOW), _Steps(bags, grad, start, until, run))
        seconds = time.perf_counter() - begun_s
        stats = store.stats()
        after = stats["store"]
        updates = after["row_update_count"] - before["row_update_count"]
        moved = {
            name: after["io"][name] - before["io"][name] for name in ("read_bytes", "write_bytes")
        }
        job.told.row(
            {
                "epoch": epoch + 1,
                "first_batch": start,
                "open_s": open_s,
                "restart_s": open_s + run.steps_s[0],
                "seconds": seconds,
                **run.columns(shape),
                "ids_per_s": len(run.steps_s) * shape.batch_ids / seconds,
                "samples_per_s": len(run.steps_s) * shape.batch / seconds,
                "row_updates": updates,
                "row_updates_per_s": updates / seconds,
                "step_row_updates_per_s": updates / sum(run.steps_s),
                "loader_s": loader.seconds,
                "read_bytes_per_update": moved["read_bytes"] / updates,
                "written_bytes_per_update": moved["write_bytes"] / updates,
                "wait_count": after["wait_count"] - before["wait_count"],
                "disk_bytes": stats["disk_bytes"],
                **memory(),
            },
            run.curve,
        )


class Curve:
    """The rate of an epoch, part by part; checkpoints are left out.

    Args:
        shape: What is trained.
        start: Batches done before.
        begun_s: When it begins.
    """

    def __init__(self, shape: Shape, start: int, begun_s: float) -> None:
        self.points: list[list[float]] = []
        self._shape = shape
        self._every = max(1, shape.batch_count // POINTS)
        self._begun_s = begun_s
        self._done, self._since_s = start, begun_s

    def note(self, done: int, now_s: float) -> None:
        """Notes batches that are done; each part has a point: share, seconds, ids a second."""
        if done - self._done < self._every:
            return
        rate = (done - self._done) * self._shape.batch_ids / (now_s - self._since_s)
        self.points.append([done / self._shape.batch_count, now_s - self._begun_s, rate])
        self._done, self._since_s = done, now_s

    def leave_out(self, seconds: float) -> None:
        """Takes time out of the part that is on its way."""
        self._since_s += seconds


@dataclass
class _Steps:
    bags: Any
    grad: torch.Tensor
    start: int
    until: int
    run: _Run


def _train(job: Job, store: Store, ahead: Any, steps: _Steps) -> None:
    """Steps batch by batch, with checkpoints at the batches that were asked for."""
    shape, run = job.shape, steps.run
    saves = {int(at) for at in job.given.get("checkpoints", [])}
    kill_at = int(job.given.get("kill_at") or -1)
    curve = Curve(shape, steps.start, time.perf_counter())
    batches = iter(ahead)
    for done in range(steps.start + 1, steps.until + 1):
        step_s = time.perf_counter()
        batch = next(batches)
        run.ahead_s += time.perf_counter() - step_s
        torch.autograd.backward(steps.bags(batch).values(), steps.grad)
        run.steps_s.append(time.perf_counter() - step_s)
        job.told.progress(done, shape.batch_count, "batches")
        curve.note(done, time.perf_counter())
        if done == kill_at:
            job.told.moment("reached")
        if done in saves or done == steps.until:
            _save(job, store, run, f"batch-{done}")
            curve.leave_out(run.checkpoints_s[-1])
    run.curve = curve.points
    if steps.until == shape.batch_count:
        assert next(batches, None) is None, "the epoch ends where its last batch was stepped"


def _save(job: Job, store: Store, run: _Run, name: str) -> None:
    job.told.moment("checkpoint")
    before = store.stats()["store"]
    begun_s = time.perf_counter()
    store.checkpoint(name, capture_rng=False)
    run.checkpoints_s.append(time.perf_counter() - begun_s)
    after = store.stats()["store"]
    moved = after["io"]["write_bytes"] - before["io"]["write_bytes"]
    run.checkpoints_bytes.append(moved + after["dump_bytes"] - before["dump_bytes"])


def _scan(job: Job) -> None:
    """Reads every row once and keeps a digest of a sample."""
    sample = Sample(job.shape)
    seen = 0

    def visit(name: str, rows: Any, *record: Any) -> None:
        nonlocal seen
        seen += len(rows)
        job.told.progress(seen, job.shape.row_count, "rows")
        sample.visit(name, rows, *record)

    with open_store(job) as store:
        begun_s = time.perf_counter()
        store.scan(visit, chunk_rows=CHUNK_ROWS)
        seconds = time.perf_counter() - begun_s
    digest, rows = sample.digest()
    job.told.row(
        {
            "seconds": seconds,
            "rows": seen,
            "rows_per_s": seen / seconds,
            "sample_rows": rows,
            "digest": digest,
            **memory(),
        }
    )


def _few_rows(job: Job) -> None:
    """Reads a row or a few of a table that the plan does not bring now, and more than it finds."""
    told: dict[str, Any] = {}
    with open_store(job) as store:
        random = torch.Generator().manual_seed(job.shape.seed)
        # One row more than windows is read by a pass over everything.
        many = int(store.order()["plan"]["window_count"]) + 1
        for name, count in (*((str(count), count) for count in FEW_ROWS), ("many", many)):
            times = FEW_TIMES if count != many else MANY_TIMES
            taken_s = []
            for at in range(times):
                job.told.progress(at, times, f"times {count} rows")
                first = int(torch.randint(job.shape.rows, (1,), generator=random))
                spread = torch.arange(count) * max(1, job.shape.rows // count)
                rows = (first + spread) % job.shape.rows
                begun_s = time.perf_counter()
                store.gather_rows(job.shape.names[0], rows)
                taken_s.append(time.perf_counter() - begun_s)
            told[f"read_{name}_ms_p50"] = 1e3 * median(taken_s)
        order = store.order()
    told["many"] = many
    told["searches"] = order["unplanned_search_count"]
    told["scans"] = order["unplanned_scan_count"]
    job.told.row({**told, **memory()})


def _verify(job: Job) -> None:
    """Checks every checksum of the store."""
    with open_store(job) as store:
        begun_s = time.perf_counter()
        pages = store.verify()
        seconds = time.perf_counter() - begun_s
        disk_bytes = _disk_bytes(store)
    job.told.row(
        {
            "seconds": seconds,
            "pages": pages,
            "bytes_per_s": disk_bytes / seconds,
            "disk_bytes": disk_bytes,
            **memory(),
        }
    )


PHASES: dict[str, Phase] = {
    "plan": _plan,
    "epoch": _epoch,
    "scan": _scan,
    "few rows": _few_rows,
    "verify": _verify,
}
