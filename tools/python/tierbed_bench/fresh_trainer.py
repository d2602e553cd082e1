"""A trainer whose rows are published, for ``tierbed bench fresh``."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch

from tierbed import (
    SGD,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    Store,
)
from tierbed.config.words import Positive, Range
from tierbed_bench.common import zipf_batches

__all__ = ["MIB", "PARTS", "STEP_IDS", "FreshOptions", "Row", "Spent", "Trainer", "cpu_s"]

Row = dict[str, Any]
PARTS = ("publish", "tracking", "pauses", "freshness")
# Rows that one step trains at most: the store looks them up together.
STEP_ROWS = 1 << 18
# Ids of a step of training.
STEP_IDS = 26 * 1024
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FreshOptions:
    """What is measured.

    Args:
        parts: publish, tracking, freshness, by comma.
        rows: Rows of the table.
        dim: Elements of a row.
        changed_share: Share of the rows that changes between two versions.
        skew: How uneven rows are drawn that change; 0 is evenly.
        location: Of freshness: where versions are pushed to, a folder or a bucket; by default a
            folder beside the store.
        poll: Of freshness: from one look of the server at the channel to the next.
        rounds: Of each part.
        dram_budget: Memory of the store, bytes.
        scratch: Folder for stores and versions, deleted again; by default the folder of results.
        quick: Few rows and rounds.
        seed: Of the ids that are trained.
    """

    parts: tuple[str, ...] = PARTS
    rows: Positive = 4_000_000
    dim: Positive = 32
    changed_share: Annotated[float, Range(0)] = 0.01
    skew: Annotated[float, Range(0)] = 1.05
    location: str = ""
    poll: str = "2s"
    rounds: Positive = 5
    dram_budget: Positive = 256 * MIB
    scratch: Path | None = None
    quick: bool = False
    seed: int = 1


class Trainer:
    """A store with one table, and steps that change rows of it."""

    def __init__(self, path: Path, options: FreshOptions) -> None:
        self.options, self.path = options, path
        self.open()
        self.draws = 0
        self.random = torch.Generator().manual_seed(options.seed)

    def open(self) -> None:
        """Opens the store, at its last checkpoint, with no row in memory."""
        options = self.options
        self.store = Store.open(self.path, dram_budget=options.dram_budget, seed=options.seed)
        table = EmbeddingBagConfig(
            name="item", num_embeddings=options.rows, embedding_dim=options.dim
        )
        self.tables = EmbeddingBagCollection([table], store=self.store, optimizer=SGD(lr=0.1))

    def train(self, ids: torch.Tensor) -> None:
        """Changes these rows, in as many steps as that takes."""
        for part in torch.split(ids, STEP_ROWS):
            lengths = torch.ones(len(part), dtype=torch.int32)
            self.step(KeyedJaggedTensor(["item"], part, lengths=lengths))

    def step(self, features: KeyedJaggedTensor) -> None:
        """Looks rows up and changes them."""
        self.tables(features).values().sum().backward()  # type: ignore[no-untyped-call]

    def round(self, batches: Sequence[KeyedJaggedTensor]) -> None:
        """Trains some batches, and makes what they changed last."""
        for batch in batches:
            self.step(batch)
        self.store.checkpoint("bench")

    def train_all(self) -> None:
        """Writes every row."""
        self.train(torch.arange(self.options.rows))

    def train_share(self) -> int:
        """Changes a share of the rows; returns how many."""
        options = self.options
        count = max(1, int(options.rows * options.changed_share))
        ids = torch.empty(0, dtype=torch.int64)
        while len(ids) < count:
            self.draws += 1
            [drawn] = zipf_batches(
                {"item": options.rows},
                2 * count,
                1,
                seed=options.seed + 1_000 * self.draws,
                skew=options.skew,
            )
            ids = torch.unique(torch.cat([ids, drawn.values()]))
        order = torch.randperm(len(ids), generator=self.random)[:count]
        self.train(ids[order].sort().values)
        return count


@dataclass
class Spent:
    """What a call took: seconds, and processor seconds of this process."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def call(self, work: Callable[[], Any]) -> Any:
        """Does the work, and returns what it returns."""
        begun_s, begun_cpu_s = time.perf_counter(), cpu_s()
        result = work()
        self.seconds.append(time.perf_counter() - begun_s)
        self.cpu_s.append(cpu_s() - begun_cpu_s)
        return result


def cpu_s() -> float:
    """Processor seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
