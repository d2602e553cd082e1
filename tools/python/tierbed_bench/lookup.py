"""What does a lookup cost from a snapshot on disk, next to memory?

Systems: a snapshot read directly through a row cache of several budgets, the same through
``mmap`` and the page cache, the same wholly in memory, and ``torch.nn.EmbeddingBag`` in memory
(one thread). Pages and bytes read per batch come first, then time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierbed._util.report import print_table, write_json
from tierbed.config.optim import SGD
from tierbed.config.tables import EmbeddingBagConfig, Uniform
from tierbed.config.words import SnapshotBackend
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn import EmbeddingBagCollection
from tierbed.serve.snapshot import Snapshot
from tierbed.train.store import Store
from tierbed_bench.common import (
    Measured,
    counts,
    flat_counters,
    interleave,
    percentile,
    ratio,
    zipf_batches,
)
from tierbed_bench.suite import write_suite

__all__ = ["run_lookup"]


Rounds = list[list[KeyedJaggedTensor]]


@dataclass(frozen=True)
class _Size:
    features: dict[str, int]
    dim: int
    batch_size: int
    batches: int
    rounds: int
    shares: tuple[float, ...] = (0.05, 0.1, 0.5)


_QUICK = _Size({f"c{at}": 250_000 for at in range(4)}, 32, 64, 100, 5)
_FULL = _Size({f"c{at}": 1_000_000 for at in range(8)}, 64, 64, 400, 5)


def run_lookup(out: Path, quick: bool, seed: int = 1, json_path: Path | None = None) -> Path:
    """Runs the suite; writes ``lookup.json`` and ``.png`` to ``out``, and ``json_path``."""
    size = _QUICK if quick else _FULL
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    row_bytes = sum(4 * size.dim * rows for rows in size.features.values())
    # Other batches than those that decided the order of rows on pages.
    rounds = [
        zipf_batches(size.features, size.batch_size, size.batches, seed=seed + 1 + number)
        for number in range(size.rounds + 1)
    ]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=out)))
        path, weights = _publish(folder, size, seed)
        systems = [
            _snapshot(
                stack,
                path,
                f"direct_{round(100 * share)}pct",
                "direct",
                int(share * row_bytes),
                rounds,
            )
            for share in size.shares
        ]
        systems += [
            _snapshot(stack, path, "mmap", "mmap", row_bytes // 10, rounds),
            _snapshot(stack, path, "memory", "memory", 4 * row_bytes, rounds),
            _torch_bags(weights, rounds),
        ]
        interleave([system for system, _ in systems], size.rounds)
    rows = [_row(system, waits, size, row_bytes) for system, waits in systems]
    return _write(out, rows, json_path)


def _publish(folder: Path, size: _Size, seed: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """Trains every row once and popular ones more, publishes, returns path and rows."""
    with Store.open(folder / "store", dram_budget="512MiB", seed=seed) as store:
        emb = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=size.dim,
                    init=Uniform(-0.1, 0.1),
                )
                for name, rows in size.features.items()
            ],
            store=store,
            optimizer=SGD(lr=0.01),
        )
        rows = max(size.features.values())
        step = 20_000
        for first in range(0, rows, step):
            ids = torch.arange(first, min(first + step, rows))
            every = KeyedJaggedTensor(
                list(size.features),
                ids.repeat(len(size.features)),
                lengths=torch.ones(len(size.features) * ids.numel(), dtype=torch.int64),
            )
            emb(every).values().sum().backward()  # type: ignore[no-untyped-call]
        for batch in zipf_batches(size.features, 4096, 20, seed=seed):
            emb(batch).values().sum().backward()  # type: ignore[no-untyped-call]
        store.publish(folder / "snapshot")
        weights = {name: store.read_rows(name, 0, rows) for name, rows in size.features.items()}
    return folder / "snapshot", weights


Timed = tuple[Measured, list[float]]


def _timed(
    name: str,
    lookup: Callable[[KeyedJaggedTensor], Any],
    rounds: Rounds,
    parameters: dict[str, Any] | None = None,
    counters: Callable[[], dict[str, float]] = dict,
) -> Timed:
    waits: list[float] = []

    def run(number: int) -> None:
        if number == 1:
            waits.clear()  # round 0 is not counted
        for batch in rounds[number]:
            started_s = time.perf_counter()
            lookup(batch)
            waits.append(time.perf_counter() - started_s)

    return Measured(name, run, parameters or {}, counters), waits


def _snapshot(
    stack: ExitStack,
    path: Path,
    name: str,
    backend: SnapshotBackend,
    budget: int,
    rounds: Rounds,
) -> Timed:
    snapshot = stack.enter_context(Snapshot.open(path, dram_budget=budget, backend=backend))
    return _timed(
        name,
        snapshot.lookup,
        rounds,
        {"backend": backend, "dram_budget_bytes": budget},
        lambda: flat_counters(snapshot.stats()),
    )


def _torch_bags(weights: dict[str, torch.Tensor], rounds: Rounds) -> Timed:
    bags = {
        name: torch.nn.EmbeddingBag.from_pretrained(rows, mode="sum")
        for name, rows in weights.items()
    }

    @torch.no_grad()
    def lookup(batch: KeyedJaggedTensor) -> torch.Tensor:
        stride = batch.stride()
        columns = batch.values().view(len(batch.keys()), stride)
        starts = batch.offsets()[:stride]
        parts = [bags[key](columns[at], starts) for at, key in enumerate(batch.keys())]
        return torch.cat(parts, dim=1)

    return _timed("torch_embedding_bag", lookup, rounds, {"backend": "memory"})


def _row(system: Measured, waits: list[float], size: _Size, row_bytes: int) -> dict[str, Any]:
    ids = size.batch_size * len(size.features)
    growth = {name: value / size.batches for name, value in counts(system.growth).items()}
    return {
        "system": system.name,
        "threads": 1,
        "features": len(size.features),
        "dim": size.dim,
        "batch_size": size.batch_size,
        "batches": size.batches,
        "rounds": size.rounds,
        "row_bytes": row_bytes,
        **system.parameters,
        **{f"{name}_per_batch": value for name, value in growth.items()},
        "latency_us_p50": 1e6 * percentile(waits, 0.50),
        "latency_us_p99": 1e6 * percentile(waits, 0.99),
        "ids_per_s": ids * size.batches / system.median_s,
    }


def _write(out: Path, rows: Sequence[dict[str, Any]], json_path: Path | None) -> Path:
    speed = {row["system"]: row["ids_per_s"] for row in rows}
    ratios = {
        f"{name}_vs_{baseline}": ratio(speed[name], speed[baseline])
        for name in speed
        for baseline in ("mmap", "memory", "torch_embedding_bag")
        if name != baseline
    }
    names = dict.fromkeys(name for row in rows for name in row)
    shown = [name for name in names if _is_shown(name)]
    print_table("lookup: a batch of one id per feature", rows, shown)
    print_table("ratios of ids per second", [{"ratio": k, "value": v} for k, v in ratios.items()])
    if json_path is not None:
        write_json(json_path, {"rows": rows, "ratios": ratios})
    return write_suite(out, "lookup", rows, ratios, _bars(rows))


def _is_shown(name: str) -> bool:
    wanted = ("system", "dram_budget_bytes", "latency_us_p50", "latency_us_p99", "ids_per_s")
    return name in wanted or name in (
        "snapshot_cache_hits_per_batch",
        "snapshot_cache_misses_per_batch",
        "snapshot_lookups_pages_read_per_batch",
        "snapshot_io_read_bytes_per_batch",
    )


def _bars(rows: Sequence[dict[str, Any]]) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        names = [row["system"].replace("_", " ") for row in rows]
        left.barh(names, [row["ids_per_s"] for row in rows], color="#3b6ea5")
        left.set_xlabel("ids per second (median of rounds)")
        left.invert_yaxis()
        right.barh(names, [row["latency_us_p99"] for row in rows], color="#b5651d")
        right.set_xlabel("p99 of a batch, us")
        right.set_xscale("log")
        right.invert_yaxis()

    return draw
