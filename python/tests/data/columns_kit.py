"""A generated log in every form that is read, and what its samples are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import torch

import tierbed as tb
from tierbed.data import ColumnData, Hashed, OpenIds, Rows

SAMPLES = 103
LISTS = {"user": Rows(1000), "site": Hashed(64), "tags": Hashed(32, seed=3), "query": OpenIds()}
FLAT = {name: LISTS[name] for name in ("user", "site", "query")}


def log(samples: int = SAMPLES, first: int = 0) -> pyarrow.Table:
    """A row per sample; ``number`` tells them apart."""
    rows = range(first, first + samples)
    return pyarrow.table(
        {
            "number": [float(row) for row in rows],
            "click": [row % 3 == 0 for row in rows],
            "user": pyarrow.array([row * 7 % 1000 for row in rows], pyarrow.int32()),
            "site": [f"site-of-a-long-name-{row % 11}"[: 3 + row % 19] for row in rows],
            "tags": [[f"t{row % 5}"] * (row % 4) for row in rows],
            "query": [(row * 0x9E3779B97F4A7C15) % (1 << 62) for row in rows],
            "price": [row / 4 for row in rows],
        }
    )


def parquet_files(folder: Path, samples: int = SAMPLES, files: int = 3, group: int = 10) -> str:
    """Writes the log into files with row groups; returns their pattern."""
    table = log(samples)
    each = -(-samples // files)
    for at in range(files):
        part = table.slice(at * each, each)
        pyarrow.parquet.write_table(part, folder / f"part_{at}.parquet", row_group_size=group)
    return str(folder / "part_*.parquet")


def read(source: Any, *, ids: Any = None, batch_size: int = 8, **more: Any) -> ColumnData:
    more = {"label": "number", "dense": ["price"], **more}
    return tb.data.columns(source, ids=ids or LISTS, batch_size=batch_size, **more)


def numbers(batches: Any) -> list[int]:
    """The samples of batches by their numbers, in order."""
    found = [batch.label for batch in batches]
    return torch.cat(found).long().tolist() if found else []


def same(one: Any, other: Any) -> bool:
    pairs = zip(parts(one), parts(other), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def parts(batch: Any) -> list[torch.Tensor]:
    sparse = batch.sparse
    weights = sparse.weights_or_none()
    found = [batch.dense, batch.label, sparse.values(), sparse.lengths()]
    return found if weights is None else [*found, weights]
