"""Stores written in Python keep the same promise, and their mistakes are errors, not crashes."""

from __future__ import annotations

import contextlib
import errno
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierbed as tb
from tierbed.backends import RowStoreProtocol
from tierbed.testing import check_row_store
from tierbed_bench.stores import RocksDictStore, SqliteStore


class PlainRows:
    """The simplest store: dictionaries, committed by a copy into ``kept``."""

    def __init__(self, kept: dict[str, Any] | None = None) -> None:
        self.kept = {} if kept is None else kept
        self.rows: dict[int, dict[int, bytes]] = {
            table: dict(rows) for table, rows in self.kept.get("rows", {}).items()
        }
        self.record_bytes: dict[int, int] = {}

    def add_table(self, table: int, name: str, row_count: int, record_bytes: int) -> None:
        self.rows.setdefault(table, {})
        self.record_bytes[table] = record_bytes

    def read(self, table: int, rows: Any) -> tuple[Any, Any]:
        none = bytes(self.record_bytes[table])
        found = [self.rows[table].get(row) for row in rows.tolist()]
        packed = b"".join(record or none for record in found)
        records = np.frombuffer(packed, dtype=np.uint8).reshape(len(rows), -1)
        return records, np.array([record is not None for record in found], dtype=np.bool_)

    def write(self, table: int, rows: Any, records: Any) -> None:
        for row, record in zip(rows.tolist(), records, strict=True):
            self.rows[table][row] = record.tobytes()

    def scan(self, table: int, after: int, row_count_max: int) -> tuple[Any, Any]:
        rows = sorted(row for row in self.rows[table] if row > after)[:row_count_max]
        packed = b"".join(self.rows[table][row] for row in rows)
        width = self.record_bytes[table]
        records = np.frombuffer(packed, dtype=np.uint8).reshape(len(rows), width)
        return np.array(rows, dtype=np.int64), records

    def commit(self, blobs: Mapping[str, bytes]) -> None:
        rows = {table: dict(rows) for table, rows in self.rows.items()}
        self.kept.update(rows=rows, blobs=dict(blobs))

    def blob(self, name: str) -> bytes | None:
        blobs: dict[str, bytes] = self.kept.get("blobs", {})
        return blobs.get(name)

    def disk_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


def rocksdict(path: Path, **options: Any) -> RocksDictStore:
    pytest.importorskip("rocksdict", reason="rocksdict is not installed (uv sync --group bench)")
    return RocksDictStore(path, **options)


STORES = {
    "sqlite": lambda path: SqliteStore(path / "rows.sqlite"),
    "rocksdict": lambda path: rocksdict(path / "rocks", memory_bytes=2 << 20),
    "rocksdict-universal": lambda path: rocksdict(path / "rocks", universal=True),
}


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return lambda: STORES[request.param](tmp_path)


def test_they_pass_the_conformance_kit(make: Any) -> None:
    made = make()
    assert isinstance(made, RowStoreProtocol)
    made.close()
    check_row_store(make, step_count=60)


def test_a_store_of_dictionaries_passes_with_and_without_keeping() -> None:
    kept: dict[str, Any] = {}
    check_row_store(lambda: PlainRows(kept))
    check_row_store(PlainRows, keeps=False)


class Stale(PlainRows):
    """Forgets that rows are written again."""

    def write(self, table: int, rows: Any, records: Any) -> None:
        for row, record in zip(rows.tolist(), records, strict=True):
            self.rows[table].setdefault(row, record.tobytes())


class Durable(PlainRows):
    """Keeps what was never committed."""

    def close(self) -> None:
        self.kept["rows"] = self.rows


@pytest.mark.parametrize("broken", [Stale, Durable])
def test_the_kit_finds_stores_that_do_not_keep_the_promise(broken: Any) -> None:
    kept: dict[str, Any] = {}
    with pytest.raises(tb.CorruptionError, match="differs"):
        check_row_store(lambda: broken(kept), step_count=300)


@pytest.mark.parametrize("backend", ["file", "memory", "lsm", "hashdb", "mmap", "rocksdb"])
def test_our_own_pass_the_suite_for_stores(open_store: Any, backend: str) -> None:
    try:
        check_row_store(lambda: open_store(backend))
    except tb.UnsupportedError as missing:
        pytest.skip(str(missing))


def table(rows: int = 40, dim: int = 4) -> tb.EmbeddingBagConfig:
    return tb.EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim)


def test_a_second_opener_is_refused_and_what_was_not_committed_is_lost(make: Any) -> None:
    with tb.Store.over(make(), dram_budget="1MiB") as store:
        store.add_table(table(), tb.SGD())
        store.write_rows("t", 0, torch.ones(3, 4))
        store.checkpoint("one", {"epoch": 1})
        store.write_rows("t", 0, torch.zeros(3, 4))
        with pytest.raises(tb.ClosedError):
            make()
    with tb.Store.over(make(), dram_budget="1MiB") as store:
        assert store.last_checkpoint() == (1, "one")
        assert store.load_extra() == {"epoch": 1}
        assert torch.equal(store.read_rows("t", 0, 3), torch.ones(3, 4))
        assert store.stats()["disk_bytes"] > 0
        store.verify()


class Failing(PlainRows):
    """Raises what it is told to, in one call."""

    def __init__(self, call: str, error: BaseException) -> None:
        super().__init__()
        self.failure: tuple[str, BaseException] | None = (call, error)

    def fail(self, call: str) -> None:
        if self.failure is not None and self.failure[0] == call:
            raise self.failure[1]

    def read(self, table: int, rows: Any) -> tuple[Any, Any]:
        self.fail("read")
        return super().read(table, rows)

    def write(self, table: int, rows: Any, records: Any) -> None:
        self.fail("write")
        super().write(table, rows, records)

    def commit(self, blobs: Mapping[str, bytes]) -> None:
        self.fail("commit")
        super().commit(blobs)


