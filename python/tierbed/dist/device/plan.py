"""Launches that serve a lookup, and where their vectors go.

A *group* is what one launch of a rank pools: its tables of one width and pooling, one behind the
other in one arena. Every rank makes the groups of all ranks, because gradients are put into the
matrices of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierbed.config.tables import EmbeddingBagConfig, PoolingType
from tierbed.dist.held import Held, held_tables
from tierbed.dist.sharding import ColumnWise, ShardingPlan

__all__ = ["DevicePlan", "Group"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tables of a rank that one launch looks up.

    Args:
        tables: What the rank holds of each.
        is_mean: Whether bags are divided by their number of ids.
        is_mirrored: Whether every rank holds them, for its own samples.
        row_bounds: Per table of row-wise ones, the first row of each rank, then the number of rows.
        features: Input features that read them, in the order of the input.
        table_of: Per feature, which of ``tables``.
        output_columns: Per feature, its first column in an output.
        grad_columns: Per feature, its first column in the rank's matrix of gradients.
    """

    tables: tuple[Held, ...]
    is_mean: bool
    is_mirrored: bool
    row_bounds: tuple[tuple[int, ...], ...]
    features: tuple[int, ...]
    table_of: tuple[int, ...]
    output_columns: tuple[int, ...]
    grad_columns: tuple[int, ...]

    @property
    def dim(self) -> int:
        """Columns that are held of each table."""
        return len(self.tables[0].columns)

    @property
    def is_row_wise(self) -> bool:
        """Whether each rank holds some of their rows, which are pooled where they arrive."""
        return len(self.row_bounds) > 0

    @property
    def is_pooled_for_all(self) -> bool:
        """Whether who holds them pools the bags of all ranks."""
        return not self.is_mirrored and not self.is_row_wise


class DevicePlan:
    """The groups of all ranks.

    Args:
        tables: All tables, in the order of their features.
        plan: Who holds what.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig], plan: ShardingPlan) -> None:
        # Whether a row's product with a gradient is nobody's alone.
        self.is_divided = any(
            isinstance(plan.tables.get(config.name), ColumnWise) for config in tables
        )
        features = [config for config in tables for _ in config.feature_names]
        self.row_counts = [config.num_embeddings or 0 for config in features]
        self.names = [name for config in tables for name in config.feature_names]
        columns = [0]
        for config in features:
            columns.append(columns[-1] + config.embedding_dim)
        self.output_dim = columns.pop()
        self._features = features
        self._columns = columns
        self.groups = [self._groups_of(tables, plan, rank) for rank in range(plan.rank_count)]
        # Columns of each rank's matrix of gradients.
        self.widths = [
            sum(group.dim * len(group.features) for group in groups) for groups in self.groups
        ]

    def _groups_of(
        self, tables: Sequence[EmbeddingBagConfig], plan: ShardingPlan, rank: int
    ) -> list[Group]:
        members: dict[tuple[int, bool, str], list[Held]] = {}
        for held in held_tables(tables, plan, rank):
            way = plan.sharding(held.config)["kind"]
            kind = way if way in ("mirrored", "rows") else "pooled"
            is_mean = held.config.pooling is PoolingType.MEAN
            members.setdefault((len(held.columns), is_mean, kind), []).append(held)
        groups, width = [], 0
        for (dim, is_mean, kind), held_here in members.items():
            place = {held.config.name: at for at, held in enumerate(held_here)}
            read = [at for at, config in enumerate(self._features) if config.name in place]
            table_of = [place[self._features[at].name] for at in read]
            firsts = [held_here[table].columns.start for table in table_of]
            groups.append(
                Group(
                    tables=tuple(held_here),
                    is_mean=is_mean,
                    is_mirrored=kind == "mirrored",
                    row_bounds=tuple(
                        tuple(plan.sharding(held.config)["bounds"])
                        for held in held_here
                        if kind == "rows"
                    ),
                    features=tuple(read),
                    table_of=tuple(table_of),
                    output_columns=tuple(
                        self._columns[at] + first for at, first in zip(read, firsts, strict=True)
                    ),
                    grad_columns=tuple(width + at * dim for at in range(len(read))),
                )
            )
            width += dim * len(read)
        return groups
