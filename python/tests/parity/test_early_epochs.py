"""An epoch that ends early is followed by the next one, with the bits of training in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tierbed as tb
from tests.parity.test_forward_order import (
    BATCHES,
    Known,
    OpenStore,
    Training,
    assert_same,
    assert_same_rows,
    forward_training,
    itself,
    memory_training,
)

Epochs = Callable[[Training], Iterator[torch.Tensor]]


def store_training(open_store: OpenStore, kind: str) -> Training:
    if kind in ("file", "cold", "lsm", "mmap", "hashdb"):
        return Training(open_store(kind, seed=5), tb.Adagrad(lr=0.05))
    options: dict[str, Any] = {"order": "auto"} if kind in ("auto", "shards") else {"order": kind}
    if kind == "shards":
        options.update(shards=2, dram_budget="12MiB")
    return forward_training(open_store, **options)


KINDS = ["auto", "forward", "shards", "window", "file", "cold", "lsm", "mmap", "hashdb"]


def broken_epochs(stops: tuple[int, ...]) -> Epochs:
    """Epochs of which each ends after so many batches, its last one handed out and not stepped."""

    def run(training: Training) -> Iterator[torch.Tensor]:
        ahead = tb.lookahead(Known(), training.emb, window=4, key=itself)
        for stop in stops:
            for at, batch in enumerate(ahead):
                if at == stop:
                    break
                yield training.step(batch)

    return run


def sliced_epochs(training: Training) -> Iterator[torch.Tensor]:
    """Epochs of five steps."""
    for _ in range(3):
        for batch in islice(tb.lookahead(Known(), training.emb, window=4, key=itself), 5):
            yield training.step(batch)


def interrupted_epochs(training: Training) -> Iterator[torch.Tensor]:
    """KeyboardInterrupt before a lookup, between lookup and step, behind a step."""
    for point in ("before", "between", "behind"):
        try:
            for at, batch in enumerate(tb.lookahead(Known(), training.emb, window=4, key=itself)):
                if (at, point) == (3, "before"):
                    raise KeyboardInterrupt
                if (at, point) == (6, "between"):
                    training.emb(batch)
                    raise KeyboardInterrupt
                yield training.step(batch)
                if (at, point) == (2, "behind"):
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            continue


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "epochs",
    [
        broken_epochs((7, BATCHES, 1, BATCHES)),
        broken_epochs((0, BATCHES - 1, BATCHES, 3)),
        sliced_epochs,
        interrupted_epochs,
    ],
    ids=["broken", "ends", "sliced", "interrupted"],
)
def test_the_next_epoch_begins(open_store: OpenStore, kind: str, epochs: Epochs) -> None:
    ours, theirs = store_training(open_store, kind), memory_training(open_store)
    assert_same(list(epochs(ours)), list(epochs(theirs)))
    assert_same_rows(ours.store, theirs.store)
    along = kind in ("auto", "forward", "shards")
    assert ours.store.order()["kind"] == ("forward" if along else "window")
    assert ours.store.order()["fallback_count"] == 0


@pytest.mark.parametrize("kind", ["auto", "forward", "shards"])
def test_a_resumed_epoch_may_end_early_too(open_store: OpenStore, kind: str) -> None:
    ours, theirs = store_training(open_store, kind), memory_training(open_store)
    for at, batch in enumerate(tb.lookahead(Known(), ours.emb, window=4, key=itself)):
        ours.step(batch)
        if at == 5:
            ours.save()
            break
    ours.store.close()
    ours = store_training(open_store, kind)
    ours.load()
    stands = ours.store.order()["batch"]
    assert stands == 6
    resumed = tb.lookahead(Known(), ours.emb, window=4, key=itself, start=stands)
    found = [ours.step(batch) for batch in islice(resumed, 3)]
    found += ours.run(Known())
    wanted = [theirs.step(batch) for batch in islice(Known(), 9)][6:]
    wanted += theirs.run(Known(), window=0)
    assert_same(found, wanted)
    assert_same_rows(ours.store, theirs.store)
    # Reopened where it stands in the middle, and begun anew.
    for training in (ours, theirs):
        for batch in islice(tb.lookahead(Known(), training.emb, window=4, key=itself), 4):
            training.step(batch)
    ours.save()
    ours.store.close()
    ours = store_training(open_store, kind)
    ours.load()
    assert_same(ours.run(Known()), theirs.run(Known(), window=0))
    assert_same_rows(ours.store, theirs.store)


def test_the_rest_is_told_and_a_wrong_start_is_refused(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    ours = store_training(open_store, "auto")
    for batch in islice(tb.lookahead(Known(), ours.emb, window=4, key=itself), 5):
        ours.step(batch)
    with pytest.raises(tb.InvalidError, match="start=5"):
        ours.run(Known(), start=7)
    with caplog.at_level(logging.WARNING, logger="tierbed"):
        ours.run(Known())
    assert "passing over the batches between" in caplog.text
    assert ours.store.order()["epoch"] == 2


def seeded(rows: int = 600) -> DataLoader[Any]:
    def collate(ids: list[int]) -> tb.KeyedJaggedTensor:
        values = torch.tensor(ids)
        return tb.KeyedJaggedTensor(keys=["i"], values=values, lengths=torch.ones_like(values))

    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        list(range(rows)),
        batch_size=50,
        shuffle=True,
        generator=generator,
        collate_fn=collate,
    )


@pytest.mark.parametrize("order", ["auto", "forward"])
def test_shuffled_epochs_that_end_early(open_store: OpenStore, order: str) -> None:
    # Another order every epoch: behind a checkpoint it is followed, otherwise left by `auto`.
    def run(training: Any, store: tb.Store, *, saves: bool) -> None:
        loader = seeded()
        for _ in range(3):
            for batch in islice(tb.lookahead(loader, training, window=3, key=itself), 5):
                training(batch).values().square().sum().backward()
            if saves:
                store.checkpoint("epoch")

    def make(store: tb.Store) -> tb.EmbeddingBagCollection:
        config = tb.EmbeddingBagConfig(
            name="t", num_embeddings=600, embedding_dim=8, feature_names=["i"]
        )
        return tb.EmbeddingBagCollection([config], store=store, optimizer=tb.Adagrad(lr=0.1))

    wanted = open_store("memory", seed=5)
    run(make(wanted), wanted, saves=False)
    for saves in (True, False):
        ours = open_store(None, order=order, seed=5, dram_budget="4MiB", name=f"s-{saves}")
        if order == "forward" and not saves:
            with pytest.raises(tb.InvalidError, match="checkpoint"):
                run(make(ours), ours, saves=saves)
            continue
        run(make(ours), ours, saves=saves)
        assert torch.equal(ours.read_rows("t", 0, 600), wanted.read_rows("t", 0, 600))
        assert ours.order()["kind"] == ("forward" if saves else "window")


# ---------------------------------------------------------------- what is told


def test_two_collections_are_told_as_the_reason(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    def two(store: tb.Store) -> tuple[Any, Any]:
        pooled = tb.EmbeddingBagConfig(
            name="u", num_embeddings=100, embedding_dim=4, feature_names=["i"]
        )
        rows = tb.EmbeddingConfig(
            name="h", num_embeddings=100, embedding_dim=4, feature_names=["i"]
        )
        return (
            tb.EmbeddingBagCollection([pooled], store=store),
            tb.EmbeddingCollection([rows], store=store),
        )

    store = open_store(None)
    bags, rows = two(store)
    with caplog.at_level(logging.WARNING, logger="tierbed"):
        for _ in range(2):
            for batch in tb.lookahead(seeded(100), bags, window=2, key=itself):
                (bags(batch).values().sum() + rows(batch)["i"].values().sum()).backward()
    assert "2 collections" in store.order()["reason"]
    assert caplog.text.count("2 collections") == 1
    insisting = open_store(None, order="forward", name="insisting")
    bags, rows = two(insisting)
    with pytest.raises(tb.InvalidError, match="2 collections"):
        next(iter(tb.lookahead(seeded(100), bags, window=2, key=itself)))


def test_scans_for_validation_are_told_once(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    ours = store_training(open_store, "auto")
    with caplog.at_level(logging.WARNING, logger="tierbed"):
        for _ in range(3):
            ours.run(Known())
            ours.emb.eval()
            for batch in tb.lookahead(list(Known(seed=9))[:3], ours.emb, window=2, key=itself):
                ours.emb(batch)
            ours.emb.train()
    assert caplog.text.count("read the whole store") == 1
