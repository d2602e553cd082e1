"""RocksDB in its two formats of files, through the package ``rocksdict``.

A key is the page of 15 rows that a row would lie on, and its place there: with it PlainTable's
index needs one entry for 15 rows. Neither is compressed: these rows cannot be.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tierbed_bench.peers.systems.base import Peer, bring
from tierbed_bench.peers.table import Ids, Rows, Table

__all__ = ["RocksBlock", "RocksPlain"]

PAGE_ROWS = 15
KEY_BYTES, PAGE_KEY_BYTES = 5, 4
# Rows of a file that is loaded, which has few bytes more than they have.
FILE_BYTES = 1 << 30
# Of the memory: rows, then blocks and their index. The rest is for what the allocator adds;
# with 0.75 in one cache of blocks the process exceeded its limit.
ROW_CACHE_SHARE, BLOCK_CACHE_SHARE = 0.45, 0.3
UNLIMITED_BYTES = 64 << 30


class _Rocks(Peer):
    """What both formats share: keys, and reading many of them at once."""

    def __init__(self, table: Table, folder: Path) -> None:
        super().__init__(table, folder)
        self._rocks = bring("rocksdict", "rocksdict")

    @abstractmethod
    def _options(self, memory_bytes: int) -> Any:
        """Returns the format, and what it has in memory."""

    def _plain_options(self) -> Any:
        options = self._rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_compression_type(self._rocks.DBCompressionType.none())
        options.set_advise_random_on_open(True)
        return options

    def open(self, memory_bytes: int, clients: int) -> None:
        """Opens it read-only."""
        self._db = self._rocks.Rdict(
            str(self.folder / "db"),
            options=self._options(memory_bytes or UNLIMITED_BYTES),
            access_type=self._rocks.AccessType.read_only(),
        )

    def read(self, ids: Ids) -> Rows:
        """Gets all keys by one call."""
        return self.rows_of(b"".join(self._db.get(_keys(ids))))

    def close(self) -> None:
        """Closes it."""
        self._db.close()


class RocksBlock(_Rocks):
    """Blocks of 4 KiB, a cache of rows and one of blocks, read past the page cache."""

    def _options(self, memory_bytes: int) -> Any:
        rocks, options = self._rocks, self._plain_options()
        table = rocks.BlockBasedOptions()
        table.set_block_size(4096)
        table.set_block_cache(rocks.Cache(int(BLOCK_CACHE_SHARE * memory_bytes)))
        # The index of all blocks would take a fifth of 1 % memory: only its upper level stays.
        table.set_index_type(rocks.BlockBasedIndexType.two_level_index_search())
        table.set_cache_index_and_filter_blocks(True)
        table.set_pin_top_level_index_and_filter(True)
        options.set_block_based_table_factory(table)
        options.set_row_cache(rocks.Cache(int(ROW_CACHE_SHARE * memory_bytes)))
        options.set_use_direct_reads(True)
        return options

    def load(self) -> None:
        """Writes sorted files and moves them into the database."""
        options = self._options(64 << 20)
        per_file = max(1, FILE_BYTES // (self.table.row_bytes + 16))
        writer: Any = None
        paths: list[str] = []
        held = 0
        for first, rows in self.table.chunks():
            if writer is None:
                paths.append(str(self.folder / f"{first}.sst"))
                writer = self._rocks.SstFileWriter(options=options)
                writer.open(paths[-1])
                held = 0
            for key, row in zip(_keys_from(first, len(rows)), rows, strict=True):
                writer[key] = row.tobytes()
            held += len(rows)
            if held >= per_file:
                writer.finish()
                writer = None
        if writer is not None:
            writer.finish()
        database = self._rocks.Rdict(str(self.folder / "db"), options=options)
        moving = self._rocks.IngestExternalFileOptions()
        moving.set_move_files(True)
        database.ingest_external_file(paths, moving)
        database.close()
        for path in paths:
            Path(path).unlink(missing_ok=True)


class RocksPlain(_Rocks):
    """PlainTable: files that are mapped, an index by hash of the page's key, no cache."""

    def _options(self, memory_bytes: int) -> Any:
        rocks, options = self._rocks, self._plain_options()
        options.set_prefix_extractor(rocks.SliceTransform.create_fixed_prefix(PAGE_KEY_BYTES))
        table = rocks.PlainTableFactoryOptions()
        table.user_key_length = KEY_BYTES
        table.bloom_bits_per_key = 0
        table.hash_table_ratio = 0.75
        table.index_sparseness = PAGE_ROWS + 1
        # Else opening reads every row.
        table.store_index_in_file = True
        options.set_plain_table_factory(table)
        options.set_allow_mmap_reads(True)
        options.set_write_buffer_size(FILE_BYTES // 2)
        return options

    def load(self) -> None:
        """Writes rows in order: files of this format cannot be made outside of a database."""
        shutil.rmtree(self.folder / "db", ignore_errors=True)
        database = self._rocks.Rdict(str(self.folder / "db"), options=self._options(0))
        writing = self._rocks.WriteOptions()
        writing.disable_wal = True
        for first, rows in self.table.chunks():
            batch = self._rocks.WriteBatch(raw_mode=True)
            for key, row in zip(_keys_from(first, len(rows)), rows, strict=True):
                batch.put(key, row.tobytes())
            database.write(batch, writing)
        database.flush(True)
        database.close()


def _keys_from(first: int, count: int) -> Sequence[bytes]:
    return _keys(np.arange(first, first + count))


def _keys(ids: Ids) -> list[bytes]:
    """Keys that order as ids do."""
    made = np.empty(len(ids), np.dtype([("page", ">u4"), ("place", "u1")]))
    made["page"], made["place"] = np.divmod(ids, PAGE_ROWS)
    packed = made.tobytes()
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
