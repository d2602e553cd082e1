"""Rows stepped by a RowOptimizer follow torch, and have the bits of steps within backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierbed as tb
from tierbed.data import BatchOrder
from tierbed.testing import random_bags

ROWS, DIMS, BATCH = {"a": 60, "b": 40}, {"a": 8, "b": 5}, 12
# Float32 sums of a few dozen terms in another order.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
FUSED = {
    "sgd": tb.SGD(lr=0.1, weight_decay=0.01),
    "adagrad": tb.Adagrad(lr=0.1),
    "row_wise_adagrad": tb.RowWiseAdagrad(lr=0.1),
    "adam": tb.Adam(lr=0.01),
    "partial_row_wise_adam": tb.PartialRowWiseAdam(lr=0.01),
}
OF_TORCH = {
    "sgd": (tb.SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (tb.Adagrad(lr=0.1), torch.optim.Adagrad, {"lr": 0.1}),
    "adam": (tb.Adam(lr=0.01), torch.optim.SparseAdam, {"lr": 0.01}),
}


@pytest.fixture(autouse=True)
def _warnings_fail() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # by torch.optim.Adagrad
        yield


def tables(**more: Any) -> list[tb.EmbeddingBagConfig]:
    more.setdefault("pooling", "sum")
    features = {"a": ["a", "a2"], "b": ["b"]}
    return [
        tb.EmbeddingBagConfig(
            name=name,
            num_embeddings=ROWS[name],
            embedding_dim=DIMS[name],
            feature_names=features[name],
            **more,
        )
        for name in ROWS
    ]


def batch(seed: int, is_weighted: bool = False) -> tb.KeyedJaggedTensor:
    sizes = {"a": ROWS["a"], "a2": ROWS["a"], "b": ROWS["b"]}
    return random_bags(sizes, BATCH, seed=seed, is_weighted=is_weighted)


def state_of(store: tb.Store) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for name, rows in ROWS.items():
        found += store.read_rows_and_state(name, 0, rows)
        found += [store.use_counts(name, 0, rows), torch.tensor(store.steps_done(name))]
    return found


def assert_same(one: tb.Store, other: tb.Store) -> None:
    for ours, theirs in zip(state_of(one), state_of(other), strict=True):
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------- one lookup, one step


CASES = [("memory", pooling, weighted) for pooling in ("sum", "mean") for weighted in (False, True)]


@pytest.mark.parametrize(
    ("backend", "pooling", "is_weighted"), [*CASES, ("file", "sum", True), ("lsm", "mean", False)]
)
@pytest.mark.parametrize("kind", FUSED)
def test_a_step_has_the_bits_of_a_backward(
    open_store: Any, backend: str, pooling: str, is_weighted: bool, kind: str
) -> None:
    stores = [open_store(backend, name=name) for name in ("ours", "fused")]
    embs = [
        tb.EmbeddingBagCollection(
            tables(pooling=pooling), store=store, optimizer=FUSED[kind], is_weighted=is_weighted
        )
        for store in stores
    ]
    optimizer = tb.RowOptimizer(stores[0])
    target = torch.randn(BATCH, sum(DIMS.values()) + DIMS["a"])
    for step in range(4):
        grads = []
        for emb in embs:
            given = batch(step, is_weighted)
            weights = given.weights_or_none()
            if weights is not None:
                weights = weights.clone().requires_grad_()
            bags = tb.KeyedJaggedTensor(
                given.keys(), given.values(), weights, offsets=given.offsets()
            )
            (emb(bags).values() * target).sin().sum().backward()
            grads.append(None if weights is None else weights.grad)
        if is_weighted:
            torch.testing.assert_close(grads[0], grads[1], **TOLERANCE)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(*stores)


def test_sequences_have_the_bits_of_a_backward(open_store: Any) -> None:
    stores = [open_store(name=name) for name in ("ours", "fused")]
    config = tb.EmbeddingConfig(
        name="a", num_embeddings=ROWS["a"], embedding_dim=8, feature_names=["a", "a2"]
    )
    embs = [tb.EmbeddingCollection([config], store=s, optimizer=tb.Adam()) for s in stores]
    optimizer = tb.RowOptimizer(embs[0])
    for step in range(5):
        for emb in embs:
            rows = emb(batch(step))
            (rows["a"].values().sin().sum() + rows["a2"].values().square().sum()).backward()
        optimizer.step()
    ours, theirs = (store.read_rows_and_state("a", 0, ROWS["a"]) for store in stores)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


# ---------------------------------------------------------------- several lookups, one step


def reference(store: tb.Store) -> dict[str, nn.EmbeddingBag]:
    return {
        name: nn.EmbeddingBag.from_pretrained(
            store.read_rows(name, 0, rows),
            freeze=False,
            mode="sum",
            sparse=True,
            include_last_offset=True,
        )
        for name, rows in ROWS.items()
    }


def looked_up(bags: dict[str, nn.EmbeddingBag], of: tb.KeyedJaggedTensor) -> torch.Tensor:
    pairs = {"a": "a", "a2": "a", "b": "b"}
    found = [bags[name](of[key].values(), of[key].offsets()) for key, name in pairs.items()]
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("backend", ["memory", "file"])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("kind", OF_TORCH)
def test_accumulated_gradients_follow_torch(
    open_store: Any, backend: str, backwards: int, kind: str
) -> None:
    fused, torch_class, kwargs = OF_TORCH[kind]
    store = open_store(backend)
    emb = tb.EmbeddingBagCollection(tables(), store=store, optimizer=fused)
    bags = reference(store)
    ours = tb.RowOptimizer(emb)
    theirs = torch_class([bag.weight for bag in bags.values()], **kwargs)
    target = torch.randn(BATCH, sum(DIMS.values()) + DIMS["a"])
    for step in range(6):
        # Two micro-batches, each with two lookups of the tables in one backward or in several.
        for micro in range(backwards):
            one, other = batch(100 * step + micro), batch(100 * step + micro + 50)
            for look in (emb_values(emb), lambda of: looked_up(bags, of)):
                (look(one) * look(other) * target).sum().backward()
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for name, bag in bags.items():
        torch.testing.assert_close(
            store.read_rows(name, 0, ROWS[name]), bag.weight.detach(), **TOLERANCE
        )
        assert store.steps_done(name) == 6


def emb_values(emb: Any) -> Any:
    return lambda of: emb(of).values()


def test_lookups_have_the_bits_of_one_lookup_of_all_ids(open_store: Any) -> None:
    config = [tb.EmbeddingBagConfig(name="a", num_embeddings=ROWS["a"], embedding_dim=8)]
    stores = [open_store(name=name) for name in ("ours", "fused")]
    embs = [tb.EmbeddingBagCollection(config, store=s, optimizer=tb.Adam()) for s in stores]
    optimizer = tb.RowOptimizer(embs[0])
    for step in range(6):
        parts = [random_bags({"a": ROWS["a"]}, BATCH, seed=3 * step + at) for at in range(3)]
        for part in parts:
            embs[0](part).values().sin().sum().backward()
        optimizer.step()
        whole = tb.KeyedJaggedTensor(
            ["a"],
            torch.cat([part.values() for part in parts]),
            lengths=torch.cat([part.lengths() for part in parts]),
        )
        embs[1](whole).values().sin().sum().backward()
    ours, theirs = (store.read_rows_and_state("a", 0, ROWS["a"]) for store in stores)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_tied_tables_of_two_modules_make_one_step(open_store: Any) -> None:
    store = open_store()
    pooled = tb.EmbeddingBag(
        ROWS["a"], 8, store=store, name="a", mode="mean", optimizer=tb.Adam(lr=0.01)
    )
    config = tb.EmbeddingConfig(name="a", num_embeddings=ROWS["a"], embedding_dim=8)
    rows = tb.EmbeddingCollection([config], store=store)
    weight = nn.Parameter(store.read_rows("a", 0, ROWS["a"]))
    ours, theirs = tb.RowOptimizer(store), torch.optim.SparseAdam([weight], lr=0.01)
    for step in range(4):
        ids = torch.randint(0, ROWS["a"], (6, 4), generator=torch.Generator().manual_seed(step))
        sequence = tb.KeyedJaggedTensor(
            ["a"], ids.view(-1), lengths=torch.full((6,), 4, dtype=torch.int64)
        )
        user = pooled(ids)
        (user[:, None] * rows(sequence)["a"].values().view(6, 4, 8)).sum().sin().backward()
        ours.step()
        bag = nn.functional.embedding_bag(ids, weight, mode="mean", sparse=True)
        item = nn.functional.embedding(ids, weight, sparse=True)
        (bag[:, None] * item).sum().sin().backward()
        theirs.step()
        theirs.zero_grad()
    torch.testing.assert_close(store.read_rows("a", 0, ROWS["a"]), weight.detach(), **TOLERANCE)
    assert store.steps_done("a") == 4


# ---------------------------------------------------------------- along a plan


class Known:
    """A loader that tells its order: the same ten batches in every epoch."""

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return (batch(seed) for seed in range(10))

    def known_order(self) -> BatchOrder:
        return BatchOrder("known", self.__iter__, 0, 10)


def train(store: tb.Store, *, every: int, fused: bool, dims: int = 0, epochs: int = 2) -> Any:
    kind = tables()
    emb = tb.EmbeddingBagCollection(kind, store=store, optimizer=tb.Adam(lr=0.01))
    optimizer = None if fused else tb.RowOptimizer(emb)
    for _ in range(epochs):
        ahead = tb.lookahead(Known(), emb, window=4, key=lambda bags: bags)
        for at, bags in enumerate(ahead):
            emb(bags).values().sin().sum().backward()
            if optimizer is not None and (at + 1) % every == 0:
                nn.utils.clip_grad_norm_(optimizer.parameters(), 1e9)
                optimizer.step()
                optimizer.zero_grad()
    return store.order()


@pytest.mark.parametrize("shards", [None, 2])
def test_a_step_per_batch_follows_the_plan(
    open_store: Any, tmp_path: Path, shards: int | None
) -> None:
    budget = {"dram_budget": "16MiB"}
    ours = open_store(None, name="ours", order="forward", shards=shards, **budget)
    order = train(ours, every=1, fused=False)
    assert (order["kind"], order["fallback_count"]) == ("forward", 0)
    fused = open_store("memory", name="fused")
    train(fused, every=1, fused=True)
    assert_same(ours, fused)


def test_accumulation_leaves_the_plan_with_the_same_numbers(
    open_store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ours = open_store(None, name="ours", dram_budget="16MiB")
    order = train(ours, every=2, fused=False)
    assert (order["kind"], order["fallback_count"]) == ("window", 1)
    assert caplog.text.count("left the forward order") == 1
    other = open_store("memory", name="other")
    train(other, every=2, fused=False)
    assert_same(ours, other)


def test_a_store_that_insists_on_its_plan_refuses_accumulation(open_store: Any) -> None:
    store = open_store(None, order="forward", dram_budget="16MiB")
    with pytest.raises(tb.InvalidError, match=r"step after each batch, or open.*window"):
        train(store, every=2, fused=False)
    windowed = open_store(None, name="windowed", order="window", dram_budget="16MiB")
    train(windowed, every=2, fused=False)
    assert windowed.steps_done("a") == 10
