"""Are rows that a scan hands out those of the store, and the visitor's for as long as it likes?"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierbed as tb

ROWS, DIM = 3000, 6


def _trained(path: Path, backend: str = "file", optimizer: Any = None) -> tb.Store:
    store = tb.Store.open(path, backend=backend, dram_budget="32MiB")
    tables = [tb.EmbeddingBagConfig(ROWS, DIM, name) for name in ("a", "b")]
    tb.EmbeddingBagCollection(tables, store=store, optimizer=optimizer or tb.Adagrad(lr=0.1))
    for at, table in enumerate("ab"):
        weights = torch.randn(ROWS - 7, DIM)
        words = store.read_rows_and_state(table, 0, 1)[1].shape[1]
        counts = torch.arange(ROWS - 7) * 1000 + at
        store.write_rows(table, 7, weights, torch.rand(ROWS - 7, words), counts)
    return store


@pytest.mark.parametrize("chunk_rows", [1, 999, ROWS, 10**12])
@pytest.mark.parametrize("optimizer", [tb.SGD(), tb.Adam(lr=0.1)], ids=["sgd", "adam"])
def test_all_written_rows_come_once_in_chunks(
    tmp_path: Path, chunk_rows: int, optimizer: Any
) -> None:
    found: dict[str, list[tuple[Tensor, ...]]] = {"a": [], "b": []}
    with _trained(tmp_path, optimizer=optimizer) as store:
        store.scan(lambda table, *parts: found[table].append(parts), chunk_rows=chunk_rows)
        for table, chunks in found.items():
            assert all(0 < len(rows) <= chunk_rows for rows, *_ in chunks)
            # Chunks that the visitor kept have what they had, though others came after them.
            rows, weights, state, counts = (torch.cat(parts) for parts in zip(*chunks, strict=True))
            assert rows.tolist() == list(range(7, ROWS))
            wanted = store.read_rows_and_state(table, 7, ROWS - 7)
            assert torch.equal(weights, wanted[0])
            assert torch.equal(state, wanted[1])
            assert torch.equal(counts, store.use_counts(table, 7, ROWS - 7))
            assert counts.dtype == rows.dtype == torch.int64


def test_rows_of_all_tables_together_are_no_more_than_a_chunk(tmp_path: Path) -> None:
    seen = []
    with _trained(tmp_path) as store:
        store.scan(lambda table, rows, *_: seen.append((table, len(rows))), chunk_rows=ROWS)
    # Two chunks of almost as many rows would be twice the memory.
    assert seen == [("a", ROWS - 7), ("b", 7), ("b", ROWS - 14)]


def test_rows_outlive_the_store_and_are_the_visitors(tmp_path: Path) -> None:
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    store = _trained(tmp_path)

    def keep(table: str, rows: Tensor, weights: Tensor, state: Tensor, _counts: Tensor) -> None:
        if table == "a":
            kept.append((rows, weights, state))

    store.scan(keep, chunk_rows=500)
    wanted = store.read_rows("a", 7, ROWS - 7)
    for _, weights, state in kept:
        starts = {tensor.untyped_storage().data_ptr() for tensor in (weights, state)}
        assert len(starts) == 1, "weights and state are views of what was read"
    kept[0][1].fill_(5)
    assert torch.equal(store.read_rows("a", 7, ROWS - 7), wanted), "the store has rows of its own"
    store.close()
    del store
    gc.collect()
    assert torch.equal(torch.cat([weights for _, weights, _ in kept[1:]]), wanted[500:])


def test_what_a_visitor_raises_ends_the_scan(tmp_path: Path) -> None:
    seen = []

    def stop(table: str, rows: Tensor, *_: Tensor) -> None:
        seen.append((table, len(rows)))
        raise KeyError("enough")

    with _trained(tmp_path) as store:
        for _ in range(3):
            with pytest.raises(KeyError, match="enough"):
                store.scan(stop, chunk_rows=100)
        assert seen == [("a", 100)] * 3
        assert store.verify() > 0


def test_a_large_table_is_scanned_in_few_reads(tmp_path: Path) -> None:
    store = tb.Store.open(tmp_path, backend="file", dram_budget="16MiB")
    with store:
        tables = [tb.EmbeddingBagConfig(50_000, 16, "large")]
        tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.Adagrad(lr=0.1))
        store.write_rows("large", 0, torch.randn(50_000, 16))
        before = store.stats()["store"]
        count = 0

        def add(_table: str, rows: Tensor, *_: Tensor) -> None:
            nonlocal count
            count += len(rows)

        store.scan(add)
        after = store.stats()["store"]
        assert count == 50_000
        reads = after["io"]["read_count"] - before["io"]["read_count"]
        pages = after["pages_read"] - before["pages_read"]
        assert pages > 1000
        assert reads * 20 < pages
