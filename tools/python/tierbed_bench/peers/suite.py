"""What do stores of rows answer from a device, under one limit of memory, next to a snapshot?

All hold the same table and answer the same queries in the same order. Every measurement is a
process of its own in a memory cgroup, which counts its share of the page cache, too. It begins with
none of its files in the page cache, and warms up with queries that are not asked again. Systems
take turns, so that other load falls on all of them.

Memory is a share of the rows' bytes, for rows and for all that finds them. ``SLACK_BYTES`` more are
allowed for stacks, buffers and page tables. What a process had before it opened its system does not
count: Python, modules, queries.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tierbed._util.bytes import size_text
from tierbed._util.progress import Progress
from tierbed._util.report import print_table, write_json
from tierbed.errors import CorruptionError, InvalidError, NoSpaceError
from tierbed_bench.common import least_stolen
from tierbed_bench.memory_group import MemoryGroup
from tierbed_bench.peers.queries import Queries
from tierbed_bench.peers.report import COLUMNS, compared, figure, medians, ratios
from tierbed_bench.peers.systems import OURS, SYSTEMS
from tierbed_bench.peers.table import Table
from tierbed_bench.suite import write_suite
from tierbed_bench.workers import Worker, WorkerError

__all__ = ["PeersOptions", "run_peers"]

Row = dict[str, Any]
SLACK_BYTES = 8 << 20
# Rows asked for while warming, for each row that fits the memory: a cache of rows of a power law
# is nearly full then.
WARM_FOLD = 5
# No system answers more rows a second here; as many queries are made.
ROWS_PER_S_MAX = 1_500_000
# Beside what is measured: opening, filling and checking.
CELL_SECONDS = 900.0
# What systems need on disk at most, next to the rows' bytes: pages of 4 KiB with rows of 256 bytes.
DISK_FOLD = 1.12
# Redis has 400 bytes for a row of 256.
IN_MEMORY_FOLD = 1.8


@dataclass(frozen=True, kw_only=True)
class PeersOptions:
    """What to measure.

    Args:
        systems: Which; Tierbed is always among them.
        table_bytes: Bytes of all rows.
        dim: Elements of a row, float32.
        rows: Rows of a query.
        clients: Threads that ask, each one query at a time.
        memory: Memory as shares of the rows' bytes.
        rounds: Measurements of each; medians count.
        seconds: Longest time of a measurement.
        warm_seconds: Longest time of the queries before it.
        skew: Exponent of how often rows are asked for; with a log, copies of its rows.
        log: A query log, one per line: its rows are repeated until the table is large enough.
        scratch: Folder for what is deleted again.
        seed: Of all that is drawn.
        quick: A small table, for seconds: it shows only that all work.
    """

    systems: tuple[str, ...] = tuple(SYSTEMS)
    table_bytes: int = 8 << 30
    dim: int = 64
    rows: tuple[int, ...] = (26, 200)
    clients: tuple[int, ...] = (1, 8)
    memory: tuple[float, ...] = (0.01, 0.05)
    rounds: int = 3
    seconds: float = 4.0
    warm_seconds: float = 20.0
    skew: float = 1.05
    log: Path | None = None
    scratch: Path | None = None
    seed: int = 1
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement of each system.

    Args:
        rows: Rows of a query.
        clients: Threads that ask.
        memory_share: Of the rows' bytes; None is no limit.
    """

    rows: int
    clients: int
    memory_share: float | None


