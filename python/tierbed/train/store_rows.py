"""Rows of a training store: its tables, and reading, writing and finding their rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tierbed._util.tensors import check_tensors
from tierbed.config.optim import state_words
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.train.store_tables import StoreTables

__all__ = ["RowVisitor", "StoreRows"]

RowVisitor = Callable[[str, Tensor, Tensor, Tensor, Tensor], None]


class StoreRows(StoreTables):
    """The rows of a :class:`tierbed.Store`, by table."""

    def read_rows(self, table: str, first_row: int, row_count: int) -> Tensor:
        """Copies rows ``first_row..`` of a table, ``[row_count, D]`` f32.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            row_count: How many rows.

        Raises:
            InvalidError: Rows the table does not have.
        """
        return self._read(table, first_row, row_count, with_state=False)[0]

    def read_rows_and_state(
        self, table: str, first_row: int, row_count: int
    ) -> tuple[Tensor, Tensor]:
        """Copies rows and their optimizer state, ``[N, D]`` and ``[N, S]`` f32.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            row_count: How many rows.
        """
        return self._read(table, first_row, row_count, with_state=True)

    def _read(
        self, table: str, first_row: int, row_count: int, with_state: bool
    ) -> tuple[Tensor, Tensor]:
        at = self.table_id(table)
        schema = self._schema()[at]
        rows = schema["row_count"]
        if not (0 <= first_row <= rows and 0 <= row_count <= rows - first_row):
            raise InvalidError(
                f"{row_count} rows from {first_row} are not all in table {table} of {rows} rows",
                {"table": table, "first_row": str(first_row), "row_count": str(row_count)},
            )
        weights = torch.empty((row_count, schema["dim"]), dtype=torch.float32, device="cpu")
        words = state_words(schema["optimizer"], schema["dim"])
        rows_state = torch.empty((row_count, words), dtype=torch.float32, device="cpu")
        takes_state = with_state and words > 0
        self._native.read_rows(at, first_row, weights, rows_state if takes_state else None)
        return weights, rows_state

    def scan(self, visit: RowVisitor, *, chunk_rows: int = 65536) -> None:
        """Visits every row that was ever written, once, in one pass over everything.

        The tensors are the visitor's to keep; weights and state are views of the same memory.

        Args:
            visit: Called with the table's name, rows ``[N]`` i64, weights ``[N, D]`` f32, state
                ``[N, S]`` f32 and use counts ``[N]`` i64. In forward order rows come in no order.
            chunk_rows: Most rows at a time, of all tables together.
        """
        tables = self._schema()

        def hand_on(at: int, rows: Any, words: Any) -> None:
            dim = tables[at]["dim"]
            # Weights, state, use count: views of one matrix.
            records = from_dlpack(words)
            counts = records.view(torch.int32)[:, -1].to(torch.int64)
            name, weights, state = tables[at]["name"], records[:, :dim], records[:, dim:-1]
            visit(name, from_dlpack(rows), weights, state, counts)

        self._native.scan_rows(chunk_rows, hand_on)

    def gather_rows(self, table: str, rows: Tensor) -> Tensor:
        """Copies rows ``rows`` ``[N]`` i64, in any order, into ``[N, D]`` f32.

        Args:
            table: Name of the table.
            rows: Rows ``[N]`` i64.
        """
        check_tensors(rows=rows)
        at = self.table_id(table)
        weights = torch.empty(
            (rows.numel(), self._schema()[at]["dim"]), dtype=torch.float32, device="cpu"
        )
        self._native.gather_rows(at, rows, weights)
        return weights

    def write_rows(
        self,
        table: str,
        first_row: int,
        weights: Tensor,
        rows_state: Tensor | None = None,
        use_counts: Tensor | None = None,
    ) -> None:
        """Overwrites rows ``first_row..`` with ``weights`` ``[N, D]`` f32.

        Without ``rows_state`` ``[N, S]`` the optimizer state of those rows starts anew, without
        ``use_counts`` ``[N]`` i64 they count as never used.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            weights: Rows ``[N, D]`` f32.
            rows_state: Optimizer state ``[N, S]`` f32.
            use_counts: Use counts ``[N]`` i64.

        Raises:
            InvalidError: Rows beyond the table, or tensors of another width.
        """
        check_tensors(weights=weights, rows_state=rows_state, use_counts=use_counts)
        at, detached = self._checked(table, weights, rows_state)
        self._native.write_rows(at, first_row, weights.detach(), detached, use_counts)

    def _checked(
        self, table: str, weights: Tensor, rows_state: Tensor | None
    ) -> tuple[int, Tensor | None]:
        """Returns the id of a table, and state as the engine takes it; refuses other widths."""
        at = self.table_id(table)
        schema = self._schema()[at]
        words = state_words(schema["optimizer"], schema["dim"])
        for name, tensor, width in (
            ("weights", weights, schema["dim"]),
            ("state", rows_state, words),
        ):
            if tensor is not None and (tensor.dim() != 2 or tensor.shape[1] != width):
                raise InvalidError(
                    f"{name} of table {table!r} must be [N, {width}], found {tuple(tensor.shape)}",
                    {"table": table},
                )
        return at, None if rows_state is None or words == 0 else rows_state.detach()

    def scatter_rows(
        self, table: str, rows: Tensor, weights: Tensor, rows_state: Tensor | None = None
    ) -> None:
        """Overwrites rows ``rows`` ``[N]`` i64, in any order, as :meth:`write_rows` does.

        Rows that follow each other are written at once.

        Args:
            table: Name of the table.
            rows: Rows ``[N]`` i64; none twice.
            weights: Their weights ``[N, D]`` f32.
            rows_state: Optimizer state ``[N, S]`` f32.

        Raises:
            InvalidError: Rows beyond the table, or tensors of another width.
        """
        check_tensors(rows=rows, weights=weights, rows_state=rows_state)
        at, state = self._checked(table, weights, rows_state)
        ordered, order = rows.sort()
        weights = weights.detach()[order]
        state = None if state is None else state[order]
        starts = [0, *(torch.nonzero(ordered.diff() != 1)[:, 0] + 1).tolist(), len(ordered)]
        for first, end in itertools.pairwise(starts):
            if first < end:
                part = None if state is None else state[first:end]
                self._native.write_rows(at, int(ordered[first]), weights[first:end], part, None)

    def copy_table(
        self, source: StoreRows, table: str, *, to: str | None = None, chunk_rows: int = 262_144
    ) -> None:
        """Copies all rows of a table of another store into one of this store.

        With optimizer state, use counts and steps, so that training goes on with the same bits. So
        a table becomes larger, gets another name, or another optimizer, whose state then starts
        anew. Rows behind those of ``source`` keep what they have.

        Args:
            source: The other store, such as one opened with ``read_only=True``.
            table: The table there.
            to: The table here, which a collection made; by default of the same name.
            chunk_rows: Rows in memory at a time. In forward order ``source`` is read whole for each
                chunk.

        Raises:
            InvalidError: No such table, fewer rows here, or another dim.
            UnsupportedError: A table of open vocabulary.
        """
        name = table if to is None else to
        theirs, ours = source.table(table), self.table(name)
        if table in source.vocabularies() or name in self.vocabularies():
            raise UnsupportedError(
                f"rows of an open vocabulary belong to ids; move {table!r} by 'tierbed export' and "
                "'tierbed import'",
                {"table": table},
            )
        row_count, dim = int(theirs["row_count"]), int(theirs["dim"])
        if ours["dim"] != dim or ours["row_count"] < row_count:
            raise InvalidError(
                f"table {name!r} has {ours['row_count']} x {ours['dim']}, which does not hold "
                f"the {row_count} x {dim} of {table!r}; make it with at least as many rows, of "
                "that dim",
                {"table": name},
            )
        is_same = theirs["optimizer"] == ours["optimizer"]
        for first in range(0, row_count, chunk_rows):
            count = min(chunk_rows, row_count - first)
            rows, state = source.read_rows_and_state(table, first, count)
            uses = source.use_counts(table, first, count)
            self.write_rows(name, first, rows, state if is_same else None, uses)
        if is_same:
            self.set_steps_done(name, source.steps_done(table))

    def steps_done(self, table: str) -> int:
        """Returns how many steps the optimizer of ``table`` did; Adam's corrections follow it.

        Args:
            table: Name of the table.
        """
        return self._native.steps_done(self.table_id(table))

    def set_steps_done(self, table: str, steps: int) -> None:
        """Lets the optimizer of ``table`` have done ``steps`` steps.

        For a run that goes on with rows written by :meth:`write_rows`.

        Args:
            table: Name of the table.
            steps: How many.
        """
        self._native.set_steps_done(self.table_id(table), steps)

    def use_counts(self, table: str, first_row: int, row_count: int) -> Tensor:
        """Returns how many update steps touched each row, ``[row_count]`` i64.

        Args:
            table: Name of the table.
            first_row: First of the rows.
            row_count: How many rows.
        """
        counts = torch.empty(row_count, dtype=torch.int64, device="cpu")
        self._native.use_counts(self.table_id(table), first_row, counts)
        return counts
