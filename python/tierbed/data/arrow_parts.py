"""Sources of columns as parts of Arrow: files and stores of objects, tables, other libraries.

A part is what is read as a whole: a row group of Parquet, a file of another format, a range of a
table. Where the rows of every part are known, reading begins anywhere and parts may be permuted;
a *stream* is one part of unknown length, read from its beginning.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from tierbed._util.arrow import arrow_modules
from tierbed.errors import InvalidError

__all__ = [
    "PART_ROWS",
    "READ_AHEAD",
    "Parts",
    "ReaderStream",
    "ScannedStream",
    "TableParts",
    "check_columns",
    "ranges",
]

PART_ROWS = 1 << 14
"""Rows of a part where the source has none of its own."""

READ_AHEAD = {"batch_readahead": 2, "fragment_readahead": 1, "use_threads": False}
"""Of scans: threads of pyarrow would read on without bounds while a batch is trained on."""


class Parts(ABC):
    """A source of record batches with a schema, in parts."""

    schema: Any
    """What its columns are, a ``pyarrow.Schema``."""

    part_rows: list[int] | None
    """Rows of each part; None for a stream."""

    is_read_once: bool = False
    """Whether there is no second pass."""

    @abstractmethod
    def read(self, parts: Sequence[int], columns: list[str], step: int) -> Iterator[Any]:
        """Yields the record batches of parts, one part behind the other.

        Args:
            parts: Numbers of parts, in the order to read them; ``[0]`` for a stream.
            columns: The columns that are read.
            step: About how many rows a record batch has at most.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Returns what a position must agree with (JSON values)."""

    def order_identity(self) -> dict[str, Any] | str:
        """Returns what the rows and their order depend on, or why that is not known."""
        return self.identity()

    def count(self) -> int | None:
        """Returns the number of rows, by a pass if need be; None where a pass would use them up."""
        if self.part_rows is not None:
            return sum(self.part_rows)
        if self.is_read_once:
            return None
        rows: list[int] = [
            batch.num_rows for batch in self.read([0], self.schema.names[:1], PART_ROWS)
        ]
        return sum(rows)

    def check(self, columns: Sequence[str]) -> None:
        """Refuses columns that there are not.

        Raises:
            InvalidError: A column is missing.
        """
        check_columns("the source", self.schema.names, columns)


def check_columns(name: str, has: Sequence[str], columns: Sequence[str]) -> None:
    """Refuses columns that are not among those that ``name`` has.

    Raises:
        InvalidError: A column is missing.
    """
    missing = [column for column in columns if column not in has]
    if missing:
        raise InvalidError(
            f"{name} has no column {', '.join(missing)}; it has {', '.join(has)}",
            {"path": name},
        )


class ScannedStream(Parts):
    """A dataset of pyarrow that is not of files: a union, or one in memory."""

    part_rows = None

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.schema = dataset.schema

    def read(self, parts: Sequence[int], columns: list[str], step: int) -> Iterator[Any]:
        """Yields record batches.

        Args:
            parts: ``[0]``.
            columns: The columns that are read.
            step: About how many rows a record batch has at most.
        """
        yield from self.dataset.to_batches(columns=columns, batch_size=step, **READ_AHEAD)

    def identity(self) -> dict[str, Any]:
        """Returns what the columns are."""
        return {"schema": str(self.schema.remove_metadata())}

    def order_identity(self) -> dict[str, Any] | str:
        """Tells that there is no known order."""
        return f"a {type(self.dataset).__name__} does not tell its order"


class ReaderStream(ScannedStream):
    """A reader of record batches, read once."""

    is_read_once = True

    def read(self, parts: Sequence[int], columns: list[str], step: int) -> Iterator[Any]:
        """Yields record batches, the first time.

        Args:
            parts: ``[0]``.
            columns: The columns that are read.
            step: Does not matter.

        Raises:
            InvalidError: The second time.
        """
        if self.dataset is None:
            raise InvalidError(
                "a RecordBatchReader can be read once; for several epochs give paths, a table or a "
                "dataset"
            )
        reader, self.dataset = self.dataset, None
        for batch in reader:
            yield batch.select(columns)

    def order_identity(self) -> dict[str, Any] | str:
        """Tells that there is no known order."""
        return "a RecordBatchReader can be read once"


def ranges(rows: int) -> list[int]:
    """Returns the rows of equal parts."""
    return [min(PART_ROWS, rows - first) for first in range(0, rows, PART_ROWS)]


class TableParts(Parts):
    """A table in memory, in ranges of rows; nothing is copied."""

    def __init__(self, table: Any) -> None:
        self.table = table
        self.schema = table.schema
        self.part_rows = ranges(table.num_rows)
        self._digest: str | None = None

    def read(self, parts: Sequence[int], columns: list[str], step: int) -> Iterator[Any]:
        """Yields record batches.

        Args:
            parts: Numbers of parts.
            columns: The columns that are read.
            step: About how many rows a record batch has at most.
        """
        table = self.table.select(columns)
        for at in parts:
            yield from table.slice(at * PART_ROWS, PART_ROWS).to_batches(max_chunksize=step)

    def identity(self) -> dict[str, Any]:
        """Returns rows and columns."""
        schema = str(self.schema.remove_metadata())
        return {"rows": self.table.num_rows, "schema": schema}

    def order_identity(self) -> dict[str, Any] | str:
        """Returns a digest of the rows."""
        arrow, _, _ = arrow_modules()
        if self._digest is None:
            digest = hashlib.blake2b(digest_size=16)

            class Sink:
                closed = False

                def write(self, raw: Any) -> int:
                    digest.update(memoryview(raw))
                    return len(raw)

                def flush(self) -> None: ...

                def close(self) -> None: ...

            with arrow.ipc.new_stream(arrow.PythonFile(Sink(), "w"), self.schema) as stream:
                # Equal rows in other chunks are the same.
                for first in range(0, self.table.num_rows, PART_ROWS):
                    stream.write_table(self.table.slice(first, PART_ROWS).combine_chunks())
            self._digest = digest.hexdigest()
        return {**self.identity(), "digest": self._digest}
