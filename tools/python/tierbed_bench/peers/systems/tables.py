"""Systems of tables: Tierbed's snapshot, Lance and SQLite."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierbed.jagged import KeyedJaggedTensor
from tierbed.placement.files import import_tables
from tierbed.serve.snapshot import Snapshot
from tierbed_bench.peers.systems.base import Peer, bring
from tierbed_bench.peers.table import Ids, Rows, Table

__all__ = ["Lance", "Sqlite", "Tierbed"]

# What Lance keeps about its files, and what a connection to SQLite keeps of pages: the page cache
# has the rows of both.
LANCE_METADATA_BYTES = 8 << 20
SQLITE_PAGES_KIB = 1024
LANCE_FILE_BYTES = 1 << 30


class Tierbed(Peer):
    """A snapshot of rows by id, without an index, through :meth:`tierbed.Snapshot.lookup`."""

    def load(self) -> None:
        """Writes the snapshot from the mapped file."""
        mapped = np.memmap(
            self.table.file, np.float32, "c", shape=(self.table.row_count, self.table.dim)
        )
        import_tables({"rows": torch.from_numpy(mapped)}, self._path, head_rows=0)

    @property
    def _path(self) -> Path:
        return self.folder / "snapshot"

    def open(self, memory_bytes: int, clients: int) -> None:
        """Opens it with its default cache."""
        budget = memory_bytes or 2 * self.table.byte_count + (64 << 20)
        self._snapshot = Snapshot.open(self._path, dram_budget=budget)
        self._lengths: dict[int, torch.Tensor] = {}

    def read(self, ids: Ids) -> Rows:
        """Looks the rows up, each a bag of its own."""
        count = len(ids)
        lengths = self._lengths.get(count)
        if lengths is None:
            lengths = self._lengths[count] = torch.ones(count, dtype=torch.int64)
        bags = KeyedJaggedTensor(["rows"], torch.from_numpy(ids), lengths=lengths, stride=count)
        return self._snapshot.lookup(bags).values().numpy()

    def close(self) -> None:
        """Closes the snapshot."""
        self._snapshot.close()


class Lance(Peer):
    """A dataset of fixed-size lists, by ``take``."""

    def __init__(self, table: Table, folder: Path) -> None:
        super().__init__(table, folder)
        self._arrow = bring("pyarrow", "pyarrow")
        self._lance = bring("lance", "pylance")

    def load(self) -> None:
        """Writes files of a gigabyte."""
        arrow, dim = self._arrow, self.table.dim
        schema = arrow.schema([arrow.field("row", arrow.list_(arrow.float32(), dim))])

        def batches() -> Iterator[Any]:
            for _, rows in self.table.chunks():
                lists = arrow.FixedSizeListArray.from_arrays(arrow.array(rows.reshape(-1)), dim)
                yield arrow.record_batch([lists], schema=schema)

        reader = arrow.RecordBatchReader.from_batches(schema, batches())
        rows_max = max(1, LANCE_FILE_BYTES // self.table.row_bytes)
        self._lance.write_dataset(reader, self._path, schema=schema, max_rows_per_file=rows_max)

    @property
    def _path(self) -> str:
        return str(self.folder / "rows.lance")

    def open(self, memory_bytes: int, clients: int) -> None:
        """Opens it with small caches of its own."""
        self._rows = self._lance.dataset(
            self._path,
            metadata_cache_size_bytes=LANCE_METADATA_BYTES,
            index_cache_size_bytes=LANCE_METADATA_BYTES,
        )

    def read(self, ids: Ids) -> Rows:
        """Takes the rows."""
        column = self._rows.take(ids.tolist(), columns=["row"])["row"]
        values = [chunk.flatten().to_numpy() for chunk in column.chunks]
        found: Rows = np.concatenate(values).reshape(-1, self.table.dim)
        return found

    def close(self) -> None:
        """Lance closes files when nobody has the dataset."""
        del self._rows


class Sqlite(Peer):
    """A table with the id as primary key, ``IN (...)``, a connection for every thread."""

    def load(self) -> None:
        """Inserts rows in order."""
        database = sqlite3.connect(self._file, isolation_level=None)
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, row BLOB NOT NULL)")
        database.execute("BEGIN")
        for first, rows in self.table.chunks():
            database.executemany(
                "INSERT INTO rows VALUES (?, ?)",
                ((first + at, row.tobytes()) for at, row in enumerate(rows)),
            )
        database.execute("COMMIT")
        database.close()

    @property
    def _file(self) -> Path:
        return self.folder / "rows.sqlite"

    def open(self, memory_bytes: int, clients: int) -> None:
        """Each thread connects when it first reads."""
        self._of_thread = threading.local()

    def _connection(self) -> sqlite3.Connection:
        found: sqlite3.Connection | None = getattr(self._of_thread, "database", None)
        if found is None:
            name = f"file:{self._file}?mode=ro&immutable=1"
            found = sqlite3.connect(name, uri=True, isolation_level=None)
            found.execute(f"PRAGMA cache_size = -{SQLITE_PAGES_KIB}")
            self._of_thread.database = found
        return found

    def read(self, ids: Ids) -> Rows:
        """Selects the rows, which come in the order of the table."""
        wanted = ids.tolist()
        places = {row: at for at, row in enumerate(wanted)}
        marks = ",".join("?" * len(wanted))
        select = f"SELECT id, row FROM rows WHERE id IN ({marks})"  # noqa: S608
        found = np.empty((len(wanted), self.table.dim), np.float32)
        for row, packed in self._connection().execute(select, wanted):
            found[places[row]] = np.frombuffer(packed, np.float32)
        return found

    def close(self) -> None:
        """Connections end with their threads."""
