"""Shards by placement: rows that are asked for together live on one host.

:func:`divide_rows` makes :class:`RowShards` of a query log; a publish divides tables by them.
:meth:`RowShards.reads` counts the shards that other queries would need.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from tierbed._native import NativeRowShards
from tierbed.config.words import Positive, Range
from tierbed.placement.build import QueryLog

__all__ = ["RowShards", "ShardOptions", "ShardReads", "divide_rows"]

Path = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How rows are divided.

    Args:
        shards: How many shards.
        tolerance: By how much a shard may have more rows, and more load, than the mean.
        iterations: Exchanges per split of the bisection.
        seed: Equal seeds divide equally.
        threads: They change the time, never the shards.
    """

    shards: Positive = 8
    tolerance: Annotated[float, Range(0.0, 10.0)] = 0.05
    iterations: Positive = 16
    seed: int = 1
    threads: Positive = 1


@dataclass(frozen=True, kw_only=True)
class ShardReads:
    """What some queries ask of shards.

    Attributes:
        query_count: Queries with a row at least.
        shard_sum: Shards that these queries need, summed.
        queries: By shard: queries that need it.
        rows: By shard: rows asked of it.
    """

    query_count: int
    shard_sum: int
    queries: list[int]
    rows: list[int]

    @property
    def shards_per_query(self) -> float:
        """Shards that a query needs on average; 0 without queries."""
        return self.shard_sum / max(1, self.query_count)

    @property
    def rows_imbalance(self) -> float:
        """Rows asked of the busiest shard by the mean; 1 is even, 0 without rows."""
        return _imbalance(self.rows)

    @property
    def queries_imbalance(self) -> float:
        """Queries that need the busiest shard by the mean; 1 is even, 0 without queries."""
        return _imbalance(self.queries)


def _imbalance(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts) if sum(counts) else 0.0


class RowShards:
    """The shard of each row of a table, or of the tables of a placement.

    Args:
        native: Those of the native module; use :func:`divide_rows` or :meth:`read`.

    Examples:
        >>> queries = (torch.tensor([1, 2, 3, 4, 1, 2, 3, 4]), torch.tensor([0, 2, 4, 6, 8]))
        >>> log = tb.QueryLog.from_batches(10, [queries])
        >>> shards = tb.placement.divide_rows(log, tb.placement.ShardOptions(shards=2))
        >>> shards.reads(log).shards_per_query
        1.0
    """

    def __init__(self, native: NativeRowShards) -> None:
        self.native = native

    @classmethod
    def by_hash(cls, shards: int, row_count: int) -> RowShards:
        """Divides rows as a publish by hash does.

        Args:
            shards: How many shards.
            row_count: Rows of the table.
        """
        return cls(NativeRowShards.by_hash(shards, row_count))

    @classmethod
    def by_rows(cls, shards: int, row_count: int) -> RowShards:
        """Divides rows into ranges of equal size.

        Args:
            shards: How many shards.
            row_count: Rows of the table.
        """
        return cls(NativeRowShards.by_rows(shards, row_count))

    @classmethod
    def read(cls, placement: Path) -> RowShards:
        """Reads the shards that lie beside a placement.

        Args:
            placement: The file of the placement.

        Raises:
            InvalidError: It has none.
            CorruptionError: The file is damaged.
        """
        return cls(NativeRowShards.read(os.fspath(placement)))

    def write(self, placement: Path) -> None:
        """Writes the shards beside a placement, as its name with ``.shards`` for an ending.

        Args:
            placement: The file of the placement.
        """
        self.native.write(os.fspath(placement))

    @property
    def shard_count(self) -> int:
        """How many shards there are."""
        return self.native.shard_count

    @property
    def row_count(self) -> int:
        """Rows that are divided."""
        return self.native.row_count

    def shards(self) -> Tensor:
        """The shard of each row, ``[row_count]`` int64."""
        words = bytearray(self.native.shards())
        if not words:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(words, dtype=torch.int16).to(torch.int64)

    def row_counts(self) -> list[int]:
        """Rows of each shard."""
        counts: list[int] = torch.bincount(self.shards(), minlength=self.shard_count).tolist()
        return counts

    def reads(self, log: QueryLog) -> ShardReads:
        """Counts what the queries of ``log`` ask of each shard.

        Args:
            log: Queries of the same rows.

        Raises:
            InvalidError: The log is of other rows.
        """
        return ShardReads(**self.native.reads(log.native))


def divide_rows(log: QueryLog, options: ShardOptions | None = None) -> RowShards:
    """Divides the rows of ``log``: those asked for together go to one shard.

    The rows are bisected as for pages, into as many parts as there are shards. Then rows move until
    no shard has more rows, or more load, than is tolerated. Load is rows asked for. Rows that no
    query names fill up what is missing.

    Args:
        log: Queries; its rows are all rows of the table.
        options: How they are divided.

    Raises:
        InvalidError: An option is out of range.
    """
    return RowShards(NativeRowShards.divide(log.native, options or ShardOptions()))
