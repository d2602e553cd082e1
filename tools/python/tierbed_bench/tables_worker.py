"""One system that is called through Python, in a process of its own.

Same commands as the native worker: ``open`` and ``run``, whose mode ``skip`` trains and does not
count rows. A step is a lookup, a synthetic gradient and the optimizer's step, without a dense
model; in forward order the look-ahead, too. Reading the trace is not in it.
"""

from __future__ import annotations

import importlib
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tierbed.config.optim import Adagrad, RowWiseAdagrad
from tierbed.config.tables import EmbeddingBagConfig, Uniform
from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn import EmbeddingBagCollection
from tierbed.train.lookahead import lookahead
from tierbed.train.store import Store
from tierbed_bench.baselines import INIT, FbgemmTables, InMemoryTables, TorchTables
from tierbed_bench.trace import Trace
from tierbed_bench.workers import answer_commands

__all__ = ["main"]

_LR = 0.01


class _Reading:
    """The trace's batches in their known order; tells how long reading them took."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.seconds = 0.0
        self.cpu_seconds = 0.0

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        for number in range(self._trace.batch_count):
            at, cpu_at = time.perf_counter(), time.process_time()
            batch = self._trace.batch(number)
            self.seconds += time.perf_counter() - at
            self.cpu_seconds += time.process_time() - cpu_at
            yield batch

    def known_order(self) -> Any:
        """Promises the order; see :mod:`tierbed.data.order`."""
        order: Any = importlib.import_module("tierbed.data.order")
        return order.BatchOrder("trace", lambda: self, batch_count=self._trace.batch_count)


class _Forward:
    """Our tables in forward order, as a training loop uses them."""

    def __init__(self, job: dict[str, Any], trace: Trace) -> None:
        self._store = Store.open(
            Path(job["folder"]),
            dram_budget=int(job["dram_budget_bytes"]),
            order="forward",
            storage_thread=int(job["threads"]) > 1,
            seed=1,
        )
        self.reading = _Reading(trace)
        self._bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=feature,
                    num_embeddings=rows,
                    embedding_dim=int(job["dim"]),
                    init=Uniform(-INIT, INIT),
                )
                for feature, rows in trace.features.items()
            ],
            store=self._store,
            optimizer=RowWiseAdagrad(lr=_LR),
        )
        self._batches: Iterator[KeyedJaggedTensor] = iter(())

    def begin_epoch(self) -> None:
        """Makes the plan, the first time, and starts along it."""
        self._batches = lookahead(self.reading, self._bags, key=lambda batch: batch)

    def step(self, _: KeyedJaggedTensor, grad: torch.Tensor) -> None:
        """Takes the next batch of the order, which is the one the others are given."""
        batch = next(self._batches, None)
        if batch is None:
            self.begin_epoch()
            batch = next(self._batches)
        torch.autograd.backward(self._bags(batch).values(), grad)


class _Session:
    def __init__(self, job: dict[str, Any]) -> None:
        self.trace = Trace(Path(job["trace"]), int(job["batch_len"]))
        self.tables = _open(job, self.trace)
        shape = (self.trace.batch_len, len(self.trace.features) * int(job["dim"]))
        generator = torch.Generator().manual_seed(1)
        self._grad = torch.rand(shape, generator=generator) * 0.02

    def run(self, first: int, count: int, is_counted: bool) -> dict[str, Any]:
        steps_us = []
        cpu_s = 0.0
        reading = self.tables.reading if isinstance(self.tables, _Forward) else None
        batch = self.trace.batch(first)
        for number in range(first, first + count):
            if reading is None:
                batch = self.trace.batch(number)
            else:
                reading.seconds = reading.cpu_seconds = 0.0
            cpu_at, at = time.process_time(), time.perf_counter()
            self.tables.step(batch, self._grad)
            took_s, took_cpu_s = time.perf_counter() - at, time.process_time() - cpu_at
            if reading is not None:
                took_s -= reading.seconds
                took_cpu_s -= reading.cpu_seconds
            steps_us.append(round(1e6 * took_s))
            cpu_s += took_cpu_s
        numbers = range(first, first + count) if is_counted else ()
        return {
            "batches": count,
            "row_updates": sum(self.trace.row_count(number) for number in numbers),
            "steps_us": steps_us,
            "tail_us": 0,
            "cpu_ns": round(1e9 * cpu_s),
            "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "growth": {},
            "counters": {},
        }


def _open(job: dict[str, Any], trace: Trace) -> InMemoryTables | _Forward:
    makers: dict[str, Callable[[], InMemoryTables | _Forward]] = {
        "forward": lambda: _Forward(job, trace),
        "torch": lambda: TorchTables(trace.features, int(job["dim"]), Adagrad(lr=_LR)),
        "fbgemm": lambda: FbgemmTables(trace.features, int(job["dim"]), RowWiseAdagrad(lr=_LR)),
    }
    if job["system"] not in makers:
        raise InvalidError(f"unknown system {job['system']!r}")
    return makers[job["system"]]()


class _Answers:
    """What a worker says to commands; the session is that of the last ``open``."""

    def __init__(self) -> None:
        self._session: _Session | None = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "open":
            torch.set_num_threads(int(command["job"]["threads"]))
            at = time.perf_counter()
            self._session = _Session(command["job"])
            return {"seconds": time.perf_counter() - at}
        if self._session is None or command["do"] != "run":
            raise InvalidError(f"cannot {command['do']!r} here")
        is_counted = command["mode"] == "train"
        return self._session.run(int(command["first"]), int(command["count"]), is_counted)


def main() -> None:
    """Serves commands until standard input ends."""
    answer_commands(_Answers().answer)


if __name__ == "__main__":
    main()
