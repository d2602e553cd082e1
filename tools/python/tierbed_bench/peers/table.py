"""The table that all systems hold: rows that can be told from their ids, in one file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CHUNK_ROWS", "Ids", "Rows", "Table", "forget_pages"]

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]
# Rows that are written or loaded at once.
CHUNK_ROWS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of float32 rows, and where the systems keep it.

    Args:
        folder: Each system has a folder of its own in it, with its name.
        row_count: Rows; ids are below.
        dim: Elements of a row.
    """

    folder: Path
    row_count: int
    dim: int

    @classmethod
    def of(cls, told: dict[str, Any]) -> Table:
        """The table that :meth:`told` told."""
        return cls(folder=Path(told["folder"]), row_count=told["row_count"], dim=told["dim"])

    def told(self) -> dict[str, Any]:
        """Its fields, for another process."""
        return {"folder": str(self.folder), "row_count": self.row_count, "dim": self.dim}

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return 4 * self.dim

    @property
    def byte_count(self) -> int:
        """Bytes of all rows."""
        return self.row_bytes * self.row_count

    @property
    def file(self) -> Path:
        """All rows, one after the other; it is also what is mapped."""
        return self.folder / "memory_map" / "rows.f32"

    def rows(self, ids: Ids) -> Rows:
        """Makes rows ``[n, dim]`` in -0.5 to 0.5; no system can pack them much smaller."""
        mixed = ids.astype(np.uint32)[:, None] * np.uint32(0x9E3779B1)
        mixed = mixed + np.arange(self.dim, dtype=np.uint32) * np.uint32(0x85EBCA6B)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            mixed ^= mixed >> np.uint32(shift)
            mixed *= np.uint32(factor)
        mixed ^= mixed >> np.uint32(16)
        # The fraction of a number between 1 and 2.
        bits = (mixed >> np.uint32(9)) | np.uint32(0x3F800000)
        rows: Rows = bits.view(np.float32) - np.float32(1.5)
        return rows

    def write(self) -> None:
        """Writes the file."""
        self.file.parent.mkdir(parents=True)
        with self.file.open("wb") as file:
            for first in range(0, self.row_count, CHUNK_ROWS):
                last = min(first + CHUNK_ROWS, self.row_count)
                file.write(self.rows(np.arange(first, last)).tobytes())

    def mapped(self) -> Rows:
        """Maps the file, ``[row_count, dim]``."""
        return np.memmap(self.file, np.float32, "r", shape=(self.row_count, self.dim))

    def chunks(self) -> Iterator[tuple[int, Rows]]:
        """Yields the first id and the rows of chunks, all rows in the order of their ids."""
        rows = self.mapped()
        for first in range(0, self.row_count, CHUNK_ROWS):
            yield first, np.array(rows[first : first + CHUNK_ROWS])


def forget_pages(folder: Path) -> None:
    """Makes files durable and drops them from the page cache.

    Pages that another group of processes brought there are free to this one, and so not measured.
    """
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
