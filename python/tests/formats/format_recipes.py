"""What was trained in a kept store, and how does that training go on?

A recipe is plain data and lies in the manifest beside the fixtures, so what old fixtures hold is
told by them and not by today's code. Batches come from arithmetic on whole numbers alone: no
version of a library draws other ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import tierbed as tb
from tierbed.order import BatchOrder

_WORD = (1 << 64) - 1
SAMPLES = 6

OPTIMIZERS: dict[str, Any] = {
    "sgd": tb.SGD(lr=0.05),
    "adagrad": tb.Adagrad(lr=0.05),
    "row_wise_adagrad": tb.RowWiseAdagrad(lr=0.05),
    "adam": tb.Adam(lr=0.01, weight_decay=0.01),
    "partial_row_wise_adam": tb.PartialRowWiseAdam(lr=0.01),
}

# Rows, dim, pooling; None: open vocabulary. "wide" has rows longer than a page.
TABLES: dict[str, tuple[int | None, int, str]] = {
    "a": (200, 9, "sum"),
    "b": (120, 12, "mean"),
    "c": (97, 1, "sum"),
    "d": (60, 18, "sum"),
    "e": (60, 7, "mean"),
    "wide": (4, 1100, "sum"),
    "item": (None, 6, "sum"),
    "rare": (None, 4, "sum"),
}

_OPEN: dict[str, dict[str, Any]] = {
    "item": {"init": tb.Uniform(-0.5, 0.5)},
    "rare": {
        "init": tb.Normal(0.0, 0.25),
        "admission_strategy": tb.FrequencyAdmissionStrategy(2),
        "virtual_table_eviction_policy": tb.CountBasedEvictionPolicy(2.5, decay_rate=0.9),
    },
}


def mixed(*numbers: int) -> int:
    """Returns 64 bits of ``numbers`` by SplitMix64."""
    word = 0x9E3779B97F4A7C15
    for number in numbers:
        word = (word + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
        word ^= word >> 31
    return word


def config(name: str) -> tb.EmbeddingBagConfig:
    rows, dim, pooling = TABLES[name]
    return tb.EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        pooling=pooling,
        **_OPEN.get(name, {}),
    )


def draw(names: list[str], step: int, seed: int = 0) -> tb.KeyedJaggedTensor:
    """Draws the batch of one step: bags of 0 to 3 ids, half of them among the first ten rows."""
    values, lengths = [], []
    for name in names:
        rows, at = TABLES[name][0], list(TABLES).index(name)
        for sample in range(SAMPLES):
            count = mixed(seed, step, at, sample) % 4
            lengths.append(count)
            for place in range(count):
                drawn = mixed(seed, step, at, sample, place)
                if rows is None:
                    values.append((1 + drawn % 50) * 2**40 + at)
                else:
                    values.append((drawn >> 8) % (min(10, rows) if drawn % 2 else rows))
    return tb.KeyedJaggedTensor(
        names,
        torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        stride=SAMPLES,
    )


def table_names(recipe: dict[str, Any]) -> list[str]:
    return [name for part in recipe["collections"] for name in part["tables"]]


def batch_at(recipe: dict[str, Any], names: list[str], step: int) -> tb.KeyedJaggedTensor:
    """Returns what step ``step`` of a run trains on, whether it was planned or not."""
    if step in recipe.get("unplanned", []):
        return draw(names, step, seed=99)
    epoch = recipe.get("epoch")
    return draw(names, step if epoch is None else step % epoch)


class KnownEpoch:
    """A loader that tells its order: the batches of an epoch, from batch ``start`` on."""

    def __init__(self, names: list[str], batch_count: int, start: int) -> None:
        self.names, self.batch_count, self.start = names, batch_count, start

    def epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
        return (draw(self.names, at) for at in range(self.batch_count))

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return (draw(self.names, at) for at in range(self.start, self.batch_count))

    def known_order(self) -> BatchOrder:
        return BatchOrder("kept formats", self.epoch, self.start, self.batch_count)


class Training:
    """A run of a recipe on a store."""

    def __init__(self, recipe: dict[str, Any], store: tb.Store) -> None:
        self.recipe, self.store = recipe, store
        self.parts = [
            (
                part["tables"],
                tb.EmbeddingBagCollection(
                    [config(name) for name in part["tables"]],
                    store=store,
                    optimizer=OPTIMIZERS[part["optimizer"]],
                ),
            )
            for part in recipe["collections"]
        ]

    def steps(self, first: int, last: int) -> Iterator[int]:
        """Does steps ``first`` to ``last - 1`` one by one; yields how many are done."""
        if self.recipe.get("epoch") is not None and self.store.path is not None:
            yield from self._planned(first, last)
            return
        for step in range(first, last):
            for names, part in self.parts:
                self._step(part, batch_at(self.recipe, names, step))
            if step + 1 == self.recipe.get("evict_after"):
                self.store.evict(now_mins=1000)
            yield step + 1

    def run(self, first: int, last: int) -> None:
        for _ in self.steps(first, last):
            pass

    def _planned(self, first: int, last: int) -> Iterator[int]:
        epoch = self.recipe["epoch"]
        ((names, part),) = self.parts
        done = first
        while done < last:
            loader: Any = KnownEpoch(names, epoch, done % epoch)
            for _ in tb.lookahead(loader, part, window=4, key=lambda batch: batch):
                self._step(part, batch_at(self.recipe, names, done))
                done += 1
                yield done
                if done == last:
                    return

    def _step(self, part: tb.EmbeddingBagCollection, batch: tb.KeyedJaggedTensor) -> None:
        pooled = part(batch).values()
        # The gradient follows the output: any difference spreads.
        (pooled * (pooled.detach() * 0.3 + 0.1)).sum().backward()
