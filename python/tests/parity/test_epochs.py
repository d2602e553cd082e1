"""One plan of several shuffled epochs gives the bits of training in memory, and moves no rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import tierbed as tb
from tierbed.data import columns

OpenStore = Callable[..., tb.Store]
ROWS, SAMPLES, BATCH, EPOCHS = 500, 88, 16, 3
BATCHES = -(-SAMPLES // BATCH)


class Clicks(Dataset[torch.Tensor]):
    """Each sample has an id of its own, and one that others have."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.tensor([at, 100 + at % 7])


def collate(samples: list[torch.Tensor]) -> tb.KeyedJaggedTensor:
    ids = torch.stack(samples)
    return tb.KeyedJaggedTensor(
        ["item"], ids.flatten(), lengths=torch.full((len(samples),), 2, dtype=torch.int64)
    )


def clicks(**options: Any) -> DataLoader[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return DataLoader(
        Clicks(), BATCH, shuffle=True, collate_fn=collate, generator=generator, **options
    )


def distributed() -> DataLoader[torch.Tensor]:
    sampler: Any = DistributedSampler(Clicks(), num_replicas=1, rank=0, shuffle=True, seed=3)
    return DataLoader(Clicks(), BATCH, sampler=sampler, collate_fn=collate)


def bags(store: tb.Store) -> tb.EmbeddingBagCollection:
    table = tb.EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=8)
    return tb.EmbeddingBagCollection([table], store=store, optimizer=tb.Adagrad(lr=0.05))


def step(emb: tb.EmbeddingBagCollection, batch: Any) -> torch.Tensor:
    pooled = emb(getattr(batch, "sparse", batch)).values()
    (pooled - 1.0).square().sum().backward()
    return pooled.detach()


def key(batch: Any) -> Any:
    return getattr(batch, "sparse", batch)


def planned(open_store: OpenStore, path: Path | None = None) -> Any:
    """Returns a store in forward order and its bags."""
    options: dict[str, Any] = {"order": "forward", "dram_budget": "4MiB", "seed": 5}
    store = open_store(None, **options) if path is None else tb.Store.open(path, **options)
    return store, bags(store)


def in_memory(open_store: OpenStore, epochs: Iterator[Any]) -> list[torch.Tensor]:
    emb = bags(open_store("memory", seed=5))
    return [step(emb, batch) for batch in epochs]


def drawn(loader: Any, epochs: int = EPOCHS) -> Iterator[Any]:
    """Yields what a bare loader yields in its epochs."""
    for epoch in range(epochs):
        for one in (getattr(loader, "sampler", None), loader):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        yield from loader


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), f"outputs of step {at}"


def told_dataset(_: Path) -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    ids = np.arange(SAMPLES)
    table = pyarrow.table({"item": ids, "label": (ids % 2).astype(np.float32)})
    return columns(table, ids={"item": ROWS}, label="label", batch_size=BATCH, shuffle=32, seed=3)


LOADERS: dict[str, Callable[[Path], Any]] = {
    "seeded": lambda _: clicks(),
    "workers": lambda _: clicks(num_workers=2),
    "kept workers": lambda _: clicks(num_workers=2, persistent_workers=True),
    "told sampler": lambda _: distributed(),
    "told dataset": told_dataset,
}


