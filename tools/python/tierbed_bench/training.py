"""What does a row update cost with tables on disk, next to others and next to memory?

A generated trace of Criteo-Kaggle's shape is trained by every system with equal memory (5 % of
the tables), each in a process of its own. Stores run behind the window engine, with the look-ahead
that :func:`tierbed.lookahead` has by default. The forward order stays open from begin to end; every
other system in turn trains some batches to warm up, and then slices that alternate with the forward
order's slices *of the same batches*. Ratios are medians over pairs of slices, so that neighbours'
load falls on both sides. Native systems are driven without Python; ``forward_python``, torch and
FBGEMM are called through Python. All have one thread, but for those that say so in their names: the
second one is torch's and FBGEMM's for their arithmetic, and moves rows in the forward order.

Slices are short next to an epoch: amplification of the baselines is still rising when they end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tierbed.errors import InvalidError
from tierbed_bench.training_report import Outcome, ratios_of, row_of, shown, write_training
from tierbed_bench.workers import Worker, WorkerError

__all__ = ["DIM", "LOOK_AHEAD_BATCHES", "RECORD_BYTES", "TrainingOptions", "run_training"]

DIM = 36
RECORD_BYTES = 4 * (DIM + 2)  # weights, row-wise Adagrad's state, use count
LOOK_AHEAD_BATCHES = 64  # the default of tierbed.lookahead
PLAN_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What to run.

    Args:
        scale: Share of Criteo-Kaggle's samples; 1 is all.
        seed: Of the trace.
        quick: Small sizes, about a minute.
        repeats: Slices a system.
        dram_share: Memory of every system, as a share of the tables.
        systems: These beside the forward order, by comma; all when empty.
        scratch: Folder for trace, plans and rows, by default beside the results.
        seconds_max: Longest time for one answer of a system; then it counts as skipped.
    """

    scale: float | None = None
    seed: int = 1
    quick: bool = False
    repeats: int = 3
    dram_share: float = 0.05
    systems: tuple[str, ...] = ()
    scratch: Path | None = None
    seconds_max: float = 400.0


@dataclass(frozen=True, kw_only=True)
class _System:
    """A system to hold against the forward order."""

    name: str
    kind: str  # forward, keyed, memory, python
    order: str
    native: str = ""
    dram_share: float | None = None
    threads: int = 1  # in forward order the second one moves rows


_SYSTEMS = (
    _System(name="memory", kind="memory", order="any"),
    # Early: they must come to where the forward order stands before they can be held beside it.
    _System(name="forward_pipelined", kind="forward", order="forward", threads=2),
    _System(name="forward_2_5_percent", kind="forward", order="forward", dram_share=0.025),
    _System(name="forward_20_percent", kind="forward", order="forward", dram_share=0.2),
    _System(name="rocksdb", kind="keyed", order="by key"),
    _System(name="hashdb", kind="keyed", order="by key"),
    _System(name="file", kind="keyed", order="by key"),
    _System(name="cold", kind="keyed", order="cold"),
    _System(name="recdb", kind="keyed", order="by key"),
    _System(name="forward_python", kind="python", order="forward", native="forward"),
    _System(name="torch", kind="python", order="any"),
    _System(name="fbgemm", kind="python", order="any"),
    _System(
        name="forward_python_2_threads", kind="python", order="forward", native="forward", threads=2
    ),
    _System(name="torch_2_threads", kind="python", order="any", native="torch", threads=2),
    _System(name="fbgemm_2_threads", kind="python", order="any", native="fbgemm", threads=2),
)

_PARTS = tuple(
    _System(name=name, kind="keyed", order="by key")
    for name in (
        "recdb",
        "recdb_without_hot_rows",
        "recdb_without_sorter",
        "recdb_without_picker",
        "recdb_without_scheduler",
        "plain_lsm",
    )
)


@dataclass(frozen=True)
class _Size:
    scale: float
    batch_len: int
    warm_batches: int
    slice_batches: int


def _size_of(options: TrainingOptions) -> _Size:
    if options.quick:
        return _Size(options.scale or 0.01, 256, 32, 16)
    scale = 0.1 if options.scale is None else options.scale
    if not 0 < scale <= 1:
        raise InvalidError(f"scale must be above 0 and at most 1, not {scale}")
    return _Size(scale, 2048 if scale >= 0.25 else 1024 if scale >= 0.05 else 256, 256, 96)


