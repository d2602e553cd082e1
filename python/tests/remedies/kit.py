"""What tests of remedies share: a small store, and the error that names the remedy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb

ROWS, DIM, BUDGET = 1000, 8, "8MiB"


@contextmanager
def refused(kind: type[Exception], remedy: str) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expects an error of ``kind`` whose message has ``remedy``."""
    with pytest.raises(kind) as caught:
        yield caught
    assert remedy in str(caught.value), str(caught.value)
    told = str(caught.value).count("remedy: ")
    assert told <= 1 or "cause: " in str(caught.value), str(caught.value)


def table(name: str = "item", rows: int | None = ROWS, **more: Any) -> tb.EmbeddingBagConfig:
    more = {"embedding_dim": DIM, "num_embeddings": rows, **more}
    return tb.EmbeddingBagConfig(name=name, **more)


def collection(store: Any, *tables: Any, **more: Any) -> tb.EmbeddingBagCollection:
    more.setdefault("optimizer", tb.Adagrad(lr=0.1))
    return tb.EmbeddingBagCollection(list(tables) or [table()], store=store, **more)


def bags(*ids: int, name: str = "item") -> tb.KeyedJaggedTensor:
    lengths = torch.ones(len(ids), dtype=torch.int64)
    return tb.KeyedJaggedTensor([name], torch.tensor(ids, dtype=torch.int64), lengths=lengths)


def step(emb: tb.EmbeddingBagCollection, first: int = 0, count: int = 20) -> None:
    emb(bags(*range(first, first + count))).values().square().sum().backward()


def opened(path: Path | None, **options: Any) -> tb.Store:
    options.setdefault("dram_budget", BUDGET)
    return tb.Store.open(path, **options)


def rows_of(store: tb.Store, name: str = "item") -> torch.Tensor:
    return store.read_rows(name, 0, ROWS)


def trained(path: Path, *, keep: str | None = None, **options: Any) -> torch.Tensor:
    """Trains and closes a store at its checkpoint ``last``; returns its rows."""
    with opened(path, **options) as store:
        emb = collection(store)
        step(emb)
        if keep is not None:
            store.checkpoint(keep, keep=True)
        step(emb, 10)
        store.checkpoint("last")
        return rows_of(store)


def put_back(copy: Path, folder: Path) -> None:
    """Brings a folder back from its copy."""
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


def flip(path: Path, at: int | None = None) -> None:
    """Damages a byte that was written, the middle one unless told."""
    raw = bytearray(path.read_bytes())
    written = [place for place, byte in enumerate(raw) if byte] or [0]
    raw[written[len(written) // 2] if at is None else at] ^= 1
    path.unlink()  # Kept checkpoints share files.
    path.write_bytes(raw)


def snapshot_of(folder: Path, **options: Any) -> tb.Snapshot:
    """Opens a snapshot; options of its cache may stand among the others."""
    names = {"cache": "tiers", "neighbours": "neighbours", "refresh": "refresh"}
    names |= {"tier_budget": "budget", "tier_floor": "floor"}
    cache = {names[name]: options.pop(name) for name in list(options) if name in names}
    return tb.Snapshot.open(folder, cache=tb.CacheOptions(**cache), **options)
