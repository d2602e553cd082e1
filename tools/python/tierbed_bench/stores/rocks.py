"""Rows in RocksDB by the package ``rocksdict``: no library of the system is needed.

Tuned as ``backend="rocksdb"`` (RecDB's division of memory, FBGEMM's direct I/O without log,
compression and checksums). Every row crosses Python, so this one is for users who have RocksDB
in Python already, not for speed.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierbed.errors import ClosedError, CorruptionError, IoError, NoSpaceError, UnsupportedError

__all__ = ["RocksDictStore"]

_MEMTABLES = 4
_LIVE = "live"


class RocksDictStore:
    """A :class:`~tierbed.backends.RowStoreProtocol` in RocksDB.

    A commit flushes the memtables and links RocksDB's files into a checkpoint folder; opening the
    store starts from the last one, so a crash loses what was not committed, all of it.

    Args:
        path: The folder; made when there is none.
        memory_bytes: Memtables (84 %) and block cache (16 %), beside the engine's budget.
        universal: Universal compaction, as FBGEMM, instead of levels.

    Raises:
        UnsupportedError: ``rocksdict`` is not installed.
        ClosedError: Another process has it open.
        CorruptionError: Files of the last commit are missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        memory_bytes: int = 64 << 20,
        universal: bool = False,
    ) -> None:
        try:
            self._rocks: Any = importlib.import_module("rocksdict")
        except ImportError as error:
            raise UnsupportedError(
                f"rocksdict is not installed; pip install 'tierbed-bench[rocksdict]': {error}"
            ) from error
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._path / "LOCK")
        self._record_bytes: dict[int, int] = {}
        try:
            self._number = self._restore()
            options = _options(self._rocks, memory_bytes, universal)
            with _errors():
                self._db: Any = self._rocks.Rdict(str(self._path / _LIVE), options)
                write = self._rocks.WriteOptions()
                write.disable_wal = True
                self._db.set_write_options(write)
        except BaseException:
            self._lock.close()
            raise

    def _restore(self) -> int:
        """Makes the live database anew from the last commit and returns its number."""
        current = self._path / "CURRENT"
        number = int(current.read_text()) if current.exists() else 0
        kept = _checkpoint_name(number)
        for folder in self._path.iterdir():
            if folder.is_dir() and folder.name != kept:
                shutil.rmtree(folder)
        if number:
            source = self._path / kept
            if not (source / "CURRENT").exists():
                raise CorruptionError(f"{source} is missing; restore the folder from a copy")
            live = self._path / _LIVE
            live.mkdir()
            for file in source.iterdir():
                # SSTs never change: linked. The small files do: copied.
                if file.suffix == ".sst":
                    os.link(file, live / file.name)
                else:
                    shutil.copyfile(file, live / file.name)
        return number

    def add_table(self, table: int, name: str, row_count: int, record_bytes: int) -> None:
        """See :meth:`RowStoreProtocol.add_table`."""
        self._record_bytes[table] = record_bytes

    def read(
        self, table: int, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """See :meth:`RowStoreProtocol.read`."""
        width = self._record_bytes[table]
        keys = [_key(table, row) for row in rows.tolist()]
        with _errors():
            found = self._db.get(keys) if keys else []
        present = np.array([record is not None for record in found], dtype=np.bool_)
        packed = b"".join(bytes(width) if record is None else record for record in found)
        return self._decode(table, packed, len(keys)), present

    def _decode(self, table: int, packed: bytes, count: int) -> NDArray[np.uint8]:
        width = self._record_bytes[table]
        if len(packed) != count * width:
            raise CorruptionError(f"a record of table {table} has another length in RocksDB")
        return np.frombuffer(packed, dtype=np.uint8).reshape(count, width)

    def write(self, table: int, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        """See :meth:`RowStoreProtocol.write`."""
        width, packed = records.shape[1], records.tobytes()
        batch = self._rocks.WriteBatch(raw_mode=True)
        for at, row in enumerate(rows.tolist()):
            batch.put(_key(table, row), packed[at * width : (at + 1) * width])
        with _errors():
            self._db.write(batch)

    def scan(
        self, table: int, after: int, row_count_max: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """See :meth:`RowStoreProtocol.scan`."""
        end = _key(table + 1, 0)
        rows: list[int] = []
        found: list[bytes] = []
        with _errors():
            for key, record in self._db.items(from_key=_key(table, after + 1)):
                if key >= end or len(rows) == row_count_max:
                    break
                rows.append(int.from_bytes(key[-5:], "big"))
                found.append(record)
        return np.array(rows, dtype=np.int64), self._decode(table, b"".join(found), len(rows))

    def commit(self, blobs: Mapping[str, bytes]) -> None:
        """See :meth:`RowStoreProtocol.commit`."""
        batch = self._rocks.WriteBatch(raw_mode=True)
        batch.delete_range(b"b", b"c")
        for name, content in blobs.items():
            batch.put(b"b" + name.encode(), content)
        number = self._number + 1
        folder = self._path / _checkpoint_name(number)
        with _errors():
            self._db.write(batch)
            self._db.flush(True)
            self._rocks.Checkpoint(self._db).create_checkpoint(str(folder))
        for file in folder.iterdir():
            _sync(file)
        _sync(folder)
        temporary = self._path / "CURRENT.tmp"
        temporary.write_text(f"{number}\n")
        _sync(temporary)
        temporary.replace(self._path / "CURRENT")
        _sync(self._path)
        old, self._number = self._number, number
        shutil.rmtree(self._path / _checkpoint_name(old), ignore_errors=True)

    def blob(self, name: str) -> bytes | None:
        """See :meth:`RowStoreProtocol.blob`."""
        with _errors():
            found = self._db.get(b"b" + name.encode())
        return None if found is None else bytes(found)

    def disk_bytes(self) -> int:
        """See :meth:`RowStoreProtocol.disk_bytes`; linked files count once."""
        files = {
            stat.st_ino: stat.st_size
            for stat in (file.stat() for file in self._path.glob("*/*") if file.is_file())
        }
        return sum(files.values())

    def close(self) -> None:
        """See :meth:`RowStoreProtocol.close`."""
        self._db.close()
        self._lock.close()


def _checkpoint_name(number: int) -> str:
    return f"checkpoint-{number:06}"


def _key(table: int, row: int) -> bytes:
    """Orders as (table, row) do; blobs, ``b...``, lie before."""
    return b"r" + table.to_bytes(3, "big") + row.to_bytes(5, "big")


def _lock(path: Path) -> Any:
    # Closed by close(), or by the system when the process ends.
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ClosedError(f"{path.parent} is in use by another opener") from error
    return file


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _options(rocks: Any, memory_bytes: int, universal: bool) -> Any:
    memory_bytes = max(memory_bytes, 1 << 20)
    cache_bytes = memory_bytes * 16 // 100
    memtable_bytes = (memory_bytes - cache_bytes) // _MEMTABLES
    options = rocks.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_use_direct_reads(True)
    options.set_use_direct_io_for_flush_and_compaction(True)
    options.set_write_buffer_size(memtable_bytes)
    options.set_max_write_buffer_number(_MEMTABLES)
    options.set_max_background_jobs(2)
    options.set_compression_type(rocks.DBCompressionType.none())
    options.set_bytes_per_sync(1 << 20)
    options.set_optimize_filters_for_hits(True)
    options.set_memtable_whole_key_filtering(True)
    options.set_memtable_prefix_bloom_ratio(0.05)
    options.set_target_file_size_base(32 << 20)
    if universal:
        shape = rocks.UniversalCompactOptions()
        shape.max_size_amplification_percent = 400
        options.set_compaction_style(rocks.DBCompactionStyle.universal())
        options.set_universal_compaction_options(shape)
    else:
        options.set_level_compaction_dynamic_level_bytes(True)
        options.set_max_bytes_for_level_base(max(_MEMTABLES * memtable_bytes, 128 << 20))
    table = rocks.BlockBasedOptions()
    table.set_block_size(4096)
    table.set_block_cache(rocks.Cache(cache_bytes))
    table.set_bloom_filter(10, False)
    table.set_checksum_type(rocks.ChecksumType.no_checksum())
    options.set_block_based_table_factory(table)
    return options


@contextmanager
def _errors() -> Iterator[None]:
    """Sorts RocksDB's errors into ours."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if "No space left" in text:
            raise NoSpaceError(f"RocksDB: {text}; free disk space, then reopen") from error
        if text.startswith("Corruption"):
            raise CorruptionError(f"RocksDB: {text}; restore the folder from a copy") from error
        raise IoError(f"RocksDB: {text}") from error
