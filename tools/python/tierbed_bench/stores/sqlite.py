"""Rows in SQLite: one file, no dependency, one transaction per checkpoint.

Everything since the last commit is one transaction, so a crash rolls it back by itself. The
write-ahead file grows with it: commit now and then. Page cache: ``cache_bytes``.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierbed.errors import ClosedError, CorruptionError, IoError, NoSpaceError

__all__ = ["SqliteStore"]

# Rows of one SELECT: within the 999 variables that every SQLite takes.
_READ_ROWS = 512


class SqliteStore:
    """A :class:`~tierbed.backends.RowStoreProtocol` in one SQLite file.

    Tables are ``WITHOUT ROWID``, so that a record lies in the leaf of its row; the journal is a
    write-ahead file (WAL), synced at every commit.

    Args:
        path: The file; made when there is none.
        cache_bytes: SQLite's page cache, beside the engine's budget.

    Raises:
        ClosedError: Another process has it open.
        CorruptionError: The file is no database.
    """

    def __init__(self, path: str | os.PathLike[str], *, cache_bytes: int = 16 << 20) -> None:
        self._path = Path(path)
        with _errors():
            self._db = sqlite3.connect(
                self._path, timeout=0.2, isolation_level=None, check_same_thread=False
            )
        try:
            with _errors():
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.execute(f"PRAGMA cache_size = -{max(cache_bytes >> 10, 1)}")
                self._db.execute("BEGIN IMMEDIATE")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS blobs (name TEXT PRIMARY KEY, bytes BLOB NOT NULL)"
                )
                self._db.execute("COMMIT")
        except BaseException:
            self._db.close()
            raise
        self._record_bytes: dict[int, int] = {}

    def add_table(self, table: int, name: str, row_count: int, record_bytes: int) -> None:
        """See :meth:`RowStoreProtocol.add_table`."""
        self._record_bytes[table] = record_bytes
        with self._writing():
            self._db.execute(
                f"CREATE TABLE IF NOT EXISTS rows_{int(table)} "
                "(row INTEGER PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID"
            )

    def read(
        self, table: int, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """See :meth:`RowStoreProtocol.read`."""
        records = np.zeros((len(rows), self._record_bytes[table]), dtype=np.uint8)
        present = np.zeros(len(rows), dtype=np.bool_)
        for first in range(0, len(rows), _READ_ROWS):
            some = rows[first : first + _READ_ROWS]
            places = {row: first + at for at, row in enumerate(some.tolist())}
            marks = ",".join("?" * len(places))
            query = f"SELECT row, record FROM rows_{int(table)} WHERE row IN ({marks})"  # noqa: S608
            with _errors():
                for row, record in self._db.execute(query, list(places)):
                    records[places[row]] = self._decode(table, record)
                    present[places[row]] = True
        return records, present

    def _decode(self, table: int, record: bytes) -> NDArray[np.uint8]:
        if not isinstance(record, bytes) or len(record) != self._record_bytes[table]:
            raise CorruptionError(f"a record of table {table} has another length in SQLite")
        return np.frombuffer(record, dtype=np.uint8)

    def write(self, table: int, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        """See :meth:`RowStoreProtocol.write`."""
        width, packed = records.shape[1], records.tobytes()
        pairs = (
            (row, packed[at * width : (at + 1) * width]) for at, row in enumerate(rows.tolist())
        )
        with self._writing():
            self._db.executemany(
                f"INSERT OR REPLACE INTO rows_{int(table)} VALUES (?, ?)",  # noqa: S608
                pairs,
            )

    def scan(
        self, table: int, after: int, row_count_max: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """See :meth:`RowStoreProtocol.scan`."""
        query = (
            f"SELECT row, record FROM rows_{int(table)} "  # noqa: S608
            "WHERE row > ? ORDER BY row LIMIT ?"
        )
        with _errors():
            found = self._db.execute(query, (after, row_count_max)).fetchall()
        records = np.zeros((len(found), self._record_bytes[table]), dtype=np.uint8)
        for at, (_, record) in enumerate(found):
            records[at] = self._decode(table, record)
        return np.array([row for row, _ in found], dtype=np.int64), records

    def commit(self, blobs: Mapping[str, bytes]) -> None:
        """See :meth:`RowStoreProtocol.commit`."""
        with self._writing():
            self._db.execute("DELETE FROM blobs")
            self._db.executemany("INSERT INTO blobs VALUES (?, ?)", list(blobs.items()))
        with _errors():
            self._db.execute("COMMIT")

    def blob(self, name: str) -> bytes | None:
        """See :meth:`RowStoreProtocol.blob`."""
        with _errors():
            found = self._db.execute("SELECT bytes FROM blobs WHERE name = ?", (name,)).fetchone()
        return None if found is None else bytes(found[0])

    def disk_bytes(self) -> int:
        """See :meth:`RowStoreProtocol.disk_bytes`."""
        files = (self._path, self._path.with_name(self._path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """See :meth:`RowStoreProtocol.close`."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with _errors():
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except sqlite3.Error as error:
                if self._db.in_transaction:
                    raise
                # A full disk may end the whole transaction: what was written before is gone.
                raise IoError(
                    f"SQLite gave up what was written since the last checkpoint: {error}; "
                    "reopen the store"
                ) from error


@contextmanager
def _errors() -> Iterator[None]:
    """Sorts SQLite's errors into ours."""
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        if "disk is full" in text:
            raise NoSpaceError(f"SQLite: {text}; free disk space") from error
        if "locked" in text:
            raise ClosedError(f"SQLite: {text}; another process has the store open") from error
        if isinstance(error, sqlite3.DatabaseError) and (
            "malformed" in text or "not a database" in text
        ):
            raise CorruptionError(f"SQLite: {text}; restore the file from a copy") from error
        raise IoError(f"SQLite: {text}") from error
