"""A model that trains while it is published, and what is served of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.train import publisher as publisher_module

SIZES = {"user": 20_000, "item": 10_000}
DIM = 16


class Clock:
    """The time of publishers."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    @classmethod
    def of_publishers(cls, monkeypatch: pytest.MonkeyPatch) -> Clock:
        """Puts one in the place of theirs."""
        clock = cls()
        monkeypatch.setattr(publisher_module, "time", clock)
        return clock

    def monotonic(self) -> float:
        return self.now_s


class Training:
    """A model that trains, and what it was after each step."""

    def __init__(self, folder: Path, *, batch: int = 8, **options: Any) -> None:
        self.folder, self.batch = folder, batch
        self.location = folder / "models" / "ads"
        options = {"dram_budget": "32MiB", "order": "window", **options}
        self.store = tb.Store.open(folder / "store", **options)
        tables = [
            tb.EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=DIM)
            for name, size in SIZES.items()
        ]
        self.emb = tb.EmbeddingBagCollection(
            tables, store=self.store, optimizer=tb.RowWiseAdagrad(lr=0.1)
        )
        self.dense = torch.nn.Linear(2, 1)
        extra = self.store.load_extra()
        self.steps = 0
        if self.store.last_checkpoint() is None and options["order"] == "window":
            # As a model that trained for long: all rows are written.
            luck = torch.Generator().manual_seed(1)
            for name, size in SIZES.items():
                self.store.write_rows(name, 0, torch.randn(size, DIM, generator=luck))
        if extra is not None:
            self.steps = int(extra["step"])
            self.dense.load_state_dict(extra["dense"])
        self.was: dict[int, dict[str, torch.Tensor]] = {}

    def draw(self, at: int) -> tb.KeyedJaggedTensor:
        luck = torch.Generator().manual_seed(at)
        values = [torch.randint(0, size, (self.batch,), generator=luck) for size in SIZES.values()]
        return tb.KeyedJaggedTensor(
            list(SIZES), torch.cat(values), lengths=torch.ones(2 * self.batch, dtype=torch.int64)
        )

    def train_on(self, batch: tb.KeyedJaggedTensor) -> None:
        self.emb(batch).values().pow(2).add(0.1).sum().backward()
        with torch.no_grad():
            for weight in self.dense.parameters():
                weight.add_(0.01)
        self.steps += 1

    def step(self) -> None:
        self.train_on(self.draw(self.steps))

    def note(self) -> None:
        """Remembers the state of this step."""
        rows = {name: self.store.read_rows(name, 0, size) for name, size in SIZES.items()}
        self.was[self.steps] = rows | {"dense": self.dense.weight.detach().clone()}

    def checkpoint(self) -> None:
        extra = {"step": self.steps, "dense": self.dense.state_dict()}
        self.store.checkpoint(f"step-{self.steps}", extra=extra)

    def publisher(self, **options: Any) -> tb.Publisher:
        options = {"attachments": lambda: {"step": str(self.steps).encode()}, **options}
        return tb.Publisher(self.store, self.dense, self.location, **options)


class Served:
    """What a server of a channel would answer from."""

    def __init__(self, training: Training, channel: str = "canary") -> None:
        scratch = training.folder / "served"
        shutil.rmtree(scratch, ignore_errors=True)
        pulled = tb.Versions(training.location).pull(scratch / "pulled", channel=channel)
        self.folders = [Path(folder) for folder in pulled.folders]
        whole = self.folders[0]
        for at, delta in enumerate(self.folders[1:]):
            tb.Snapshot.apply(whole, delta, scratch / f"whole-{at}")
            whole = scratch / f"whole-{at}"
        self.step = int((self.folders[-1] / "att.step").read_bytes())
        with tb.Snapshot.open(whole) as snapshot:
            self.rows = rows_of(snapshot)
            dense = snapshot.attachment("dense.safetensors")
        assert dense is not None
        import safetensors.torch

        self.rows["dense"] = safetensors.torch.load(dense)["weight"]

    def check(self, training: Training) -> Served:
        """Compares with the training's own state at the step that the version names."""
        wanted = training.was[self.step]
        for name, rows in wanted.items():
            assert torch.equal(self.rows[name], rows), f"{name} at step {self.step}"
        return self


def rows_of(snapshot: tb.Snapshot) -> dict[str, torch.Tensor]:
    ids = [torch.arange(size) for size in SIZES.values()]
    lengths = torch.ones(sum(SIZES.values()), dtype=torch.int64)
    everything = [ids[0], ids[1]]
    found = {}
    for name, one in zip(SIZES, everything, strict=True):
        bags = tb.KeyedJaggedTensor([name], one, lengths=lengths[: len(one)])
        found[name] = snapshot.lookup(bags)[name].clone()
    return found
