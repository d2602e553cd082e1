"""Query logs from columns: each record is a query, each column the ids of a table.

Records are read in bounded batches, from files, stores of objects and frames of other libraries, as
:func:`tierbed.data.columns` reads samples. Rows of several tables are numbered through: those of
the first column's table, then those of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierbed._util.arrow import arrow_modules
from tierbed.data.arrow_parts import Parts
from tierbed.data.library_parts import parts_of
from tierbed.errors import InvalidError
from tierbed.placement.build import LogOptions, QueryLog

__all__ = ["log_of_columns", "parse_columns"]

#: Records of a batch: what is held beside the log.
RECORDS_AT_ONCE = 1 << 14

Queries = tuple[NDArray[numpy.int64], NDArray[numpy.int64]]


def parse_columns(text: str) -> dict[str, int | None]:
    """Reads columns with commas between, each with the rows of its table where they are known.

    Args:
        text: Such as ``user_items=5000000,site``.

    Raises:
        InvalidError: A name is missing or twice, or rows are no number.
    """
    columns: dict[str, int | None] = {}
    for part in text.split(","):
        name, sign, rows = (word.strip() for word in part.partition("="))
        if not name or name in columns or (sign and not (rows.isdigit() and int(rows) > 0)):
            raise InvalidError(
                f"--columns are different names with commas between, not {text!r}; write "
                "user_items,site or, with the rows of tables, user_items=5000000,site=1000"
            )
        columns[name] = int(rows) if rows else None
    return columns


def log_of_columns(
    source: Any,
    columns: Mapping[str, int | None],
    options: LogOptions | None = None,
    *,
    filesystem: Any = None,
) -> QueryLog:
    """Reads the log in batches of records; beside the log some batches are in memory.

    Args:
        source: Files, told by path, pattern or address (``s3://logs/2026-11-2*/*.parquet``), a
            ``LazyFrame`` of Polars, or what else :func:`tierbed.data.columns` takes.
        columns: Rows of each column's table; None counts them by a pass before: one more than the
            largest id. A column has whole numbers, or lists of them.
        options: What is read of it; ``row_count`` is that of all tables, and told by ``columns``.
        filesystem: Where paths lie, of ``pyarrow.fs`` or fsspec; by default told by the address.

    Raises:
        InvalidError: No such column, an id that is no row, or a source that is read once without
            known rows.
        UnsupportedError: pyarrow is not installed.

    Examples:
        >>> import pyarrow
        >>> clicks = pyarrow.table({"seen": [[1, 2], [2]], "site": [0, 3]})
        >>> log = tb.placement.log_of_columns(clicks, {"seen": 5, "site": 4})
        >>> log[0], log[1], log.row_count
        ([1, 2, 5], [2, 8], 9)
    """
    given = options or LogOptions()
    if given.row_count is not None:
        raise InvalidError("columns say their rows; leave out --rows, and write COLUMN=ROWS")
    parts = parts_of(source, filesystem, None)
    parts.check(list(columns))
    sizes = _sizes(parts, columns)
    total = sum(sizes.values())

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for values, offsets in _kept(_read(parts, sizes), given):
            yield torch.from_numpy(values), torch.from_numpy(offsets)

    return QueryLog.from_batches(total, batches())


def _sizes(parts: Parts, columns: Mapping[str, int | None]) -> dict[str, int]:
    """Rows of each table; those that are not known are counted in one pass."""
    unknown = [name for name, rows in columns.items() if rows is None]
    if unknown and parts.is_read_once:
        raise InvalidError(
            f"rows of {', '.join(unknown)} are not known, and this source is read once; give them "
            "with the columns"
        )
    largest = dict.fromkeys(unknown, -1)
    for batch in _batches(parts, unknown) if unknown else ():
        for name, found in largest_ids(batch, unknown).items():
            largest[name] = max(largest[name], found)
    return {name: largest[name] + 1 if rows is None else rows for name, rows in columns.items()}


def largest_ids(batch: Any, names: list[str]) -> dict[str, int]:
    """The largest id of each column of a record batch; -1 without any.

    Args:
        batch: A record batch or table of pyarrow.
        names: The columns.
    """
    found = {}
    for name in names:
        values, _ = _ids(batch.column(name), name)
        found[name] = int(values.max(initial=-1))
    return found


def queries_of(batch: Any, sizes: Mapping[str, int]) -> Queries:
    """Makes a query of each record: its ids of all columns, in the order of the columns.

    Args:
        batch: A record batch or table of pyarrow.
        sizes: Rows of each column's table, at least one.

    Returns:
        Row ids ``[E]`` and offsets ``[queries + 1]``, both int64.

    Raises:
        InvalidError: An id is no row of its table.
    """
    records = numpy.arange(batch.num_rows)
    rows, of_record, counts = [], [], numpy.zeros(batch.num_rows, dtype=numpy.int64)
    start = 0
    for name, size in sizes.items():
        values, lengths = _ids(batch.column(name), name)
        if len(values) and (values.min() < 0 or values.max() >= size):
            wrong = values[(values < 0) | (values >= size)][0]
            raise InvalidError(
                f"column {name!r} has the id {wrong}, which is no row of {size}; give more rows "
                "with the column, or hash ids to rows before"
            )
        rows.append(values + start)
        of_record.append(numpy.repeat(records, lengths))
        counts += lengths
        start += size
    order = numpy.argsort(numpy.concatenate(of_record), kind="stable")
    offsets = numpy.zeros(batch.num_rows + 1, dtype=numpy.int64)
    numpy.cumsum(counts, out=offsets[1:])
    return numpy.concatenate(rows)[order], offsets


def _ids(column: Any, name: str) -> Queries:
    """The ids of a column and how many each record has; nulls are none."""
    arrow, compute, _ = arrow_modules()
    if isinstance(column, arrow.ChunkedArray):
        column = column.combine_chunks()
    kind = column.type
    is_list = arrow.types.is_list(kind) or arrow.types.is_large_list(kind)
    inner = kind.value_type if is_list else kind
    if not arrow.types.is_integer(inner):
        raise InvalidError(
            f"column {name!r} has values of {kind}; name columns of whole numbers or of lists of "
            "them"
        )
    if is_list:
        lengths = compute.fill_null(compute.list_value_length(column), 0).to_numpy(
            zero_copy_only=False
        )
        records = numpy.repeat(numpy.arange(len(column)), lengths)
        values = column.flatten()
    else:
        records, values = numpy.arange(len(column)), column
    if values.null_count:
        records = records[values.is_valid().to_numpy(zero_copy_only=False)]
        values = values.drop_null()
    counts = numpy.bincount(records, minlength=len(column))
    ids = values.to_numpy(zero_copy_only=False).astype(numpy.int64, copy=False)
    return ids, counts.astype(numpy.int64, copy=False)


def _batches(parts: Parts, names: list[str]) -> Iterator[Any]:
    # A stream is one part.
    numbers = range(1 if parts.part_rows is None else len(parts.part_rows))
    yield from parts.read(numbers, names, RECORDS_AT_ONCE)


def _read(parts: Parts, sizes: Mapping[str, int]) -> Iterator[Queries]:
    for batch in _batches(parts, list(sizes)):
        yield queries_of(batch, sizes)


def _kept(queries: Iterator[Queries], options: LogOptions) -> Iterator[Queries]:
    """Keeps what ``options`` say, in the order of the log; empty queries are none."""
    draw = numpy.random.Generator(numpy.random.PCG64(options.seed))
    left = options.query_count_max
    for values, offsets in queries:
        lengths = numpy.diff(offsets)
        is_kept = lengths > 0
        if options.sample < 1.0:
            is_kept &= draw.random(len(lengths)) < options.sample
        if left is not None:
            is_kept &= numpy.cumsum(is_kept) <= left
            left -= int(is_kept.sum())
        wanted = lengths * is_kept
        if options.query_rows_max is not None:
            wanted = numpy.minimum(wanted, options.query_rows_max)
        # The first ids of each query that is kept.
        within = numpy.arange(len(values)) - numpy.repeat(offsets[:-1], lengths)
        kept = values[within < numpy.repeat(wanted, lengths)]
        bounds = numpy.zeros(int(is_kept.sum()) + 1, dtype=numpy.int64)
        numpy.cumsum(wanted[is_kept], out=bounds[1:])
        yield kept, bounds
        if left == 0:
            return
