"""Trains on disk and in memory, publishes and asks, with an installed wheel, and compares bits."""

from __future__ import annotations

import platform
import tempfile

import torch

import tierbed as tb

ROWS, DIM = 20_000, 16


def trained(path: str | None, steps: int) -> tb.Store:
    """Returns a store after some steps; without a path its rows are in memory."""
    store = tb.Store.open(path, backend=None if path else "memory", dram_budget="16MiB")
    tables = [tb.EmbeddingBagConfig(ROWS, DIM, "item")]
    emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.Adagrad(lr=0.1))
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, ROWS, (256,), generator=generator)
        features = tb.KeyedJaggedTensor(["item"], ids, lengths=torch.full((64,), 4))
        emb(features).values().square().sum().backward()
    return store


def main() -> None:
    """Compares and says what machine and versions it did so with."""
    with tempfile.TemporaryDirectory() as folder:
        memory, disk = trained(None, 20), trained(f"{folder}/store", 20)
        rows = memory.read_rows("item", 0, ROWS)
        assert torch.equal(rows, disk.read_rows("item", 0, ROWS)), "disk and memory differ"
        disk.checkpoint("end")
        disk.publish(f"{folder}/snapshot")
        disk.close()
        with tb.Snapshot.open(f"{folder}/snapshot", dram_budget="8MiB") as snapshot:
            asked = torch.arange(100) * 199
            features = tb.KeyedJaggedTensor(["item"], asked, lengths=torch.ones(100).long())
            found = snapshot.lookup(features).values()
            assert torch.equal(found, rows[asked]), "a lookup differs"
        memory.close()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"{platform.machine()}, {versions}, tierbed {tb.__version__}: equal bits")


if __name__ == "__main__":
    main()
