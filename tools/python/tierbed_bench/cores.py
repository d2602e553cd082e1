"""How do training, placement and lookups scale with cores?

Every measurement runs in a process of its own, kept to its cores, with as many threads as cores.
Work is the same for every number of cores, and so are the results, which the run checks.

- training: a store of as many shards as cores follows a plan, memory for a share of the tables;
- lookups: threads look up batches of a snapshot whose pages are in memory;
- placement: a generated log is placed by ``shp``, and no placement may depend on the threads;
- arithmetic and copies: threads that share nothing, in their caches and in memory. What these lose
  the machine takes: cores of a virtual machine may be halves of one, and share its memory.

Counts say what a unit took, and where speed is lost: to idle cores, or to more work for a unit. A
model of them says where more cores stop to pay, also of machines with more cores than this one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierbed._util.progress import Progress
from tierbed._util.report import print_table, write_json
from tierbed.config.optim import RowWiseAdagrad
from tierbed.config.tables import EmbeddingBagConfig
from tierbed.data.order import BatchOrder
from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn.embedding import EmbeddingBagCollection
from tierbed.placement.build import QueryLog, place
from tierbed.serve.snapshot import Snapshot
from tierbed.train.lookahead import lookahead
from tierbed.train.store import Store
from tierbed_bench.common import long_tail_batch, measured_apart, ratio
from tierbed_bench.cores_counts import CoreCounts, Scaling, scaling_of
from tierbed_bench.generator import GeneratedData, scale_for_rows
from tierbed_bench.suite import write_suite

__all__ = ["PARTS", "CoresOptions", "run_cores"]

Row = dict[str, Any]
PARTS = ("training", "lookups", "placement", "arithmetic", "copies")
TABLES, DIM, BATCH = 16, 32, 2048
# Memory of a training store beside the rows: buffers of its shards.
BUDGET_BYTES = 256 << 20
# Of threads that share nothing: what fits a core's own cache, and what no cache holds.
CACHED_BYTES, UNCACHED_BYTES = 256 << 10, 64 << 20


@dataclass(frozen=True, kw_only=True)
class CoresOptions:
    """What to measure.

    Args:
        cores: Numbers of cores; those that the machine lacks are left out.
        parts: Which of :data:`PARTS`.
        rows: Rows of each of the 16 tables.
        batches: Batches of an epoch, and lookups of a thread.
        samples: Samples of the placed log.
        rounds: Measurements of each; the median counts.
        seed: Of all that is drawn.
    """

    cores: tuple[int, ...] = (1, 2, 4, 8, 16)
    parts: tuple[str, ...] = PARTS
    rows: int = 200_000
    batches: int = 60
    samples: int = 300_000
    rounds: int = 3
    seed: int = 1


def run_cores(out: Path, options: CoresOptions, json_path: Path | None = None) -> Path:
    """Runs the suite and writes ``cores.json`` and ``cores.png`` to ``out``."""
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        raise InvalidError(f"unknown parts {unknown}; there are {list(PARTS)}")
    usable = [count for count in options.cores if count <= len(os.sched_getaffinity(0))]
    if not usable:
        raise InvalidError("the machine has fewer cores than asked for; --cores 1 needs one")
    found: dict[tuple[str, int], list[Row]] = {}
    with Progress("cores", options.rounds * len(options.parts) * len(usable), "runs") as bar:
        # Numbers of cores in turn: other load falls on all of them.
        for _ in range(options.rounds):
            for part in options.parts:
                for count in usable:
                    found.setdefault((part, count), []).append(_measured(part, count, options))
                    bar.advance(1, f"{part}, {count} cores")
    rows = [_median(of_one) for of_one in found.values()]
    for part in options.parts:
        results = {row.pop("result") for row in rows if row["part"] == part}
        if len(results) > 1:
            raise InvalidError(f"{part} has other results on other numbers of cores")
    ratios = {
        f"{row['part']}_{row['cores']}_vs_1": ratio(row["per_s"], one["per_s"])
        for row in rows
        for one in rows
        if one["part"] == row["part"] and one["cores"] == 1 != row["cores"]
    }
    of_parts = {part: [row for row in rows if row["part"] == part] for part in options.parts}
    found_models = {part: scaling_of(of_part) for part, of_part in of_parts.items()}
    models = {part: model for part, model in found_models.items() if model is not None}
    model_rows = [model.row(part, options.cores) for part, model in models.items()]
    told = {
        "tables": TABLES,
        "dim": DIM,
        "batch": BATCH,
        "rounds": options.rounds,
        "models": model_rows,
    }
    path = write_suite(out, "cores", rows, ratios, _figure(rows, models, options.cores), told)
    print_table("units per second by cores", rows)
    print_table("speed over that of one core, by Amdahl's law", model_rows)
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _median(rows: Sequence[Row]) -> Row:
    return sorted(rows, key=lambda row: float(row["per_s"]))[len(rows) // 2]


def _measured(part: str, cores: int, options: CoresOptions) -> Row:
    """Measures in a process of its own."""
    sizes = [options.rows, options.batches, options.samples, options.seed]
    arguments = [part, str(cores), *map(str, sizes)]
    return measured_apart(__name__, arguments, f"{part} on {cores} cores")


def _figure(
    rows: Sequence[Row], models: Mapping[str, Scaling], cores: Sequence[int]
) -> Callable[[Any], None]:
    """Speed over that of one core, by cores; a line per part, and a dashed one of its model."""

    def draw(figure: Any) -> None:
        plot = figure.subplots()
        most = max(cores)
        plot.plot([1, most], [1, most], color="lightgray", label="linear")
        for part in dict.fromkeys(row["part"] for row in rows):
            of_part = sorted((row["cores"], row["per_s"]) for row in rows if row["part"] == part)
            counts, speeds = zip(*of_part, strict=True)
            relative = [speed / speeds[0] for speed in speeds]
            (line,) = plot.plot(counts, relative, marker="o", label=part)
            if part in models:
                modelled = [models[part].at(count) for count in range(1, most + 1)]
                plot.plot(range(1, most + 1), modelled, "--", color=line.get_color())
        plot.set_xlabel("cores; dashed: by the model")
        plot.set_ylabel(f"speed, that of {min(row['cores'] for row in rows)} cores is 1")
        plot.legend()

    return draw


# ------------------------------------------------------------ in the process of a measurement


class _Sizes:
    def __init__(self, cores: int, words: Sequence[str]) -> None:
        self.cores = cores
        self.rows, self.batches, self.samples, self.seed = map(int, words)

    def names(self) -> list[str]:
        return [f"t{at}" for at in range(TABLES)]

    def batch(self, generator: torch.Generator) -> KeyedJaggedTensor:
        """Returns ids with a long tail, one per table and sample."""
        return long_tail_batch(self.names(), self.rows, BATCH, generator)

    def epoch(self) -> Iterator[KeyedJaggedTensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return (self.batch(generator) for _ in range(self.batches))

    def tables(self) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(name=name, num_embeddings=self.rows, embedding_dim=DIM)
            for name in self.names()
        ]


class _Known:
    """The batches of two epochs, in a known order."""

    def __init__(self, batches: list[KeyedJaggedTensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        return iter([*self.batches, *self.batches])

    def known_order(self) -> BatchOrder:
        return BatchOrder("cores", lambda: iter(self.batches), 0, len(self.batches))


def _training(sizes: _Sizes, folder: Path, counts: CoreCounts) -> Row:
    batches = list(sizes.epoch())
    with Store.open(folder / "store", dram_budget=BUDGET_BYTES, shards=sizes.cores) as store:
        emb = EmbeddingBagCollection(sizes.tables(), store=store, optimizer=RowWiseAdagrad())
        grad = torch.full((BATCH, TABLES * DIM), 1e-3)
        for at, batch in enumerate(lookahead(_Known(batches), emb, window=16, key=lambda it: it)):
            if at == sizes.batches:
                counts.begin()
            emb(batch).values().backward(grad)  # type: ignore[no-untyped-call]
        row = counts.row(sizes.cores, sizes.batches * TABLES * BATCH)
        result = store.read_rows("t0", 0, min(sizes.rows, 10_000))
    return {"unit": "ids", **row, "result": _of(result)}


def _lookups(sizes: _Sizes, folder: Path, counts: CoreCounts) -> Row:
    with Store.open(backend="memory", dram_budget="4GiB", seed=sizes.seed) as store:
        EmbeddingBagCollection(sizes.tables(), store=store)
        for name in sizes.names():
            # Rows that were never written are made, not read.
            store.write_rows(name, 0, store.read_rows(name, 0, sizes.rows))
        store.publish(folder / "snapshot")
    batches = list(sizes.epoch())
    with Snapshot.open(folder / "snapshot", dram_budget="4GiB", readers=sizes.cores) as snapshot:

        def ask(_: int = 0) -> torch.Tensor:
            # A view would keep the whole output, and each lookup would need fresh memory.
            return torch.stack([snapshot.lookup(batch).values()[0].clone() for batch in batches])

        with ThreadPoolExecutor(sizes.cores) as threads:
            # Every thread has memory of its own to warm up.
            results = list(threads.map(ask, range(sizes.cores)))
            counts.begin()
            list(threads.map(ask, range(sizes.cores)))
            row = counts.row(sizes.cores, sizes.cores * sizes.batches * TABLES * BATCH)
    return {"unit": "ids", **row, "result": _of(results[0])}


def _placement(sizes: _Sizes, folder: Path, counts: CoreCounts) -> Row:
    data = GeneratedData(scale_for_rows(400_000), sizes.samples, 1 << 12, sizes.seed)
    batches = data.batches(0, sizes.samples, 1 << 12)
    samples = (batch.sparse for batch in batches)
    log = QueryLog.from_samples(dict(data.table_sizes()), samples)
    counts.begin()
    # Pages are grown a block of the log per thread, and this log is one block; bisecting is
    # divided whatever the log.
    placement = place(log, method="shp", ratio=0.0, seed=sizes.seed, threads=sizes.cores)
    row = counts.row(sizes.cores, log.pin_count)
    placement.write(folder / "placement")
    result = hashlib.sha256((folder / "placement").read_bytes()).hexdigest()
    return {"unit": "pins", **row, "result": result}


def _arithmetic(sizes: _Sizes, folder: Path, counts: CoreCounts) -> Row:
    data = bytes(range(256)) * (CACHED_BYTES // 256)

    def work(_: int) -> str:
        digest = hashlib.sha256()
        for _ in range(16 * sizes.batches):
            digest.update(data)
        return digest.hexdigest()

    return _apart(sizes, counts, work, 16 * sizes.batches * CACHED_BYTES)


def _copies(sizes: _Sizes, folder: Path, counts: CoreCounts) -> Row:
    def make() -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.arange(UNCACHED_BYTES // 4, dtype=torch.int32)
        return source, source.clone()

    copies = [make() for _ in range(sizes.cores)]

    def work(at: int) -> str:
        torch.set_num_threads(1)
        source, copy = copies[at]
        for _ in range(sizes.batches):
            copy.copy_(source)
        return str(int(copy[-1]))

    return _apart(sizes, counts, work, sizes.batches * UNCACHED_BYTES)


def _apart(sizes: _Sizes, counts: CoreCounts, work: Callable[[int], str], bytes_each: int) -> Row:
    """Measures threads that each do the same work, with nothing of it shared."""
    with ThreadPoolExecutor(sizes.cores) as threads:
        counts.begin()
        results = set(threads.map(work, range(sizes.cores)))
        row = counts.row(sizes.cores, sizes.cores * bytes_each)
    return {"unit": "bytes", **row, "result": " ".join(results)}


def _of(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.numpy().tobytes()).hexdigest()


def _main(part: str, cores: int, words: Sequence[str]) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    torch.set_num_threads(cores)
    measure = {
        "training": _training,
        "lookups": _lookups,
        "placement": _placement,
        "arithmetic": _arithmetic,
        "copies": _copies,
    }[part]
    # Before any thread is there.
    counts = CoreCounts()
    with tempfile.TemporaryDirectory() as folder:
        row = measure(_Sizes(cores, words), Path(folder), counts)
    print(json.dumps({"part": part, "cores": cores, **row}))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