def run_peers(out: Path, options: PeersOptions, json_path: Path | None = None) -> Path:
    """Runs the suite and writes ``peers.json`` and ``peers.png`` to ``out``.

    Raises:
        InvalidError: Options that cannot be measured.
        NoSpaceError: The scratch folder has no room for all systems.
        UnsupportedError: This user may not make memory cgroups.
        CorruptionError: A system answered wrong.
    """
    options = _checked(options)
    out.mkdir(parents=True, exist_ok=True)
    scratch = options.scratch or out
    scratch.mkdir(parents=True, exist_ok=True)
    # Asked for first: loading takes long.
    MemoryGroup.make(_group_name()).__exit__()
    with TemporaryDirectory(dir=scratch) as folder:
        row_count = options.table_bytes // (4 * options.dim)
        bench = _Bench(options, Table(folder=Path(folder), row_count=row_count, dim=options.dim))
        bench.load()
        for round_ in range(options.rounds):
            bench.measure(round_)
            # A run takes hours: what is known is written after every round.
            path = _write(out, bench)
    rows = medians(bench.measured)
    print_table("rows of queries, one limit of memory", rows, COLUMNS)
    print_table("Tierbed next to the best of the others; above 1 it is ahead", compared(rows))
    for name, reason in bench.absent.items():
        print(f"{name} is left out: {reason}")
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _write(out: Path, bench: _Bench) -> Path:
    rows = medians(bench.measured)
    told = {
        "table": {"row_count": bench.table.row_count, "dim": bench.table.dim},
        "slack_bytes": SLACK_BYTES,
        "log": None if bench.options.log is None else bench.options.log.name,
        "left_out": bench.absent,
        "loaded": bench.loaded,
        "compared": compared(rows),
        "measured": bench.measured,
    }
    return write_suite(out, "peers", rows, ratios(bench.measured), figure(rows), told)


def _group_name() -> str:
    return f"tierbed-peers-{os.getpid()}"


def _checked(options: PeersOptions) -> PeersOptions:
    if options.quick:
        options = replace(
            options,
            table_bytes=min(options.table_bytes, 64 << 20),
            seconds=min(options.seconds, 0.3),
            warm_seconds=min(options.warm_seconds, 0.5),
            rounds=min(options.rounds, 1),
        )
    unknown = sorted(set(options.systems) - set(SYSTEMS))
    if unknown:
        raise InvalidError(f"unknown systems {unknown}; there are {list(SYSTEMS)}")
    numbers = (*options.rows, *options.clients, options.dim, options.rounds)
    if min(numbers) < 1 or not all(0.0 < share <= 1.0 for share in options.memory):
        raise InvalidError("rows, clients, dim and rounds begin at 1, memory is a share up to 1")
    others = [name for name in options.systems if name != OURS]
    return replace(options, systems=(OURS, *others))


