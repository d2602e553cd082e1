"""Rows of tables in forward order: all by few scans, and those that were never trained."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.errors import IoError
from tierbed.tables import export_tables, find_tables
from tierbed.tables.scanned import ScannedRows

ROWS, DIM, BATCH, BATCHES = 3000, 8, 64, 20
NAMES = ["a", "b"]


class Known:
    """Batches whose order is known; two thirds of the rows are in none."""

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(BATCHES):
            ids = torch.randint(ROWS // 3, (2 * BATCH,), generator=generator) * 3
            lengths = torch.ones(2 * BATCH, dtype=torch.int64)
            yield tb.KeyedJaggedTensor(NAMES, ids, lengths=lengths, stride=BATCH)

    def known_order(self) -> tb.data.BatchOrder:
        return tb.data.BatchOrder("known", lambda: iter(self), batch_count=BATCHES)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tb.Store]:
    tables = [tb.EmbeddingBagConfig(ROWS, DIM, name) for name in NAMES]
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB", order="forward", seed=5) as opened:
        emb = tb.EmbeddingBagCollection(tables, store=opened, optimizer=tb.Adagrad(lr=0.5))
        for batch in tb.lookahead(Known(), emb, key=lambda batch: batch):
            emb(batch).values().square().sum().backward()
        yield opened


def scans(store: tb.Store) -> int:
    return int(store.order()["unplanned_scan_count"])


def test_a_table_is_exported_by_one_scan_whatever_the_chunks(
    store: tb.Store, tmp_path: Path
) -> None:
    before = scans(store)
    export_tables(store, tmp_path / "a.safetensors", "a", chunk_rows=100, state=True)
    assert scans(store) - before == 1
    (table,) = find_tables(tmp_path / "a.safetensors").tables
    weights, state = store.read_rows_and_state("a", 0, ROWS)
    assert torch.equal(table.weight.whole(), weights)
    assert torch.equal(table.state["sum"].whole(), state)


@pytest.mark.parametrize("part_rows", [1, 700, ROWS])
def test_parts_have_the_rows_of_the_store(store: tb.Store, tmp_path: Path, part_rows: int) -> None:
    scanned = ScannedRows(store, "b", tmp_path, part_bytes=4 * (2 * DIM + 1) * part_rows)
    weights, state = store.read_rows_and_state("b", 0, ROWS)
    before = scans(store)
    for first in range(0, ROWS, 500):
        rows, of_rows = scanned.read(first, 500)
        assert torch.equal(rows, weights[first : first + 500])
        assert torch.equal(of_rows, state[first : first + 500])
    assert scans(store) - before == -(-ROWS // max(500, part_rows // 500 * 500))


def test_a_full_disk_is_told_and_with_room_all_goes_on(
    store: tb.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    scanned = ScannedRows(store, "a", tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(IoError, match=r"do not fit into .*; free some space there"):
        scanned.read(0, 10)
    monkeypatch.setattr(os, "pwrite", lambda *_: 3)
    with pytest.raises(IoError, match="No space left"):
        scanned.read(0, 10)
    monkeypatch.undo()
    assert torch.equal(scanned.read(0, 10)[0], store.read_rows("a", 0, 10))


def test_the_default_dtype_of_torch_changes_nothing(store: tb.Store, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        export_tables(store, tmp_path / "a.safetensors", "a", chunk_rows=1000, state=True)
    finally:
        torch.set_default_dtype(torch.float32)
    (table,) = find_tables(tmp_path / "a.safetensors").tables
    weights, state = store.read_rows_and_state("a", 0, ROWS)
    assert torch.equal(table.weight.whole(), weights)
    assert torch.equal(table.state["sum"].whole(), state)


def test_rows_that_are_cut_are_not_taken_for_untrained_ones(
    store: tb.Store, tmp_path: Path
) -> None:
    rows = ScannedRows(store, "a", tmp_path)
    rows.read(0, 10)
    os.ftruncate(rows._file, 8)
    with pytest.raises(AssertionError, match="was cut"):
        rows.read(0, 10)
