"""How long do requests of a trained model wait when little of its tables is in memory?

The rows of all tables of the model are one table, cloned until it is large; a request is one of
the log's, of a clone drawn unevenly (as in ``tierbed_bench::lookup``). The same bytes are allowed
to every system for rows and all that finds them: to caches by their capacity, to mapped pages by
a memory cgroup around the process that asks. Where rows lie on disk is known to all systems
alike, beside these bytes. The later part of the log is asked: request by request, and in batches
with the dense part of the model behind the lookup.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierbed import _native
from tierbed._util.progress import Progress
from tierbed.codec import Codec, train_product
from tierbed.errors import UnsupportedError
from tierbed.placement.build import Placement, QueryLog
from tierbed.serve.cache import TierPlan, TierTable
from tierbed.serve.neighbours import Neighbours, find_neighbours
from tierbed.serve.snapshot import Snapshot
from tierbed_bench.memory_group import MemoryGroup
from tierbed_bench.precision import DIM
from tierbed_bench.sim.ssd import READ_US, SsdSimOptions
from tierbed_bench.tiers_model import LARGE_TABLE, CacheOf, Published
from tierbed_bench.workers import Worker, WorkerError

__all__ = ["ServedOptions", "measure_served"]

Row = dict[str, Any]
#: Requests of a batch, as in FlashEmbedding's measurements.
BATCH = 128
#: A map needs few requests until its pages have all been replaced.
MAP_WARM_REQUESTS = 3_000
#: Below this share of the bytes a plan has one byte for every row, above two.
TWO_BYTES_FROM = 0.03


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """What to measure.

    Args:
        table_bytes: Rows are cloned until their f32 bytes are at least this many.
        shares: Memory for rows, as shares of the f32 bytes.
        warm_requests: Requests before these, drawn from the earlier samples in their order.
        singles: Requests asked one by one.
        batches: Batches asked each way.
        skew: How unevenly clones are asked for.
        seed: Of what is drawn.
    """

    table_bytes: int
    shares: tuple[float, ...]
    warm_requests: int
    singles: int
    batches: int
    skew: float = 1.0
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class _System:
    """One way to keep rows.

    Args:
        name: As results spell it.
        cache: Its tiers.
        backend: Of the snapshot.
        placed_for: The codec of the cache that rows are placed for; None: rows used about as
            often share pages.
        keeps_codes: Whether a code of every row is kept, by which misses are answered.
    """

    name: str
    cache: tuple[str, ...] = ()
    backend: str = "direct"
    placed_for: str | None = None
    keeps_codes: bool = False

    @property
    def has_neighbours(self) -> bool:
        """Whether rows that left the tiers are answered by others."""
        return any(part.startswith("neighbours") for part in self.cache)


# EVStore's layers hold rows of 8 and 4 bits in its own formats, the third 4 % of the bytes
# (experiment 11).
_SYSTEMS = (
    _System(name="mmap", backend="mmap"),
    _System(name="flash_embedding", cache=("f32:lru:1:2",)),
    _System(name="ev_lfu_f32", cache=("f32:ev_lfu",)),
    _System(name="evstore_l1", cache=("evstore8:ev_lfu",)),
    _System(name="evstore_l1_l2", cache=("evstore8:ev_lfu", "evstore4:ev_lfu")),
    _System(
        name="evstore_l1_l2_l3",
        cache=("evstore8:ev_lfu:48", "evstore4:ev_lfu:48", "neighbours:second_chance:4"),
    ),
    _System(name="group_frequency_f32", cache=("f32:group_frequency",), placed_for="f32"),
    _System(name="group_frequency_int8", cache=("int8:group_frequency",), placed_for="int8"),
    _System(name="group_frequency_gauss4", cache=("gauss4:group_frequency",), placed_for="int8"),
    _System(name="group_frequency_no_reads", keeps_codes=True),
)
_MEMORY = _System(name="memory", backend="memory")


def measure_served(folder: Path, published: Published, options: ServedOptions) -> list[Row]:
    """Measures all systems; returns a row for each system and share, ``part`` being ``served``.

    Times of the EV-SSD are simulated, and their rows say so. Systems that cannot be measured have
    a row with a ``note``.
    """
    table = _Table(folder, published, options)
    with ExitStack() as stack:
        group, note = None, None
        try:
            name = f"tierbed-bench-{os.getpid()}"
            group = stack.enter_context(MemoryGroup.make(name))
        except UnsupportedError as error:
            note = str(error)
        worker = stack.enter_context(Worker(module="tierbed_bench.tiers_worker"))
        job = {"requests": str(table.requests), "model": str(published.plain)}
        worker.ask("load", job=job, group=None if group is None else str(group.folder))
        bench = _Bench(table, options, worker, note)
        return bench.measure()


class _Table:
    """The large table on disk, by use and placed, and the requests."""

    def __init__(self, folder: Path, published: Published, options: ServedOptions) -> None:
        self.published, self.options, self.folder = published, options, folder
        self.one = torch.cat(list(published.rows.values()))
        self.used = torch.cat(list(published.counts.values()))
        self.clones = max(1, math.ceil(options.table_bytes / (4 * self.one.numel())))
        self.row_count = self.clones * self.one.shape[0]
        self.f32_bytes = 4 * DIM * self.row_count
        weights = torch.arange(1, self.clones + 1, dtype=torch.float64).pow(-options.skew)
        self.weights = weights / weights.sum()
        self.requests = folder / "requests"
        self._write_requests()
        self._rows = folder / "rows.f32"
        self._rows.write_bytes(self.one.contiguous().numpy().astype("<f4", copy=False).tobytes())
        self.plain = self._write("plain", published.by_frequency)
        self._write_neighbours()

    def placed(self, cache: CacheOf) -> Path:
        """Writes the snapshot of rows placed for a cache; the one before is removed."""
        shutil.rmtree(self.folder / "placed.large", ignore_errors=True)
        return self._write("placed", self.published.placements[cache])

    def _write(self, name: str, placement: Placement) -> Path:
        file, out = self.folder / f"{name}.placement", self.folder / f"{name}.large"
        placement.write(file)
        job = {
            "do": "write",
            "placement": str(file),
            "out": str(out),
            "dim": DIM,
            "clones": self.clones,
            "rows": str(self._rows),
        }
        _native.bench_lookup(json.dumps(job))
        return out

    def _write_neighbours(self) -> None:
        """Writes who stands for each row, beside the plain snapshot: a row of the same clone."""
        near = find_neighbours({LARGE_TABLE: self.one}, {LARGE_TABLE: self.used}).of[LARGE_TABLE]
        starts = torch.arange(self.clones)[:, None] * self.one.shape[0]
        rows = (near[None, :, 1] + starts).reshape(-1)
        pairs = torch.stack([torch.zeros_like(rows), rows], 1)
        with Snapshot.open(self.plain, cache=[]) as snapshot:
            name = snapshot.tables()[0]["name"]
            Neighbours(tables=(name,), of={name: pairs}).write(snapshot)

    def _write_requests(self) -> None:
        """Writes earlier samples, to warm with, then later ones, over and over until enough."""
        source, options = self.published.source, self.options
        generator = torch.Generator().manual_seed(options.seed)
        parts: dict[str, list[Tensor]] = {"ids": [], "dense": [], "label": []}
        count = source.train_samples + source.eval_samples
        for batch in source.batches(0, count, 4096):
            size = batch.label.numel()
            parts["ids"].append(batch.sparse.values().view(-1, size).T.to(torch.int64))
            parts["dense"].append(batch.dense)
            parts["label"].append(batch.label)
        whole = {name: torch.cat(part) for name, part in parts.items()}
        sizes = torch.tensor([rows.shape[0] for rows in self.published.rows.values()])
        whole["ids"] += torch.cumsum(sizes, 0) - sizes
        wanted = options.singles + 2 * BATCH * options.batches
        asked = torch.cat(
            [
                torch.arange(options.warm_requests) % source.train_samples,
                source.train_samples + torch.arange(wanted) % source.eval_samples,
            ]
        )
        clone = torch.multinomial(self.weights, asked.numel(), True, generator=generator)
        picked = {name: part[asked] for name, part in whole.items()}
        picked["ids"] += (clone * self.one.shape[0])[:, None]
        self.ids = picked["ids"]
        torch.save(picked, self.requests)

    def plan(self, rows_bytes: int) -> TierPlan:
        """Returns a code of every row, and wider ones of the most used, in so many bytes."""
        # A bit per row and a rank per 512 rows say who is in the head; and small change.
        marks = self.row_count // 8 + 4 * (self.row_count // 512) + 4096
        parts = 2 if rows_bytes >= TWO_BYTES_FROM * self.f32_bytes else 1
        weights = self.used.clamp_max(4.0) + 0.1
        tail = train_product(self.one, parts, weights=weights, seed=self.options.seed)
        codes = tail.encode(self.one).repeat(self.clones, 1)
        fixed = codes.numel() + 4 * tail.codebooks.numel() + marks
        uses = (self.weights[:, None] * self.used[None, :]).reshape(-1)
        head_rows = max(0, rows_bytes - fixed) // Codec("int8", DIM).code_bytes
        head = uses.topk(min(head_rows, uses.numel())).indices.sort().values
        table = replace(self._resident(head), tail_codes=codes)
        return TierPlan(tables=(table,), codebooks={DIM: tail.codebooks})

    def _resident(self, head: Tensor) -> TierTable:
        codes = Codec("int8", DIM).encode(self.one)
        return TierTable(
            name=LARGE_TABLE,
            row_count=self.row_count,
            dim=DIM,
            head_codec="int8",
            head_rows=head,
            head_codes=codes[head % self.one.shape[0]],
        )


class _Bench:
    """Asks all systems in turn."""

    def __init__(
        self, table: _Table, options: ServedOptions, worker: Worker, note: str | None
    ) -> None:
        self.table, self.options, self.worker, self.note = table, options, worker, note

    def measure(self) -> list[Row]:
        rows = [self._system(_MEMORY, 1.0)]
        jobs = [(share, system) for share in self.options.shares for system in _SYSTEMS]
        with Progress("serving", len(jobs), "systems") as bar:
            for share, system in jobs:
                bar.advance(0, note=f"{system.name} {share:g}")
                rows.append(self._system(system, share))
                bar.advance(1)
        exact = rows[0]
        for row in rows:
            # A map is exact, and asked too little to be scored.
            if row.get("scored_requests") == exact["scored_requests"]:
                row["auc_change"] = row["auc"] - exact["auc"]
                row["pr_auc_change"] = row["pr_auc"] - exact["pr_auc"]
        for share in self.options.shares:
            rows += self._simulated(share, exact["batch_dense_us_mean"])
        return rows

    def _system(self, system: _System, share: float) -> Row:
        table, options = self.table, self.options
        named = {"part": "served", "system": system.name, "budget_share": share}
        named |= {"is_simulated": False}
        is_mapped = system.backend == "mmap"
        if is_mapped and self.note is not None:
            return {**named, "note": self.note}
        rows_bytes = int(share * table.f32_bytes)
        plan = table.plan(rows_bytes) if system.keeps_codes else None
        file = table.folder / "plan"
        if plan is not None:
            plan.save(file)
        warm = table.options.warm_requests
        # A map is slow and has no admission to learn: fewer requests say as much.
        few = 4 if is_mapped else 1
        codec = system.placed_for
        job = {
            "snapshot": str(table.plain if codec is None else table.placed((share, codec))),
            "backend": system.backend,
            "cache": list(system.cache),
            "cache_bytes": rows_bytes if system.cache else 0,
            "plan": None if plan is None else str(file),
            "misses": "surrogate" if system.keeps_codes or system.has_neighbours else "read",
            "rows_bytes": table.f32_bytes * 4 if system.backend == "memory" else rows_bytes,
            "batch": BATCH,
            "warm_from": max(0, warm - MAP_WARM_REQUESTS) if not system.cache else 0,
            "warm_requests": warm,
            "singles": options.singles // few,
            "batches": max(1, options.batches // few),
        }
        try:
            return {**named, "rows_bytes": rows_bytes, **self.worker.ask("ask", job=job)}
        except WorkerError as error:
            if error.kind == "gone":
                raise
            return {**named, "note": str(error)}

    def _simulated(self, share: float, dense_us: float) -> Iterator[Row]:
        """FlashEmbedding's device: all times are simulated, on the same requests."""
        table = self.table
        measured = 2 * BATCH * self.options.batches
        first = max(0, table.options.warm_requests - 2 * measured)
        ids = table.ids[first:]
        offsets = torch.arange(ids.shape[0] + 1) * ids.shape[1]
        log = QueryLog.from_batches(table.row_count, [(ids.reshape(-1), offsets)])
        trace = _native.CacheLog.of(log.native, [table.row_count])
        for read_us in READ_US:
            options = SsdSimOptions(
                read_us=read_us,
                batch=BATCH,
                vector_bytes=4 * DIM,
                # Of the rows that are asked for at all, which is what the simulation knows.
                cache_share=min(0.99, share * table.row_count / trace.sizes()[2]),
                dense_us=round(dense_us),
                warm_share=1.0 - measured / ids.shape[0],
            )
            for told in json.loads(trace.replay_ssd(options.native())):
                yield {
                    "part": "served",
                    "system": f"simulated_{told['system']}_{read_us}us",
                    "budget_share": share,
                    "is_simulated": True,
                    "batch_lookup_us_mean": told["lookup_us"],
                    "batch_lookup_us_p99": told["lookup_us_p99"],
                    "batch_dense_us_mean": dense_us,
                    "batch_inference_us_mean": told["lookup_us"] + dense_us,
                    "hit_rate": told["hit_rate"],
                }