class _Bench:
    """One run: loads all systems, then measures them in turns.

    Args:
        options: What to measure.
        table: The rows, not yet written.
    """

    def __init__(self, options: PeersOptions, table: Table) -> None:
        self.options, self.table = options, table
        self.absent: dict[str, str] = {}
        self.loaded: list[Row] = []
        self.measured: list[Row] = []
        self._ended: set[Any] = set()

    def load(self) -> None:
        """Writes table and queries, and loads every system.

        Raises:
            NoSpaceError: The disk has no room for all of them.
        """
        self._check_disk()
        with Progress("loading", len(self.options.systems), "systems") as bar:
            self.table.write()
            source = Queries(
                self.table.row_count, self.options.skew, self.options.seed, self.options.log
            )
            for id_count in self.options.rows:
                count = self._warm_queries(id_count) + self._measured_queries(id_count)
                source.drawn(count, id_count).tofile(self._queries(id_count))
            for system in self.options.systems:
                bar.advance(0, system)
                self._load(system)
                bar.advance()

    def _load(self, system: str) -> None:
        try:
            row = self._ask("load", system, 24 * 3600.0)
        except WorkerError as error:
            if error.kind != "unsupported":
                raise
            self.absent[system] = str(error)
            return
        self.loaded.append({"system": system, **row})

    def _check_disk(self) -> None:
        on_disk = [name for name in self.options.systems if not SYSTEMS[name].is_in_memory]
        needed = int(DISK_FOLD * self.table.byte_count * len({*on_disk, "memory_map"}))
        free = shutil.disk_usage(self.table.folder).free
        if needed > free:
            raise NoSpaceError(
                f"{len(on_disk)} systems need {size_text(needed)} in {self.table.folder.parent},"
                f" which has {size_text(free)}; use fewer --systems or a smaller --table"
            )

    def _ask(self, do: str, system: str, seconds_max: float, **fields: Any) -> Row:
        with Worker(seconds_max, module="tierbed_bench.peers.cell") as worker:
            return worker.ask(do, system=system, table=self.table.told(), **fields)

    def _queries(self, id_count: int) -> Path:
        return self.table.folder / f"queries_{id_count}"

    def _warm_queries(self, id_count: int) -> int:
        kept_rows = max(self.options.memory) * self.table.row_count
        return math.ceil(WARM_FOLD * kept_rows / id_count)

    def _measured_queries(self, id_count: int) -> int:
        return math.ceil(ROWS_PER_S_MAX * self.options.seconds / id_count)

    def _cells(self) -> list[Cell]:
        """Cells without a limit, for systems that need all rows in memory, come last."""
        return [
            Cell(rows=rows, clients=clients, memory_share=share)
            for share in (*self.options.memory, None)
            for rows in self.options.rows
            for clients in self.options.clients
        ]

    def measure(self, round_: int) -> None:
        """Measures every system once in every cell."""
        systems = [name for name in self.options.systems if name not in self.absent]
        # Each round begins with another system.
        turn = round_ % len(systems)
        jobs = [
            (cell, system)
            for cell in self._cells()
            for system in (*systems[turn:], *systems[:turn])
            if cell.memory_share is not None or SYSTEMS[system].is_in_memory
        ]
        with Progress(f"round {round_ + 1}", len(jobs), "measurements") as bar:
            for cell, system in jobs:
                share = "all" if cell.memory_share is None else f"{cell.memory_share:.0%}"
                bar.advance(0, f"{system}, {cell.rows} rows, {cell.clients} clients, {share}")
                # What was killed once is killed again.
                if (cell, system) not in self._ended:
                    self._measure(cell, system, round_)
                bar.advance()

    def _measure(self, cell: Cell, system: str, round_: int) -> None:
        share = cell.memory_share
        memory_bytes = 0 if share is None else int(share * self.table.byte_count)
        row: Row = {"system": system, **vars(cell), "memory_bytes": memory_bytes, "round": round_}
        if share is None and _available_bytes() < IN_MEMORY_FOLD * self.table.byte_count:
            found: Row = {"note": "this machine has too little memory"}
        else:
            found = least_stolen(lambda: self._measured_once(cell, system, memory_bytes))
        if "note" in found:
            self._ended.add((cell, system))
        self.measured.append({**row, **found})

    def _measured_once(self, cell: Cell, system: str, memory_bytes: int) -> Row:
        """Returns what was measured, or a note why nothing was."""
        with ExitStack() as stack:
            group = stack.enter_context(MemoryGroup.make(_group_name()))
            if cell.memory_share is not None:
                group.allow(memory_bytes + SLACK_BYTES)
            stack.callback(group.end_processes)
            try:
                seconds = self.options.warm_seconds + self.options.seconds + CELL_SECONDS
                found = self._ask(
                    "measure", system, seconds, **self._job(cell, memory_bytes, group)
                )
            except WorkerError as error:
                if error.kind not in ("gone", "invalid"):
                    raise
                is_killed = group.killed_count() > 0
                note = "killed: it took more than its limit" if is_killed else str(error)
                return {"note": note, "is_killed": is_killed}
            if wrong_count := found.pop("wrong_count"):
                raise CorruptionError(f"{system} answered {wrong_count} queries wrong")
            return {**found, "peak_bytes": group.peak_bytes()}

    def _job(self, cell: Cell, memory_bytes: int, group: MemoryGroup) -> Row:
        return {
            "queries": str(self._queries(cell.rows)),
            "rows": cell.rows,
            "clients": cell.clients,
            "memory_bytes": memory_bytes,
            "group": str(group.folder),
            "warm_queries": self._warm_queries(cell.rows),
            "warm_seconds": self.options.warm_seconds,
            "seconds": self.options.seconds,
        }


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
