"""Indexes of faiss in and out of a store: what faiss writes we read, and what we write it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierbed as tb
from tierbed.tables import export_tables, find_tables, import_tables

faiss = pytest.importorskip("faiss", reason="faiss is not installed (make framework-deps)")

DIM = 12
KEYS = np.array([7, -3, 2**62, 0, 41], dtype="i8")


@pytest.fixture
def store() -> Any:
    with tb.Store.open(backend="memory", dram_budget="64MiB") as one:
        yield one


@pytest.mark.parametrize("kind", [faiss.IndexFlatIP, faiss.IndexFlatL2])
@pytest.mark.parametrize("dim", [1, DIM])
def test_a_flat_index_comes_in(store: Any, tmp_path: Path, kind: Any, dim: int) -> None:
    rows = np.random.default_rng(3).random((1000, dim), dtype="f4")
    index = kind(dim)
    index.add(rows)
    faiss.write_index(index, str(tmp_path / "item.index"))
    done = import_tables(store, tmp_path / "item.index", optimizer=tb.SGD(), chunk_rows=300)
    assert [(one.table, one.rows, one.has_ids) for one in done] == [("item", 1000, False)]
    assert np.array_equal(store.read_rows("item", 0, 1000).numpy(), rows)


@pytest.mark.parametrize("wrap", [faiss.IndexIDMap, faiss.IndexIDMap2])
def test_an_index_with_ids_becomes_an_open_vocabulary(
    store: Any, tmp_path: Path, wrap: Any
) -> None:
    rows = np.random.default_rng(3).random((len(KEYS), DIM), dtype="f4")
    index = wrap(faiss.IndexFlatL2(DIM))
    index.add_with_ids(rows, KEYS)
    faiss.write_index(index, str(tmp_path / "item.faiss"))
    import_tables(store, tmp_path / "item.faiss", optimizer=tb.SGD(), chunk_rows=2)
    found = store.gather_rows("item", store.translate("item", torch.from_numpy(KEYS)))
    assert np.array_equal(found.numpy(), rows)


def test_faiss_reads_what_goes_out(store: Any, tmp_path: Path) -> None:
    store.add_table(tb.EmbeddingBagConfig(500, DIM, "fixed"), tb.SGD())
    store.write_rows("fixed", 0, torch.randn(500, DIM))
    store.add_table(tb.EmbeddingBagConfig(None, DIM, "open"), tb.SGD())
    keys = torch.from_numpy(KEYS)
    store.scatter_rows("open", store.assign_ids("open", keys), torch.randn(len(KEYS), DIM))
    export_tables(store, tmp_path / "out", file_format="faiss", chunk_rows=64)

    fixed = faiss.read_index(str(tmp_path / "out" / "fixed.faiss"))
    assert isinstance(fixed, faiss.IndexFlat)
    assert fixed.metric_type == faiss.METRIC_INNER_PRODUCT
    rows = store.read_rows("fixed", 0, 500)
    assert np.array_equal(fixed.reconstruct_n(0, 500), rows.numpy())
    _, ids = fixed.search(rows[:20].numpy(), 5)
    expected = (rows[:20] @ rows.T).topk(5).indices
    assert np.array_equal(ids, expected.numpy())

    opened = faiss.read_index(str(tmp_path / "out" / "open.faiss"))
    assert isinstance(opened, faiss.IndexIDMap)
    queries = store.gather_rows("open", store.translate("open", keys))
    _, ids = opened.search(queries.numpy(), len(KEYS))
    assert (np.sort(ids, axis=1) == np.sort(KEYS)).all()
    best = (queries @ queries.T).argmax(dim=1)
    assert np.array_equal(ids[:, 0], KEYS[best.numpy()])
    again = find_tables(tmp_path / "out")
    assert [(one.name, one.rows) for one in again.tables] == [("fixed", 500), ("open", len(KEYS))]
