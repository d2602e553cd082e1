"""Systems that read through a map of their file: a plain file of rows, and LMDB."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from tierbed_bench.peers.systems.base import Peer, bring
from tierbed_bench.peers.table import Ids, Rows, Table

__all__ = ["Lmdb", "MemoryMap"]


class MemoryMap(Peer):
    """NumPy's map of the file of rows, told that it is read in no order."""

    def load(self) -> None:
        """The table's own file is what is mapped."""

    def open(self, memory_bytes: int, clients: int) -> None:
        """Maps the file. The page cache has the limit of the process."""
        with self.table.file.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Else a fault reads 128 KiB around its page.
        self._map.madvise(mmap.MADV_RANDOM)
        self._rows = self.rows_of(memoryview(self._map))

    def read(self, ids: Ids) -> Rows:
        """Copies the rows; NumPy holds no lock meanwhile."""
        return self._rows.take(ids, axis=0)

    def close(self) -> None:
        """Takes the map away."""
        del self._rows
        self._map.close()


class Lmdb(Peer):
    """LMDB with keys in order, without read-ahead; a read transaction a query."""

    def __init__(self, table: Table, folder: Path) -> None:
        super().__init__(table, folder)
        self._lmdb = bring("lmdb", "lmdb")

    def load(self) -> None:
        """Appends rows in the order of their keys."""
        # A page of 4 KiB holds 14 rows of 256 bytes; small tables have pages of their own beside.
        size = 2 * self.table.byte_count + (64 << 20)
        env = self._lmdb.open(str(self.folder), map_size=size, sync=False)
        for first, rows in self.table.chunks():
            keys = np.arange(first, first + len(rows), dtype=">u4").tobytes()
            with env.begin(write=True) as changes:
                for at, row in enumerate(rows):
                    changes.put(keys[4 * at : 4 * at + 4], row.tobytes(), append=True)
        env.sync(True)
        env.close()

    def open(self, memory_bytes: int, clients: int) -> None:
        """Opens it read-only."""
        self._env = self._lmdb.open(
            str(self.folder), readonly=True, lock=False, readahead=False, max_readers=clients
        )

    def read(self, ids: Ids) -> Rows:
        """Gets all keys by one cursor."""
        keys = ids.astype(">u4").tobytes()
        wanted = [keys[at : at + 4] for at in range(0, len(keys), 4)]
        with self._env.begin(buffers=True) as reading, reading.cursor() as cursor:
            return self.rows_of(b"".join([row for _, row in cursor.getmulti(wanted)]))

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()
