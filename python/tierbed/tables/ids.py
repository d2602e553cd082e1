"""Ids that lie beside the rows of a file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
from torch import Tensor

from tierbed.errors import InvalidError
from tierbed.tables.found import FoundTable
from tierbed.tables.rows import CHUNK_ROWS, Rows
from tierbed.tables.tensors import npy_rows

__all__ = ["checked_ids", "is_counting", "with_ids"]


def with_ids(found: FoundTable, path: str | os.PathLike[str]) -> FoundTable:
    """Returns a table with the ids of an npy file."""
    return dataclasses.replace(found, ids=npy_rows(Path(path)), has_row_numbers=False)


def checked_ids(found: FoundTable, row_count: int | None) -> Tensor | None:
    """Returns the ids of all rows ``[N]`` i64; None where each is the number of its row.

    Takes 16 bytes of memory per id while they are compared.

    Args:
        found: The table.
        row_count: Rows of the table they are for; None: an open vocabulary, which takes any.

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
    ids = torch.cat(
        [torch.empty(0, dtype=torch.int64, device="cpu"), *(c.long() for c in rows.chunks())]
    )
    ordered = ids.sort().values
    again = torch.nonzero(ordered.diff() == 0)
    if len(again):
        raise InvalidError(
            f"{found.name} has the id {int(ordered[again[0]])} twice; leave one of its rows out",
            {"table": found.name},
        )
    is_within = not len(ids) or (int(ordered[0]) >= 0 and int(ordered[-1]) < (row_count or 0))
    if row_count is not None and not is_within:
        raise InvalidError(
            f"{found.name} has ids from {int(ordered[0])} to {int(ordered[-1])}, and the table "
            f"{row_count} rows; import into a table with an open vocabulary, which takes any id",
            {"table": found.name},
        )
    return ids


def is_counting(rows: Rows) -> bool:
    """Whether numbers are 0, 1, 2, ..."""
    first = 0
    for chunk in rows.chunks(CHUNK_ROWS):
        if not torch.equal(chunk, torch.arange(first, first + len(chunk), device="cpu")):
            return False
        first += len(chunk)
    return True
