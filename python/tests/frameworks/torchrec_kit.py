"""What tests with the real TorchRec share: tables, batches, and its modules beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tierbed as tb

torchrec = pytest.importorskip("torchrec", reason="needs the dependency group frameworks")

ROWS, DIM = 200, 8


def bag_configs(rows: int = ROWS, dim: int = DIM, **more: Any) -> list[Any]:
    """Two tables; the second is read by two features."""
    return [
        torchrec.EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, **more
        )
        for name, features in (("t1", ["f1"]), ("t2", ["f2", "f3"]))
    ]


def configs(rows: int = ROWS, dim: int = DIM) -> list[Any]:
    return [
        torchrec.EmbeddingConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features
        )
        for name, features in (("t1", ["f1"]), ("t2", ["f2", "f3"]))
    ]


def batch(
    seed: int = 0,
    *,
    keys: tuple[str, ...] = ("f1", "f2", "f3"),
    samples: int = 5,
    rows: int = ROWS,
    weighted: bool = False,
    ids: torch.dtype = torch.int64,
) -> Any:
    """TorchRec's batch of random bags, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * samples,), generator=generator)
    count = int(lengths.sum())
    values = torch.randint(0, rows, (count,), generator=generator).to(ids)
    weights = torch.rand(count, generator=generator) if weighted else None
    return torchrec.KeyedJaggedTensor(list(keys), values, weights, lengths=lengths)


def batches(count: int, **options: Any) -> Iterator[Any]:
    for seed in range(count):
        yield batch(seed, **options)


def memory() -> tb.Store:
    return tb.Store.open(backend="memory", dram_budget="16MiB")


def rows_differ(theirs: Any, store: tb.Store) -> float:
    """The largest difference of a weight, over all tables."""
    tables = getattr(theirs, "embedding_bags", None) or theirs.embeddings
    return max(
        float((store.read_rows(name, 0, len(table.weight)) - table.weight.detach()).abs().max())
        for name, table in tables.items()
    )
