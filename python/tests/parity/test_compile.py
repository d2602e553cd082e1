"""The operators live in compiled graphs: no break, no lost and no doubled update."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tierbed as tb
from tierbed.ops import operators as ops
from tierbed.testing import random_bags

# Inductor needs a C++ compiler; without one the same graphs are traced and run by torch's kernels.
BACKEND = "inductor" if shutil.which(os.environ.get("CXX", "g++")) else "aot_eager"

FEATURES = {"x": 20, "y": 20, "b": 30}


def collection(store: tb.Store, optimizer: Any) -> tb.EmbeddingBagCollection:
    return tb.EmbeddingBagCollection(
        [
            tb.EmbeddingBagConfig(
                name="a", num_embeddings=20, embedding_dim=4, feature_names=["x", "y"]
            ),
            tb.EmbeddingBagConfig(name="b", num_embeddings=30, embedding_dim=6, pooling="mean"),
        ],
        store=store,
        optimizer=optimizer,
        is_weighted=True,
    )


def bags(seed: int, batch_size: int = 5) -> tb.KeyedJaggedTensor:
    return random_bags(FEATURES, batch_size, seed=seed, is_weighted=True)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_opcheck(open_store: Any, pooled: bool, weighted: bool) -> None:
    # opcheck runs backward several times: with a learning rate of 0 the rows stay.
    store = open_store()
    if pooled:
        emb: Any = collection(store, tb.SGD(lr=0.0))
    else:
        emb = tb.EmbeddingCollection(
            [
                tb.EmbeddingConfig(name=name, num_embeddings=30, embedding_dim=4)
                for name in FEATURES
            ],
            store=store,
            optimizer=tb.SGD(lr=0.0),
        )
    batch = bags(0)
    weights = batch.weights_or_none().requires_grad_() if weighted and pooled else None
    torch.library.opcheck(
        torch.ops.tierbed.lookup,
        (
            emb._hook,
            batch.values(),
            batch.offsets(),
            weights,
            emb._binding.handle,
            3,
            emb._binding.output_dim,
            pooled,
        ),
    )


def test_a_lookup_nobody_watches_does_without_the_operator(
    open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    emb = collection(open_store(), tb.SGD(lr=0.5)).eval()
    batch = bags(0)
    asked = []
    operator = ops.lookup_op
    monkeypatch.setattr(ops, "lookup_op", lambda *args: asked.append(1) or operator(*args))
    with torch.no_grad():
        plain = emb(batch).values()
        assert not asked
        # Whoever wants to see operators sees them, and the bits are the same.
        with FlopCounterMode(display=False):
            watched = emb(batch).values()
        assert asked.pop()
        assert torch.equal(plain, watched)
    batch.weights_or_none().requires_grad_()
    plain = emb(batch).values()
    assert plain.requires_grad
    assert not asked
    with FlopCounterMode(display=False):
        watched = emb(batch).values()
    assert asked.pop()
    assert torch.equal(plain, watched)


def test_the_operator_and_autograd_alone_make_the_same_step(open_store: Any) -> None:
    def train(is_watched: bool) -> tuple[tb.Store, list[torch.Tensor]]:
        store = open_store(seed=4)
        emb = collection(store, tb.Adagrad(lr=0.1))
        found = []
        for seed in range(4):
            batch = bags(seed)
            weights = batch.weights_or_none().requires_grad_()
            with FlopCounterMode(display=False) if is_watched else contextlib.nullcontext():
                out = emb(batch).values()
                out.square().sum().backward()
            found += [out.detach(), weights.grad]
        return store, found

    (plain, eager), (watched, operators) = train(False), train(True)
    assert all(torch.equal(one, other) for one, other in zip(eager, operators, strict=True))
    for name, rows in (("a", 20), ("b", 30)):
        ours, theirs = (store.read_rows_and_state(name, 0, rows) for store in (plain, watched))
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_a_second_derivative_of_a_lookup_is_refused(open_store: Any) -> None:
    emb = collection(open_store(), tb.SGD(lr=0.5))
    out = emb(bags(0)).values()
    (first,) = torch.autograd.grad(out.square().sum(), emb._hook, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        first.sum().backward()


def test_training_eagerly_does_not_import_the_compiler(tmp_path: Path) -> None:
    program = """
