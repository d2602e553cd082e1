"""Batches of a generated trace as tensors; format: ``docs/reference/formats/trace.md``."""

from __future__ import annotations

import struct
import weakref
from pathlib import Path

import torch

from tierbed.errors import CorruptionError, InvalidError
from tierbed.jagged import KeyedJaggedTensor

__all__ = ["Trace"]

_PAGE_BYTES = 4096
_COLUMNS = 26


class Trace:
    """A trace read batch by batch, over and over: number ``n`` is batch ``n`` modulo all.

    Args:
        path: The file.
        batch_len: ``B``.

    Raises:
        CorruptionError: the file is no trace.
    """

    def __init__(self, path: Path, batch_len: int) -> None:
        with path.open("rb") as file:
            page = file.read(_PAGE_BYTES)
        if len(page) < _PAGE_BYTES or page[:8] != b"TBtrace1":
            raise CorruptionError(f"not a trace: {path}")
        (samples,) = struct.unpack_from("<Q", page, 32)
        self._places = [struct.unpack_from("<IIQ", page, 40 + 16 * at) for at in range(_COLUMNS)]
        if samples < batch_len:
            raise InvalidError(f"a trace of {samples} samples holds no whole batch of {batch_len}")
        self._file = path.open("rb")
        weakref.finalize(self, self._file.close)
        self.batch_len = batch_len
        self.batch_count = samples // batch_len
        self.features = {f"c{at + 1}": place[0] for at, place in enumerate(self._places)}
        self._lengths = torch.ones(_COLUMNS * batch_len, dtype=torch.int64)

    def ids(self, number: int) -> torch.Tensor:
        """Returns the ids of a batch, ``[26 * B]`` i64, feature by feature."""
        first = number % self.batch_count * self.batch_len
        columns = []
        for _, width, first_byte in self._places:
            self._file.seek(first_byte + first * width)
            raw = bytearray(self._file.read(self.batch_len * width))
            digits = torch.frombuffer(raw, dtype=torch.uint8).view(-1, width).to(torch.int64)
            columns.append((digits << (8 * torch.arange(width))).sum(dim=1))
        return torch.cat(columns)

    def batch(self, number: int) -> KeyedJaggedTensor:
        """Returns a batch as bags of one id."""
        return KeyedJaggedTensor(
            list(self.features), self.ids(number), lengths=self._lengths, stride=self.batch_len
        )

    def row_count(self, number: int) -> int:
        """Counts the distinct rows of a batch."""
        columns = self.ids(number).view(_COLUMNS, self.batch_len)
        return sum(int(torch.unique(column).numel()) for column in columns)
