"""Tables in Parquet: a column of vectors, ids beside them, and optimizer state in further columns.

The column ``id`` has ids of an open vocabulary, null for the row that all other ids share, which
comes last; ``row`` has numbers of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierbed._util.arrow import arrow_modules
from tierbed.errors import CorruptionError, InvalidError
from tierbed.tables.found import FoundTable, TableFile
from tierbed.tables.rows import CHUNK_ROWS, Rows, of_tensor
from tierbed.tables.state import STATE_NAMES
from tierbed.tables.writing import Report

__all__ = ["read_parquet", "write_parquet"]

STEPS, OPTIMIZER = b"tierbed.steps", b"tierbed.optimizer"


def read_parquet(path: Path) -> TableFile:
    """Opens a Parquet file; rows are read by groups of rows."""
    arrow, _, parquet = arrow_modules()
    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise CorruptionError(f"{path} is not a whole Parquet file: {error}") from error
    schema = file.schema_arrow
    columns = {
        field.name: _Column(path, file, field.name).rows()
        for field in schema
        if _is_read(arrow, field.type)
    }
    lists = [
        name for name, rows in columns.items() if len(rows.shape) == 2 and name not in STATE_NAMES
    ]
    ids, has_shared = _ids(path, file) if "id" in columns else (None, False)
    told = schema.metadata or {}
    # State belongs to the only table, or to the one that an export wrote.
    owner = lists[0] if len(lists) == 1 else "weight"
    found = []
    for name in lists:
        mine = {key: columns[key] for key in columns if key in STATE_NAMES and name == owner}
        count = columns[name].count - has_shared
        found.append(
            FoundTable(
                name=f"{path.stem}.weight" if name == "weight" else name,
                weight=columns[name].before(count),
                ids=ids if ids is not None else columns.get("row"),
                has_row_numbers=ids is None and "row" in columns,
                shared=columns[name].after(count) if has_shared else None,
                state={key: rows.before(count) for key, rows in mine.items()},
                shared_state={k: r.after(count) for k, r in mine.items()} if has_shared else {},
                steps=int(told[STEPS]) if STEPS in told else None,
                optimizer=told[OPTIMIZER].decode() if OPTIMIZER in told else None,
            )
        )
    return TableFile(path, found)


def _is_read(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        return bool(types.is_floating(kind.value_type))
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _ids(path: Path, file: Any) -> tuple[Rows, bool]:
    """Returns the ids, and whether a last row without one is there."""
    batches = file.iter_batches(columns=["id"])
    column = [batch.column(0) for batch in batches]
    nulls = sum(part.null_count for part in column)
    is_last = nulls == 1 and not column[-1][len(column[-1]) - 1].is_valid
    if nulls > 0 and not is_last:
        raise InvalidError(
            f"{path} has {nulls} rows without id; only the last row may have none, which is that "
            "of all ids without a row",
            {"path": str(path)},
        )
    empty = [torch.empty(0, dtype=torch.int64, device="cpu")]
    numbers = [torch.from_numpy(_plain(part.drop_null(), np.int64)) for part in column]
    return of_tensor(torch.cat([*empty, *numbers])), is_last


def _plain(column: Any, kind: Any) -> Any:
    # Unsigned ids beyond 2^63 keep their bits.
    return column.to_numpy(zero_copy_only=False).astype(kind, copy=True)


class _Column:
    """One column, read on from where the last read ended, or from the group that has the row."""

    def __init__(self, path: Path, file: Any, name: str) -> None:
        self._path = path
        self._file = file
        self._name = name
        self._batches: Iterator[Any] = iter(())
        self._kept = torch.empty(0, device="cpu")
        self._at = -1
        field = file.schema_arrow.field(name)
        self._is_list = hasattr(field.type, "value_type")
        self._dim = self._list_size(field.type) if self._is_list else 1
        whole = str(field.type).startswith(("int", "uint"))
        self._kind = np.int64 if whole else np.float32

    def rows(self) -> Rows:
        """Returns it as rows."""
        count = self._file.metadata.num_rows
        shape = (count, self._dim) if self._is_list else (count,)
        return Rows(shape, torch.int64 if self._kind is np.int64 else torch.float32, self.read)

    def read(self, first: int, count: int) -> Tensor:
        """Reads rows."""
        if first != self._at:
            self._seek(first)
        parts = [self._kept]
        missing = count - self._kept.shape[0]
        while missing > 0:
            parts.append(self._next())
            missing -= parts[-1].shape[0]
        joined = torch.cat([part for part in parts if part.shape[0]] or [self._tensor_of(None)])
        self._at, self._kept = first + count, joined[count:]
        return joined[:count]

    def _seek(self, first: int) -> None:
        metadata, start = self._file.metadata, 0
        for group in range(metadata.num_row_groups):
            held = metadata.row_group(group).num_rows
            if start + held > first:
                break
            start += held
        groups = list(range(group, metadata.num_row_groups)) if metadata.num_row_groups else []
        self._batches = self._file.iter_batches(CHUNK_ROWS, row_groups=groups, columns=[self._name])
        self._kept = self._tensor_of(None)
        while self._kept.shape[0] <= first - start and groups:
            start += self._kept.shape[0]
            self._kept = self._next()
        self._kept = self._kept[first - start :]

    def _next(self) -> Tensor:
        try:
            batch = next(self._batches, None)
        except Exception as error:
            raise self._damaged(str(error)) from error
        if batch is None:
            raise self._damaged("its rows end too early")
        return self._tensor_of(batch.column(0))

    def _tensor_of(self, column: Any) -> Tensor:
        if column is None:
            empty = np.empty((0, self._dim) if self._is_list else 0, dtype=self._kind)
            return torch.from_numpy(empty)
        if not self._is_list:
            return torch.from_numpy(_plain(column.fill_null(0), self._kind))
        flat = column.flatten()
        if len(flat) != len(column) * self._dim or flat.null_count:
            raise InvalidError(
                f"the vectors in column {self._name!r} of {self._path} are not all of {self._dim} "
                "numbers; leave rows without a whole vector out",
                {"path": str(self._path)},
            )
        return torch.from_numpy(_plain(flat, self._kind)).view(-1, self._dim)

    def _list_size(self, kind: Any) -> int:
        if hasattr(kind, "list_size"):
            return int(kind.list_size)
        first = next(self._file.iter_batches(1, columns=[self._name]), None)
        return 0 if first is None else len(first.column(0).flatten())

    def _damaged(self, reason: str) -> CorruptionError:
        return CorruptionError(
            f"column {self._name!r} of {self._path} cannot be read: {reason}",
            {"path": str(self._path)},
        )


def write_parquet(tables: list[FoundTable], path: Path, report: Report) -> None:
    """Writes one table, a group of rows per chunk."""
    arrow, _, parquet = arrow_modules()
    table = tables[0]
    parts = {"weight": table.weight, **table.state}
    shared = {"weight": table.shared, **table.shared_state}
    kinds = {name: arrow.list_(arrow.float32(), rows.width) for name, rows in parts.items()}
    numbers = "row" if table.ids is None else "id"
    told = {STEPS: str(table.steps)} if table.steps is not None and table.state else {}
    told |= {OPTIMIZER: table.optimizer} if table.optimizer and table.state else {}
    schema = arrow.schema([(numbers, arrow.int64()), *kinds.items()], metadata=told)
    with parquet.ParquetWriter(path, schema) as writer:

        def write(ids: Any, chunk: dict[str, Tensor]) -> None:
            columns = [_arrow_column(arrow, chunk[name], kinds[name]) for name in kinds]
            writer.write_table(arrow.table([ids, *columns], schema=schema))

        for first in range(0, table.rows, report.chunk_rows):
            count = min(report.chunk_rows, table.rows - first)
            ids = np.arange(first, first + count)
            if table.ids is not None:
                ids = table.ids.read(first, count).numpy()
            write(arrow.array(ids), {name: rows.read(first, count) for name, rows in parts.items()})
            report.add(count)
        if table.shared is not None:
            last = {name: rows.whole() for name, rows in shared.items() if rows is not None}
            write(arrow.array([None], arrow.int64()), last)


def _arrow_column(arrow: Any, chunk: Tensor, kind: Any) -> Any:
    values = arrow.array(chunk.contiguous().numpy().reshape(-1))
    return arrow.FixedSizeListArray.from_arrays(values, kind.list_size)