@pytest.mark.parametrize("kind", LOADERS)
def test_shuffled_epochs_share_a_plan(open_store: OpenStore, kind: str, tmp_path: Path) -> None:
    store, emb = planned(open_store)
    ahead = tb.lookahead(LOADERS[kind](tmp_path), emb, window=4, key=key, epochs=EPOCHS)
    found = []
    for _ in range(EPOCHS):
        epoch = [step(emb, batch) for batch in ahead]
        assert len(epoch) == BATCHES == len(ahead)
        found.append(epoch)
    wanted = in_memory(open_store, drawn(LOADERS[kind](tmp_path)))
    assert_same([one for epoch in found for one in epoch], wanted)
    first, second = (torch.cat(epoch[:2]) for epoch in found[:2])
    assert not torch.equal(first, second), "the epochs have one order"
    order = store.order()
    assert (order["kind"], order["replan_count"]) == ("forward", 0)
    assert order["plan"]["batch_count"] == EPOCHS * BATCHES


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("done", [BATCHES - 2, BATCHES, 2 * BATCHES + 1])
def test_a_restart_goes_on_in_a_later_epoch(
    open_store: OpenStore, tmp_path: Path, kind: str, is_saved: bool, done: int
) -> None:
    path = tmp_path / "store"
    store, emb = planned(open_store, path)
    ahead = tb.lookahead(LOADERS[kind](tmp_path), emb, window=4, key=key, epochs=EPOCHS)
    found = []
    for _ in range(EPOCHS):
        for batch in ahead:
            found.append(step(emb, batch))
            if len(found) == done:
                store.checkpoint("here")
                saved = ahead.state_dict()
                break
        if len(found) == done:
            break
    store.close()
    store, emb = planned(open_store, path)
    start = 0 if is_saved else store.order()["batch"]
    again = tb.lookahead(
        LOADERS[kind](tmp_path), emb, window=4, key=key, epochs=EPOCHS, start=start
    )
    if is_saved:
        again.load_state_dict(saved)
    assert len(again) == BATCHES - start % BATCHES
    for _ in range(EPOCHS - done // BATCHES):
        found += [step(emb, batch) for batch in again]
    assert_same(found, in_memory(open_store, drawn(LOADERS[kind](tmp_path))))
    order = store.order()
    assert (order["kind"], order["replan_count"], order["fallback_count"]) == ("forward", 0, 0)


@pytest.mark.parametrize("kind", LOADERS)
def test_an_epoch_that_ends_early_leaves_the_order_of_the_next(
    open_store: OpenStore, tmp_path: Path, kind: str
) -> None:
    store, emb = planned(open_store)
    ahead = tb.lookahead(LOADERS[kind](tmp_path), emb, window=4, key=key, epochs=EPOCHS)
    stops = (2, BATCHES, 1)
    found = [step(emb, batch) for stop in stops for batch in islice(ahead, stop)]
    batches = list(drawn(LOADERS[kind](tmp_path)))
    if kind == "told dataset":
        # It goes on with an epoch that was left early.
        stops = (BATCHES, 1)
    trained = [batch for at, stop in enumerate(stops) for batch in batches[at * BATCHES :][:stop]]
    assert_same(found, in_memory(open_store, iter(trained)))
    order = store.order()
    assert (order["kind"], order["replan_count"], order["fallback_count"]) == ("forward", 0, 0)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_damaged_plan_is_made_again_in_a_later_epoch(
    open_store: OpenStore, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "store"
    store, emb = planned(open_store, path)
    loader = LOADERS[kind](tmp_path)
    ahead = tb.lookahead(loader, emb, window=4, key=key, epochs=EPOCHS)
    found = [step(emb, batch) for _ in range(2) for batch in ahead]
    store.checkpoint("two")
    saved = ahead.state_dict()
    store.close()
    (plan,) = path.glob("order-*.plan")
    plan.unlink()
    store, emb = planned(open_store, path)
    again = tb.lookahead(LOADERS[kind](tmp_path), emb, window=4, key=key, epochs=EPOCHS)
    again.load_state_dict(saved)
    found += [step(emb, batch) for batch in again]
    assert_same(found, in_memory(open_store, drawn(LOADERS[kind](tmp_path))))
    order = store.order()
    assert (order["kind"], order["replan_count"], order["fallback_count"]) == ("forward", 0, 0)


def test_what_has_an_epoch_and_no_set_epoch_is_left_alone(open_store: OpenStore) -> None:
    class Counting(DataLoader[torch.Tensor]):
        epoch = "the first"

    _, emb = planned(open_store)
    options: dict[str, Any] = {"shuffle": True, "collate_fn": collate}
    mine = Counting(Clicks(), BATCH, generator=torch.Generator().manual_seed(7), **options)
    ahead = tb.lookahead(mine, emb, window=4, epochs=2)
    found = [step(emb, batch) for _ in range(2) for batch in ahead]
    assert_same(found, in_memory(open_store, drawn(clicks(), epochs=2)))


def test_the_next_plan_follows_a_checkpoint(open_store: OpenStore) -> None:
    store, emb = planned(open_store)
    ahead = tb.lookahead(clicks(), emb, window=4, epochs=2)
    found = [step(emb, batch) for _ in range(2) for batch in ahead]
    store.checkpoint("two")
    found += [step(emb, batch) for _ in range(2) for batch in ahead]
    assert_same(found, in_memory(open_store, drawn(clicks(), epochs=4)))
    order = store.order()
    assert (order["kind"], order["replan_count"]) == ("forward", 1)


def test_a_dataset_goes_on_with_the_numbers_of_a_next_plan(
    open_store: OpenStore, tmp_path: Path
) -> None:
    store, emb = planned(open_store)
    data = told_dataset(tmp_path)
    ahead = tb.lookahead(data, emb, window=4, key=key, epochs=2)
    found = [step(emb, batch) for _ in range(2) for batch in ahead]
    store.checkpoint("two")
    saved = ahead.state_dict()
    found += [step(emb, batch) for batch in ahead]
    assert data.epoch == 2
    assert_same(found, in_memory(open_store, drawn(told_dataset(tmp_path), epochs=3)))
    restarted = told_dataset(tmp_path)
    again = tb.lookahead(restarted, emb, window=0, key=key, epochs=2)
    again.load_state_dict(saved)
    assert len([*again]) == BATCHES
    assert restarted.epoch == 2


@pytest.mark.parametrize("kind", ["in order", "told dataset in order"])
def test_epochs_of_one_order_need_a_plan_of_one(
    open_store: OpenStore, tmp_path: Path, kind: str
) -> None:
    def make() -> Any:
        if kind == "in order":
            return DataLoader(Clicks(), BATCH, collate_fn=collate)
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.table({"item": np.arange(SAMPLES)})
        return columns(table, ids={"item": ROWS}, batch_size=BATCH)

    store, emb = planned(open_store)
    ahead = tb.lookahead(make(), emb, window=4, key=key, epochs=EPOCHS)
    found = [step(emb, batch) for _ in range(EPOCHS + 1) for batch in ahead]
    assert_same(found, in_memory(open_store, drawn(make(), epochs=EPOCHS + 1)))
    order = store.order()
    assert (order["plan"]["batch_count"], order["replan_count"]) == (BATCHES, 0)


def test_by_window_epochs_are_those_of_the_loader(open_store: OpenStore) -> None:
    store = open_store(None, order="window", dram_budget="4MiB", seed=5)
    emb = bags(store)
    ahead = tb.lookahead(clicks(), emb, window=4, epochs=2)
    found = [step(emb, batch) for _ in range(3) for batch in ahead]
    assert_same(found, in_memory(open_store, drawn(clicks())))


def test_what_cannot_be_planned_together_is_refused(open_store: OpenStore) -> None:
    store, emb = planned(open_store)
    with pytest.raises(tb.InvalidError, match="at least 1, not 0"):
        tb.lookahead(clicks(), emb, epochs=0)
    with pytest.raises(tb.InvalidError, match="knows its number of batches"):
        tb.lookahead((batch for batch in clicks()), emb, epochs=2)
    late = tb.lookahead(clicks(), emb, epochs=2, start=2 * BATCHES)
    with pytest.raises(tb.InvalidError, match=f"have {2 * BATCHES} batches"):
        next(late)
    ahead = tb.lookahead(clicks(), emb, epochs=2, start=BATCHES + 1)
    for _ in range(2):
        with pytest.raises(tb.InvalidError, match="continue where the store stands with start=0"):
            next(iter(ahead))
    assert store.order()["batch"] == 0
