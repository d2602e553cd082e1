"""Training through a file store gives the bits of training in memory, for any budget."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.testing import random_bags

OPTIMIZERS = {
    "sgd": tb.SGD(lr=0.05),
    "adagrad": tb.Adagrad(lr=0.05),
    "row_wise_adagrad": tb.RowWiseAdagrad(lr=0.05),
    "adam": tb.Adam(lr=0.01, weight_decay=0.01),
    "partial_row_wise_adam": tb.PartialRowWiseAdam(lr=0.01),
}
ROWS = {"a": 300_000, "b": 60_000, "c": 97}
DIMS = {"a": 16, "b": 7, "c": 33}
STEPS, BATCH = 500, 32
BUDGET_SHARE = 0.02


def tables() -> list[tb.EmbeddingBagConfig]:
    return [
        tb.EmbeddingBagConfig(
            name=name,
            num_embeddings=ROWS[name],
            embedding_dim=DIMS[name],
            pooling="mean" if name == "b" else "sum",
        )
        for name in ROWS
    ]


def table_bytes(optimizer: tb.nn.embedding.Optimizer) -> int:
    return sum(
        4 * (DIMS[name] + optimizer.state_words(DIMS[name]) + 1) * rows
        for name, rows in ROWS.items()
    )


class Training:
    """A small model over three tables: weights, duplicates and empty bags."""

    def __init__(self, store: tb.Store, optimizer: Any) -> None:
        torch.manual_seed(3)
        self.store = store
        self.emb = tb.EmbeddingBagCollection(
            tables(), store=store, optimizer=optimizer, is_weighted=True
        )
        self.dense = torch.nn.Linear(sum(DIMS.values()), 1)
        self.dense_optimizer = torch.optim.Adam(self.dense.parameters(), lr=0.01)
        self.step = 0

    def run(self, last: int, window: int) -> list[torch.Tensor]:
        outputs = []
        batches = (
            random_bags(ROWS, BATCH, seed=at, is_weighted=True) for at in range(self.step, last)
        )
        for batch in tb.lookahead(batches, self.emb, window=window, key=lambda bags: bags):
            pooled = self.emb(batch).values()
            loss = (self.dense(pooled).squeeze(1) - 1.0).square().mean()
            self.dense_optimizer.zero_grad()
            loss.backward()
            self.dense_optimizer.step()
            outputs.append(pooled.detach())
            self.step += 1
        return outputs

    def save(self) -> None:
        self.store.checkpoint(
            f"step-{self.step}",
            extra={
                "dense": self.dense.state_dict(),
                "optimizer": self.dense_optimizer.state_dict(),
                "step": self.step,
            },
        )

    def load(self) -> None:
        extra = self.store.load_extra()
        assert extra is not None
        self.dense.load_state_dict(extra["dense"])
        self.dense_optimizer.load_state_dict(extra["optimizer"])
        self.step = extra["step"]


def assert_same(one: Training, other: Training) -> None:
    for name, rows in ROWS.items():
        for first in range(0, rows, 50_000):
            count = min(50_000, rows - first)
            ours = one.store.read_rows_and_state(name, first, count)
            theirs = other.store.read_rows_and_state(name, first, count)
            assert torch.equal(ours[0], theirs[0]), f"rows of {name} from {first}"
            assert torch.equal(ours[1], theirs[1]), f"state of {name} from {first}"
            uses = one.store.use_counts(name, first, count)
            assert torch.equal(uses, other.store.use_counts(name, first, count))
    for ours_dense, theirs_dense in zip(
        one.dense.parameters(), other.dense.parameters(), strict=True
    ):
        assert torch.equal(ours_dense, theirs_dense)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_percent_of_the_memory_gives_the_same_bits(open_store: Any, kind: str) -> None:
    optimizer = OPTIMIZERS[kind]
    budget = int(BUDGET_SHARE * table_bytes(optimizer))
    small = Training(open_store("file", dram_budget=budget, seed=5), optimizer)
    whole = Training(open_store("memory", dram_budget="1GiB", seed=5), optimizer)
    for step, (ours, theirs) in enumerate(
        zip(small.run(STEPS, window=16), whole.run(STEPS, window=0), strict=True)
    ):
        assert torch.equal(ours, theirs), f"outputs of step {step}"
    assert_same(small, whole)
    used = small.store.stats()["budget"]
    assert used["peak_bytes"] <= budget
    assert small.store.stats()["buffer"]["evicted_count"] > 0, "the budget was never tight"


def test_restarts_and_windows_change_no_bit(open_store: Any) -> None:
    optimizer = OPTIMIZERS["partial_row_wise_adam"]
    whole = Training(open_store("memory", seed=5), optimizer)
    whole.run(120, window=0)
    last = None
    for number, stop in enumerate((40, 80, 120)):
        store = open_store("file", dram_budget="2MiB", seed=5)
        last = Training(store, optimizer)
        if number:
            last.load()
        last.run(stop, window=(0, 3, 50)[number])
        last.save()
        if stop < 120:
            last.run(stop + 7, window=4)  # lost, as if the process had died
            store.close()
    assert last is not None
    assert_same(last, whole)


CHILD = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import tierbed as tb
from test_bit_identity import OPTIMIZERS, Training

store = tb.Store.open({path!r}, dram_budget="2MiB", seed=5)
training = Training(store, OPTIMIZERS["adagrad"])
if store.last_checkpoint():
    training.load()
while training.step < 150:
    training.run(training.step + 10, window=4)
    training.save()
    print("saved", training.step, flush=True)
"""


def test_killed_processes_resume_with_the_same_bits(open_store: Any, tmp_path: Path) -> None:
    path = tmp_path / "store"
    code = CHILD.format(tests=str(Path(__file__).parent), path=str(path))
    for saves in (1, 4, 3):  # killed at three different moments, once right after a save
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for _ in range(saves):
                assert child.stdout.readline().startswith("saved")
            os.kill(child.pid, signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
    resumed = Training(open_store("file", dram_budget="2MiB", seed=5), OPTIMIZERS["adagrad"])
    resumed.load()
    assert resumed.step >= 80
    resumed.run(150, window=4)
    whole = Training(open_store("memory", seed=5), OPTIMIZERS["adagrad"])
    whole.run(150, window=0)
    assert_same(resumed, whole)
