"""What all writers of tables share: rows in chunks, counted, as bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tierbed.tables.found import FoundTable
from tierbed.tables.rows import CHUNK_ROWS, Rows

__all__ = ["Progress", "Report", "bytes_of", "numbers_of"]

Progress = Callable[[int, int], None]


def bytes_of(chunk: Tensor) -> bytes:
    """Returns numbers as a file has them: i64 or f32, little-endian."""
    kind = "<i8" if chunk.dtype == torch.int64 else "<f4"
    return chunk.contiguous().numpy().astype(kind, copy=False).tobytes()


def numbers_of(table: FoundTable) -> Rows:
    """Returns the ids of a table ``[N]`` i64: its own, or the numbers of its rows."""
    if table.ids is not None:
        return table.ids
    return Rows(
        (table.rows,), torch.int64, lambda at, count: torch.arange(at, at + count, device="cpu")
    )


@dataclass
class Report:
    """Hands rows on in chunks, and tells how far it is.

    Args:
        total: Rows of all tables.
        chunk_rows: Rows in memory at a time.
        progress: Called with (rows done, rows in all).
        counted: The rows that count; of others, such as ids, nothing is told.
    """

    total: int
    chunk_rows: int = CHUNK_ROWS
    progress: Progress | None = None
    counted: list[Rows] = field(default_factory=list)
    done: int = 0

    def chunks(self, rows: Rows) -> Iterator[Tensor]:
        """Yields all rows, and counts them after each chunk."""
        is_counted = any(rows is one for one in self.counted)
        for chunk in rows.chunks(self.chunk_rows):
            yield chunk
            if is_counted:
                self.add(chunk.shape[0])

    def add(self, rows: int) -> None:
        """Counts rows."""
        self.done += rows
        if self.progress is not None:
            self.progress(self.done, self.total)
