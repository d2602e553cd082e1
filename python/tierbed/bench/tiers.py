"""What do the tiers of the papers and ours read, how long do requests wait, and what AUC is left?

A DLRM is trained on the earlier samples of a log and published twice: with every table on pages
of its own, most used rows first, and with all tables placed together, so that rows asked for
together share pages. All earlier samples warm the tiers, in their order; then the later ones
are asked one by one, and at last all of these are scored through the same open snapshot. Every
system has the same bytes for its tiers: index, keys, policy and surrogates included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from json import loads
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tierbed.bench.common import percentile, ratio
from tierbed.bench.precision import DIM, PrecisionOptions, open_samples, use_counts
from tierbed.evaluate import evaluate
from tierbed.nn import CtrModel
from tierbed.placement import QueryLog, place, rows_per_page_of
from tierbed.progress import Progress
from tierbed.report import print_table, write_json, write_suite
from tierbed.serve import load_model
from tierbed.snapshot import Snapshot
from tierbed.source import Source
from tierbed.tier_plan import nearest_popular, plan_tiers
from tierbed.tiers import TierPlan, TierTable
from tierbed.train import EVAL_BATCH, Run, TrainOptions, auto_batch_size

__all__ = ["TiersOptions", "run_tiers"]

Row = dict[str, Any]
# The budgets of plans that read nothing, as shares of the f32 bytes.
PLAN_SHARES = (0.02, 0.025, 0.03, 0.04)
NEIGHBOUR_BYTES = 4
WARM_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class TiersOptions:
    """What to run.

    Args:
        log: Samples to train on and to ask, in Criteo's layout; generated ones when None.
        eval_share: Share of the samples, the last ones, that are asked and scored.
        shares: Bytes of all tiers, as shares of the bytes of the f32 rows.
        ratio: Replicas per row where all tables are placed together.
        requests: Ask at most this many of the samples.
        scratch: Folder for snapshots, deleted again; by default the folder of results.
        quick: Fewer generated samples and requests.
        seed: Of generated samples and initial weights.
    """

    log: Path | None = None
    eval_share: float = 0.2
    shares: tuple[float, ...] = (0.01, 0.05)
    ratio: float = 0.4
    requests: int | None = None
    scratch: Path | None = None
    quick: bool = False
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to keep rows.

    Args:
        name: As results spell it.
        cache: Its tiers.
        backend: Of the snapshot.
        is_placed: Whether all tables are placed together.
        neighbours: Whether a near row answers for a missing one (EVStore's third layer).
    """

    name: str
    cache: tuple[str, ...] = ()
    backend: str = "direct"
    is_placed: bool = False
    neighbours: bool = False


# EVStore's layers hold rows of 8 and 4 bits in its own formats.
SYSTEMS = (
    System(name="lru", cache=("f32:lru",)),
    System(name="flash_embedding", cache=("f32:lru:1:2",)),
    System(name="ev_lfu", cache=("f32:ev_lfu",)),
    System(name="evstore_l1", cache=("evstore8:ev_lfu",)),
    System(name="evstore_l1_l2", cache=("evstore8:ev_lfu", "evstore4:ev_lfu")),
    System(name="evstore_l1_l2_l3", cache=("evstore8:ev_lfu", "evstore4:ev_lfu"), neighbours=True),
    System(name="ours_f32_placed", cache=("f32:ours",), is_placed=True),
    System(name="ours_int8", cache=("int8:ours",)),
    System(name="ours_int8_placed", cache=("int8:ours",), is_placed=True),
    System(name="ours_int8_int4_placed", cache=("int8:ours:0.5", "int4:ours:0.5"), is_placed=True),
)


@dataclass(frozen=True)
class _Published:
    """Everything the systems are measured with."""

    plain: Path
    placed: Path
    source: Source
    asked: int
    f32_bytes: int
    exact: dict[str, float]
    rows: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor]


