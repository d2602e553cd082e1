"""Ids that lie beside the rows of a file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
from torch import Tensor

from tierbed.errors import InvalidError
from tierbed.tables.found import FoundTable
from tierbed.tables.numbers import first_repeated
from tierbed.tables.rows import CHUNK_ROWS, Rows
from tierbed.tables.tensors import npy_rows

__all__ = ["checked_ids", "is_counting", "with_ids"]


def with_ids(found: FoundTable, path: str | os.PathLike[str]) -> FoundTable:
    """Returns a table with the ids of an npy file."""
    return dataclasses.replace(found, ids=npy_rows(Path(path)), has_row_numbers=False)


def checked_ids(
    found: FoundTable, row_count: int | None, scratch: str | None = None
) -> Rows | None:
    """Returns the ids of all rows ``[N]`` i64; None where each is the number of its row.

    They are read once here, and memory does not grow with them.

    Args:
        found: The table.
        row_count: Rows of the table they are for; None: an open vocabulary, which takes any.
        scratch: Folder with room for 8 bytes of each, where there are many; None: the system's.

    Raises:
        InvalidError: No whole numbers, not one per row, one twice, or none of a row.
    """
    rows = found.ids
    if rows is None:
        return None
    if len(rows.shape) != 1 or rows.dtype.is_floating_point or rows.count != found.rows:
        raise InvalidError(
            f"the ids of {found.name} are {rows.dtype} {list(rows.shape)}; give one whole number "
            f"for each of its {found.rows} rows",
            {"table": found.name},
        )
    if found.has_row_numbers and is_counting(rows):
        return None
    seen = _Range()
    repeated = first_repeated(map(seen.note, rows.chunks()), rows.count, scratch)
    if repeated is not None:
        raise InvalidError(
            f"{found.name} has the id {repeated} twice; leave one of its rows out",
            {"table": found.name},
        )
    is_within = not rows.count or (seen.least >= 0 and seen.most < (row_count or 0))
    if row_count is not None and not is_within:
        raise InvalidError(
            f"{found.name} has ids from {seen.least} to {seen.most}, and the table "
            f"{row_count} rows; import into a table with an open vocabulary, which takes any id",
            {"table": found.name},
        )
    read = rows.read
    return Rows(rows.shape, torch.int64, lambda first, count: read(first, count).long())


class _Range:
    """The least and the most of ids that pass."""

    def __init__(self) -> None:
        self.least, self.most = 0, -1

    def note(self, chunk: Tensor) -> Tensor:
        """Returns the ids as they are, i64."""
        ids = chunk.long()
        low, high = (int(end) for end in ids.aminmax())
        is_first = self.most < self.least
        self.least = low if is_first else min(self.least, low)
        self.most = high if is_first else max(self.most, high)
        return ids


def is_counting(rows: Rows) -> bool:
    """Whether numbers are 0, 1, 2, ..."""
    first = 0
    for chunk in rows.chunks(CHUNK_ROWS):
        if not torch.equal(chunk, torch.arange(first, first + len(chunk), device="cpu")):
            return False
        first += len(chunk)
    return True
