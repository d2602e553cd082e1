"""Several collections over one store follow one plan, with the bits of training in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tierbed as tb

ROWS, DIM, BATCH, BATCHES = 4000, 8, 16, 12
Parts = list[tb.KeyedJaggedTensor]


class Samples:
    """Users, ads and a history of items of each."""

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.randint(0, ROWS, (6,), generator=torch.Generator().manual_seed(at))


def collated(samples: list[torch.Tensor]) -> Parts:
    """The profile with an id of each feature, and sequences of 0 to 4 items."""
    rows = torch.stack(samples)
    ones = torch.ones(2 * len(rows), dtype=torch.int64)
    profile = tb.KeyedJaggedTensor(["user", "ad"], rows[:, :2].t().reshape(-1), lengths=ones)
    lengths = rows[:, 0] % 5
    ids = torch.cat([row[2 : 2 + count] for row, count in zip(rows, lengths, strict=True)])
    return [profile, tb.KeyedJaggedTensor(["item"], ids, lengths=lengths)]


def loader(seed: int = 3) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    samples: Any = Samples()
    return DataLoader(samples, BATCH, shuffle=True, generator=generator, collate_fn=collated)


class Model(torch.nn.Module):
    """Two collections over one store, and a loss in which both take part."""

    def __init__(self, store: tb.Store, optimizer: Any = None) -> None:
        super().__init__()
        self.store = store
        pooled = [tb.EmbeddingBagConfig(ROWS, DIM, name) for name in ("user", "ad")]
        self.profile = tb.EmbeddingBagCollection(pooled, store=store, optimizer=optimizer)
        items = [tb.EmbeddingConfig(ROWS, DIM, "item")]
        self.items = tb.EmbeddingCollection(items, store=store, optimizer=optimizer)
        self.both = [self.profile, self.items]

    def loss(self, batch: Parts) -> torch.Tensor:
        profile, items = self.profile(batch[0]).values(), self.items(batch[1])["item"].values()
        return profile.square().sum() + (items.sum() * profile.sum()).tanh()

    def step(self, batch: Parts) -> None:
        self.loss(batch).backward()

    def rows(self) -> list[torch.Tensor]:
        names = ("user", "ad", "item")
        return [part for name in names for part in self.store.read_rows_and_state(name, 0, ROWS)]


def in_memory(run: Callable[[Model], None], optimizer: Any = None) -> list[torch.Tensor]:
    with tb.Store.open(backend="memory", dram_budget="64MiB", seed=2) as store:
        model = Model(store, optimizer)
        run(model)
        return model.rows()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def opened(folder: Path, order: Any = "forward", **options: Any) -> tb.Store:
    return tb.Store.open(folder, dram_budget="8MiB", order=order, seed=2, **options)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_two_collections_follow_one_plan(folder: Path) -> None:
    def run(model: Model) -> None:
        ahead = tb.lookahead(loader(), model.both, window=3, key=list, epochs=2)
        for _ in range(2):
            for batch in ahead:
                model.step(batch)

    with opened(folder) as store:
        model = Model(store)
        run(model)
        order = store.order()
        assert (order["kind"], order["epoch"], order["batch"]) == ("forward", 1, 0)
        assert order["plan"]["batch_count"] == 2 * BATCHES
        assert_same(model.rows(), in_memory(run))


def test_the_collections_of_a_model_are_found(folder: Path) -> None:
    def run(model: Model) -> None:
        wrapped = torch.nn.Sequential(torch.nn.Linear(1, 1), model)
        for batch in tb.lookahead(loader(), wrapped, window=3, key=list):
            model.step(batch)
        for only in (torch.nn.ModuleList([model.items]), model.items):
            ahead = tb.lookahead([], only)
            assert type(ahead._session).__name__ == "StepSession"

    with opened(folder) as store:
        model = Model(store)
        run(model)
        assert (store.order()["kind"], store.order()["epoch"]) == ("forward", 1)
        assert_same(model.rows(), in_memory(run))


def test_a_batch_may_be_stepped_in_part_or_only_looked_at(folder: Path) -> None:
    def run(model: Model) -> None:
        for at, batch in enumerate(tb.lookahead(loader(), model.both, window=3, key=list)):
            if at % 4 == 1:
                with torch.no_grad():
                    model.loss(batch)
            elif at % 4 == 2:
                model.items(batch[1])["item"].values().square().sum().backward()
            else:
                model.step(batch)

    with opened(folder) as store:
        model = Model(store)
        run(model)
        assert (store.order()["epoch"], store.order()["batch"]) == (1, 0)
        assert store.steps_done("item") > store.steps_done("user")
        assert_same(model.rows(), in_memory(run))


def test_training_goes_on_at_the_checkpoint_of_all(folder: Path) -> None:
    def run(model: Model) -> None:
        for batch in loader():
            model.step(batch)

    with opened(folder) as store:
        model = Model(store)
        for at, batch in enumerate(tb.lookahead(loader(), model.both, window=3, key=list)):
            model.step(batch)
            if at == 4:
                store.checkpoint("five")
            if at == 6:
                break
    with opened(folder) as store:
        model = Model(store)
        assert store.order()["batch"] == 5
        for batch in tb.lookahead(loader(), model.both, window=3, key=list, start=5):
            model.step(batch)
        assert store.order()["epoch"] == 1
        assert_same(model.rows(), in_memory(run))


def test_an_optimizer_of_torch_steps_all_collections(folder: Path) -> None:
    def run(model: Model) -> None:
        optimizer = tb.RowOptimizer(model.store)
        for batch in tb.lookahead(loader(), model.both, window=3, key=list):
            optimizer.zero_grad()
            model.step(batch)
            optimizer.step()

    with opened(folder) as store:
        model = Model(store)
        run(model)
        assert (store.order()["epoch"], store.order()["batch"]) == (1, 0)
        assert_same(model.rows(), in_memory(run))


def test_another_batch_leaves_the_plan_with_the_same_bits(folder: Path, caplog: Any) -> None:
    other = list(loader(8))

    def run(model: Model) -> None:
        for at, batch in enumerate(tb.lookahead(loader(), model.both, window=3, key=list)):
            model.step(batch)
            if at == 4:
                model.step(other[0])

    with opened(folder, order="auto") as store, caplog.at_level(logging.WARNING):
        model = Model(store)
        run(model)
        assert (store.order()["kind"], store.order()["fallback_count"]) == ("window", 1)
        assert "left the forward order" in caplog.text
        assert_same(model.rows(), in_memory(run))


def test_held_out_batches_are_looked_up_beside_the_plan(folder: Path) -> None:
    held_out = list(loader(8))[:3]

    def run(model: Model) -> list[torch.Tensor]:
        for batch in tb.lookahead(loader(), model.both, window=3, key=list):
            model.step(batch)
        for module in model.both:
            module.eval()
        ahead = tb.lookahead(held_out, model.both, window=2, key=list)
        return [model.loss(batch).detach() for batch in ahead]

    with tb.Store.open(backend="memory", dram_budget="64MiB", seed=2) as store:
        expected = run(Model(store))
    with opened(folder) as store:
        assert_same(run(Model(store)), expected)
        assert store.order()["kind"] == "forward"


USER = tb.EmbeddingBagConfig(ROWS, DIM, "user")
SHARED = tb.EmbeddingBagConfig(ROWS, DIM, "item", feature_names=["ad"])
OPEN = tb.EmbeddingBagConfig(None, DIM, "ad")


@pytest.mark.filterwarnings("ignore:one backward stepped the tables")
@pytest.mark.parametrize(
    ("tables", "stores", "options", "reason"),
    [
        pytest.param([USER, SHARED], 1, {}, "share a table", id="a shared table"),
        pytest.param([USER, OPEN], 1, {}, "open vocabulary", id="an open vocabulary"),
        pytest.param([USER], 2, {}, "stores of their own", id="two stores"),
        pytest.param([USER], 1, {"shards": 2}, "several shards", id="two shards"),
    ],
)
def test_what_cannot_follow_a_plan_together_says_why(
    tables: Any, stores: int, options: Any, reason: str, tmp_path: Path
) -> None:
    made = [opened(tmp_path / str(at), "auto", **options) for at in range(stores)]
    profile = tb.EmbeddingBagCollection(tables, store=made[0])
    items = tb.EmbeddingCollection([tb.EmbeddingConfig(ROWS, DIM, "item")], store=made[-1])
    for batch in tb.lookahead(loader(), [profile, items], window=3, key=list):
        (profile(batch[0]).values().sum() + items(batch[1])["item"].values().sum()).backward()
    for store in made:
        assert store.order()["kind"] == "window"
        assert reason in str(store.order()["reason"])
        store.close()


def test_collections_that_are_not_looked_ahead_are_counted(folder: Path) -> None:
    with opened(folder) as store:
        model = Model(store)
        third = tb.Embedding(10, 4, store=store, name="third")
        with pytest.raises(tb.InvalidError, match="1 more collections train on the store"):
            next(tb.lookahead(loader(), model.both, key=list))
        with pytest.raises(tb.InvalidError, match="look them ahead together"):
            next(tb.lookahead(loader(), model.profile, key=lambda batch: batch[0]))
        del third
