"""Ranks whose memory holds a small part of their rows: on demand, by window, along plans.

Beside them all rows in memory.

Two ranks of one host train the same batches for two epochs; the second one counts, when all rows
that come were trained and lie on disk. Runs take turns. What a plan costs is told beside: it is
made once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import tierbed as tb
from tierbed import dist as tbd
from tierbed.config.words import Positive
from tierbed.data.order import BatchOrder
from tierbed_bench.hosts import hosts

__all__ = ["WAYS", "LookaheadOptions", "run_lookahead", "train_ahead"]

RANKS = 2
#: What a store takes beside rows, such as buffers of the disk.
FIXED_BYTES = 4 << 20


@dataclass(frozen=True)
class Way:
    """How rows come.

    Args:
        window: Batches that are looked ahead.
        options: Of the store.
    """

    window: int
    options: Mapping[str, Any]


WAYS = {
    "on_demand": Way(0, {"order": "window"}),
    "window": Way(16, {"order": "window"}),
    "forward": Way(16, {"order": "forward"}),
    "in_memory": Way(0, {"backend": "memory", "dram_budget": "4GiB"}),
}


@dataclass(frozen=True, kw_only=True)
class LookaheadOptions:
    """What is trained.

    Args:
        tables: Tables, one id of each in a sample.
        rows: Rows of a table.
        dim: Elements of a row.
        batch: Samples of a rank and step.
        steps: Batches of an epoch.
        dram_share: Share of the rows in memory.
        rounds: Runs of each kind; the one in the middle counts.
        skew: Ids are ``rows * u ** skew`` for a uniform ``u``.
        seed: Of the ids.
    """

    tables: Positive = 16
    rows: Positive = 200_000
    dim: Positive = 64
    batch: Positive = 512
    steps: Positive = 60
    dram_share: float = 0.05
    rounds: Positive = 3
    skew: float = 2.0
    seed: int = 0


class _Epoch:
    """The batches of a rank, which tell their order."""

    def __init__(self, options: LookaheadOptions, names: list[str], rank: int) -> None:
        self._options, self._names, self._rank = options, names, rank

    def __len__(self) -> int:
        return self._options.steps

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        options = self._options
        for step in range(options.steps):
            seed = (options.seed * options.steps + step) * RANKS + self._rank
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.rand(len(self._names) * options.batch, generator=generator)
            ids = (drawn**options.skew * options.rows).long()
            lengths = torch.ones(len(ids), dtype=torch.int64)
            yield tb.KeyedJaggedTensor(self._names, ids, lengths=lengths)

    def known_order(self) -> BatchOrder:
        """Returns the order."""
        name = f"{self._options} {self._rank}"
        return BatchOrder(name, lambda: self, 0, len(self))


def train_ahead(options: LookaheadOptions, way: str, folder: str) -> dict[str, float]:
    """Trains as one rank; returns seconds of the epochs, and what the store counted in the last.

    Args:
        options: What is trained.
        way: One of :data:`WAYS`.
        folder: Where stores are.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    names = [f"t{at}" for at in range(options.tables)]
    tables = [tb.EmbeddingBagConfig(options.rows, options.dim, name) for name in names]
    ways = {name: tbd.TableWise(at % count) for at, name in enumerate(names)}
    own_bytes = options.tables * options.rows * options.dim * 4 / count
    budget = int(own_bytes * options.dram_share) + FIXED_BYTES
    epoch = _Epoch(options, names, rank)
    given = {"dram_budget": budget, **WAYS[way].options}
    place = None if "backend" in given else Path(folder) / f"rank-{rank}"
    with tb.Store.open(place, **given) as store:
        rows = tbd.ShardedEmbeddingBagCollection(
            tables,
            store=store,
            plan=tbd.ShardingPlan(count, ways),
            optimizer=tb.RowWiseAdagrad(lr=0.05),
        )
        seconds, counts = [], []
        with rows:
            for _ in range(2):
                dist.barrier()
                started_s = time.perf_counter()
                for batch in tb.lookahead(epoch, rows, window=WAYS[way].window):
                    torch.autograd.backward(rows(batch).values().sum())
                dist.barrier()
                seconds.append(time.perf_counter() - started_s)
                counts.append(store.stats())
    first, last = (stats["store"] for stats in counts)
    moved = [
        last["io"][what] - first["io"][what] if "io" in last else 0
        for what in ("read_bytes", "write_bytes")
    ]
    return {
        "first_s": seconds[0],
        "second_s": seconds[1],
        "disk_bytes": float(sum(moved)),
        "waits": float(last.get("wait_count", 0) - first.get("wait_count", 0)),
        "order_is_forward": float(counts[1]["order"]["kind"] == "forward"),
    }


def run_lookahead(options: LookaheadOptions) -> list[dict[str, Any]]:
    """Runs all ways in turns; returns samples a second of each."""
    found: dict[str, list[list[dict[str, float]]]] = {way: [] for way in WAYS}
    with hosts(1) as made:
        for _ in range(options.rounds):
            for way in WAYS:
                with tempfile.TemporaryDirectory() as folder:
                    ranks = made.run(
                        train_ahead,
                        options,
                        way,
                        str(folder),
                        folder=Path(folder) / "ranks",
                        local_ranks=RANKS,
                        limit_s=600,
                    )
                found[way].append(ranks)
    samples = RANKS * options.batch * options.steps
    rows: list[dict[str, Any]] = []
    for way, runs in found.items():
        middle = median(max(rank["second_s"] for rank in ranks) for ranks in runs)
        rows.append(
            {
                "way": way,
                "dram_share": 1.0 if way == "in_memory" else options.dram_share,
                "samples_per_s": samples / middle,
                "first_epoch_s": median(max(rank["first_s"] for rank in ranks) for ranks in runs),
                "disk_bytes_per_sample": median(
                    sum(rank["disk_bytes"] for rank in ranks) / samples for ranks in runs
                ),
                "waits": median(sum(rank["waits"] for rank in ranks) for ranks in runs),
                "is_planned": all(rank["order_is_forward"] for ranks in runs for rank in ranks),
            }
        )
    for row in rows:
        row["vs_on_demand"] = row["samples_per_s"] / rows[0]["samples_per_s"]
    return rows
