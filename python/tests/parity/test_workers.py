"""Training fed by the workers of a DataLoader gives the bits of training without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tierbed as tb

SAMPLES, BATCH, ROWS, DIM = 240, 20, 500, 8

OpenStore = Callable[..., tb.Store]


def collate(samples: list[int]) -> tb.KeyedJaggedTensor:
    ids = torch.tensor(samples).repeat_interleave(2) * 7 % ROWS
    return tb.KeyedJaggedTensor(
        keys=["item"], values=ids, lengths=torch.full((len(samples),), 2, dtype=torch.int64)
    )


def itself(batch: Any) -> Any:
    return batch


def seeded_loader(seed: int = 7, **options: Any) -> DataLoader[int]:
    generator = torch.Generator().manual_seed(seed)
    samples: Any = list(range(SAMPLES))
    return DataLoader(
        samples, BATCH, shuffle=True, generator=generator, collate_fn=collate, **options
    )


def with_workers(method: str, *, persistent: bool) -> dict[str, Any]:
    return {
        "num_workers": 2,
        "multiprocessing_context": method,
        "persistent_workers": persistent,
    }


def item_bags(store: tb.Store) -> tb.EmbeddingBagCollection:
    table = tb.EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM)
    return tb.EmbeddingBagCollection([table], store=store, optimizer=tb.Adagrad(lr=0.1))


def train(store: tb.Store, loader: Any, *, epochs: int = 2) -> list[torch.Tensor]:
    """Trains, with a checkpoint behind every epoch; returns what every step looked up."""
    emb = item_bags(store)
    ahead = tb.lookahead(loader, emb, window=4, key=itself)
    outputs = []
    for epoch in range(epochs):
        for batch in ahead:
            pooled = emb(batch).values()
            (pooled - 1.0).square().sum().backward()
            outputs.append(pooled.detach())
        store.checkpoint(f"epoch-{epoch}")
    return outputs


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) == 2 * SAMPLES // BATCH
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), f"outputs of step {step}"


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_seeded_shuffle_is_followed_with_workers_too(
    open_store: OpenStore, method: str, persistent: bool
) -> None:
    options = with_workers(method, persistent=persistent)
    ours = open_store(None, order="forward", dram_budget="8MiB")
    theirs = open_store("memory")
    # What a bare loader yields is trained on, however its workers start.
    bare = seeded_loader(**with_workers("fork", persistent=persistent))
    bare_epochs = [list(bare) for _ in range(2)]
    found = train(ours, seeded_loader(**options))
    emb = item_bags(theirs)
    wanted = []
    for epoch in bare_epochs:
        for batch in epoch:
            pooled = emb(batch).values()
            (pooled - 1.0).square().sum().backward()
            wanted.append(pooled.detach())
    assert_same(found, wanted)
    order = ours.order()
    assert (order["kind"], order["replan_count"], order["fallback_count"]) == ("forward", 1, 0)


def test_a_restart_goes_on_with_a_shuffle_drawn_by_kept_workers(open_store: OpenStore) -> None:
    loader = seeded_loader(**with_workers("fork", persistent=True))
    ours = open_store(None, order="forward", dram_budget="8MiB")
    train(ours, loader)
    generator = loader.generator.get_state()
    ours.close()
    # A new process has a new loader, which draws a seed for its workers: another order, another
    # plan, and no mismatch.
    again = seeded_loader(**with_workers("fork", persistent=True))
    again.generator.set_state(generator)
    resumed = open_store(None, order="forward", dram_budget="8MiB")
    train(resumed, again, epochs=1)
    assert resumed.order()["kind"] == "forward"
