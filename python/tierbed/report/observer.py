"""What sees the lookups of a store or a snapshot: counts over time, and a sample of rows.

A lookup costs a comparison and a sum. Counters of the engine are read at moments that grow
rarer, twenty a second at first; the file of progress is written once a second. Only
:meth:`Observer.begin_sample` makes lookups cost more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from tierbed.config.tables import is_own
from tierbed.report.counts import Counts, counts_of
from tierbed.report.history import History, ProgressFile
from tierbed.report.reuse import ReuseSample

__all__ = ["Observer"]

_TICK_S = 0.05
_WRITE_S = 1.0


class Observed(Protocol):
    """The engine's store or snapshot."""

    def stats(self) -> dict[str, Any]:
        """Returns its counters."""

    def schema(self) -> dict[str, Any]:
        """Returns its tables."""


class Observer:
    """Sees lookups.

    Args:
        native: The engine's store or snapshot.
        folder: A training store's folder, whose progress is told beside it.
    """

    def __init__(
        self,
        native: Observed,
        folder: str | None = None,
    ) -> None:
        self._native = native
        self._folder = folder
        self._file: ProgressFile | None = None
        self._pid = os.getpid()
        self._busy = threading.Lock()
        # Several threads may look up; one at a time is noted.
        self._noting = threading.Lock()
        self._next_tick_s = self._next_write_s = 0.0
        self.ids = 0
        """Ids looked up."""
        self.history = History(time.time())
        self.sample: ReuseSample | None = None
        self.sample_start: Counts | None = None
        """The counts when the sample began."""
        self.row_buffer: tuple[int, int] | None = None
        """Bytes and rows of the row buffer at the last look; a publish gives it up for a while."""

    def note(self, tables: Sequence[int], indices: Tensor, offsets: Tensor) -> None:
        """Notes a lookup.

        Args:
            tables: Table id of each feature.
            indices: ``[E]`` i64, feature by feature.
            offsets: ``[F*B+1]`` i64.
        """
        count = indices.numel()
        with self._noting:
            self.ids += count
            if self.sample is not None and count:
                bounds = offsets[:: max(1, (offsets.numel() - 1) // len(tables))].numpy()
                of_table = np.repeat(np.asarray(tables, np.int64), np.diff(bounds))
                self.sample.note(of_table, indices.numpy())
        moment_s = time.monotonic()
        if moment_s >= self._next_tick_s:
            self._tick(moment_s)

    def begin_sample(self, row_count_max: int) -> None:
        """Begins a new sample of the rows that are looked up from now on."""
        sample = ReuseSample(row_count_max)
        with self._noting:
            self.sample, self.sample_start = sample, self.counts()

    def stats(self) -> dict[str, Any]:
        """Returns counters of the store or snapshot."""
        stats = self._native.stats()
        is_by_window = "buffer" in stats and stats["order"]["kind"] == "window"
        if is_by_window and stats["buffer"]["row_capacity"]:
            held_bytes = stats["budget"]["parts"]["row buffer"]["used_bytes"]
            self.row_buffer = held_bytes, stats["buffer"]["row_capacity"]
        return stats

    def counts(self) -> Counts:
        """Returns what was counted until now."""
        return counts_of(self.stats(), self.ids)

    def close(self) -> None:
        """Tells other processes that the store is closed, if it was in use."""
        if self.ids and self._pid == os.getpid():
            self._write("closed")

    def _tick(self, moment_s: float) -> None:
        # A forked child is not the one that trains; another thread does it already.
        if self._pid != os.getpid() or not self._busy.acquire(blocking=False):
            return
        try:
            spacing_s = max(_TICK_S, self.history.spacing_s)
            self._next_tick_s = moment_s + min(spacing_s, max(_TICK_S, _WRITE_S))
            if self._folder is not None and moment_s >= self._next_write_s:
                is_first = self._next_write_s == 0.0
                self._next_write_s = moment_s + _WRITE_S
                if not is_first:
                    self._write("running")
                    return
            self.history.add(time.time(), self.counts())
        finally:
            self._busy.release()

    def _write(self, state: str) -> None:
        if self._folder is None:
            return
        stats = self.stats()
        counts = counts_of(stats, self.ids)
        self.history.add(time.time(), counts)
        if self._file is None:
            self._file = ProgressFile(self._folder)
        now = {
            "written_s": time.time(),
            "counts": counts.columns(),
            "budget": stats["budget"],
            "order": {name: stats["order"].get(name) for name in ("kind", "reason")},
            "disk_bytes": stats["disk_bytes"],
            "another_budget": self._another_budget(stats),
            "tables": [
                {name: table[name] for name in ("name", "row_count", "dim", "optimizer")}
                for table in self._native.schema()["tables"]
                if not is_own(table)
            ],
        }
        self._file.write(self.history, now, state)

    def _another_budget(self, stats: dict[str, Any]) -> dict[str, Any] | None:
        if self.sample is None:
            return None
        # Programs that record nothing do without query logs.
        from tierbed.report.budgets import of_sample

        found = of_sample(stats, self)
        return None if found is None else found.to_dict()
