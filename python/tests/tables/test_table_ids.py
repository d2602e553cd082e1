"""Ids beside rows: open vocabularies in and out, and damage that changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierbed as tb
from tierbed.tables import export_tables, import_tables

DIM = 4
IDS = torch.tensor([2**62, -1, 0, 17, -(2**63), 5])


def trained(store: tb.Store, optimizer: Any = None, **more: Any) -> Any:
    table = tb.EmbeddingBagConfig(None, DIM, "item", init=tb.Normal(std=0.5), **more)
    emb = tb.EmbeddingBagCollection([table], store=store, optimizer=optimizer or tb.Adagrad(lr=0.5))
    step(emb, IDS)
    return emb


def step(emb: Any, ids: torch.Tensor) -> torch.Tensor:
    lengths = torch.ones(len(ids), dtype=torch.int64)
    out: torch.Tensor = emb(tb.KeyedJaggedTensor(["item"], ids, lengths=lengths)).values()
    out.square().sum().backward()
    return out.detach()


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".pt", ".parquet"])
@pytest.mark.parametrize("optimizer", [tb.Adam(lr=0.1), tb.PartialRowWiseAdam(), tb.SGD()])
def test_an_open_vocabulary_trains_on_elsewhere_with_the_same_bits(
    open_store: Any, tmp_path: Path, suffix: str, optimizer: Any
) -> None:
    admission = tb.FrequencyAdmissionStrategy(threshold=2)
    store = open_store("file")
    emb = trained(store, optimizer, admission_strategy=admission)
    step(emb, IDS)
    step(emb, torch.tensor([123]))  # Not admitted: it trains the shared row.
    done = export_tables(store, tmp_path / f"item{suffix}", state=True, chunk_rows=4)
    assert done[0].rows == len(IDS)
    other = open_store()
    table = tb.EmbeddingBagConfig(None, DIM, "item", admission_strategy=admission)
    mine = tb.EmbeddingBagCollection([table], store=other, optimizer=optimizer)
    import_tables(other, tmp_path / f"item{suffix}", chunk_rows=4)
    assert other.vocabularies()["item"]["id_count"] == len(IDS)
    for ids in (IDS, torch.tensor([7, 5]), IDS.flip(0)):
        assert torch.equal(step(mine, ids), step(emb, ids))


def test_a_table_with_gaps_goes_out_with_its_state(open_store: Any, tmp_path: Path) -> None:
    store = open_store()
    policy = tb.CountBasedEvictionPolicy(1.5, decay_rate=0.99)
    emb = trained(store, virtual_table_eviction_policy=policy)
    step(emb, torch.arange(100, 400))
    step(emb, IDS[1:4])
    store.evict()
    ids, rows = store.ids("item")
    assert ids.tolist() == IDS[1:4].tolist()
    step(emb, torch.tensor([-99]))  # Takes a row that is free.
    ids, rows = store.ids("item")
    export_tables(store, tmp_path / "item.pt", state=True, chunk_rows=50)
    other = open_store()
    import_tables(other, tmp_path / "item.pt", optimizer=tb.Adagrad())
    there = other.translate("item", ids)
    for row, mine in zip(rows.tolist(), there.tolist(), strict=True):
        pairs = zip(
            store.read_rows_and_state("item", row, 1),
            other.read_rows_and_state("item", mine, 1),
            strict=True,
        )
        assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("place", ["npy", "safetensors", "pt", "parquet"])
def test_a_vocabulary_without_ids_moves_too(open_store: Any, tmp_path: Path, place: Any) -> None:
    store = open_store()
    store.add_table(tb.EmbeddingBagConfig(None, DIM, "item"), tb.Adagrad())
    store.write_rows("item", 0, torch.ones(1, DIM))
    done = export_tables(store, tmp_path / "out", file_format=place, state=True)
    assert [one.rows for one in done] == [0]
    other = open_store()
    import_tables(other, tmp_path / "out", "item", optimizer=tb.Adagrad())
    assert other.vocabularies()["item"]["id_count"] == 0
    assert torch.equal(other.read_rows("item", 0, 1), torch.ones(1, DIM))


@pytest.mark.parametrize("backend", ["memory", "file"])
def test_rows_are_written_in_any_order(open_store: Any, backend: str) -> None:
    store = open_store(backend)
    store.add_table(tb.EmbeddingBagConfig(40, DIM, "t"), tb.Adagrad())
    expected, state = store.read_rows_and_state("t", 0, 40)
    rows = torch.tensor([7, 39, 8, 0, 9, 20])
    expected[rows], state[rows] = torch.randn(6, DIM), torch.rand(6, DIM)
    store.scatter_rows("t", rows, expected[rows], state[rows])
    found = store.read_rows_and_state("t", 0, 40)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], state)
    store.scatter_rows("t", rows[:0], expected[:0])
    with pytest.raises(tb.InvalidError):
        store.scatter_rows("t", torch.tensor([40]), torch.ones(1, DIM))
    with pytest.raises(tb.InvalidError, match=r"weights of table 't' must be \[N, 4\]"):
        store.scatter_rows("t", rows, torch.ones(6, DIM + 1))


def test_ids_get_rows_at_once_and_keep_them(open_store: Any) -> None:
    store = open_store()
    admission = tb.FrequencyAdmissionStrategy(threshold=5)
    config = tb.EmbeddingBagConfig(None, DIM, "item", admission_strategy=admission)
    store.add_table(config, tb.SGD())
    rows = store.assign_ids("item", IDS)
    assert rows.tolist() == list(range(1, len(IDS) + 1))
    assert torch.equal(store.assign_ids("item", IDS.flip(0)), rows.flip(0))
    assert torch.equal(store.translate("item", IDS), rows)
    assert store.vocabularies()["item"]["waiting_count"] == 0
    store.add_table(tb.EmbeddingBagConfig(9, DIM, "fixed"), tb.SGD())
    with pytest.raises(tb.InvalidError, match="ids of table 'fixed' are its rows"):
        store.assign_ids("fixed", IDS)


def test_ids_in_a_file_of_their_own(open_store: Any, tmp_path: Path) -> None:
    rows = torch.randn(len(IDS), DIM)
    np.save(tmp_path / "vectors.npy", rows.numpy())
    np.save(tmp_path / "keys.npy", IDS.numpy())
    store = open_store()
    trained(store)
    with pytest.raises(tb.InvalidError, match=r"open vocabulary, whose rows belong to ids.*--ids"):
        import_tables(store, tmp_path / "vectors.npy", "item")
    import_tables(store, tmp_path / "vectors.npy", "item", ids={"item": tmp_path / "keys.npy"})
    assert torch.equal(store.gather_rows("item", store.translate("item", IDS)), rows)


def test_other_ids_keep_their_rows(open_store: Any, tmp_path: Path) -> None:
    store = open_store()
    emb = trained(store)
    step(emb, torch.tensor([1000]))
    kept = store.gather_rows("item", store.translate("item", torch.tensor([1000])))
    rows = torch.randn(len(IDS), DIM)
    torch.save({"item.weight": rows, "item.ids": IDS}, tmp_path / "new.pt")
    import_tables(store, tmp_path / "new.pt")
    assert torch.equal(store.gather_rows("item", store.translate("item", IDS)), rows)
    again = store.gather_rows("item", store.translate("item", torch.tensor([1000])))
    assert torch.equal(again, kept)


WRONG = {
    "twice": (torch.tensor([5, 6, 7, 5, 8, 9]), "has the id 5 twice; leave one of its rows out"),
    "few": (IDS[:4], r"ids of item.weight are torch.int64 \[4\]; give one whole number for each"),
    "float": (IDS.float(), "ids of item.weight are torch.float32"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_ids_change_nothing(open_store: Any, tmp_path: Path, wrong: str) -> None:
    ids, told = WRONG[wrong]
    torch.save({"item.weight": torch.ones(6, DIM), "item.ids": ids}, tmp_path / "in.pt")
    store = open_store()
    trained(store)
    before = store.vocabularies(), store.read_rows("item", 0, 7)
    with pytest.raises(tb.InvalidError, match=told):
        import_tables(store, tmp_path / "in.pt")
    assert store.vocabularies() == before[0]
    assert torch.equal(store.read_rows("item", 0, 7), before[1])
    with pytest.raises(tb.InvalidError):
        import_tables(store, tmp_path / "in.pt", {"new": "item"}, optimizer=tb.SGD())
    assert [table["name"] for table in store.tables()] == ["item"]


def test_ids_beyond_a_table_are_refused(open_store: Any, tmp_path: Path) -> None:
    torch.save({"item.weight": torch.ones(6, DIM), "item.ids": IDS}, tmp_path / "in.pt")
    store = open_store()
    store.add_table(tb.EmbeddingBagConfig(6, DIM, "item"), tb.SGD())
    with pytest.raises(tb.InvalidError, match=r"has ids from -9223372036854775808 to .* 6 rows"):
        import_tables(store, tmp_path / "in.pt")


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".pt", ".parquet", ".faiss"])
def test_a_file_that_was_cut_changes_nothing(open_store: Any, tmp_path: Path, suffix: str) -> None:
    store = open_store()
    store.add_table(tb.EmbeddingBagConfig(300, DIM, "t"), tb.Adagrad())
    rows = store.read_rows("t", 0, 300)
    file = tmp_path / f"table{suffix}"
    export_tables(store, file)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(tb.CorruptionError):
        import_tables(store, file, "t")
    assert torch.equal(store.read_rows("t", 0, 300), rows)


def test_other_shapes_and_formats_are_refused(open_store: Any, tmp_path: Path) -> None:
    store = open_store()
    store.add_table(tb.EmbeddingBagConfig(300, DIM, "t"), tb.Adagrad())
    np.save(tmp_path / "wide.npy", np.zeros((300, DIM + 1), dtype=np.float32))
    np.save(tmp_path / "long.npy", np.zeros((301, DIM), dtype=np.float32))
    np.save(tmp_path / "short.npy", np.zeros((299, DIM), dtype=np.float32))
    np.save(tmp_path / "flat.npy", np.zeros(4, dtype=np.float32))
    np.save(tmp_path / "text.npy", np.array([["a"]]))
    for name, told in (
        ("wide", "5 numbers a row, table 't' 4"),
        ("long", "301 rows, table 't' 300"),
        ("short", "only 299 rows, table 't' 300"),
        ("flat", "flat.npy holds shape"),
        ("text", "text.npy"),
        ("nothing", "no such file"),
    ):
        with pytest.raises((tb.InvalidError, tb.CorruptionError), match=told):
            import_tables(store, tmp_path / f"{name}.npy", "t")
    import_tables(store, tmp_path / "short.npy", "t", allow_fewer=True)
    for call in (export_tables, import_tables):
        (tmp_path / "table.xls").write_text("")
        with pytest.raises(tb.InvalidError, match="format"):
            call(store, tmp_path / "table.xls")
