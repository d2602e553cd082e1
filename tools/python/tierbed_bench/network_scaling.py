"""Whole steps of a DLRM on two hosts of a core each, beside one core.

Each rank has a core to itself, one thread and equally many samples. Vectors and their gradients
travel as bfloat16 or float32 over links of 10 Gbit/s; dense gradients are averaged by
DistributedDataParallel. Runs of one host and of two take turns.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierbed as tb
from tierbed import dist as tbd
from tierbed.config.words import Positive
from tierbed_bench.hosts import hosts

__all__ = ["ScalingOptions", "run_scaling", "train_dlrm"]

DENSE = 13
WARM_STEPS = 2
TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class ScalingOptions:
    """What is trained.

    Args:
        tables: Tables, one id of each in a sample.
        rows: Rows of a table.
        dim: Elements of a row.
        batch: Samples of a rank and step.
        steps: Steps that count.
        rounds: Runs of each kind; the one in the middle counts.
        rate: Of the links.
        seed: Of everything that is drawn.
    """

    tables: Positive = 26
    rows: Positive = 50_000
    dim: Positive = 64
    batch: Positive = 1024
    steps: Positive = 10
    rounds: Positive = 3
    rate: str = "10gbit"
    seed: int = 0


class _Dense(nn.Module):
    """DLRM's two networks and the products between vectors."""

    def __init__(self, options: ScalingOptions) -> None:
        super().__init__()
        count = options.tables + 1
        self._pairs = torch.triu_indices(count, count, offset=1)
        self._dim = options.dim
        self.bottom = nn.Sequential(
            nn.Linear(DENSE, 256), nn.ReLU(), nn.Linear(256, options.dim), nn.ReLU()
        )
        width = options.dim + self._pairs.shape[1]
        self.top = nn.Sequential(
            nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Computes logits ``[B]``."""
        own = self.bottom(dense)
        vectors = torch.cat([own[:, None], pooled.view(len(dense), -1, self._dim)], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = products[:, self._pairs[0], self._pairs[1]]
        logits: Tensor = self.top(torch.cat([own, pairs], dim=1)).squeeze(1)
        return logits


def train_dlrm(options: ScalingOptions, dtype: str) -> float:
    """Trains as one rank; returns the seconds of the steps."""
    rank, count = dist.get_rank(), dist.get_world_size()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    names = [f"t{at}" for at in range(options.tables)]
    tables = [tb.EmbeddingBagConfig(options.rows, options.dim, name) for name in names]
    ways = {name: tbd.TableWise(at % count) for at, name in enumerate(names)}
    how = tbd.ExchangeOptions(output_dtype=TYPES[dtype])
    with tb.Store.open(backend="memory", dram_budget="2GiB") as store:
        rows = tbd.ShardedEmbeddingBagCollection(
            tables,
            store=store,
            plan=tbd.ShardingPlan(count, ways),
            exchange=how,
            optimizer=tb.RowWiseAdagrad(lr=0.05),
        )
        dense: nn.Module = _Dense(options)
        if count > 1:
            dense = nn.parallel.DistributedDataParallel(dense)
        optimizer = torch.optim.SGD(dense.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(options.seed * count + rank)
        with rows:
            started_s = 0.0
            for step in range(WARM_STEPS + options.steps):
                if step == WARM_STEPS:
                    dist.barrier()
                    started_s = time.perf_counter()
                _step(options, names, generator, rows, dense, optimizer)
            spent_s = time.perf_counter() - started_s
    return spent_s


def _step(
    options: ScalingOptions,
    names: list[str],
    generator: torch.Generator,
    rows: tbd.ShardedEmbeddingBagCollection,
    dense: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    count = options.tables * options.batch
    ids = torch.randint(0, options.rows, (count,), generator=generator)
    lengths = torch.ones(count, dtype=torch.int64)
    pooled = rows(tb.KeyedJaggedTensor(names, ids, lengths=lengths)).values()
    numbers = torch.rand(options.batch, DENSE, generator=generator)
    labels = (numbers[:, 0] > 0.5).float()
    logits = dense(numbers, pooled.float())
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def run_scaling(options: ScalingOptions) -> list[dict[str, Any]]:
    """Runs one host and two in turns; returns samples a second by type in transit."""
    found: dict[tuple[int, str], list[float]] = {}
    with hosts(1) as one, hosts(2, rate=options.rate) as two:
        for _ in range(options.rounds):
            for dtype in TYPES:
                for made in (one, two):
                    with tempfile.TemporaryDirectory() as folder:
                        spent_s = made.run(
                            train_dlrm, options, dtype, folder=Path(folder) / "ranks", limit_s=600
                        )
                    samples = made.count * options.batch * options.steps
                    found.setdefault((made.count, dtype), []).append(samples / max(spent_s))
    rows = []
    for dtype in TYPES:
        alone, both = (median(found[count, dtype]) for count in (1, 2))
        rows.append(
            {
                "dtype": dtype,
                "rate": options.rate,
                "one_core_samples_per_s": alone,
                "two_hosts_samples_per_s": both,
                "scaling": both / alone,
            }
        )
    return rows
