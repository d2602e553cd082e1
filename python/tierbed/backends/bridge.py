"""Arrays for stores written in Python, from and to the engine's bytes.

The native module calls a :class:`Bridge`; it checks dtype and shape of every answer, so that a
store's mistake is an error that names the call.
"""

from __future__ import annotations

import _thread
import errno
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierbed.backends.protocol import RowStoreProtocol
from tierbed.errors import InvalidError, TierbedError

__all__ = ["Bridge"]


class Bridge:
    """A :class:`RowStoreProtocol` as the native module calls it.

    Args:
        store: The store; the bridge closes it.
    """

    def __init__(self, store: RowStoreProtocol) -> None:
        missing = [
            name
            for name in ("add_table", "read", "write", "scan", "commit", "blob", "close")
            if not callable(getattr(store, name, None))
        ]
        if missing:
            raise InvalidError(f"{type(store).__name__} is no row store: it has no {missing}")
        self._store = store
        self._record_bytes: dict[int, int] = {}

    def add_table(self, table: int, name: str, row_count: int, record_bytes: int) -> None:
        """Announces a table."""
        self._store.add_table(table, name, row_count, record_bytes)
        self._record_bytes[table] = record_bytes

    def read(self, table: int, rows: bytes) -> tuple[bytes, bytes]:
        """Reads rows (i64); returns records and one byte of presence per row."""
        wanted = np.frombuffer(rows, dtype=np.int64)
        records, present = self._store.read(table, wanted)
        width = self._record_bytes[table]
        _check("read", "records", records, np.uint8, (len(wanted), width))
        _check("read", "present", present, np.bool_, (len(wanted),))
        return records.tobytes(), present.tobytes()

    def write(self, table: int, rows: bytes, records: bytes) -> None:
        """Writes rows (i64) and their records."""
        width = self._record_bytes[table]
        self._store.write(
            table,
            np.frombuffer(rows, dtype=np.int64),
            np.frombuffer(records, dtype=np.uint8).reshape(-1, width),
        )

    def scan(self, table: int, after: int, row_count_max: int) -> tuple[bytes, bytes]:
        """Returns the next rows (i64) and their records."""
        rows, records = self._store.scan(table, after, row_count_max)
        _check("scan", "rows", rows, np.int64, (len(rows),))
        _check("scan", "records", records, np.uint8, (len(rows), self._record_bytes[table]))
        return rows.tobytes(), records.tobytes()

    def commit(self, blobs: list[tuple[str, bytes]]) -> None:
        """Commits everything written with ``blobs``."""
        self._store.commit(dict(blobs))

    def blob(self, name: str) -> bytes | None:
        """Returns a blob of the last commit."""
        found = self._store.blob(name)
        if found is not None and not isinstance(found, bytes):
            raise TypeError(f"blob must return bytes or None, not {type(found).__name__}")
        return found

    def disk_bytes(self) -> int:
        """Returns the bytes the store occupies; 0 when it does not say."""
        count = getattr(self._store, "disk_bytes", None)
        return int(count()) if callable(count) else 0

    def close(self) -> None:
        """Closes the store."""
        self._store.close()

    def kind_of(self, error: BaseException) -> str:
        """Returns the kind of engine error that ``error`` is."""
        if isinstance(error, KeyboardInterrupt):
            # The engine must end the call with an error of its own first; raised here, the
            # interrupt would be lost on the way.
            threading.Timer(0.05, _thread.interrupt_main).start()
        if isinstance(error, TierbedError):
            return error.kind
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return "no_space"
        return "io"


def _check(
    call: str, what: str, array: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
        found = (
            f"{array.dtype} {array.shape}"
            if isinstance(array, np.ndarray)
            else type(array).__name__
        )
        raise TypeError(f"{call} must return {what} as {dtype.__name__} {shape}, found {found}")