import sys, torch, tierbed as tb
store = tb.Store.open("store", dram_budget="16MiB")
config = tb.EmbeddingBagConfig(name="a", num_embeddings=9, embedding_dim=4)
emb = tb.EmbeddingBagCollection([config], store=store, optimizer=tb.SGD(lr=1.0))
bags = tb.KeyedJaggedTensor(["a"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
emb(bags).values().sum().backward()
assert store.stats()["steps"] == 1
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=120)


@pytest.mark.slow
def test_a_compiled_model_trains_like_an_eager_one(open_store: Any) -> None:
    def train(compiled: bool) -> tuple[tb.Store, torch.nn.Module, list[float]]:
        torch.manual_seed(1)
        store = open_store(seed=2)
        emb = collection(store, tb.Adagrad(lr=0.1))
        model = torch.nn.Sequential(torch.nn.Linear(14, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(batch: tb.KeyedJaggedTensor) -> torch.Tensor:
            return model(emb(batch).values()).square().mean()

        step = torch.compile(loss_of, fullgraph=True, backend=BACKEND) if compiled else loss_of
        losses = []
        for seed in range(12):
            # Other sizes, and the features in another order: shapes and permutation compile too.
            batch = bags(seed, batch_size=4 + seed % 3)
            batch = batch.select(["b", "y", "x"]) if seed % 2 else batch
            loss = step(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return store, model, losses

    eager, eager_model, eager_losses = train(compiled=False)
    compiled, compiled_model, compiled_losses = train(compiled=True)
    assert compiled_losses == pytest.approx(eager_losses, rel=1e-4)
    assert compiled.stats()["steps"] == eager.stats()["steps"] == 12
    for name, rows in (("a", 20), ("b", 30)):
        torch.testing.assert_close(
            compiled.read_rows(name, 0, rows), eager.read_rows(name, 0, rows), rtol=1e-4, atol=1e-6
        )
    for ours, theirs in zip(compiled_model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_two_lookups_of_a_batch_are_two_updates_compiled_too(open_store: Any) -> None:
    # Both updates have equal arguments; the compiler merged them into one before it was told.
    store = open_store()
    emb = collection(store, tb.SGD(lr=0.1))

    def twice(batch: tb.KeyedJaggedTensor) -> torch.Tensor:
        return (emb(batch).values() + emb(batch).values()).sum()

    twice(bags(0)).backward()
    assert store.stats()["steps"] == 2
    torch.compile(twice, fullgraph=True, backend=BACKEND)(bags(0)).backward()
    assert store.stats()["steps"] == 4


@pytest.mark.parametrize("kind", ["dlrm", "deepfm", "pnn"])
def test_the_click_models_compile_whole(open_store: Any, kind: str) -> None:
    sizes = {f"c{at}": 40 for at in range(4)}
    model = tb.nn.MODELS[kind](3, sizes, store=open_store(), optimizer=tb.SGD(lr=0.0))
    batch = random_bags(sizes, 6, seed=0, bag_max=2)
    dense = torch.rand(6, 3)
    found = torch.compile(model, fullgraph=True, backend=BACKEND)(dense, batch)
    torch.testing.assert_close(found, model(dense, batch))
    found.sum().backward()


def test_nothing_is_updated_without_training(open_store: Any) -> None:
    store = open_store()
    emb = collection(store, tb.SGD(lr=0.1))
    layer = torch.nn.Linear(14, 1)
    emb.eval()
    layer(emb(bags(0)).values()).sum().backward()
    emb.train()
    with torch.no_grad():
        emb(bags(0))
    with torch.inference_mode():
        emb(bags(0))
    torch.autograd.grad(layer(emb(bags(0)).values()).sum(), list(layer.parameters()))
    assert store.stats()["steps"] == 0
    layer(emb(bags(0)).values()).sum().backward()
    assert store.stats()["steps"] == 1


def test_a_collection_has_no_dense_parameters(open_store: Any) -> None:
    emb = collection(open_store(), tb.SGD(lr=0.1))
    assert list(emb.parameters()) == []
    assert dict(emb.state_dict()) == {}
    full = emb.full_state_dict()
    assert {name: tuple(rows.shape) for name, rows in full.items()} == {
        "embedding_bags.a.weight": (20, 4),
        "embedding_bags.b.weight": (30, 6),
    }
