"""Rows of a table in forward order, by number.

There a row has no address: whoever reads some rows reads the whole store. So a scan brings a large
part of a table into an unnamed file, in the order of its numbers, and chunks are read from that.
"""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierbed.errors import IoError
from tierbed.train.store import Store

__all__ = ["PART_BYTES", "ScannedRows"]

#: Bytes of the file: rows are written to it in no order, so it should fit the page cache.
PART_BYTES = 1 << 30
#: Rows of each table that a scan hands on at once.
_SCAN_ROWS = 4096
_INITIAL_BYTES = 1 << 30


class ScannedRows:
    """Rows of one table with their optimizer state.

    Args:
        store: A store in forward order.
        table: Name of the table.
        folder: On the disk for the unnamed file.
        part_bytes: At most so many bytes of it.
    """

    def __init__(
        self, store: Store, table: str, folder: Path, *, part_bytes: int = PART_BYTES
    ) -> None:
        self._store = store
        self._table = table
        self._folder = folder
        self._part_bytes = part_bytes
        self._rows = int(store.table(table)["row_count"])
        self._part: tuple[int, int, int] | None = None  # first row, row behind, words of a row
        self._file = -1
        self._close: weakref.finalize[..., ScannedRows] | None = None
        self._initial: Store | None = None

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Reads rows ``[count, D]`` and their state ``[count, S]``.

        Args:
            first: First of the rows.
            count: How many.

        Raises:
            IoError: The disk of the folder is full.
        """
        if self._part is None or not self._part[0] <= first <= first + count <= self._part[1]:
            self._bring(first, count)
        assert self._part is not None
        start, _, words = self._part
        raw = os.pread(self._file, 4 * words * count, 4 * words * (first - start))
        # The mark of a row that was cut off would say that it was never trained.
        assert len(raw) == 4 * words * count, f"the unnamed file of {self._table!r} was cut"
        records = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(count, words)
        dim = int(self._store.table(self._table)["dim"])
        weights, state, marks = records[:, :dim], records[:, dim:-1], records[:, -1]
        absent = marks == 0.0
        if bool(absent.any()):
            initial, initial_state = self._initial_rows(first, count)
            weights[absent] = initial[absent]
            state[absent] = initial_state[absent]
        return weights, state

    def _bring(self, first: int, count: int) -> None:
        """Brings rows from ``first`` on, at least ``count``, by one scan."""
        schema = self._store.table(self._table)
        weights, state = self._initial_rows(first, 1)
        words = weights.shape[1] + state.shape[1] + 1  # the last marks a row that is there
        rows = max(count, self._part_bytes // (4 * words))
        end = min(self._rows, first + rows)
        file = self._new_file()
        # Rows that nobody writes are zeros, which take no disk.
        os.ftruncate(file, 4 * words * (end - first))

        def keep(name: str, rows: Tensor, weights: Tensor, state: Tensor, uses: Tensor) -> None:
            if name != schema["name"]:
                return
            of_part = torch.nonzero((rows >= first) & (rows < end))[:, 0]
            ordered, order = rows[of_part].sort()
            of_part = of_part[order]
            ones = torch.ones(len(of_part), 1, dtype=torch.float32, device="cpu")
            records = torch.cat([weights[of_part], state[of_part], ones], 1).numpy()
            # Rows that follow each other are written at once.
            starts = [0, *(torch.nonzero(ordered.diff() != 1)[:, 0] + 1).tolist(), len(ordered)]
            places = ((ordered - first) * (4 * words)).tolist()
            for low, high in itertools.pairwise(starts):
                if low < high:
                    _write(file, np.ascontiguousarray(records[low:high]), places[low])

        try:
            self._store.scan(keep, chunk_rows=_SCAN_ROWS)
        except OSError as error:
            raise IoError(
                f"rows of table {self._table!r} do not fit into {self._folder} on their way: "
                f"{error.strerror}; free some space there, or write into another folder",
                {"path": str(self._folder)},
                error.errno,
            ) from error
        self._part = (first, end, words)

    def _new_file(self) -> int:
        """Begins an unnamed file in place of the one there was; it is gone with this object."""
        if self._close is not None:
            self._close()
        self._file, name = tempfile.mkstemp(dir=self._folder)
        os.unlink(name)
        self._close = weakref.finalize(self, os.close, self._file)
        return self._file

    def _initial_rows(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Reads what rows have that were never trained, which follows from the schema alone."""
        if self._initial is None:
            self._initial = Store.open(backend="memory", dram_budget=_INITIAL_BYTES)
            weakref.finalize(self, self._initial.close)
            self._initial.native.add_table(self._store.table(self._table))  # type: ignore[arg-type]
        return self._initial.read_rows_and_state(self._table, first, count)


def _write(file: int, records: Any, place: int) -> None:
    if os.pwrite(file, records.data, place) != records.nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
