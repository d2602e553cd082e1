"""What does a one-sided exchange save, next to a collective one?

Two processes, rows as arrays in memory, one kernel for all systems; only lookups are measured,
after the ids are known everywhere. The ladder, from what cannot be beaten to what is usual:

- ``compute``: each rank pools all samples into a matrix of its own and sends nothing;
- ``one_sided``: each vector is written straight into its place in the output that needs it;
- ``same_transport``: pool, copy blocks over the same shared memory, unpack;
- ``gloo``: pool, ``torch.distributed`` all-to-all over loopback sockets, unpack.

A round runs all systems in turn, each round another one first: what comes before warms caches.
Times are of the processor (all threads of a rank, waiting included as far as it spins) and of the
wall; each is the median over rounds of the mean over ranks.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tierbed._util.report import print_table, write_json
from tierbed_bench.common import ratio
from tierbed_bench.suite import write_suite

if TYPE_CHECKING:
    from tierbed._native_options import ExchangePlan, ShardedTable

__all__ = ["ExchangeOptions", "run_exchange"]

RANKS = 2
SYSTEMS = ("compute", "one_sided", "same_transport", "gloo")
TIMEOUT_MS = 120_000


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """What is measured.

    Args:
        quick: Small sizes, few rounds.
        seed: Of the ids.
    """

    quick: bool = False
    seed: int = 1

    @property
    def tables_per_rank(self) -> int:
        """Tables that each rank holds."""
        return 4 if self.quick else 16

    @property
    def row_count(self) -> int:
        """Rows of a table."""
        return 20_000 if self.quick else 100_000

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return 64

    @property
    def rounds(self) -> int:
        """Rounds that count."""
        return 8 if self.quick else 24

    @property
    def cases(self) -> list[tuple[int, int, int]]:
        """Samples of all ranks, fewest and most ids of a bag."""
        if self.quick:
            return [(512, 1, 1), (512, 0, 8), (512, 0, 16)]
        bags = [(1, 1), (0, 8), (0, 16), (0, 64)]
        return [(batch, *bag) for batch in (4096, 512) for bag in bags] + [(64, 0, 8)]


def run_exchange(out: Path, options: ExchangeOptions, json_path: Path | None = None) -> Path:
    """Runs the suite and writes ``exchange.json`` and ``exchange.png`` to ``out``."""
    with tempfile.TemporaryDirectory(prefix="tierbed-exchange-") as folder:
        spawn(_be_rank, args=(folder, options), nprocs=RANKS, join=True)  # type: ignore[no-untyped-call]
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    rows = [
        _row(case, system, [of_rank[at][system] for of_rank in ranks])
        for at, case in enumerate(options.cases)
        for system in SYSTEMS
    ]
    ratios = _ratios(rows)
    print_table("lookup of two ranks, ms (median)", rows)
    print_table("processor time", [{"ratio": name, "value": v} for name, v in ratios.items()])
    told = {
        "tables_per_rank": options.tables_per_rank,
        "row_count": options.row_count,
        "dim": options.dim,
        "rounds": options.rounds,
        "seed": options.seed,
        "measured": "measured-cpu",
    }
    path = write_suite(out, "exchange", rows, ratios, _bars(rows), told)
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _row(case: tuple[int, int, int], system: str, ranks: Sequence[Any]) -> dict[str, Any]:
    batch, shortest, longest = case
    rounds = list(zip(*ranks, strict=True))
    return {
        "variant": system,
        "ranks": RANKS,
        "batch": batch,
        "pooling": (shortest + longest) / 2,
        "cpu_ms": median(sum(cpu for cpu, _ in of_round) / RANKS for of_round in rounds),
        "wall_ms": median(max(wall for _, wall in of_round) for of_round in rounds),
    }


def _ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    cpu = {(row["variant"], row["batch"], row["pooling"]): row["cpu_ms"] for row in rows}
    ratios: dict[str, float | None] = {}
    for system, batch, pooling in cpu:
        if system != "one_sided":
            continue
        case = f"b{batch}_l{pooling:g}"
        own = cpu["one_sided", batch, pooling]
        for baseline in ("same_transport", "gloo"):
            ratios[f"one_sided_vs_{baseline}_{case}"] = ratio(cpu[baseline, batch, pooling], own)
        # The other way round: how much of the exchange is not hidden; 1 is nothing.
        ratios[f"one_sided_vs_compute_{case}"] = ratio(own, cpu["compute", batch, pooling])
    return ratios


def _be_rank(rank: int, folder: str, options: ExchangeOptions) -> None:
    """Measures as one rank; writes per case and system the CPU and wall ms of each round."""
    torch.set_num_threads(1)
    if len(os.sched_getaffinity(0)) >= RANKS:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS
    )
    results = [_measure(rank, case, options) for case in options.cases]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _measure(
    rank: int, case: tuple[int, int, int], options: ExchangeOptions
) -> dict[str, list[tuple[float, float]]]:
    with _Systems(rank, case, options) as systems:
        systems.check()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
        for number in range(-2, options.rounds):
            first = number % len(SYSTEMS)
            for name in SYSTEMS[first:] + SYSTEMS[:first]:
                run = systems.of(name)
                dist.barrier()
                cpu, wall = time.process_time(), time.perf_counter()
                run()
                spent = (1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall))
                if number >= 0:
                    times[name].append(spent)
    return times


class _Systems:
    """The four systems over one batch and one set of tables."""

    def __init__(self, rank: int, case: tuple[int, int, int], options: ExchangeOptions) -> None:
        from tierbed._native import NativeExchangeBench, NativeExchangePlan
        from tierbed.dist import ProcessRank
        from tierbed.dist.nodes import one_node

        batch, shortest, longest = case
        tables = RANKS * options.tables_per_rank
        plan = NativeExchangePlan(_plan(options), batch, batch * tables * longest, 1)
        heap = ProcessRank().share_heap(plan.region_bytes, one_node(rank, RANKS))
        self._heap = heap
        self._bench = NativeExchangeBench(plan, heap, rank, TIMEOUT_MS)
        generator = torch.Generator().manual_seed(options.seed * RANKS + rank)
        self._own = batch // RANKS
        lengths = torch.randint(shortest, longest + 1, (tables * self._own,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.randint(0, options.row_count, (int(offsets[-1]),), generator=generator)
        self._bench.begin(ids, offsets)
        self._width = options.tables_per_rank * options.dim
        self._local = _matrix(batch, self._width)
        self._received = _matrix(batch, self._width)
        self._out = _matrix(self._own, RANKS * self._width)

    def __enter__(self) -> _Systems:
        return self

    def __exit__(self, *error: object) -> None:
        self._bench.close()

    def of(self, name: str) -> Callable[[], object]:
        """Returns what runs a round of system ``name``."""
        return {
            "compute": lambda: self._bench.compute_only(self._local),
            "one_sided": self._bench.one_sided,
            "same_transport": self._same_transport,
            "gloo": self._gloo,
        }[name]

    def check(self) -> None:
        """Fails unless all systems have the same output."""
        address = self._bench.one_sided()
        values = (ctypes.c_float * self._out.numel()).from_address(address)
        one_sided = torch.frombuffer(values, dtype=torch.float32).view_as(self._out).clone()
        self._same_transport()
        if not torch.equal(self._out, one_sided):
            raise RuntimeError("same_transport and one_sided differ")
        if not torch.equal(self._gloo(), one_sided):
            raise RuntimeError("gloo and one_sided differ")

    def _same_transport(self) -> None:
        self._bench.compute_only(self._local)
        self._bench.all_to_all_and_unpack(self._local, self._out)

    def _gloo(self) -> torch.Tensor:
        self._bench.compute_only(self._local)
        dist.all_to_all_single(self._received, self._local)
        # TorchRec unpacks so: one matrix per rank, side by side.
        return torch.cat(torch.split(self._received, self._own), dim=1)


def _matrix(rows: int, columns: int) -> torch.Tensor:
    """Makes a matrix in pages as large as those that rows lie in, so that no system has better."""
    page = 2 << 20
    memory = mmap.mmap(-1, 4 * rows * columns + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.float32)
    first = -flat.data_ptr() % page // 4
    return flat[first : first + rows * columns].view(rows, columns).zero_()


def _plan(options: ExchangeOptions) -> ExchangePlan:
    tables: list[ShardedTable] = [
        {
            "row_count": options.row_count,
            "dim": options.dim,
            "sharding": {"kind": "whole", "rank": at // options.tables_per_rank},
        }
        for at in range(RANKS * options.tables_per_rank)
    ]
    features = [(at, "sum") for at in range(len(tables))]
    precision = "f32"
    return {
        "ranks": RANKS,
        "tables": tables,
        "features": features,
        "outputs": precision,
        "rows": precision,
    }


def _bars(rows: Sequence[dict[str, Any]]) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        cases = list(dict.fromkeys((row["batch"], row["pooling"]) for row in rows))
        for at, system in enumerate(SYSTEMS):
            own = [row["cpu_ms"] for row in rows if row["variant"] == system]
            axes.barh([case + 0.2 * at for case in range(len(cases))], own, 0.18, label=system)
        axes.set_yticks(range(len(cases)), [f"batch {b}, {p:g} ids a bag" for b, p in cases])
        axes.set_xlabel("processor ms of a rank per lookup (measured-cpu)")
        axes.invert_yaxis()
        axes.legend()

    return draw
