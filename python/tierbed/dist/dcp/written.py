"""Rows of a table that were written, and tensors that have these alone.

A row takes a bit in memory. The k-th row of the tensors is the k-th of the written rows of all
ranks, in the order of their numbers; rows of a rank follow those of the ranks that hold lower ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tierbed.dist.dcp.tensors import BLOCK_ROWS, Chunk, Columns, TableState
from tierbed.dist.device.store import DeviceStore
from tierbed.dist.held import Held
from tierbed.errors import CorruptionError, InvalidError
from tierbed.train.store import Store

__all__ = ["CompactState", "OfWritten", "RowNumbers", "UseCounts", "Written"]

_ONES = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.int64)


class Written:
    """Which rows of what a rank holds are there, and where they stand among those of all ranks.

    Args:
        held: What the rank holds.
    """

    def __init__(self, held: Held) -> None:
        self.held = held
        self.first = 0
        self.total = 0
        self.is_trained = False
        self._bits = np.zeros(-(-len(held.rows) // 8), dtype=np.uint8)
        self._before: np.ndarray | None = None

    def add(self, rows: Tensor) -> None:
        """Notes rows ``[N]`` that are held."""
        at = rows.numpy() - self.held.rows.start
        bits = np.left_shift(1, at & 7).astype(np.uint8)
        np.bitwise_or.at(self._bits, at >> 3, bits)
        self._before = None

    def clear(self) -> None:
        """Forgets all rows, to note those of a checkpoint.

        Raises:
            InvalidError: Rows were trained already.
        """
        if self.is_trained:
            raise InvalidError(
                f"rows of table {self.held.config.name!r} were trained already; load into a new "
                "store",
                {"table": self.held.config.name},
            )
        self.first = self.total = 0
        self._bits[:] = 0
        self._before = None

    def count(self) -> int:
        """Returns how many are noted."""
        return int(self._ranks()[-1])

    def runs(self, first: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yields where in ``first..first + count`` some rows stand, and the rows, ascending."""
        ranks = self._ranks()
        k, end = first - self.first, first - self.first + count
        block = int(np.searchsorted(ranks, k, side="right")) - 1
        while k < end:
            bits = self._bits[block * BLOCK_ROWS // 8 : (block + 1) * BLOCK_ROWS // 8]
            rows = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            low = int(ranks[block])
            rows = rows[k - low : end - low]
            if rows.size:
                start = self.held.rows.start + block * BLOCK_ROWS
                yield k + self.first, torch.from_numpy(rows + start)
            k += rows.size
            block += 1

    def _ranks(self) -> np.ndarray:
        """Returns how many rows are noted before each block, and in all."""
        if self._before is None:
            size = BLOCK_ROWS // 8
            padded = np.zeros(-(-max(self._bits.size, 1) // size) * size, dtype=np.uint8)
            padded[: self._bits.size] = self._bits
            ones = _ONES[padded].reshape(-1, size).sum(axis=1)
            self._before = np.concatenate([[0], np.cumsum(ones)])
        return self._before


class OfWritten(TableState):
    """What tensors of written rows have in common.

    Args:
        written: The rows; None where this rank holds none of the table.
        total: Rows of all ranks, where this rank holds none.
    """

    def __init__(self, written: Written | None, total: int = 0) -> None:
        self._written = written
        self._total = total

    @property
    def size(self) -> tuple[int, ...]:
        """As :attr:`TableState.size`."""
        return (self._total if self._written is None else self._written.total,)

    def chunks(self) -> list[Chunk]:
        """As :meth:`TableState.chunks`."""
        if self._written is None or self._written.count() == 0:
            return []
        return [Chunk((self._written.first,), (self._written.count(),))]

    def begin_load(self, size: tuple[int, ...]) -> None:
        """As :meth:`TableState.begin_load`."""
        self._total = size[0]
        if self._written is not None:
            self._written.total = size[0]

    def rows_of(self, chunk: Chunk) -> Iterator[tuple[slice, Tensor]]:
        """Yields where in the chunk some rows stand, and the rows."""
        assert self._written is not None, "a rank that holds nothing is asked for nothing"
        for at, rows in self._written.runs(chunk.offsets[0], chunk.sizes[0]):
            first = at - chunk.offsets[0]
            yield slice(first, first + rows.numel()), rows


class RowNumbers(OfWritten):
    """Numbers of the written rows ``[K]`` i64. Loading it says which rows a checkpoint has.

    Args:
        written: The rows; None where this rank holds none of the table.
        total: Rows of all ranks, where this rank holds none.
    """

    def __init__(self, written: Written | None, total: int = 0) -> None:
        super().__init__(written, total)
        self._is_loaded = False

    def begin_load(self, size: tuple[int, ...]) -> None:
        """As :meth:`TableState.begin_load`; every rank looks at all numbers, to find its own.

        Raises:
            InvalidError: Rows were trained already.
        """
        if self._written is not None:
            self._written.clear()
        super().begin_load(size)
        self._is_loaded = True

    @property
    def dtype(self) -> torch.dtype:
        """As :attr:`TableState.dtype`."""
        return torch.int64

    def chunks(self) -> list[Chunk]:
        """As :meth:`TableState.chunks`; all of it where it is loaded."""
        if self._is_loaded:
            return [Chunk((0,), self.size)] if self._written is not None and self.size[0] else []
        return super().chunks()

    def read(self, chunk: Chunk) -> Tensor:
        """As :meth:`TableState.read`."""
        out = torch.empty(chunk.sizes, dtype=torch.int64)
        for place, rows in self.rows_of(chunk):
            out[place] = rows
        return out

    def write(self, chunk: Chunk, values: Tensor) -> None:
        """As :meth:`TableState.write`.

        Raises:
            CorruptionError: Rows do not ascend, or are none of the table's.
        """
        assert self._written is not None, "a rank that holds nothing is asked for nothing"
        held = self._written.held
        ends = (values < 0) | (values >= (held.config.num_embeddings or 0))
        if bool((torch.diff(values) <= 0).any()) or bool(ends.any()):
            raise CorruptionError(
                f"rows of table {held.config.name!r} of the checkpoint do not ascend within the "
                "table",
                {"table": held.config.name},
            )
        self._written.first += int((values < held.rows.start).sum())
        self._written.add(values[(values >= held.rows.start) & (values < held.rows.stop)])


class CompactState(OfWritten):
    """Weights ``[K, D]`` or state ``[K, S]`` of the written rows.

    Args:
        written: The rows; None where this rank holds none of the table.
        parts: What of them this rank holds, and the first column of each in the whole tensor.
        width: Columns of the whole tensor.
        total: Rows of all ranks, where this rank holds none.
    """

    def __init__(
        self,
        written: Written | None,
        parts: list[tuple[int, Columns]],
        width: int,
        total: int = 0,
    ) -> None:
        super().__init__(written, total)
        self._parts, self._width = parts, width

    @property
    def size(self) -> tuple[int, ...]:
        """As :attr:`TableState.size`."""
        return (*super().size, self._width)

    def chunks(self) -> list[Chunk]:
        """As :meth:`TableState.chunks`: one per part of the state."""
        return [
            Chunk(
                (*rows.offsets, first + of.held_columns.start), (*rows.sizes, len(of.held_columns))
            )
            for rows in super().chunks()
            for first, of in self._parts
        ]

    def read(self, chunk: Chunk) -> Tensor:
        """As :meth:`TableState.read`."""
        out = torch.empty(chunk.sizes, dtype=torch.float32)
        for columns, of, place in self._within(chunk):
            for at, rows in self.rows_of(chunk):
                first, last = int(rows[0]), int(rows[-1])
                block = torch.empty((last - first + 1, len(columns)), dtype=torch.float32)
                of.read(first, columns, block)
                out[at, place] = block[rows - first]
        return out

    def write(self, chunk: Chunk, values: Tensor) -> None:
        """As :meth:`TableState.write`; rows that were not written stay so."""
        for columns, of, place in self._within(chunk):
            for at, rows in self.rows_of(chunk):
                for run in _consecutive(rows):
                    of.write(int(rows[run][0]), columns, values[at, place][run])

    def _within(self, chunk: Chunk) -> Iterator[tuple[range, Columns, slice]]:
        """Yields columns of each part that the chunk has, and where they are in it."""
        low, high = chunk.offsets[1], chunk.offsets[1] + chunk.sizes[1]
        for first, of in self._parts:
            start, stop = (
                max(low, first + of.held_columns.start),
                min(high, first + of.held_columns.stop),
            )
            if start < stop:
                yield range(start - first, stop - first), of, slice(start - low, stop - low)


class UseCounts(OfWritten):
    """Use counts ``[K]`` i64 of the written rows.

    Args:
        written: The rows; None where this rank holds none of the table.
        store: Where they lie.
        total: Rows of all ranks, where this rank holds none.
    """

    def __init__(self, written: Written | None, store: Store | DeviceStore, total: int = 0) -> None:
        super().__init__(written, total)
        self._store = store

    @property
    def dtype(self) -> torch.dtype:
        """As :attr:`TableState.dtype`."""
        return torch.int64

    def read(self, chunk: Chunk) -> Tensor:
        """As :meth:`TableState.read`."""
        out = torch.empty(chunk.sizes, dtype=torch.int64)
        for place, rows in self.rows_of(chunk):
            first, last = int(rows[0]), int(rows[-1])
            counts = self._store.use_counts(self._name, first, last - first + 1)
            out[place] = counts[rows - first]
        return out

    def write(self, chunk: Chunk, values: Tensor) -> None:
        """As :meth:`TableState.write`."""
        for place, rows in self.rows_of(chunk):
            for run in _consecutive(rows):
                first, count = int(rows[run][0]), rows[run].numel()
                weights, state = self._store.read_rows_and_state(self._name, first, count)
                self._store.write_rows(self._name, first, weights, state, values[place][run])

    @property
    def _name(self) -> str:
        assert self._written is not None, "a rank that holds nothing is asked for nothing"
        return self._written.held.name


def _consecutive(rows: Tensor) -> Iterator[slice]:
    """Yields where consecutive rows stand in ``rows``, which ascend."""
    breaks = ((torch.diff(rows) != 1).nonzero().view(-1) + 1).tolist()
    for start, end in zip([0, *breaks], [*breaks, rows.numel()], strict=True):
        yield slice(start, end)
