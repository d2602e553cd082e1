"""What the format fixtures are made of: seeded training, and digests of what a store holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tierbed as tb
from tierbed.data import BatchOrder

Facts = dict[str, Any]

ROWS = {"narrow": 120, "wide": 2}
# A record of `wide` is longer than a page of 4 KiB.
DIMS = {"narrow": 9, "wide": 1100}
BUDGET = "8MiB"
SEED = 5
#: Bytes attached to every checkpoint beside ``extra``.
NOTE = b"kept with the rows"


@dataclass(frozen=True)
class Case:
    """One fixture: how a version writes it, and how every later version must read it.

    Attributes:
        name: Of the archive and its facts.
        write: Fills a new folder and returns what a reader must find there, as JSON.
        check: Opens a copy of the folder and compares it with those facts.
    """

    name: str
    write: Callable[[Path], Facts]
    check: Callable[[Path, Facts], None]


def digest(tensor: torch.Tensor) -> str:
    """Returns a digest of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:32]


def configs() -> list[tb.EmbeddingBagConfig]:
    return [
        tb.EmbeddingBagConfig(name=name, num_embeddings=ROWS[name], embedding_dim=dim)
        for name, dim in DIMS.items()
    ]


def batch(step: int, first: int = 0) -> tb.KeyedJaggedTensor:
    """The batch of ``step``: 20 ids of `narrow`, 4 of `wide`, in 4 bags each."""
    generator = torch.Generator().manual_seed(1000 + step)
    narrow = torch.randint(first, ROWS["narrow"], (20,), generator=generator)
    wide = torch.randint(0, ROWS["wide"], (4,), generator=generator)
    lengths = torch.tensor([5, 5, 5, 5, 1, 1, 1, 1])
    return tb.KeyedJaggedTensor(list(DIMS), torch.cat([narrow, wide]), lengths=lengths)


def collection(store: tb.Store) -> tb.EmbeddingBagCollection:
    return tb.EmbeddingBagCollection(configs(), store=store, optimizer=tb.Adagrad(lr=0.1))


def one_step(emb: Any, bags: tb.KeyedJaggedTensor) -> None:
    pooled = emb(bags).values()
    (pooled * torch.linspace(0.1, 1.0, pooled.shape[1])).square().sum().backward()


def train(store: tb.Store, first: int, last: int) -> None:
    emb = collection(store)
    for step in range(first, last):
        one_step(emb, batch(step))


class Loader:
    """A loader that tells its order: batches ``start..`` of an epoch of ``count``."""

    def __init__(self, count: int, start: int = 0) -> None:
        self.count, self.start = count, start

    def epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
        return (batch(step) for step in range(self.count))

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return (batch(step) for step in range(self.start, self.count))

    def known_order(self) -> BatchOrder:
        return BatchOrder("fixture", self.epoch, self.start, self.count)


def train_planned(store: tb.Store, loader: Loader, last: int) -> None:
    """Trains the loader's batches until batch ``last``, along its plan."""
    emb = collection(store)
    step = loader.start
    for bags in tb.lookahead(loader, emb, window=2, key=lambda bags: bags):
        one_step(emb, bags)
        step += 1
        if step == last:
            break


def open_store(path: Path | None, backend: str | None = None, **more: Any) -> tb.Store:
    return tb.Store.open(path, backend=backend, dram_budget=BUDGET, seed=SEED, **more)


def rows_of(store: tb.Store) -> Facts:
    """Returns digests of rows, optimizer state and use counts of both tables."""
    found = {}
    for name, count in ROWS.items():
        rows, state = store.read_rows_and_state(name, 0, count)
        uses = store.use_counts(name, 0, count)
        found[name] = {
            "rows": digest(rows),
            "state": digest(state),
            "uses": digest(uses),
            "use_count": int(uses.sum()),
            "steps": store.steps_done(name),
        }
    return found


def trained_in_memory(last: int) -> Facts:
    """Returns what a store in memory holds after the first ``last`` steps."""
    with open_store(None, "memory") as store:
        train(store, 0, last)
        return rows_of(store)


def save(store: tb.Store, name: str, step: int, **more: Any) -> None:
    torch.manual_seed(step)
    extra = {"step": step, "dense": torch.arange(3.0) + step}
    store.checkpoint(name, extra=extra, attachments={"note": NOTE}, **more)


def saved(store: tb.Store, step: int) -> None:
    """Asserts what :func:`save` put beside the rows."""
    extra = store.load_extra()
    assert extra is not None
    assert extra["step"] == step
    assert torch.equal(extra["dense"], torch.arange(3.0) + step)
    assert store.attachment("note") == NOTE
    assert store.restore_rng()
    drawn = torch.rand(3)
    torch.manual_seed(step)
    assert torch.equal(drawn, torch.rand(3))


def bags_of(name: str, rows: torch.Tensor) -> tb.KeyedJaggedTensor:
    """One bag for each row of table ``name``."""
    return tb.KeyedJaggedTensor([name], rows, lengths=torch.ones_like(rows))
