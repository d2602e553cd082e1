"""Rows of a store in an index of faiss: the same neighbours as our own scan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed.nn import row_chunks, top_k

faiss = pytest.importorskip("faiss", reason="faiss is not installed (make framework-deps)")


def test_an_index_of_the_rows_finds_what_the_scan_finds(tmp_path: Path) -> None:
    rows = torch.randn(3000, 16)
    with tb.Store.open(tmp_path / "store", backend="file", dram_budget="8MiB") as store:
        tb.EmbeddingCollection([tb.EmbeddingConfig(3000, 16, "item")], store=store)
        store.write_rows("item", 0, rows)
        index = faiss.IndexFlatIP(16)
        for chunk in row_chunks(store, "item", chunk_rows=700):
            index.add(chunk.rows.numpy())
        queries = torch.randn(20, 16)
        found = top_k(queries, store, "item", 10, chunk_rows=700)
    scores, ids = index.search(queries.numpy(), 10)
    assert torch.equal(torch.from_numpy(ids), found.ids)
    torch.testing.assert_close(torch.from_numpy(scores), found.scores)
