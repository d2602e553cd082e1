"""Where the rows of a window lie, on the host and on a device.

A row is one record on the host: weights, optimizer state, use count. On the device the parts of
all rows of a kind lie apart, so that kernels read whole vectors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "CHUNK_WORDS",
    "LINE_WORDS",
    "GivenTable",
    "Kind",
    "Memory",
    "RowsOfKind",
    "Window",
    "host_floats",
    "host_pairs",
]

# Words that are copied at once: memory of the device that is taken beside the windows.
CHUNK_WORDS = 8 << 20
# Words that each part of the rows of a kind begins at a multiple of: whole lines of memory.
LINE_WORDS = 32

Memory = tuple[int, int]
"""Address and words of memory of the engine."""
GivenTable = tuple[int, int, int, int]
"""First entry, entries, first word, words of a record."""


class Kind(NamedTuple):
    """Rows that lie together on the device."""

    dim: int
    state_words: int

    @property
    def record_words(self) -> int:
        """Words of a row on the host."""
        return self.dim + self.state_words + 1


@dataclass(frozen=True)
class RowsOfKind:
    """The rows of a window that are of one kind.

    Args:
        weights: ``[N, dim]`` f32.
        state: ``[N, S]`` f32.
        use_counts: ``[N]`` i32.
    """

    weights: Tensor
    state: Tensor
    use_counts: Tensor

    def put(self, first: int, records: Tensor) -> None:
        """Takes ``records`` ``[n, record_words]`` as rows ``first..``."""
        rows = slice(first, first + len(records))
        dim = self.weights.shape[1]
        self.weights[rows].copy_(records[:, :dim])
        self.state[rows].copy_(records[:, dim:-1])
        self.use_counts[rows].copy_(records.view(torch.int32)[:, -1])

    def give(self, first: int, records: Tensor) -> None:
        """Writes rows ``first..`` to ``records`` ``[n, record_words]``."""
        rows = slice(first, first + len(records))
        dim = self.weights.shape[1]
        records[:, :dim] = self.weights[rows]
        records[:, dim:-1] = self.state[rows]
        records.view(torch.int32)[:, -1] = self.use_counts[rows]

    def take(self, to: Tensor, other: RowsOfKind, at: Tensor) -> None:
        """Copies rows ``at`` of ``other`` to rows ``to``."""
        for own, of_other in zip(self._parts(), other._parts(), strict=True):
            own.index_copy_(0, to, of_other.index_select(0, at))

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weights, self.state, self.use_counts


class Window:
    """The rows of one window on the device.

    Args:
        memory: Where they lie.
        tables: As the engine gives them, by table id.
        kinds: Of each table that has rows.
    """

    def __init__(self, memory: Tensor, tables: list[GivenTable], kinds: Mapping[int, Kind]) -> None:
        self.tables = tables
        self.first_rows = [0] * len(tables)
        """Per table, which row of its kind is its first."""
        counts: dict[Kind, int] = {}
        for table, (_, count, _, record_words) in enumerate(tables):
            if count:
                kind = kinds[table]
                assert kind.record_words == record_words, f"rows of table {table} have other words"
                self.first_rows[table] = counts.get(kind, 0)
                counts[kind] = self.first_rows[table] + count
        self.kinds = kinds
        self.rows: dict[Kind, RowsOfKind] = {}
        at = 0
        for kind, count in counts.items():
            parts = []
            for words in (kind.dim, kind.state_words, 1):
                parts.append(memory[at : at + count * words].view(count, words))
                at = _next_line(at + count * words)
            weights, state, use_counts = parts
            self.rows[kind] = RowsOfKind(weights, state, use_counts.view(torch.int32).view(-1))

    def chunks(self, host: Tensor) -> Iterator[tuple[RowsOfKind, int, Tensor]]:
        """Returns rows, first row and records ``[n, record_words]`` of ``host``, part by part."""
        for table, (_, count, first_word, words) in enumerate(self.tables):
            step = max(1, CHUNK_WORDS // words)
            for first in range(0, count, step):
                size = min(step, count - first)
                start = first_word + first * words
                records = host[start : start + size * words].view(size, words)
                yield self.rows[self.kinds[table]], self.first_rows[table] + first, records


def _next_line(words: int) -> int:
    return -(-words // LINE_WORDS) * LINE_WORDS


def host_floats(memory: Memory) -> Tensor:
    """Returns memory of the engine, ``[words]`` f32, valid as long as the engine says."""
    return _view(memory, ctypes.c_float, torch.float32)


def host_pairs(memory: Memory) -> Tensor:
    """As :func:`host_floats`, ``[n, 2]`` i32, of the address of ``n`` pairs."""
    address, count = memory
    return _view((address, 2 * count), ctypes.c_int32, torch.int32).view(count, 2)


def _view(memory: Memory, word: Any, dtype: torch.dtype) -> Tensor:
    address, count = memory
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer((word * count).from_address(address), dtype=dtype)
