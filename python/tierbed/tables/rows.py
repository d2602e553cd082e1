"""Tensors of files, of which some rows at a time are read."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierbed.errors import CorruptionError

__all__ = ["CHUNK_ROWS", "Rows", "joined", "of_array", "of_file", "of_mapped", "of_tensor"]

CHUNK_ROWS = 65536

_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Rows:
    """A tensor that lies elsewhere.

    Args:
        shape: Of the whole, rows first.
        dtype: Of its numbers.
        read: Returns ``count`` rows from ``first`` on, on the CPU.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    @property
    def count(self) -> int:
        """How many rows it has; 1 for a single number."""
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """Numbers per row."""
        return int(torch.Size(self.shape[1:]).numel())

    def chunks(self, chunk_rows: int = CHUNK_ROWS) -> Iterator[Tensor]:
        """Yields all rows.

        Args:
            chunk_rows: Most rows at a time.
        """
        for first in range(0, self.count, chunk_rows):
            yield self.read(first, min(chunk_rows, self.count - first))

    def matrix(self, first: int, count: int) -> Tensor:
        """Reads rows as ``[count, width]`` f32.

        Args:
            first: First of the rows.
            count: How many.
        """
        return self.read(first, count).to(torch.float32).reshape(count, self.width).contiguous()

    def whole(self) -> Tensor:
        """Reads all of it."""
        return self.read(0, self.count)

    def columns(self, first: int, width: int) -> Rows:
        """Returns some columns of it.

        Args:
            first: First of the columns.
            width: How many.
        """
        read = self.read
        return Rows(
            (self.count, width), self.dtype, lambda row, n: read(row, n)[:, first : first + width]
        )

    def before(self, count: int) -> Rows:
        """Returns its first rows.

        Args:
            count: How many.
        """
        return Rows((count, *self.shape[1:]), self.dtype, self.read)

    def after(self, skipped: int) -> Rows:
        """Returns it without its first rows.

        Args:
            skipped: How many.
        """
        read = self.read
        shape = (self.count - skipped, *self.shape[1:])
        return Rows(shape, self.dtype, lambda first, count: read(skipped + first, count))


def of_tensor(tensor: Tensor) -> Rows:
    """Returns a tensor, mapped or in memory, as rows; a single number is one row."""
    flat = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    return Rows(tuple(tensor.shape), tensor.dtype, lambda at, n: flat[at : at + n].cpu())


def of_mapped(tensor: Tensor, path: str | os.PathLike[str]) -> Rows:
    """Returns a tensor of a mapped file as rows; what was read of it leaves the memory again.

    Args:
        tensor: The tensor, which nobody writes to.
        path: The file.
    """
    rows = of_tensor(tensor)
    size_bytes = tensor.numel() * tensor.element_size()
    if not tensor.is_contiguous() or not _is_mapped(tensor.data_ptr(), size_bytes, path):
        return rows

    def read(first: int, count: int) -> Tensor:
        part = rows.read(first, count)
        copied = part.clone()
        _forget(part.data_ptr(), part.numel() * part.element_size())
        return copied

    return Rows(rows.shape, rows.dtype, read)


def _is_mapped(start: int, size_bytes: int, path: str | os.PathLike[str]) -> bool:
    """Whether memory of this process is a map of a file."""
    name = os.path.realpath(path)
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, *_, found = line.rstrip("\n").split(maxsplit=5)
            low, high = (int(end, 16) for end in addresses.split("-"))
            if low <= start and start + size_bytes <= high:
                return found == name
    return False


def _forget(start: int, size_bytes: int) -> None:
    """Lets go of the whole pages of a map that nobody wrote to; the file still has them."""
    low = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    high = (start + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if low < high:
        _LIBC.madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), mmap.MADV_DONTNEED)


def of_array(array: Any) -> Rows:
    """Returns an array of numpy, mapped or in memory, as rows."""

    def read(first: int, count: int) -> Tensor:
        part = array[first : first + count]
        # A copy, in the byte order of this machine.
        return torch.from_numpy(np.array(part, dtype=part.dtype.newbyteorder("=")))

    kind = torch.from_numpy(np.empty(0, dtype=array.dtype.newbyteorder("="))).dtype
    return Rows(tuple(array.shape), kind, read)


def of_file(path: str | os.PathLike[str], shape: tuple[int, ...], kind: str, offset: int) -> Rows:
    """Returns plain numbers in a file as rows.

    Args:
        path: The file.
        shape: Of the tensor.
        kind: Of its numbers, as numpy spells it: ``"<f4"``, ``"<i8"``.
        offset: Bytes before it.
    """
    width = int(torch.Size(shape[1:]).numel())
    dtype = np.dtype(kind)

    def read(first: int, count: int) -> Tensor:
        at = offset + first * width * dtype.itemsize
        found = np.fromfile(path, dtype, count * width, offset=at)
        if found.size != count * width:
            raise CorruptionError(
                f"{os.fspath(path)} ends within row {first + found.size // max(1, width)}; bring "
                "all its files again from where they were written",
                {"path": os.fspath(path)},
            )
        native = found.astype(dtype.newbyteorder("="), copy=False)
        return torch.from_numpy(native).reshape(count, *shape[1:])

    return Rows(shape, torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype, read)


def joined(parts: Sequence[Rows]) -> Rows:
    """Returns rows that lie in several places as one tensor."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.count)

    def read(first: int, count: int) -> Tensor:
        found = []
        for part, start in zip(parts, starts, strict=False):
            low, high = max(first, start), min(first + count, start + part.count)
            if low < high:
                found.append(part.read(low - start, high - low))
        return torch.cat(found) if found else torch.empty((0, *parts[0].shape[1:]), device="cpu")

    return Rows((starts[-1], *parts[0].shape[1:]), parts[0].dtype, read)
