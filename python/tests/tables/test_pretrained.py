"""Modules of rows that exist: as torch makes them, over a store."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tierbed as tb


@pytest.mark.parametrize("freeze", [True, False])
def test_a_bag_looks_up_as_that_of_torch(open_store: Any, freeze: bool) -> None:
    rows = torch.randn(70_000, 2)
    theirs = torch.nn.EmbeddingBag.from_pretrained(rows, freeze, mode="sum", padding_idx=3)
    store = open_store()
    options = {"mode": "sum", "padding_idx": 3, "optimizer": tb.SGD(lr=0.5)}
    ours = tb.EmbeddingBag.from_pretrained(rows, freeze, store=store, name="item", **options)
    ids, offsets = torch.tensor([1, 69_999, 3, 4]), torch.tensor([0, 2])
    assert torch.equal(ours(ids, offsets), theirs(ids, offsets))
    assert torch.equal(store.read_rows("item", 0, 70_000), rows)
    if not freeze:
        ours(ids, offsets).sum().backward()
    else:
        assert not ours(ids, offsets).requires_grad
    moved = (store.read_rows("item", 0, 70_000) != rows).any(dim=1)
    assert moved.nonzero()[:, 0].tolist() == ([] if freeze else [1, 4, 69_999])


def test_a_restart_keeps_the_rows(open_store: Any) -> None:
    store = open_store()
    given = {"user": torch.randn(5, 3).bfloat16(), "item": torch.randn(6, 3).double()}
    emb = tb.EmbeddingCollection.from_pretrained(given, False, store=store, optimizer=tb.SGD())
    ids, lengths = torch.tensor([1, 2]), torch.tensor([1, 1])
    features = tb.KeyedJaggedTensor(["user", "item"], ids, lengths=lengths)
    assert torch.equal(emb(features)["item"].values(), given["item"][2:3].float())
    emb(features)["user"].values().sum().backward()
    trained = store.read_rows("user", 0, 5)
    with pytest.raises(
        tb.InvalidError, match=r"has the tables \['item', 'user'\] already; rows='k"
    ):
        tb.EmbeddingBagCollection.from_pretrained(given, store=store)
    kept = tb.EmbeddingBagCollection.from_pretrained(given, store=store, rows="keep")
    assert torch.equal(store.read_rows("user", 0, 5), trained)
    assert torch.equal(kept(features)["user"], trained[1:2])


def test_other_tensors_and_stores_are_refused(open_store: Any) -> None:
    store = open_store()
    for wrong in (torch.ones(3), torch.ones(3, 2, dtype=torch.int64)):
        with pytest.raises(tb.InvalidError, match=r"not floats \[N, D\]"):
            tb.EmbeddingBag.from_pretrained(wrong, store=store, name="t")
    with tb.Store.open(backend="memory", dram_budget="16MiB") as other:
        coded = tb.CodedStore.of(other, [])
        with pytest.raises(tb.InvalidError, match=r"not a CodedStore; tierbed.Store.open\(path\)"):
            tb.EmbeddingBag.from_pretrained(torch.ones(3, 2), store=coded, name="t")  # type: ignore[arg-type]
