"""A store of several shards gives the bits of one in memory, from Python too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.cli import main
from tierbed.data import BatchOrder
from tierbed.testing import random_bags

ROWS = {"a": 3000, "b": 500, "c": 90, "d": 1200}
DIMS = {"a": 16, "b": 36, "c": 9, "d": 18}
BATCHES, BATCH = 10, 400

OpenStore = Callable[..., tb.Store]


class Known:
    """Seeded batches in a known order, from batch ``start`` on."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
        for at in range(BATCHES):
            yield random_bags(ROWS, BATCH, seed=at)

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return (batch for at, batch in enumerate(self.epoch()) if at >= self.start)

    def known_order(self) -> BatchOrder:
        return BatchOrder("known", self.epoch, self.start, BATCHES)


def collection(store: tb.Store) -> tb.EmbeddingBagCollection:
    tables = [
        tb.EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=DIMS[name], feature_names=[name]
        )
        for name, rows in ROWS.items()
    ]
    return tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.Adagrad(lr=0.05))


def train(store: tb.Store, start: int = 0, stop: int = BATCHES) -> list[torch.Tensor]:
    emb = collection(store)
    outputs = []
    loader: Any = Known(start)
    for at, batch in enumerate(tb.lookahead(loader, emb, window=4, key=lambda batch: batch)):
        if start + at == stop:
            break
        pooled = emb(batch).values()
        (pooled * pooled).sum().backward()
        outputs.append(pooled.detach())
    return outputs


@pytest.mark.parametrize(("order", "shards"), [("forward", 2), ("auto", 3), ("window", 2)])
def test_shards_give_the_bits_of_memory_over_a_restart(
    open_store: OpenStore, tmp_path: Path, order: str, shards: int
) -> None:
    plain = open_store("memory")
    expected = train(plain)
    options = {"dram_budget": "24MiB", "order": order}
    with tb.Store.open(tmp_path / "s", shards=shards, **options) as store:
        first = train(store, stop=6)
        store.checkpoint("sixth", extra={"at": 6})
    with tb.Store.open(tmp_path / "s", **options) as store:
        assert store.last_checkpoint() == (1, "sixth")
        assert store.load_extra() == {"at": 6}
        second = train(store, start=6)
        assert store.order()["kind"] == ("window" if order == "window" else "forward")
        assert len(store.stats()["shards"]) == shards
        for ours, theirs in zip(first + second, expected, strict=True):
            assert torch.equal(ours, theirs)
        for name, rows in ROWS.items():
            assert torch.equal(store.read_rows(name, 0, rows), plain.read_rows(name, 0, rows))
            assert torch.equal(store.use_counts(name, 0, rows), plain.use_counts(name, 0, rows))


def test_refusals_name_the_remedy(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "s", dram_budget="24MiB", shards=2, order="window") as store:
        train(store, stop=1)
        store.checkpoint("one")
        with pytest.raises(tb.errors.UnsupportedError, match="several shards"):
            store.checkpoint("kept", keep=True)
    for asked, told in ((3, "another number of shards"), (0, "at least 1"), (65, "out of range")):
        with pytest.raises(tb.errors.InvalidError, match=told):
            tb.Store.open(tmp_path / ("s" if asked == 3 else "new"), shards=asked)
    with pytest.raises(tb.errors.UnsupportedError, match="do not leave the forward order"):
        tb.Store.open(tmp_path / "s", on_mismatch="fallback")


def test_a_model_trains_and_publishes_on_two_shards(tmp_path: Path) -> None:
    run = ["--store", str(tmp_path / "run")]
    train = ["train", *run, "--format", "synthetic", "--shards", "2", "--samples", "2000"]
    assert main([*train, "--dram-budget", "32MiB"]) == 0
    assert main(["publish", *run, "--out", str(tmp_path / "snapshot")]) == 0
    assert tb.Snapshot.open(tmp_path / "snapshot").tables()
