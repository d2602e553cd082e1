"""Does `tierbed plan cluster` foretell how fast hosts train?

Ranks train a DLRM's tables on hosts that `scripts/hosts` makes of namespaces. Two runs without a
limit of the links say what a sample costs: compute and bytes with all rows in memory, the disk with
few of them. From these inputs the calculator foretells hosts by rates of their links and shares of
rows in memory; then they are measured. Each host has a rank, and each rank a thread. The hosts
share a disk, so what it brings is measured on as many of them.

The exchange of ranks and their reads follow each other, so the parts of a step are added.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierbed as tb
from tierbed import dist as tbd
from tierbed._util.report import print_table, write_json
from tierbed.config.words import ExchangeKind, Positive
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.sizing import Inputs, Measured, plan_training
from tierbed_bench.hosts import hosts, sent_bytes, why_no_hosts
from tierbed_bench.suite import write_suite

__all__ = ["ClusterOptions", "run_cluster"]

#: What a store takes beside the rows that it keeps.
FIXED_BYTES = 8 << 20
#: Steps that do not count: connections, and memory that is new.
WARM_STEPS = 3
SKEW = 3.0
HOSTS = 2


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What hosts train.

    Args:
        tables: Tables, one id of each in a sample.
        rows: Rows of a table.
        dim: Elements of a row.
        batch: Samples of a rank and step.
        steps: Steps that count.
        rounds: Runs of each kind; the one in the middle counts.
        rates: Rates of the links, in Mbit/s.
        shares: Shares of the rows in memory.
        exchange: How ranks of different hosts exchange rows.
        quick: Small sizes, about a minute.
        seed: Of everything that is drawn.
    """

    tables: Positive = 16
    rows: Positive = 50_000
    dim: Positive = 64
    batch: Positive = 1024
    steps: Positive = 40
    rounds: Positive = 3
    rates: tuple[int, ...] = (1000, 200)
    shares: tuple[float, ...] = (1.0, 0.1)
    exchange: ExchangeKind = "collective"
    quick: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) < 1:
            raise InvalidError(f"--rates are Mbit/s from 1, not {self.rates}; give 1000,200")
        if not self.shares or not all(0.0 < share <= 1.0 for share in self.shares):
            raise InvalidError(f"--shares are from 0 to 1, not {self.shares}; give 1,0.1")

    @property
    def table_bytes(self) -> int:
        """Bytes of all rows."""
        return self.tables * self.rows * self.dim * 4


@dataclass(frozen=True)
class Case:
    """Hosts that train.

    Args:
        hosts: How many.
        rate: Of their links, in Mbit/s; None: no limit.
        share: Of the rows in memory.
    """

    hosts: int
    rate: int | None
    share: float


def run_cluster(out: Path, options: ClusterOptions, json_path: Path | None = None) -> Path:
    """Runs the suite; writes ``cluster.json`` with measured inputs to ``out``.

    Raises:
        UnsupportedError: This machine makes no hosts; the error says what is missing.
    """
    if (why := why_no_hosts()) is not None:
        raise UnsupportedError(f"bench cluster: {why}")
    if options.quick:
        small = {"tables": 4, "rows": 5_000, "dim": 16, "batch": 128, "steps": 5, "rounds": 1}
        options = ClusterOptions(**{**asdict(options), **small})
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        runs = _Runs(options, Path(folder))
        values = _costs(runs, options)
        rows = [
            _row(Case(HOSTS, rate, share), runs, values, options)
            for rate in options.rates
            for share in options.shares
        ]
    print_table("inputs that were measured", [values])
    print_table("samples a second", rows)
    ratios = {
        f"{row['rate_mbit']:.0f}_mbit_{row['dram_share']:g}_dram_planned_vs_measured": (
            row["planned_samples_per_s"] / row["samples_per_s"]
        )
        for row in rows
    }
    told = {**asdict(options), "inputs": values, "error_max": max(abs(r["error"]) for r in rows)}
    path = write_suite(out, "cluster", rows, ratios, None, told)
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _costs(runs: _Runs, options: ClusterOptions) -> dict[str, float]:
    """Measures what a sample costs: the inputs of the calculator."""
    free = runs.median(Case(HOSTS, None, 1.0))
    least = min(options.shares)
    values = {
        "dim": options.dim,
        "ids": options.tables,
        "batch": options.batch,
        "ranks": 1,
        "step_us": free["step_s"] / options.batch * 1e6,
        "wire_bytes": free["sent_bytes"] / options.batch,
    }
    if least < 1.0:
        slow = runs.median(Case(HOSTS, None, least))
        waited_s = max(slow["step_s"] - free["step_s"], 1e-9)
        moved = max(slow["disk_bytes"], 1.0)
        values["disk_bytes"] = moved / options.batch
        values["host_ssd_gb_per_s"] = moved / waited_s / 1e9
    return values