def run_tiers(out: Path, options: TiersOptions, json: Path | str | None = None) -> Path:
    """Runs the suite; writes ``tiers.json`` and ``tiers.png`` to ``out``."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=options.scratch or out) as folder:
        published = _publish(Path(folder), options)
        rows = [*_bounds(published), *_plans(published), *_systems(published, options)]
    ratios = _ratios(rows)
    shown = (
        "system",
        "dram_share",
        "rows_read_per_request",
        "pages_read_per_request",
        "perfect_hit_rate",
        "approximate_rows_per_request",
        "latency_us_mean",
        "latency_us_p90",
        "latency_us_p99",
        "auc_change",
    )
    print_table("tiers: requests of one sample", rows, shown)
    print_table("ratios", [{"ratio": name, "value": value} for name, value in ratios.items()])
    told = {
        "dim": DIM,
        "log": str(options.log) if options.log else "generated",
        "requests": published.asked,
        "warm_requests": published.source.train_samples,
        "f32_bytes": published.f32_bytes,
        "auc": published.exact["auc"],
    }
    path = write_suite(out, "tiers", rows, ratios, lambda figure: _draw(figure, rows), told)
    if json is not None:
        write_json(json, loads(path.read_text()))
    return path


def _publish(folder: Path, options: TiersOptions) -> _Published:
    source = open_samples(
        folder,
        PrecisionOptions(
            log=options.log,
            eval_share=options.eval_share,
            quick=options.quick,
            seed=options.seed,
        ),
    )
    train = TrainOptions(
        embedding_dim=DIM,
        batch_size=auto_batch_size(source.train_samples),
        seed=options.seed,
    )
    memory = {"backend": "memory", "dram_budget": "8GiB"}
    run = Run(folder / "run", source, train, source.train_samples, store_options=memory)
    try:
        run.train()
        rows = {name: run.store.read_rows(name, 0, n) for name, n in source.table_sizes.items()}
        exact = run.evaluate(source.eval_samples)
        run.store.publish(folder / "plain", run.model)
        file = folder / "placement"
        _place(source, options).write(file)
        names = tuple(source.table_sizes)
        run.store.publish(folder / "placed", run.model, placement={names: file})
    finally:
        run.close()
    asked = min(source.eval_samples, options.requests or (500 if options.quick else 1 << 30))
    return _Published(
        plain=folder / "plain",
        placed=folder / "placed",
        source=source,
        asked=asked,
        f32_bytes=sum(4 * table.numel() for table in rows.values()),
        exact=exact,
        rows=rows,
        counts=use_counts(source, rows),
    )


def _place(source: Source, options: TiersOptions) -> Any:
    batches = source.batches(0, source.train_samples, EVAL_BATCH)
    log = QueryLog.from_samples(source.table_sizes, (batch.sparse for batch in batches))
    misses = log.misses(log, max(options.shares)).log
    per_page = rows_per_page_of(DIM)
    placed = place(
        log, misses=misses, rows_per_page=per_page, ratio=options.ratio, seed=options.seed
    )
    return placed.ordered_by_use(misses)


# ---------------------------------------------------------------- systems


def _bounds(published: _Published) -> Iterator[Row]:
    """Yields the rows in memory, and mapped pages that the operating system may cache at will."""
    for backend in ("memory", "mmap"):
        system = System(name=backend, backend=backend)
        with _open(published, system, 0) as snapshot:
            yield _measure(published, system.name, snapshot, 0)


def _plans(published: _Published) -> Iterator[Row]:
    """Yields plans that keep something of every row and read nothing."""
    for share in PLAN_SHARES:
        budget = int(share * published.f32_bytes)
        plan = plan_tiers(published.rows, published.counts, dram_bytes=budget)
        name = f"resident_{100 * share:g}pct_{plan.about['head']}_{plan.about['tail']}"
        system = System(name=name)
        with _open(published, system, 0, plan, "default") as snapshot:
            held = int(snapshot.stats()["snapshot"]["resident_bytes"])
            yield {**_measure(published, name, snapshot, held), **plan.about}


def _systems(published: _Published, options: TiersOptions) -> Iterator[Row]:
    neighbours = _neighbours(published)
    near_bytes = NEIGHBOUR_BYTES * sum(table.shape[0] for table in published.rows.values())
    jobs = [(share, system) for share in options.shares for system in SYSTEMS]
    with Progress("asking", len(jobs), "systems") as bar:
        for share, system in jobs:
            left = int(share * published.f32_bytes)
            plan, misses = None, "read"
            if system.neighbours:
                plan, misses, left = neighbours, "surrogate", left - near_bytes
            if left > 0:
                named = replace(system, name=f"{system.name}_{100 * share:g}pct")
                with _open(published, named, left, plan, misses) as snapshot:
                    held = left + (near_bytes if system.neighbours else 0)
                    yield {**_measure(published, named.name, snapshot, held), "budget_share": share}
            bar.advance(1)


def _neighbours(published: _Published) -> TierPlan:
    tables = []
    for name, rows in published.rows.items():
        empty = torch.zeros(0, dtype=torch.int64)
        tables.append(
            TierTable(
                name=name,
                row_count=int(rows.shape[0]),
                dim=DIM,
                head_codec="int8",
                head_rows=empty,
                head_codes=empty.to(torch.uint8),
                neighbours=nearest_popular(rows, published.counts[name]),
            )
        )
    return TierPlan(tables=tuple(tables))


def _open(
    published: _Published,
    system: System,
    cache_bytes: int,
    plan: TierPlan | None = None,
    misses: str = "read",
) -> Snapshot:
    return Snapshot.open(
        published.placed if system.is_placed else published.plain,
        dram_budget="2GiB",
        backend=system.backend,
        cache=system.cache,
        cache_bytes=cache_bytes,
        tiers=plan,
        misses=misses,
    )


def _measure(published: _Published, name: str, snapshot: Snapshot, dram_bytes: int) -> Row:
    source = published.source
    last = source.train_samples
    for batch in source.batches(0, last, WARM_BATCH):
        snapshot.lookup(batch.sparse)
    before = snapshot.stats()["snapshot"]
    waits: list[float] = []
    perfect = 0
    reads = before["lookups"]["rows_read"]
    for batch in source.batches(last, last + published.asked, 1):
        started_s = time.perf_counter()
        snapshot.lookup(batch.sparse)
        waits.append(time.perf_counter() - started_s)
        # Counters are read outside of what is timed.
        now = snapshot.stats()["snapshot"]["lookups"]["rows_read"]
        perfect += now == reads
        reads = now
    after = snapshot.stats()["snapshot"]
    grown = {
        key: (after["lookups"][key] - before["lookups"][key]) / published.asked
        for key in after["lookups"]
    }
    scored = _score(published, snapshot)
    return {
        "system": name,
        "dram_bytes": dram_bytes,
        "dram_share": dram_bytes / published.f32_bytes,
        "cache_used_bytes": after["cache_used_bytes"],
        "rows_per_request": grown["row_count"],
        "rows_read_per_request": grown["rows_read"],
        "pages_read_per_request": grown["pages_read"],
        "device_reads_per_request": (after["io"]["read_count"] - before["io"]["read_count"])
        / published.asked,
        "approximate_rows_per_request": grown["rows_surrogate"] + grown["rows_default"],
        "perfect_hit_rate": perfect / published.asked,
        "latency_us_mean": 1e6 * mean(waits),
        "latency_us_p90": 1e6 * percentile(waits, 0.9),
        "latency_us_p99": 1e6 * percentile(waits, 0.99),
        "auc_change": scored["auc"] - published.exact["auc"],
        "pr_auc_change": scored["pr_auc"] - published.exact["pr_auc"],
        "tiers": after["tiers"],
    }


def _score(published: _Published, snapshot: Snapshot) -> dict[str, float]:
    model: CtrModel | None = load_model(snapshot)
    assert model is not None, "the bench publishes its model"
    first = published.source.train_samples
    last = first + published.source.eval_samples
    return evaluate(model, published.source.batches(first, last, EVAL_BATCH))


# ---------------------------------------------------------------- results


def _ratios(rows: list[Row]) -> dict[str, float]:
    """Reads of EV-LFU, a row at a time, next to pages of the others with the same bytes."""
    base = {r["budget_share"]: r for r in rows if r["system"].startswith("ev_lfu_")}
    found = {}
    for row in rows:
        reads = base.get(row.get("budget_share"), {}).get("rows_read_per_request")
        if reads and row["pages_read_per_request"] and row["system"].startswith("ours"):
            found[f"ev_lfu_rows_vs_{row['system']}_pages"] = ratio(
                reads, row["pages_read_per_request"]
            )
    return found


def _draw(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    names = [row["system"].replace("_", " ") for row in rows]
    left.barh(names, [row["pages_read_per_request"] for row in rows], color="#3b6ea5")
    left.set_xlabel("pages read per request")
    left.invert_yaxis()
    right.barh(names, [row["auc_change"] for row in rows], color="#b5651d")
    right.set_xlabel("change of AUC")
    right.invert_yaxis()
