"""Sharding plans: which rank holds which part of each table.

A plan names, per table, one of four ways. The planner balances what costs: bytes that a rank
must keep, and rows that it must look up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tierbed.config.tables import EmbeddingBagConfig
from tierbed.errors import InvalidError, UnsupportedError

if TYPE_CHECKING:
    from tierbed._native_options import ExchangePlan

__all__ = [
    "OPEN_ROWS_MAX",
    "ColumnWise",
    "Mirrored",
    "RowWise",
    "Sharding",
    "ShardingPlan",
    "TableWise",
]

# Tables up to this size are held by every rank: a lookup of them sends nothing.
MIRROR_BYTES = 64 << 10
# Most rows of a table of open vocabulary: their numbers travel in 4 bytes.
OPEN_ROWS_MAX = (1 << 32) - 1
# Rows of such a table that one rank holds before it is the next one's turn: whole pages.
OPEN_BLOCK_ROWS = 4096
# A table of more than this share of what a rank should hold is divided by rows.
SPLIT_SHARE = 0.75


@dataclass(frozen=True)
class TableWise:
    """One rank holds the whole table.

    Args:
        rank: The rank.
    """

    rank: int


@dataclass(frozen=True)
class RowWise:
    """Each rank holds a range of rows; rows travel one by one and are pooled where they arrive.

    Of a table of open vocabulary, which grows, ranks take turns in holding blocks of 4,096 rows.

    Args:
        bounds: First row of each rank, then the number of rows; by default equal ranges. None for
            a table of open vocabulary.
    """

    bounds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ColumnWise:
    """Each rank holds some columns of every row.

    Only for optimizers whose state is per element (SGD, Adagrad, Adam).

    Args:
        bounds: First column of each rank, then the dim; by default equal ranges.
    """

    bounds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Mirrored:
    """Every rank holds the whole table: for small ones. Lookups send nothing, updates all."""


Sharding = TableWise | RowWise | ColumnWise | Mirrored


@dataclass(frozen=True)
class ShardingPlan:
    """Who holds what; the same on every rank.

    Args:
        rank_count: Ranks.
        tables: Per table name how it is divided.
    """

    rank_count: int
    tables: Mapping[str, Sharding] = field(default_factory=dict)

    @classmethod
    def balanced(
        cls,
        tables: Sequence[EmbeddingBagConfig],
        rank_count: int,
        *,
        ids_per_sample: Mapping[str, float] | None = None,
        divides_rows: bool = True,
    ) -> ShardingPlan:
        """Plans so that ranks hold about as many bytes and look up about as many rows.

        Small tables are mirrored. Tables larger than what one rank should hold are divided by
        rows, and so are those of open vocabulary. The others go, the
        costliest first, to the rank with least so far.

        Args:
            tables: The tables.
            rank_count: Ranks.
            ids_per_sample: Mean ids per sample of each table, all its features together; by
                default one per feature.
            divides_rows: Whether tables may be divided by rows.
        """
        ids = {c.name: float(len(c.feature_names)) for c in tables} | dict(ids_per_sample or {})
        of_any_size = [c for c in tables if c.num_embeddings is None]
        tables = [c for c in tables if c.num_embeddings is not None]
        table_bytes = {c.name: 4 * row_count_max(c) * c.embedding_dim for c in tables}
        lookup_cost = {c.name: ids[c.name] * c.embedding_dim for c in tables}
        shared = [c for c in tables if table_bytes[c.name] > MIRROR_BYTES]
        fair_bytes = sum(table_bytes[c.name] for c in shared) / rank_count
        fair_lookups = sum(lookup_cost[c.name] for c in shared) / rank_count

        chosen: dict[str, Sharding] = {
            c.name: Mirrored() for c in tables if table_bytes[c.name] <= MIRROR_BYTES
        }
        chosen |= {c.name: RowWise() if rank_count > 1 else TableWise(0) for c in of_any_size}
        whole = []
        for config in shared:
            is_large = table_bytes[config.name] > SPLIT_SHARE * fair_bytes * rank_count
            if divides_rows and rank_count > 1 and is_large:
                chosen[config.name] = RowWise()
            else:
                whole.append(config.name)

        def cost(name: str) -> float:
            return table_bytes[name] / fair_bytes + lookup_cost[name] / max(fair_lookups, 1e-9)

        load = [0.0] * rank_count
        for name in sorted(whole, key=lambda name: (-cost(name), name)):
            rank = min(range(rank_count), key=lambda rank: (load[rank], rank))
            chosen[name] = TableWise(rank)
            load[rank] += cost(name)
        return cls(rank_count, chosen)

    def sharding(self, config: EmbeddingBagConfig) -> dict[str, Any]:
        """Returns how ``config`` is divided, as the engine reads it.

        Args:
            config: A table of the plan.

        Raises:
            InvalidError: The plan does not name the table.
        """
        if config.name not in self.tables:
            raise InvalidError(
                f"the sharding plan does not name table {config.name!r}; it has "
                f"{sorted(self.tables)}",
                {"table": config.name},
            )
        way = self.tables[config.name]
        if isinstance(way, TableWise):
            return {"kind": "whole", "rank": way.rank}
        if isinstance(way, (RowWise, ColumnWise)) and config.num_embeddings is None:
            return _open_sharding(config, way)
        if isinstance(way, RowWise):
            bounds = way.bounds or self._equal_ranges(row_count_max(config))
            return {"kind": "rows", "bounds": list(bounds)}
        if isinstance(way, ColumnWise):
            bounds = way.bounds or self._equal_ranges(config.embedding_dim)
            return {"kind": "columns", "bounds": list(bounds)}
        return {"kind": "mirrored"}

    def described(
        self, tables: Sequence[EmbeddingBagConfig], outputs: str = "f32", rows: str = "f32"
    ) -> ExchangePlan:
        """Returns the plan of ``tables`` as ``NativeExchangePlan`` takes it.

        Args:
            tables: The tables.
            outputs: What numbers of outputs and their gradients travel in.
            rows: What numbers of single rows travel in.
        """
        return {
            "ranks": self.rank_count,
            "tables": [
                {
                    "row_count": row_count_max(config),
                    "dim": config.embedding_dim,
                    "sharding": self.sharding(config),
                }
                for config in tables
            ],
            "features": [
                (at, config.pooling.value)
                for at, config in enumerate(tables)
                for _ in config.feature_names
            ],
            "outputs": outputs,
            "rows": rows,
        }

    def index_rank(self, config: EmbeddingBagConfig, number: int) -> int:
        """Returns the rank that keeps the index of a table of open vocabulary.

        Args:
            config: The table.
            number: Of those tables which one it is, from 0: ranks take turns.
        """
        way = self.tables[config.name]
        return way.rank if isinstance(way, TableWise) else number % self.rank_count

    def blocks_of(self, config: EmbeddingBagConfig, rank: int) -> tuple[int, int, int] | None:
        """Returns what ``rank`` holds of a table whose blocks ranks hold in turn.

        The number of its first block, ranks, and rows of a block; None for other tables.

        Args:
            config: The table.
            rank: The rank.
        """
        way = self.sharding(config)
        return (rank, self.rank_count, way["block_rows"]) if way["kind"] == "blocks" else None

    def _equal_ranges(self, end: int) -> tuple[int, ...]:
        return tuple(rank * end // self.rank_count for rank in range(self.rank_count + 1))


def in_blocks(rows: Tensor, blocks: tuple[int, int, int]) -> Tensor:
    """Returns which of ``rows`` ``[N]`` i64 are in the blocks of :meth:`ShardingPlan.blocks_of`."""
    first, ranks, block_rows = blocks
    return (rows // block_rows) % ranks == first


def row_count_max(config: EmbeddingBagConfig) -> int:
    """Returns the number of rows that a table has, or the most that it may have."""
    return OPEN_ROWS_MAX if config.num_embeddings is None else config.num_embeddings


def _open_sharding(config: EmbeddingBagConfig, way: RowWise | ColumnWise) -> dict[str, Any]:
    """Returns how a table that grows is divided."""
    if isinstance(way, ColumnWise):
        raise UnsupportedError(
            f"table {config.name!r} has an open vocabulary and is divided by columns; divide it by "
            "rows, or let one rank hold it: RowWise() or TableWise(rank)",
            {"table": config.name},
        )
    if way.bounds is not None:
        raise InvalidError(
            f"table {config.name!r} has an open vocabulary, so that its rows have no bounds; give "
            "RowWise()",
            {"table": config.name},
        )
    return {"kind": "blocks", "block_rows": OPEN_BLOCK_ROWS}
