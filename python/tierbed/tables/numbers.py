"""Whole numbers of a table in files without a name, where memory must not grow with the table."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from tierbed.tables.rows import Rows

__all__ = ["Numbers", "RowOrder", "first_repeated"]

#: Numbers that are sorted at once: 64 MiB with what sorting takes.
PART_NUMBERS = 1 << 20
#: Parts at most: each has a file that is open.
PARTS_MAX = 256
#: An odd number that spreads ids over parts: 2^64 divided by the golden ratio.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_WORD_BYTES = 8


class Numbers:
    """Numbers i64 in a file that is gone with this object.

    Args:
        folder: Where there is room for 8 bytes of each; None: the system's folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self.count = 0

    def append(self, numbers: Tensor) -> None:
        """Puts numbers ``[N]`` behind those there are."""
        left = _bytes_of(numbers.to(torch.int64).contiguous())
        self.count += len(numbers)
        while left:
            left = left[self._file.write(left) :]

    def read(self, first: int, count: int) -> Tensor:
        """Returns ``count`` numbers ``[count]`` from number ``first`` on."""
        made = torch.empty(count, dtype=torch.int64, device="cpu")
        left, at = _bytes_of(made), first * _WORD_BYTES
        while left:
            done = os.preadv(self._file.fileno(), [left], at)
            if not done:
                raise EOFError(f"{count} numbers from {first} on are beyond {self.count}")
            left, at = left[done:], at + done
        return made

    def rows(self) -> Rows:
        """Returns them as rows of a table."""
        return Rows((self.count,), torch.int64, self.read)


def first_repeated(chunks: Iterable[Tensor], count: int, folder: str | None = None) -> int | None:
    """Returns a number that is there twice; None where all ``count`` differ.

    Memory does not grow with them: more than a million are divided into files, equal ones into the
    same one.

    Args:
        chunks: The numbers, ``[N]`` i64 each.
        count: How many there are.
        folder: Where the files go; None: the system's folder.
    """
    part_count = min(PARTS_MAX, -(-count // PART_NUMBERS))
    if part_count < 2:
        return _repeated(np.concatenate([np.empty(0, np.int64), *(c.numpy() for c in chunks)]))
    parts = [Numbers(folder) for _ in range(part_count)]
    for chunk in chunks:
        mixed = (chunk.numpy().view(np.uint64) * _SPREAD) >> np.uint64(32)
        part_of = torch.from_numpy((mixed % np.uint64(part_count)).astype(np.int64))
        for part, found in zip(parts, _divided(chunk, part_of, part_count), strict=True):
            part.append(found)
    repeated = (_repeated(part.read(0, part.count).numpy()) for part in parts)
    return next((number for number in repeated if number is not None), None)


def _repeated(numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int | None:
    numbers.sort()
    again = np.flatnonzero(numbers[1:] == numbers[:-1])
    return int(numbers[again[0]]) if len(again) else None


class RowOrder:
    """Sorts ids by their rows; memory does not grow with them: rows are divided into files.

    Args:
        row_count: No row is as large.
        folder: Where the files go; None: the system's folder.
    """

    def __init__(self, row_count: int, folder: str | None = None) -> None:
        self._folder = folder
        self._part_rows = max(PART_NUMBERS, -(-row_count // PARTS_MAX))
        part_count = max(1, -(-row_count // self._part_rows))
        self._parts = [(Numbers(folder), Numbers(folder)) for _ in range(part_count)]

    def add(self, rows: Tensor, ids: Tensor) -> None:
        """Takes rows ``[N]`` and their ids ``[N]``, i64, in any order; each row comes once."""
        part_of = rows // self._part_rows
        found = [_divided(one, part_of, len(self._parts)) for one in (rows, ids)]
        for part, *both in zip(self._parts, *found, strict=True):
            for numbers, some in zip(part, both, strict=True):
                numbers.append(some)

    def finish(self) -> tuple[Numbers, Numbers]:
        """Returns rows and ids, in the order of the rows."""
        all_rows, all_ids = Numbers(self._folder), Numbers(self._folder)
        for part_rows, part_ids in self._parts:
            rows, order = part_rows.read(0, part_rows.count).sort()
            all_rows.append(rows)
            all_ids.append(part_ids.read(0, part_ids.count)[order])
        self._parts = []
        return all_rows, all_ids


def _divided(numbers: Tensor, part_of: Tensor, part_count: int) -> tuple[Tensor, ...]:
    """Returns the numbers of each part, in their order."""
    if part_count == 1:
        return (numbers,)
    order = part_of.argsort(stable=True)
    counts = torch.bincount(part_of, minlength=part_count)
    return numbers[order].split_with_sizes(counts.tolist())


def _bytes_of(numbers: Tensor) -> memoryview:
    """Returns the memory of numbers i64, which lie one behind the other."""
    array: Any = numbers.numpy()
    return memoryview(array).cast("B")
