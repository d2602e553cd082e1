"""A process that loads a system, or asks it under a limit of memory.

What does not count is there before the process enters its group: modules, queries, room for
times. Clients are threads that each ask the next query, one at a time, so that queries have the
same order for every system.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tierbed.errors import TierbedError
from tierbed_bench.common import DeviceBytes, StolenTime
from tierbed_bench.memory_group import MemoryGroup
from tierbed_bench.peers.systems import SYSTEMS, Peer
from tierbed_bench.peers.table import Ids, Table, forget_pages
from tierbed_bench.workers import answer_commands

__all__ = ["answer"]

# Queries whose answers are compared with the rows, after measuring.
CHECKED = 64


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Queries that were asked.

    Args:
        count: Of them.
        seconds: From the first to the end of the last.
        waits_s: How long each took.
    """

    count: int
    seconds: float
    waits_s: np.ndarray


class _Clients:
    """Threads that ask one system.

    Args:
        peer: The system.
        queries: ``[count, id_count]`` ids.
        clients: Threads.
    """

    def __init__(self, peer: Peer, queries: Ids, clients: int) -> None:
        self.peer, self.queries, self.count = peer, queries, clients
        # Written to now: pages that come later count as the system's.
        self.waits_s = np.ones(len(queries))
        self._threads = ThreadPoolExecutor(clients)

    def ask(self, first: int, last: int, seconds_max: float) -> _Asked:
        """Asks the queries ``first..last``, for so long at most."""
        numbers = itertools.count(first)
        started = threading.Barrier(self.count)
        begun_s: list[float] = []

        def run() -> int:
            # Else one thread may do the work of two, and others have no connection yet.
            started.wait()
            begun_s.append(time.perf_counter())
            ends_s = begun_s[0] + seconds_max
            asked = 0
            while (at := next(numbers)) < last:
                began = time.perf_counter()
                if began > ends_s:
                    break
                self.peer.read(self.queries[at])
                self.waits_s[at] = time.perf_counter() - began
                asked += 1
            return asked

        count = sum(self._all(run))
        seconds = time.perf_counter() - min(begun_s)
        return _Asked(count=count, seconds=seconds, waits_s=self.waits_s[first : first + count])

    def wrong_count(self, first: int) -> int:
        """Asks some queries from the first on; returns how many got other rows than the table's."""
        numbers = itertools.count(first)
        table = self.peer.table

        def run() -> int:
            wrong = 0
            while (at := next(numbers)) < min(first + CHECKED, len(self.queries)):
                ids = self.queries[at]
                wrong += not np.array_equal(self.peer.read(ids), table.rows(ids))
            return wrong

        return sum(self._all(run))

    def _all(self, run: Callable[[], Any]) -> list[Any]:
        return [told.result() for told in [self._threads.submit(run) for _ in range(self.count)]]

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()


def answer(told: dict[str, Any]) -> dict[str, Any]:
    """Carries out ``load`` or ``measure``.

    Raises:
        TierbedError: The system is not there, or refuses its memory.
        RuntimeError: Any error of the system.
    """
    table = Table.of(told["table"])
    folder = table.folder / told["system"]
    folder.mkdir(exist_ok=True)
    do = {"load": _load, "measure": _measure}[told["do"]]
    try:
        return do(SYSTEMS[told["system"]](table, folder), told)
    except TierbedError:
        raise
    except Exception as error:
        # Systems have errors of their own, which nothing here knows.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _load(peer: Peer, told: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    peer.load()
    forget_pages(peer.folder)
    return {
        "load_s": time.perf_counter() - began,
        "disk_bytes": sum(file.stat().st_size for file in peer.folder.rglob("*") if file.is_file()),
    }


def _measure(peer: Peer, told: dict[str, Any]) -> dict[str, Any]:
    """Warms, asks, and checks; see :class:`~tierbed_bench.peers.suite.Cell` for the fields."""
    forget_pages(peer.folder)
    queries = np.fromfile(told["queries"], np.int64).reshape(-1, told["rows"])
    clients = _Clients(peer, queries, told["clients"])
    group = MemoryGroup(Path(told["group"]))
    group.add(os.getpid())
    began = time.perf_counter()
    peer.open(told["memory_bytes"], told["clients"])
    open_s = time.perf_counter() - began
    try:
        warmed = clients.ask(0, told["warm_queries"], told["warm_seconds"])
        before, stolen = DeviceBytes.now(), StolenTime()
        asked = clients.ask(told["warm_queries"], len(queries), told["seconds"])
        after, stolen_share = DeviceBytes.now(), stolen.share()
        # Before the check, which makes rows of its own.
        used_bytes = group.used_bytes()
        wrong_count = clients.wrong_count(told["warm_queries"])
    finally:
        clients.close()
        peer.close()
    return {
        "open_s": open_s,
        "warm_queries": warmed.count,
        "queries": asked.count,
        "rows_per_s": asked.count * told["rows"] / asked.seconds,
        "p50_ms": 1e3 * float(np.quantile(asked.waits_s, 0.5)),
        "p99_ms": 1e3 * float(np.quantile(asked.waits_s, 0.99)),
        "disk_bytes_per_query": (after.read - before.read) / asked.count,
        "used_bytes": used_bytes,
        "stolen_share": stolen_share,
        "wrong_count": wrong_count,
    }


if __name__ == "__main__":
    answer_commands(answer)