def run_training(out: Path, options: TrainingOptions, json_path: Path | None = None) -> Path:
    """Runs the suite and writes ``training.json`` and ``training.png`` to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    size = _size_of(options)
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        root = options.scratch or out
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=root, prefix="bench-")))
        bench = _Bench(folder / "whole", size, options)
        outcomes += bench.run(_chosen(_SYSTEMS, options))
        parts = _chosen(_PARTS, options)
        if len(parts) > 1 or not options.systems:
            shutil.rmtree(folder / "whole")
            # The parts are held against each other: a smaller trace tells the same.
            small = replace(size, scale=min(size.scale, 0.1), batch_len=min(size.batch_len, 1024))
            part_bench = _Bench(folder / "parts", small, options)
            outcomes += part_bench.run(parts, prefix="parts_")
            bench.told["parts"] = part_bench.told
    ratios, notes = ratios_of(outcomes)
    rows = [row_of(outcome) for outcome in outcomes]
    shown(rows, ratios, notes)
    told = {
        "scale": size.scale,
        "seed": options.seed,
        "repeats": options.repeats,
        "dim": DIM,
        "batch_len": size.batch_len,
        "look_ahead_batches": LOOK_AHEAD_BATCHES,
        **bench.told,
        "notes": notes,
    }
    return write_training(out, rows, ratios, told, json_path)


def _chosen(systems: tuple[_System, ...], options: TrainingOptions) -> list[_System]:
    wanted = options.systems
    known = {system.name for system in _SYSTEMS + _PARTS}
    for name in wanted:
        if name not in known:
            raise InvalidError(f"unknown system {name!r}; there are {', '.join(sorted(known))}")
    return [system for system in systems if not wanted or system.name in wanted]


@dataclass
class _Bench:
    """One trace, the forward order along it, and the systems beside it."""

    folder: Path
    size: _Size
    options: TrainingOptions
    told: dict[str, Any] = field(default_factory=dict)
    budget_bytes: int = 0
    table_bytes: int = 0
    batches: int = 0  # of an epoch
    first: int = 0  # number of the next batch of the forward order

    def run(self, systems: list[_System], prefix: str = "") -> list[Outcome]:
        """Runs the forward order and then ``systems``, one after another, beside it."""
        self.folder.mkdir(parents=True)
        self._make_trace()
        outcomes = []
        with ExitStack() as stack:
            forward_system = _System(name=f"{prefix}forward", kind="forward", order="forward")
            forward = self._outcome(forward_system)
            outcomes.append(forward)
            worker = stack.enter_context(Worker(max(self.options.seconds_max, 1800.0)))
            self._open_forward(worker, forward, forward_system, self.folder / "plan")
            for system in systems:
                outcome = self._outcome(replace(system, name=prefix + system.name))
                outcomes.append(outcome)
                try:
                    self._pair(worker, forward, system, outcome)
                except WorkerError as error:
                    outcome.skipped = str(error)
                    _say(f"{outcome.name} is skipped: {error}")
                # Rows that changed since the last checkpoint are on disk twice until the next.
                worker.ask("checkpoint")
                shutil.rmtree(self._rows(system), ignore_errors=True)
                # Discarding gigabytes may keep the device busy: not in others' slices.
                os.sync()
            forward.storage = worker.ask(
                "run", first=self.first, count=self.size.slice_batches, mode="pass"
            )
        return outcomes

    def _outcome(self, system: _System) -> Outcome:
        share = system.dram_share or self.options.dram_share
        in_memory = system.kind in ("memory", "python") and system.native != "forward"
        return Outcome(
            name=system.name,
            kind=system.kind,
            order=system.order,
            threads=system.threads,
            scale=self.size.scale,
            batch_len=self.size.batch_len,
            dram_share=1.0 if in_memory else share,
            look_ahead=LOOK_AHEAD_BATCHES if system.kind == "keyed" else "all",
            table_bytes=self.table_bytes,
        )

    def _make_trace(self) -> None:
        size = self.size
        with Worker() as worker:
            _say(f"trace of scale {size.scale:g}")
            trace = worker.ask(
                "trace", path=self.folder / "trace", scale=size.scale, seed=self.options.seed
            )
        rows = trace["total"]["row_count"]
        self.table_bytes = RECORD_BYTES * rows
        self.budget_bytes = int(self.options.dram_share * self.table_bytes)
        self.batches = trace["samples"] // size.batch_len
        self.first = self.batches
        self.told |= {
            "samples": trace["samples"],
            "rows": rows,
            "rows_used_once": trace["total"]["once_count"],
            "rows_used_ten_times": trace["total"]["ten_times_count"],
            "rows_per_batch_of_2048": trace["rows_per_batch_of_2048"],
            "table_bytes": self.table_bytes,
            "dram_budget_bytes": self.budget_bytes,
            "trace_s": trace["seconds"],
        }

    def _rows(self, system: _System) -> Path:
        return self.folder / f"rows_{system.name}"

    def _open_forward(self, worker: Worker, outcome: Outcome, system: _System, plan: Path) -> None:
        """Plans, trains the first epoch, in which rows are made, and checkpoints."""
        budget = int((system.dram_share or self.options.dram_share) * self.table_bytes)
        _say(f"{outcome.name}: plan and first epoch")
        with Worker(1800.0) as planner:
            outcome.plan = planner.ask(
                "plan",
                trace=self.folder / "trace",
                folder=plan,
                batch_len=self.size.batch_len,
                dim=DIM,
                window_bytes=budget // 12,
                memory_bytes=PLAN_MEMORY_BYTES,
            )
        worker.ask("open", job=self._job(system, "forward", budget, plan))
        outcome.first_epoch = worker.ask("run", first=0, count=self.batches, mode="train")
        outcome.checkpoint = worker.ask("checkpoint")
        outcome.warm = worker.ask(
            "run", first=self.batches, count=self.size.warm_batches, mode="train"
        )
        if system.dram_share is None and system.threads == 1:
            self.first = self.batches + self.size.warm_batches

    def _job(self, system: _System, name: str, budget: int, plan: Path) -> dict[str, Any]:
        return {
            "system": name,
            "trace": self.folder / "trace",
            "plan": plan,
            "folder": self._rows(system),
            "dim": DIM,
            "batch_len": self.size.batch_len,
            "dram_budget_bytes": budget,
            "look_ahead_batches": LOOK_AHEAD_BATCHES,
            "threads": system.threads,
        }

    def _pair(
        self, forward_worker: Worker, forward: Outcome, system: _System, outcome: Outcome
    ) -> None:
        started = time.perf_counter()
        with ExitStack() as stack:
            module = "tierbed_bench.tables_worker" if system.kind == "python" else None
            seconds = 1800.0 if system.order == "forward" else self.options.seconds_max
            worker = stack.enter_context(Worker(seconds, module))
            if system.kind == "forward":
                plan = self.folder / f"plan_{system.name}"
                stack.callback(shutil.rmtree, plan, ignore_errors=True)
                self._open_forward(worker, outcome, system, plan)
                at = self.batches + self.size.warm_batches
                if at < self.first:
                    worker.ask("run", first=at, count=self.first - at, mode="train")
                    worker.ask("checkpoint")
            else:
                _say(f"{outcome.name}: fill and warm up")
                name = system.native or system.name
                job = self._job(system, name, self.budget_bytes, self.folder / "plan")
                outcome.opened = worker.ask("open", job=job)
                first = self.first - self.size.warm_batches
                if system.kind == "python" and system.order == "forward":
                    worker.ask("run", first=0, count=first, mode="skip")
                outcome.warm = worker.ask(
                    "run", first=first, count=self.size.warm_batches, mode="train"
                )
            for _ in range(self.options.repeats):
                asked = {"first": self.first, "count": self.size.slice_batches, "mode": "train"}
                beside = forward_worker.ask("run", **asked)
                self.first += self.size.slice_batches
                forward.slices.append(beside)
                outcome.slices.append(worker.ask("run", **asked))
                outcome.beside.append(beside)
            if system.kind == "forward":
                outcome.storage = worker.ask(
                    "run", first=self.first, count=self.size.slice_batches, mode="pass"
                )
            elif system.kind == "keyed":
                outcome.checkpoint = worker.ask("checkpoint")
        _say(f"{outcome.name}: {time.perf_counter() - started:.0f} s")


def _say(text: str) -> None:
    print(f"bench training: {text}", flush=True)
