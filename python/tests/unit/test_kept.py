"""Checkpoints that stay, and deltas of snapshots, from Python and the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import tierbed as tb
from tierbed.cli import main

CONFIG = tb.EmbeddingBagConfig(
    num_embeddings=None, embedding_dim=4, name="item", init=tb.Uniform(-0.5, 0.5)
)


def train(store: tb.Store, first: int, last: int) -> None:
    emb = tb.EmbeddingBagCollection([CONFIG], store=store, optimizer=tb.Adagrad(lr=0.1))
    for step in range(first, last):
        ids = torch.arange(step, step + 20) * 2**40
        batch = tb.KeyedJaggedTensor(["item"], ids, lengths=torch.ones(20, dtype=torch.int64))
        emb(batch).values().square().sum().backward()


def one_id_each(samples: list[int]) -> tb.KeyedJaggedTensor:
    lengths = torch.ones(len(samples), dtype=torch.int64)
    return tb.KeyedJaggedTensor(["item"], torch.tensor(samples), lengths=lengths)


def itself(batch: tb.KeyedJaggedTensor) -> tb.KeyedJaggedTensor:
    return batch


def rows(store: tb.Store) -> torch.Tensor:
    return store.read_rows("item", 0, 1024)


def test_a_kept_checkpoint_is_opened_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with tb.Store.open(path, dram_budget="1MiB") as store:
        train(store, 0, 5)
        store.checkpoint("five", extra={"step": 5}, keep=True)
        expected = rows(store)
        train(store, 5, 9)
        store.checkpoint("nine", keep=True)
        later = rows(store)
        store.checkpoint("last")
        assert [kept.name for kept in store.checkpoints()] == ["five", "nine"]
        with pytest.raises(tb.InvalidError, match="already"):
            store.checkpoint("five", keep=True)
    assert not torch.equal(expected, later)
    for name, wanted in (("five", expected), ("nine", later), ("five", expected)):
        with tb.Store.open(path, dram_budget="1MiB", checkpoint=name) as store:
            assert store.last_checkpoint() is not None
            train(store, 0, 0)
            assert torch.equal(rows(store), wanted)
    with tb.Store.open(path, dram_budget="1MiB") as store:
        assert store.load_extra() == {"step": 5}
        train(store, 5, 9)
        assert torch.equal(rows(store), later)
        store.drop_checkpoint("nine")
        assert [kept.name for kept in store.checkpoints()] == ["five"]
    with pytest.raises(tb.InvalidError, match="no kept checkpoint"):
        tb.Store.open(path, checkpoint="nine")
    with pytest.raises(tb.InvalidError, match="without a path"):
        tb.Store.open(backend="memory", checkpoint="nine")


def test_epochs_of_the_default_order_are_kept(tmp_path: Path) -> None:
    """The order that a loader without a shuffle is trained in, unasked, keeps checkpoints too."""
    path, table = tmp_path / "store", dataclasses.replace(CONFIG, num_embeddings=200)
    loader: DataLoader[int] = DataLoader(list(range(200)), 20, collate_fn=one_id_each)  # type: ignore[arg-type]

    def epoch(store: tb.Store) -> torch.Tensor:
        emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.Adagrad(lr=0.1))
        for batch in tb.lookahead(loader, emb, key=itself):
            emb(batch).values().square().sum().backward()
        assert store.order()["kind"] == "forward"
        return store.read_rows("item", 0, 200)

    with tb.Store.open(path, dram_budget="4MiB") as store:
        epoch(store)
        store.checkpoint("one", extra={"epoch": 1}, keep=True)
        second = epoch(store)
        store.checkpoint("two", extra={"epoch": 2}, keep=True)
    with tb.Store.open(path, dram_budget="4MiB", checkpoint="one") as store:
        assert store.load_extra() == {"epoch": 1}
        assert torch.equal(epoch(store), second)
        assert [kept.name for kept in store.checkpoints()] == ["one", "two"]


def test_the_command_line_lists_and_drops(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="1MiB") as store:
        train(store, 0, 2)
        store.checkpoint("two", keep=True)
    for more, wanted in (([], ["two"]), (["--drop", "two"], []), ([], [])):
        out = tmp_path / "out.json"
        assert main(["checkpoints", str(tmp_path / "store"), *more, "--json", str(out)]) == 0
        kept = json.loads(out.read_text())["checkpoints"]
        assert [one["name"] for one in kept] == wanted
    assert main(["checkpoints", str(tmp_path / "store"), "--drop", "two"]) == 2


def test_a_snapshot_and_a_delta_are_the_next_snapshot(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="4MiB") as store:
        train(store, 0, 5)
        store.publish(tmp_path / "one")
        train(store, 5, 8)
        full = store.publish(tmp_path / "two")
        store.checkpoint("end")
    names = {
        "--store": tmp_path / "store",
        "--out": tmp_path / "delta",
        "--base": tmp_path / "one",
        "--dram-budget": "4MiB",
        "--json": tmp_path / "report.json",
    }
    assert main(["publish", *(str(word) for pair in names.items() for word in pair)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["row_count"] < full.row_count
    tb.Snapshot.apply(tmp_path / "one", tmp_path / "delta", tmp_path / "next")
    ids = torch.arange(0, 40) * 2**40
    batch = tb.KeyedJaggedTensor(["item"], ids, lengths=torch.ones(40, dtype=torch.int64))
    values = []
    for name in ("two", "next"):
        with tb.Snapshot.open(tmp_path / name) as snapshot:
            snapshot.verify()
            values.append(snapshot.lookup(batch).values())
    assert torch.equal(*values)
    with pytest.raises(tb.InvalidError, match="against"):
        tb.Snapshot.apply(tmp_path / "two", tmp_path / "delta", tmp_path / "wrong")
    with pytest.raises(tb.InvalidError, match="delta"):
        tb.Snapshot.open(tmp_path / "delta")
