"""Training through a store equals torch's own embedding bags and optimizers, within rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.testing import random_bags

ROWS, DIM = 50, 8
# Float32 sums of a few dozen terms in another order.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}

CASES = [
    pytest.param(tb.SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}, id="sgd"),
    pytest.param(tb.Adagrad(lr=0.1), torch.optim.Adagrad, {"lr": 0.1}, id="adagrad"),
    pytest.param(
        tb.Adagrad(lr=0.1, initial_accumulator_value=0.1, eps=1e-6),
        torch.optim.Adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-6},
        id="adagrad-initial",
    ),
    pytest.param(tb.Adam(lr=0.01), torch.optim.SparseAdam, {"lr": 0.01}, id="sparse-adam"),
]


def reference_bag(store: tb.Store, name: str, mode: str) -> torch.nn.EmbeddingBag:
    rows = store.read_rows(name, 0, ROWS)
    return torch.nn.EmbeddingBag.from_pretrained(
        rows, freeze=False, mode=mode, sparse=True, include_last_offset=True
    )


@pytest.mark.parametrize("backend", ["memory", "file"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(("fused", "torch_class", "kwargs"), CASES)
def test_rows_follow_torch(
    open_store: Any, backend: str, mode: str, fused: Any, torch_class: Any, kwargs: Any
) -> None:
    store = open_store(backend)
    emb = tb.EmbeddingBagCollection(
        [
            tb.EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, pooling=mode)
            for name in ("a", "b")
        ],
        store=store,
        optimizer=fused,
    )
    bags = {name: reference_bag(store, name, mode) for name in ("a", "b")}
    parameters = [bag.weight for bag in bags.values()]
    optimizer = torch_class(parameters, **kwargs)
    generator = torch.Generator().manual_seed(0)
    for step in range(30):
        batch = random_bags({"a": ROWS, "b": ROWS}, 16, seed=step)
        target = torch.randn(16, 2 * DIM, generator=generator)
        ours = emb(batch).values()
        theirs = torch.cat(
            [bags[key](batch[key].values(), batch[key].offsets()) for key in ("a", "b")], dim=1
        )
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
        (ours * target).sum().backward()
        optimizer.zero_grad()
        (theirs * target).sum().backward()
        optimizer.step()
    for name, bag in bags.items():
        rows = store.read_rows(name, 0, ROWS)
        torch.testing.assert_close(rows, bag.weight.detach(), **TOLERANCE)


def test_weights_and_their_gradient_follow_torch(open_store: Any) -> None:
    store = open_store()
    emb = tb.EmbeddingBagCollection(
        [tb.EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM)],
        store=store,
        optimizer=tb.SGD(lr=0.1),
        is_weighted=True,
    )
    bag = reference_bag(store, "a", "sum")
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    for step in range(10):
        batch = random_bags({"a": ROWS}, 16, seed=step, is_weighted=True)
        ours_weights = batch.weights_or_none().clone().requires_grad_()
        theirs_weights = ours_weights.detach().clone().requires_grad_()
        weighted = tb.KeyedJaggedTensor(
            ["a"], batch.values(), ours_weights, offsets=batch.offsets()
        )
        ours = emb(weighted).values()
        theirs = bag(batch.values(), batch.offsets(), theirs_weights)
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
        ours.square().sum().backward()
        optimizer.zero_grad()
        theirs.square().sum().backward()
        optimizer.step()
        torch.testing.assert_close(ours_weights.grad, theirs_weights.grad, **TOLERANCE)
    rows = store.read_rows("a", 0, ROWS)
    torch.testing.assert_close(rows, bag.weight.detach(), **TOLERANCE)


def test_frozen_rows_still_give_the_gradient_of_weights(open_store: Any) -> None:
    store = open_store()
    emb = tb.EmbeddingBagCollection(
        [
            tb.EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM),
            tb.EmbeddingBagConfig(name="b", num_embeddings=ROWS, embedding_dim=3, pooling="mean"),
        ],
        store=store,
        optimizer=tb.SGD(lr=0.0),
        is_weighted=True,
    )
    batch = random_bags({"a": ROWS, "b": ROWS}, 8, seed=3, is_weighted=True)

    def gradient(training: bool) -> torch.Tensor:
        emb.train(training)
        weights = batch.weights_or_none().clone().requires_grad_()
        bags = tb.KeyedJaggedTensor(batch.keys(), batch.values(), weights, offsets=batch.offsets())
        emb(bags).values().square().sum().backward()
        assert weights.grad is not None
        return weights.grad

    before = store.stats()["steps"]
    frozen = gradient(training=False)
    assert store.stats()["steps"] == before, "frozen rows must not step"
    torch.testing.assert_close(frozen, gradient(training=True), **TOLERANCE)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
@pytest.mark.parametrize("form", ["offsets", "last_offset", "two_dims"])
def test_embedding_bag_is_a_drop_in(
    open_store: Any, mode: str, padding_idx: int | None, form: str
) -> None:
    store = open_store()
    ours = tb.EmbeddingBag(
        ROWS,
        DIM,
        store=store,
        mode=mode,
        padding_idx=padding_idx,
        include_last_offset=form == "last_offset",
        optimizer=torch.optim.SGD,
        optimizer_kwargs={"lr": 0.1},
    )
    theirs = torch.nn.EmbeddingBag.from_pretrained(
        store.read_rows("embedding_bag", 0, ROWS),
        freeze=False,
        mode=mode,
        padding_idx=padding_idx,
        include_last_offset=form == "last_offset",
    )
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        if form == "two_dims":
            call: tuple[Any, ...] = (torch.randint(0, ROWS, (6, 4), generator=generator),)
        else:
            batch = random_bags({"a": ROWS}, 6, seed=step)
            call = (batch.values(), batch.offsets()[: None if form == "last_offset" else -1])
        weights = torch.rand(call[0].shape, generator=generator) if mode == "sum" else None
        found = ours(*call, per_sample_weights=weights)
        wanted = theirs(*call, per_sample_weights=weights)
        torch.testing.assert_close(found, wanted, **TOLERANCE)
        found.sin().sum().backward()
        optimizer.zero_grad()
        wanted.sin().sum().backward()
        optimizer.step()
    rows = store.read_rows("embedding_bag", 0, ROWS)
    torch.testing.assert_close(rows, theirs.weight.detach(), **TOLERANCE)


def test_embedding_collection_returns_rows_per_id(open_store: Any) -> None:
    store = open_store()
    emb = tb.EmbeddingCollection(
        [
            tb.EmbeddingConfig(
                name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f", "g"]
            ),
            tb.EmbeddingConfig(name="u", num_embeddings=ROWS, embedding_dim=DIM),
        ],
        store=store,
        optimizer=tb.SGD(lr=1.0),
    )
    batch = random_bags({"f": ROWS, "g": ROWS, "u": ROWS}, 5, seed=1)
    before = {name: store.read_rows(name, 0, ROWS) for name in ("t", "u")}
    out = emb(batch)
    assert list(out) == ["f", "g", "u"]
    for key, table in (("f", "t"), ("g", "t"), ("u", "u")):
        assert torch.equal(out[key].values(), before[table][batch[key].values()])
        assert torch.equal(out[key].lengths(), batch[key].lengths())
    torch.cat([part.values() for part in out.values()]).sum().backward()
    uses = torch.zeros(ROWS)
    ids = torch.cat([batch["f"].values(), batch["g"].values()])
    uses.index_add_(0, ids, torch.ones(ids.numel()))
    expected = before["t"] - uses[:, None]
    torch.testing.assert_close(store.read_rows("t", 0, ROWS), expected, **TOLERANCE)
