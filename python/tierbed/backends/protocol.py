"""The protocol of stores written in Python.

Rows are fixed-size byte records, opaque to the store, in numbered tables. Arrays are numpy's,
C-contiguous; the store must not keep or change those it is given. One call at a time, from any
thread. Exceptions: raise those of :mod:`tierbed.errors` where they fit (``NoSpaceError`` leaves
the store usable, everything else ends it until it is opened again); others become ``IoError``
with the exception's text. A store must not use the :class:`tierbed.Store` it lies under.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowStoreProtocol"]


@runtime_checkable
class RowStoreProtocol(Protocol):
    """Records by table and row, and one atomic commit."""

    def add_table(self, table: int, name: str, row_count: int, record_bytes: int) -> None:
        """Makes table number ``table`` known: its rows are ``0 .. row_count - 1``.

        Called for every table before its first use, each time the store is opened, in order.

        Args:
            table: Number of the table.
            name: Name of the table.
            row_count: Its rows.
            record_bytes: Bytes of a record.
        """

    def read(
        self, table: int, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Returns the records of ``rows`` ``[N]`` (ascending, unique).

        Args:
            table: Number of the table.
            rows: Rows ``[N]``.

        Returns:
            ``[N, record_bytes]`` with the bytes last written, and ``[N]``: False for rows never
            written, whose bytes are not looked at.
        """

    def write(self, table: int, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        """Overwrites ``rows`` ``[N]`` (ascending, unique) with ``records`` ``[N, record_bytes]``.

        They are read as written at once and durable after the next :meth:`commit`.

        Args:
            table: Number of the table.
            rows: Rows ``[N]``.
            records: Records ``[N, record_bytes]``.
        """

    def scan(
        self, table: int, after: int, row_count_max: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Returns up to ``row_count_max`` written rows greater than ``after``, ascending.

        Args:
            table: Number of the table.
            after: The last row seen; -1 at the beginning.
            row_count_max: Most rows to return.

        Returns:
            Rows ``[N]`` and records ``[N, record_bytes]``; no rows at the end of the table.
        """

    def commit(self, blobs: Mapping[str, bytes]) -> None:
        """Makes all writes so far and ``blobs`` durable, all or nothing.

        The blobs replace those of the commit before. A store opened after a crash holds what the
        last commit made durable, and nothing written after it.

        Args:
            blobs: Named bytes.
        """

    def blob(self, name: str) -> bytes | None:
        """Returns a blob of the last commit.

        Args:
            name: Name of the blob.
        """

    def disk_bytes(self) -> int:
        """Returns the bytes the store occupies."""

    def close(self) -> None:
        """Gives everything back; what was not committed is lost."""
