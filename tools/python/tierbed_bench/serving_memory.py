"""The least memory with which a server answers every row in time: part ``memory``.

Budgets double until a server keeps up with one rate: all answers good, and the 99th percentile of
their latency within a bound. Then the server's memory is told: all that no file stands behind, not
the budget that it was given. Tierbed is ``tierbed-server`` here, which has no Python beside the
rows. What the kernel caches of the disk of memcached's extstore comes on top, and is not counted.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierbed_bench.serving_activation import memory_bytes
from tierbed_bench.serving_process import AbsentError
from tierbed_bench.serving_systems import MODEL, Rows, System, command, served, started

if TYPE_CHECKING:
    from tierbed_bench.serving_bench import Bench

__all__ = ["least_memory"]

Row = dict[str, Any]
MIB = 1 << 20
# The smallest budget that is tried has room for an index, bytes a row; the next ones double.
INDEX_BYTES = 4
# Beyond this many times the rows each of them is in memory, with what an item needs beside it.
LAST_SHARE = 4
# Where ``make server`` puts the binary.
BUILT = Path(__file__).parents[3] / "build" / "server" / "tierbed-server"
PEERS = ("extstore", "redis")


def least_memory(bench: Bench) -> None:
    """Finds the least memory of Tierbed and of each peer, and tells every budget tried."""
    for name in ("tierbed_server", *(peer for peer in PEERS if peer in bench.options.peers)):
        try:
            _grow(bench, name)
        except AbsentError as reason:
            bench.absent[f"{name} memory"] = str(reason)


def _grow(bench: Bench, name: str) -> None:
    rows = bench.rows
    last = LAST_SHARE * rows.byte_count
    # Redis has every row in memory: it has no budget that could be smaller.
    budget = last if name == "redis" else 4 * MIB + INDEX_BYTES * int(rows.shape["row_count"])
    while budget <= max(last, 16 * MIB):
        with _running(name, rows, budget) as system:
            if _keeps_up(bench, system, budget):
                return
        budget *= 2
    bench.absent[f"{name} memory"] = "it kept up with no budget"


def _keeps_up(bench: Bench, system: System, budget: int) -> bool:
    """Warms the server, asks at the one rate, and tells what came of it."""
    options = bench.options
    bench.load(system, [options.memory_rate], options.seconds)
    phase = bench.load_on_time(system, options.memory_rate)
    is_kept = bench.is_good(phase, options.memory_p99_ms_max)
    memory = sum(memory_bytes(pid) for pid in system.pids)
    bench.tell(
        "memory", system.name, phase, is_kept=is_kept, budget_bytes=budget, memory_bytes=memory
    )
    return is_kept


def server_command() -> list[str]:
    """What starts ``tierbed-server``.

    Raises:
        AbsentError: It is not built.
    """
    binary = shutil.which("tierbed-server") or (str(BUILT) if BUILT.exists() else None)
    if binary is None:
        raise AbsentError("tierbed-server is not here; run make server")
    return [binary]


@contextlib.contextmanager
def _running(name: str, rows: Rows, budget: int) -> Iterator[System]:
    if name != "tierbed_server":
        with started(name, rows, dram_bytes=budget) as [system]:
            yield replace(system, may_lose=True)
        return
    log = rows.folder / "tierbed-server.log"
    with served(rows.snapshot, log, budget, [], server_command()) as running:
        target = {"protocol": "infer", "address": running.http, "model": f"{MODEL}.rows"}
        if budget > rows.byte_count:
            command("fill", target={**target, "protocol": "lookup"}, shape=rows.shape)
        yield System(name=name, target=target, pids=(running.pid,))
