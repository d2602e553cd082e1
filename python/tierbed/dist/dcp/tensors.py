"""Tensors of tables as a distributed checkpoint sees them: read and written some rows at a time."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tierbed.dist.device.store import DeviceStore
from tierbed.dist.held import Held
from tierbed.tables.state import StatePart
from tierbed.train.store import Store

__all__ = ["Chunk", "Columns", "DenseState", "StepsDone", "TableState"]

#: Rows that are read together with what lies beside them.
BLOCK_ROWS = 4096


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor.

    Args:
        offsets: Where it begins, per dimension.
        sizes: How much it has, per dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def split(self, bytes_max: int, element_size: int) -> Iterator[Chunk]:
        """Yields parts of it, of whole rows and at most ``bytes_max``, or one row."""
        width = element_size
        for size in self.sizes[1:]:
            width *= size
        step = max(1, bytes_max // max(width, 1))
        for done in range(0, self.sizes[0], step):
            first = self.offsets[0] + done
            count = min(step, self.sizes[0] - done)
            yield Chunk((first, *self.offsets[1:]), (count, *self.sizes[1:]))


class TableState(abc.ABC):
    """A tensor of a table that lies in a store, in place of the tensor in a state dictionary.

    A rank has the chunks that it holds. Give it to torch by the planners of this package.
    """

    @property
    @abc.abstractmethod
    def size(self) -> tuple[int, ...]:
        """Size of the whole tensor, of all ranks."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its elements."""
        return torch.float32

    @abc.abstractmethod
    def chunks(self) -> list[Chunk]:
        """Returns what this rank holds."""

    @abc.abstractmethod
    def read(self, chunk: Chunk) -> Tensor:
        """Reads a part of a chunk that this rank holds.

        Args:
            chunk: What to read.
        """

    @abc.abstractmethod
    def write(self, chunk: Chunk, values: Tensor) -> None:
        """Writes a part of a chunk that this rank holds; what lies beside it stays.

        Args:
            chunk: Where to.
            values: Of its size.
        """

    def begin_load(self, size: tuple[int, ...]) -> None:
        """Gets ready to be written; most know their size, and refuse another one later.

        Args:
            size: Size of the tensor in the checkpoint.
        """
        del size


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Weights, or a part of the state, of what a rank holds of a table.

    Args:
        store: Where the rows lie.
        held: What the rank holds.
        part: The part of the state in the rank's store; None for weights.
        is_word: Whether it is a number per row, whatever the dim.
    """

    store: Store | DeviceStore
    held: Held
    part: StatePart | None = None
    is_word: bool = False

    @property
    def held_columns(self) -> range:
        """Columns of the whole tensor that are held."""
        if self.is_word:
            return range(1)
        return self.held.columns

    def of_state(self, columns: range) -> slice:
        """Returns where ``columns`` of the whole tensor lie in weights or state of the store."""
        start = 0 if self.part is None else self.part.first
        first = 0 if self.is_word else self.held.columns.start
        return slice(start + columns.start - first, start + columns.stop - first)

    def read(self, first: int, columns: range, out: Tensor) -> None:
        """Reads rows ``first..`` into ``out`` ``[N, C]``."""
        place = self.of_state(columns)
        for done, count in _blocks(out.shape[0]):
            rows = self.store.read_rows_and_state(self.held.name, first + done, count)
            out[done : done + count] = rows[0 if self.part is None else 1][:, place]

    def write(self, first: int, columns: range, values: Tensor) -> None:
        """Writes ``values`` ``[N, C]`` to rows ``first..``; other columns stay as they are."""
        place, name = self.of_state(columns), self.held.name
        for done, count in _blocks(values.shape[0]):
            weights, state = self.store.read_rows_and_state(name, first + done, count)
            counts = self.store.use_counts(name, first + done, count)
            (weights if self.part is None else state)[:, place] = values[done : done + count]
            self.store.write_rows(name, first + done, weights, state, counts)


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    for done in range(0, count, BLOCK_ROWS):
        yield done, min(BLOCK_ROWS, count - done)


class DenseState(TableState):
    """Every row of a table, written or not, in the order of their numbers.

    Args:
        columns: Weights or state of what this rank holds; None where it holds nothing.
        row_count: Rows of the table.
        width: Columns of the whole tensor; 0 for a number per row, ``[N]``.
    """

    def __init__(self, columns: Columns | None, row_count: int, width: int) -> None:
        self._columns = columns
        self._size = (row_count, width) if width else (row_count,)

    @property
    def size(self) -> tuple[int, ...]:
        """As :attr:`TableState.size`."""
        return self._size

    def chunks(self) -> list[Chunk]:
        """As :meth:`TableState.chunks`."""
        if self._columns is None or len(self._columns.held.rows) == 0:
            return []
        rows, columns = self._columns.held.rows, self._columns.held_columns
        if len(self._size) == 1:
            return [Chunk((rows.start,), (len(rows),))]
        return [Chunk((rows.start, columns.start), (len(rows), len(columns)))]

    def read(self, chunk: Chunk) -> Tensor:
        """As :meth:`TableState.read`."""
        out = torch.empty(chunk.sizes, dtype=torch.float32)
        held, columns = self._place(chunk)
        held.read(chunk.offsets[0], columns, out.view(chunk.sizes[0], -1))
        return out

    def write(self, chunk: Chunk, values: Tensor) -> None:
        """As :meth:`TableState.write`."""
        held, columns = self._place(chunk)
        held.write(chunk.offsets[0], columns, values.reshape(chunk.sizes[0], -1))

    def _place(self, chunk: Chunk) -> tuple[Columns, range]:
        assert self._columns is not None, "a rank that holds nothing is asked for nothing"
        if len(chunk.sizes) == 1:
            return self._columns, range(1)
        return self._columns, range(chunk.offsets[1], chunk.offsets[1] + chunk.sizes[1])


class StepsDone(TableState):
    """How many steps the optimizer of a table did, ``[1]`` i64.

    Args:
        store: Where the rows lie; None where this rank holds nothing.
        held: What this rank holds.
        is_needed: Whether the optimizer's next step depends on it.
    """

    def __init__(self, store: Store | DeviceStore | None, held: Held | None, *, is_needed: bool):
        self._store, self._held = store, held
        self.is_needed = is_needed

    @property
    def size(self) -> tuple[int, ...]:
        """As :attr:`TableState.size`."""
        return (1,)

    @property
    def dtype(self) -> torch.dtype:
        """As :attr:`TableState.dtype`."""
        return torch.int64

    def chunks(self) -> list[Chunk]:
        """As :meth:`TableState.chunks`; all holders have the same."""
        return [] if self._held is None else [Chunk((0,), (1,))]

    def read(self, chunk: Chunk) -> Tensor:
        """As :meth:`TableState.read`."""
        assert self._store is not None and self._held is not None, "it is of a holder"  # noqa: PT018
        return torch.tensor([self._store.steps_done(self._held.name)])

    def write(self, chunk: Chunk, values: Tensor) -> None:
        """As :meth:`TableState.write`."""
        self.set(int(values[0]))

    def set(self, steps: int) -> None:
        """Lets the optimizer have done ``steps`` steps, where this rank holds rows."""
        if self._store is not None and self._held is not None:
            self._store.set_steps_done(self._held.name, steps)
