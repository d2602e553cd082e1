"""Training through every backend gives the bits of training in memory, also over a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed.testing import random_bags
from tierbed_bench.stores import RocksDictStore, SqliteStore

ROWS = {"a": 4000, "b": 700}
DIMS = {"a": 9, "b": 36}
STEPS, BATCH, BUDGET = 24, 32, "4MiB"

OPTIMIZERS = {
    "sgd": tb.SGD(lr=0.05),
    "adagrad": tb.Adagrad(lr=0.05),
    "row_wise_adagrad": tb.RowWiseAdagrad(lr=0.05),
    "adam": tb.Adam(lr=0.01),
    "partial_row_wise_adam": tb.PartialRowWiseAdam(lr=0.01),
}


def native(backend: str) -> Callable[[Path], tb.Store]:
    return lambda path: tb.Store.open(path / "store", backend=backend, dram_budget=BUDGET)


# A budget of its own: the row buffer must evict, or the store below sees nothing.
BACKENDS: dict[str, Callable[[Path], tb.Store]] = {
    **{name: native(name) for name in ("hashdb", "mmap", "rocksdb", "rocksdb_universal")},
    "sqlite": lambda path: tb.Store.over(SqliteStore(path / "rows"), dram_budget="300KiB"),
    "rocksdict": lambda path: tb.Store.over(
        RocksDictStore(path / "rows", memory_bytes=1 << 20), dram_budget="300KiB"
    ),
}


def train(store: tb.Store, optimizer: tb.nn.embedding.Optimizer, first: int, last: int) -> list:
    emb = tb.EmbeddingBagCollection(
        [
            tb.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIMS[name])
            for name, rows in ROWS.items()
        ],
        store=store,
        optimizer=optimizer,
    )
    outputs = []
    batches = (random_bags(ROWS, BATCH, seed=at) for at in range(first, last))
    for batch in tb.lookahead(batches, emb, window=3, key=lambda bags: bags):
        pooled = emb(batch).values()
        # A gradient that depends on the output: any difference spreads.
        pooled.square().sum().backward()
        outputs.append(pooled.detach())
    return outputs


def rows_of(store: tb.Store) -> list[torch.Tensor]:
    return [
        part for name, rows in ROWS.items() for part in store.read_rows_and_state(name, 0, rows)
    ]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_with_a_restart_has_the_bits_of_memory(
    tmp_path: Path, backend: str, kind: str
) -> None:
    optimizer = OPTIMIZERS[kind]
    try:
        store = BACKENDS[backend](tmp_path)
    except tb.UnsupportedError as missing:
        pytest.skip(str(missing))
    with tb.Store.open(backend="memory", dram_budget="64MiB") as memory:
        expected = train(memory, optimizer, 0, STEPS)
        half = STEPS // 2
        found = train(store, optimizer, 0, half)
        store.checkpoint("half")
        # Work that no checkpoint holds.
        train(store, optimizer, 900, 903)
        store.close()
        with BACKENDS[backend](tmp_path) as store:
            found += train(store, optimizer, half, STEPS)
            assert all(map(torch.equal, found, expected))
            assert all(map(torch.equal, rows_of(store), rows_of(memory)))
            store.verify()
