"""Sharding plans: which rank holds which part of each table.

A plan names, per table, one of four ways. The planner balances what costs: bytes that a rank
must keep, and rows that it must look up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierbed.config.tables import EmbeddingBagConfig
from tierbed.errors import InvalidError

if TYPE_CHECKING:
    from tierbed._native_options import ExchangePlan

__all__ = ["ColumnWise", "Mirrored", "RowWise", "Sharding", "ShardingPlan", "TableWise"]

# Tables up to this size are held by every rank: a lookup of them sends nothing.
MIRROR_BYTES = 64 << 10
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

    Args:
        bounds: First row of each rank, then the number of rows; by default equal ranges.
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
    ) -> ShardingPlan:
        """Plans so that ranks hold about as many bytes and look up about as many rows.

        Small tables are mirrored, tables larger than what one rank should hold are divided by
        rows; the others go, the costliest first, to the rank with least so far.

        Args:
            tables: The tables.
            rank_count: Ranks.
            ids_per_sample: Mean ids per sample of each table, all its features together; by
                default one per feature.
        """
        ids = {c.name: float(len(c.feature_names)) for c in tables} | dict(ids_per_sample or {})
        table_bytes = {c.name: 4 * _row_count(c) * c.embedding_dim for c in tables}
        lookup_cost = {c.name: ids[c.name] * c.embedding_dim for c in tables}
        shared = [c for c in tables if table_bytes[c.name] > MIRROR_BYTES]
        fair_bytes = sum(table_bytes[c.name] for c in shared) / rank_count
        fair_lookups = sum(lookup_cost[c.name] for c in shared) / rank_count

        chosen: dict[str, Sharding] = {
            c.name: Mirrored() for c in tables if table_bytes[c.name] <= MIRROR_BYTES
        }
        whole = []
        for config in shared:
            if rank_count > 1 and table_bytes[config.name] > SPLIT_SHARE * fair_bytes * rank_count:
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
        if isinstance(way, RowWise):
            bounds = way.bounds or self._equal_ranges(_row_count(config))
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
                    "row_count": _row_count(config),
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

    def _equal_ranges(self, end: int) -> tuple[int, ...]:
        return tuple(rank * end // self.rank_count for rank in range(self.rank_count + 1))


def _row_count(config: EmbeddingBagConfig) -> int:
    if config.num_embeddings is None:
        raise InvalidError(
            f"table {config.name!r} has an open vocabulary; ranks exchange dense ids, so give "
            "num_embeddings",
            {"table": config.name},
        )
    return config.num_embeddings
