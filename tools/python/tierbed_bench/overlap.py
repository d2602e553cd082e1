"""What does a storage thread bring beside dense parts of several sizes?

A store in forward order is trained through Python with a storage thread, and another one without.
Each size of the dense part has a process of its own, in which the two take turns by epochs, so that
other load falls on both. Both must end with the same rows.

Torch has as many threads as the process may use: a large dense part leaves no processor idle.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
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
from tierbed.train.lookahead import lookahead
from tierbed.train.store import Store
from tierbed_bench.common import long_tail_batch, measured_apart, percentile, ratio
from tierbed_bench.suite import write_suite

__all__ = ["OverlapOptions", "run_overlap"]

Row = dict[str, Any]
SYSTEMS = ("no_thread", "thread")
TABLES, DIM, BATCH = 16, 32, 2048
RECORD_BYTES = 4 * (DIM + 2)  # weights, row-wise Adagrad's state, use count
LOOK_AHEAD_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """What to measure.

    Args:
        widths: Widths of the dense part's two hidden layers; 0 is no dense part.
        rows: Rows of each of the 16 tables.
        batches: Batches of 2,048 samples of an epoch.
        memory_share: Memory of a store, as a share of the rows.
        rounds: Measured epochs of each system; medians count.
        seed: Of all that is drawn.
    """

    widths: tuple[int, ...] = (0, 64, 256, 1024)
    rows: int = 200_000
    batches: int = 60
    memory_share: float = 0.06
    rounds: int = 5
    seed: int = 1


def run_overlap(out: Path, options: OverlapOptions, json_path: Path | None = None) -> Path:
    """Runs the suite and writes ``overlap.json`` and ``overlap.png`` to ``out``."""
    if min(options.rows, options.batches, options.rounds) < 1 or min(options.widths) < 0:
        raise InvalidError("rows, batches and rounds are at least 1, and widths at least 0")
    rows: list[Row] = []
    with Progress("overlap", len(options.widths), "dense parts") as bar:
        for width in options.widths:
            sizes = [options.rows, options.batches, options.rounds, options.seed]
            arguments = [str(width), str(options.memory_share), *map(str, sizes)]
            found = measured_apart(__name__, arguments, f"a dense part of width {width}")
            rows += found["rows"]
            bar.advance(1, f"width {width}")
    speeds = {(row["width"], row["system"]): row["samples_per_s"] for row in rows}
    ratios = {
        f"thread_vs_no_thread_width_{width}": ratio(
            speeds[width, "thread"], speeds[width, "no_thread"]
        )
        for width in options.widths
    }
    told = {
        "tables": TABLES,
        "dim": DIM,
        "batch": BATCH,
        "look_ahead_batches": LOOK_AHEAD_BATCHES,
        "rows": options.rows,
        "batches": options.batches,
        "memory_share": options.memory_share,
        "rounds": options.rounds,
        "threads_of_torch": len(os.sched_getaffinity(0)),
    }
    path = write_suite(out, "overlap", rows, ratios, _figure(rows), told)
    print_table("samples per second by dense part", rows)
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _figure(rows: Sequence[Row]) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        plot = figure.subplots()
        for system in SYSTEMS:
            of_one = [row for row in rows if row["system"] == system]
            names = [str(row["width"]) for row in of_one]
            speeds = [row["samples_per_s"] for row in of_one]
            plot.plot(names, speeds, marker="o", label=system.replace("_", " "))
        plot.set_xlabel("width of the dense part; 0 is none")
        plot.set_ylabel("samples per second")
        plot.set_ylim(bottom=0)
        plot.legend()

    return draw


# ------------------------------------------------------------ in the process of a dense part


class _Epoch:
    """The batches of an epoch, in a known order: ids with a long tail, one per table and sample."""

    def __init__(self, rows: int, batches: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.names = [f"t{at}" for at in range(TABLES)]
        self._batches = [
            long_tail_batch(self.names, rows, BATCH, generator) for _ in range(batches)
        ]

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        return iter(self._batches)

    def known_order(self) -> BatchOrder:
        return BatchOrder("overlap", lambda: iter(self._batches), 0, len(self._batches))


class _Trainer:
    """A model over a store, and how long its steps took."""

    def __init__(self, store: Store, epoch: _Epoch, rows: int, width: int) -> None:
        self.store = store
        self._epoch = epoch
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM)
            for name in epoch.names
        ]
        self._emb = EmbeddingBagCollection(tables, store=store, optimizer=RowWiseAdagrad())
        self._grad = torch.full((BATCH, TABLES * DIM), 1e-3)
        self._dense = self._optimizer = None
        if width:
            torch.manual_seed(1)
            sizes = [TABLES * DIM, width, width, 1]
            layers = [torch.nn.Linear(*pair) for pair in pairwise(sizes)]
            relu = torch.nn.ReLU()
            self._dense = torch.nn.Sequential(layers[0], relu, layers[1], relu, layers[2])
            self._optimizer = torch.optim.SGD(self._dense.parameters(), lr=1e-3)
        self.seconds: list[float] = []
        self.steps_s: list[float] = []
        self.cpu_s = 0.0

    def run(self, is_counted: bool) -> None:
        """Trains an epoch."""
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        steps_s = []
        at = begun_s
        for batch in lookahead(
            self._epoch, self._emb, window=LOOK_AHEAD_BATCHES, key=lambda it: it
        ):
            self._step(batch)
            at, before = time.perf_counter(), at
            steps_s.append(at - before)
        if is_counted:
            self.steps_s += steps_s
            self.seconds.append(time.perf_counter() - begun_s)
            self.cpu_s += time.process_time() - begun_cpu_s

    def _step(self, batch: KeyedJaggedTensor) -> None:
        pooled = self._emb(batch).values()
        if self._dense is None or self._optimizer is None:
            torch.autograd.backward(pooled, self._grad)
            return
        self._optimizer.zero_grad()
        loss = self._dense(pooled).sigmoid().mean()
        loss.backward()
        self._optimizer.step()

    def row(self, samples: int) -> Row:
        """Returns what was counted, an epoch having ``samples``."""
        return {
            "samples_per_s": median(samples / seconds for seconds in self.seconds),
            "step_ms_p50": 1e3 * percentile(self.steps_s, 0.5),
            "step_ms_p99": 1e3 * percentile(self.steps_s, 0.99),
            "cpu_ms_per_step": 1e3 * self.cpu_s / len(self.steps_s),
        }


def _main(width: int, memory_share: float, words: Sequence[str]) -> None:
    rows, batches, rounds, seed = map(int, words)
    epoch = _Epoch(rows, batches, seed)
    budget = int(memory_share * rows * TABLES * RECORD_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        trainers = {}
        for system in SYSTEMS:
            store = Store.open(
                Path(folder) / system,
                dram_budget=budget,
                seed=seed,
                order="forward",
                storage_thread=system == "thread",
            )
            trainers[system] = _Trainer(store, epoch, rows, width)
        for number in range(1 + rounds):
            for trainer in trainers.values():
                trainer.run(is_counted=number > 0)
        found = [trainer.store.read_rows("t0", 0, rows) for trainer in trainers.values()]
        if not all(torch.equal(found[0], other) for other in found):
            raise InvalidError("systems ended with other rows")
        told = [
            {"width": width, "system": system, **trainer.row(batches * BATCH)}
            for system, trainer in trainers.items()
        ]
        for trainer in trainers.values():
            trainer.store.close()
    print(json.dumps({"rows": told}))


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
