"""A small model of rows and a dense part, for tests of frameworks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tierbed as tb

ROWS, DIM, SAMPLES, BATCH = 60, 4, 40, 4


def collate(samples: list[int]) -> dict[str, Any]:
    ids = torch.tensor(samples).repeat_interleave(2) * 7 % ROWS
    lengths = torch.full((len(samples),), 2, dtype=torch.int64)
    return {
        "sparse": tb.KeyedJaggedTensor(["item"], ids, lengths=lengths),
        "label": (torch.tensor(samples) % 3 == 0).float(),
    }


def sparse(batch: Any) -> Any:
    return batch["sparse"]


def loader(shuffle: str = "seeded") -> DataLoader[int]:
    """Ten batches: in order, shuffled by a seed of their own, or by the global generator."""
    generator = torch.Generator().manual_seed(3) if shuffle == "seeded" else None
    samples: Any = list(range(SAMPLES))
    return DataLoader(
        samples, BATCH, shuffle=shuffle != "none", generator=generator, collate_fn=collate
    )


def table() -> tb.EmbeddingBagConfig:
    return tb.EmbeddingBagConfig(ROWS, DIM, "item", init=tb.Normal(std=0.5))


class Model(nn.Module):
    """Pooled rows, a dropout, a layer: the dropout draws from the global generator."""

    def __init__(self, store: tb.Store) -> None:
        super().__init__()
        self.emb = tb.EmbeddingBagCollection([table()], store=store, optimizer=tb.Adam(lr=0.05))
        self.drop = nn.Dropout(0.25)
        self.top = nn.Linear(DIM, 1)

    def loss(self, batch: Any) -> Tensor:
        logits = self.top(self.drop(self.emb(batch["sparse"]).values())).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])

    def optimizer(self) -> tb.RowOptimizer:
        return tb.RowOptimizer(self.emb, torch.optim.Adam(self.top.parameters(), lr=0.05))


def numbers(store: tb.Store, model: Any) -> list[Tensor]:
    """Returns all rows with their state, and the dense part."""
    rows = store.read_rows_and_state("item", 0, ROWS)
    steps = torch.tensor(store.steps_done("item"))
    return [*rows, steps, *(one.detach().clone() for one in model.top.parameters())]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