def _row(
    case: Case, runs: _Runs, values: dict[str, float], options: ClusterOptions
) -> dict[str, Any]:
    """Foretells a case, measures it, and compares."""
    assert case.rate is not None, "a limit is what is foretold"
    given = {
        "table": float(options.table_bytes),
        "dram_share": case.share,
        "host_gbit": case.rate / 1000,
    }
    inputs = Inputs(given, [Measured("bench cluster", values)])
    planned = plan_training(inputs, case.hosts, is_overlapped=False)
    found = runs.median(case)
    real = case.hosts * options.batch / found["step_s"]
    return {
        "hosts": case.hosts,
        "rate_mbit": case.rate,
        "dram_share": case.share,
        "planned_samples_per_s": planned.samples_per_s,
        "samples_per_s": real,
        "error": planned.samples_per_s / real - 1.0,
        "bound_by": planned.binds,
        "wire_bytes": found["sent_bytes"] / options.batch,
        "disk_bytes": found["disk_bytes"] / options.batch,
    }


class _Runs:
    """Runs of hosts, each in a folder of its own.

    Args:
        options: What they train.
        folder: Where.
    """

    def __init__(self, options: ClusterOptions, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.count = 0

    def median(self, case: Case) -> dict[str, float]:
        """Runs a case some times; returns the run whose step is the one in the middle."""
        found = sorted(
            (self._run(case) for _ in range(self.options.rounds)), key=lambda run: run["step_s"]
        )
        return found[len(found) // 2]

    def _run(self, case: Case) -> dict[str, float]:
        self.count += 1
        folder = self.folder / str(self.count)
        rate = None if case.rate is None else f"{case.rate}mbit"
        told = (str(folder), asdict(self.options), case.share)
        with hosts(case.hosts, rate=rate) as made:
            ranks: list[dict[str, float]] = made.run(train, *told, folder=folder, limit_s=900.0)
        # All wait for the last.
        return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def train(folder: str, told: dict[str, Any], share: float) -> dict[str, float]:
    """Trains as a rank; returns seconds, bytes sent and bytes of the disk, of a step.

    Args:
        folder: Where its store is.
        told: Fields of :class:`ClusterOptions`.
        share: Share of the rows in memory.
    """
    options = ClusterOptions(**told)
    rank, count = dist.get_rank(), dist.get_world_size()
    names = [f"t{at}" for at in range(options.tables)]
    configs = [tb.EmbeddingBagConfig(options.rows, options.dim, name) for name in names]
    plan = tbd.ShardingPlan(
        count, {name: tbd.TableWise(at % count) for at, name in enumerate(names)}
    )
    # With all rows in memory there is room for the whole of their pages, too.
    budget = int(options.table_bytes / count * (2.0 if share == 1.0 else share))
    store = tb.Store.open(
        Path(folder) / f"rank-{rank}", backend="file", dram_budget=budget + FIXED_BYTES
    )
    how = tbd.ExchangeOptions(kind=options.exchange, samples_max=options.batch)
    rows = tbd.ShardedEmbeddingBagCollection(configs, store=store, plan=plan, exchange=how)
    generator = torch.Generator().manual_seed(options.seed * 1000 + rank)
    for first in range(0, options.rows, options.batch):
        # All rows are there and on disk before any of them is asked for.
        rows(_all_from(first, names, options)).values().sum().backward()  # type: ignore[no-untyped-call]
    steps = WARM_STEPS + options.steps
    batches = [_batch(names, options, generator) for _ in range(steps)]
    started_s, before = 0.0, (0, 0)
    for at, batch in enumerate(batches):
        if at == WARM_STEPS:
            dist.barrier()
            started_s, before = time.perf_counter(), (sent_bytes(), _moved(store))
        rows(batch).values().sum().backward()  # type: ignore[no-untyped-call]
    dist.barrier()
    spent_s = time.perf_counter() - started_s
    after = sent_bytes(), _moved(store)
    store.close()
    return {
        "step_s": spent_s / options.steps,
        "sent_bytes": (after[0] - before[0]) / options.steps,
        "disk_bytes": (after[1] - before[1]) / options.steps,
    }


def _batch(
    names: list[str], options: ClusterOptions, generator: torch.Generator
) -> tb.KeyedJaggedTensor:
    """Draws a sample's ids, of which few rows have most."""
    drawn = torch.rand(len(names) * options.batch, generator=generator)
    ids = (drawn**SKEW * options.rows).long()
    return tb.KeyedJaggedTensor(names, ids, lengths=torch.ones(len(ids), dtype=torch.int64))


def _all_from(first: int, names: list[str], options: ClusterOptions) -> tb.KeyedJaggedTensor:
    """A batch of rows one after the other."""
    ids = (torch.arange(first, first + options.batch) % options.rows).repeat(len(names))
    return tb.KeyedJaggedTensor(names, ids, lengths=torch.ones(len(ids), dtype=torch.int64))


def _moved(store: tb.Store) -> int:
    """Bytes read and written so far."""
    io = store.stats()["store"]["io"]
    return int(io["read_bytes"] + io["write_bytes"])