def write_read_commit(store: tb.Store) -> None:
    store.write_rows("t", 0, torch.ones(3, 4))
    store.read_rows("t", 0, 3)
    store.checkpoint("one")


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        ("read", ZeroDivisionError("a bug"), tb.IoError),
        ("write", FULL, tb.NoSpaceError),
        ("write", tb.CorruptionError("bad page"), tb.CorruptionError),
        ("commit", FULL, tb.NoSpaceError),
        ("commit", RuntimeError("sync failed"), tb.IoError),
    ],
)
def test_exceptions_keep_their_kind_and_text(call: str, error: Any, expected: Any) -> None:
    rows = Failing(call, error)
    store = tb.Store.over(rows, dram_budget="1MiB")
    store.add_table(table(), tb.SGD())
    with pytest.raises(expected, match=str(error.args[-1])) as raised:
        write_read_commit(store)
    assert call in str(raised.value)
    rows.failure = None
    if expected is tb.NoSpaceError:
        # There is room again: the same calls go through.
        write_read_commit(store)
        assert torch.equal(store.read_rows("t", 0, 3), torch.ones(3, 4))
    elif call != "read":
        with pytest.raises(tb.PoisonedError):
            store.checkpoint("after")
    store.close()


def test_an_interrupt_in_a_store_interrupts() -> None:
    store = tb.Store.over(Failing("read", KeyboardInterrupt()), dram_budget="1MiB")
    store.add_table(table(), tb.SGD())

    def read_and_go_on() -> None:
        with contextlib.suppress(tb.IoError):
            store.gather_rows("t", torch.tensor([1]))
        for _ in range(1000):
            time.sleep(0.01)

    # Started in the background by a shell, Python ignores interrupts: then there is none to pass.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            read_and_go_on()
    finally:
        signal.signal(signal.SIGINT, before)
    store.close()


def test_threads_share_a_python_store_without_a_deadlock() -> None:
    store = tb.Store.over(PlainRows(), dram_budget="1MiB")
    store.add_table(table(), tb.SGD())

    def work(first: int) -> None:
        for at in range(50):
            rows = torch.full((2, 4), float(at))
            store.write_rows("t", first, rows)
            assert torch.equal(store.read_rows("t", first, 2), rows)
            store.stats()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, 2 * number) for number in range(8)]:
            done.result(timeout=60)
    store.close()


class Wrong(PlainRows):
    """Answers with another shape or dtype."""

    def read(self, table: int, rows: Any) -> tuple[Any, Any]:
        records, present = super().read(table, rows)
        return records[:, :-1], present

    def scan(self, table: int, after: int, row_count_max: int) -> tuple[Any, Any]:
        rows, records = super().scan(table, after, row_count_max)
        return rows.astype(np.int32), records


def test_answers_of_another_shape_are_named() -> None:
    store = tb.Store.over(Wrong(), dram_budget="1MiB")
    store.add_table(table(), tb.SGD())
    with pytest.raises(tb.IoError, match=r"read must return records as uint8 \(1, 20\)"):
        store.gather_rows("t", torch.tensor([1]))
    store.close()
    store = tb.Store.over(Wrong(), dram_budget="1MiB")
    store.add_table(table(), tb.SGD())
    with pytest.raises(tb.IoError, match="scan must return rows as int64"):
        store.verify()
    store.close()
    with pytest.raises(tb.InvalidError, match="no row store"):
        tb.Store.over(object())  # type: ignore[arg-type]


def test_damaged_blobs_are_corruption() -> None:
    kept: dict[str, Any] = {}
    store = tb.Store.over(PlainRows(kept), dram_budget="1MiB")
    store.add_table(table(), tb.SGD())
    store.checkpoint("one", attachments={"note": b"text"})
    store.close()
    kept["blobs"]["att.note"] = kept["blobs"]["att.note"][:-1] + b"T"
    store = tb.Store.over(PlainRows(kept), dram_budget="1MiB")
    with pytest.raises(tb.CorruptionError, match="checksum"):
        store.attachment("note")
    store.close()
    kept["blobs"]["_schema"] = b"{"
    with pytest.raises(tb.CorruptionError, match="damaged"):
        tb.Store.over(PlainRows(kept), dram_budget="1MiB")


def test_a_full_sqlite_file_is_no_space_or_the_end(tmp_path: Path) -> None:
    rows = SqliteStore(tmp_path / "rows.sqlite", cache_bytes=1)
    store = tb.Store.over(rows, dram_budget="1MiB")
    store.add_table(table(rows=5000, dim=64), tb.SGD())
    store.write_rows("t", 0, torch.ones(1, 64))
    store.checkpoint("one")
    rows._db.execute("PRAGMA max_page_count = 40")

    def fill() -> None:
        store.write_rows("t", 0, torch.zeros(5000, 64))
        store.checkpoint("two")

    with pytest.raises(tb.IoError):
        fill()
    store.close()
    with tb.Store.over(SqliteStore(tmp_path / "rows.sqlite"), dram_budget="1MiB") as store:
        assert store.last_checkpoint() == (1, "one")
        assert torch.equal(store.read_rows("t", 0, 1), torch.ones(1, 64))


def test_no_database_is_corruption(tmp_path: Path) -> None:
    (tmp_path / "rows.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(tb.CorruptionError):
        SqliteStore(tmp_path / "rows.sqlite")
