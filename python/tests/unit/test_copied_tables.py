"""A table goes on in another store: larger, renamed, with another optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.testing import random_bags


def collection(store: tb.Store, rows: int, name: str, optimizer: Any) -> tb.EmbeddingBagCollection:
    table = tb.EmbeddingBagConfig(rows, 4, name, feature_names=["item"])
    return tb.EmbeddingBagCollection([table], store=store, optimizer=optimizer)


def train(emb: tb.EmbeddingBagCollection, seed: int) -> None:
    emb(random_bags({"item": 50}, 16, seed=seed)).values().square().sum().backward()


@pytest.mark.parametrize("optimizer", [tb.SGD(lr=0.1), tb.Adam(lr=0.1), tb.RowWiseAdagrad()])
def test_a_larger_table_goes_on_with_the_same_bits(optimizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "old"
    with tb.Store.open(path, dram_budget="16MiB", order="window") as old:
        emb = collection(old, 50, "item", optimizer)
        for seed in range(3):
            train(emb, seed)
        old.checkpoint("a")
        train(emb, 3)
        expected, expected_state = old.read_rows_and_state("item", 0, 50)
    with (
        tb.Store.open(path, dram_budget="16MiB", read_only=True) as old,
        tb.Store.open(tmp_path / "new", dram_budget="16MiB", order="window") as new,
    ):
        larger = collection(new, 90, "product", optimizer)
        untouched = new.read_rows("product", 50, 40)
        new.copy_table(old, "item", to="product", chunk_rows=7)
        assert new.use_counts("product", 0, 50).tolist() == old.use_counts("item", 0, 50).tolist()
        train(larger, 3)
        rows, state = new.read_rows_and_state("product", 0, 50)
        assert torch.equal(rows, expected)
        assert torch.equal(state, expected_state)
        assert new.steps_done("product") == 4
        assert torch.equal(new.read_rows("product", 50, 40), untouched)


def test_another_optimizer_begins_anew(open_store: Any) -> None:
    old, new = open_store(), open_store()
    train(collection(old, 50, "item", tb.Adagrad(lr=0.1)), 0)
    collection(new, 50, "item", tb.Adam(lr=0.1))
    new.copy_table(old, "item")
    rows, state = new.read_rows_and_state("item", 0, 50)
    assert torch.equal(rows, old.read_rows("item", 0, 50))
    assert (new.steps_done("item"), int(state.count_nonzero())) == (0, 0)


def test_what_does_not_fit_is_refused(open_store: Any) -> None:
    old, new = open_store(), open_store()
    collection(old, 50, "item", tb.SGD())
    collection(new, 40, "item", tb.SGD())
    match = r"40 x 4, which does not hold the 50 x 4 .*; make it with at least as many rows"
    with pytest.raises(tb.InvalidError, match=match):
        new.copy_table(old, "item")
    collection(new, 50, "larger", tb.SGD())
    new.copy_table(old, "item", to="larger")
    tb.EmbeddingBag(None, 4, store=old, name="open")
    with pytest.raises(tb.UnsupportedError, match="open vocabulary belong to ids; move 'open'"):
        new.copy_table(old, "open", to="larger")
