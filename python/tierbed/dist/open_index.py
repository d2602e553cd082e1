"""Messages between the ranks and the indexes of open vocabularies.

```text
each rank      distinct ids of its samples  ->  the rank of the index
rank of index  ids of all ranks -> rows     ->  each rank rows of its ids, and how many there are
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tierbed._native import NativeIndex, NativeStore, distinct
from tierbed._util.minutes import minutes_now
from tierbed.config.tables import EmbeddingBagConfig
from tierbed.dist.nodes import Nodes
from tierbed.dist.sharding import OPEN_ROWS_MAX, ShardingPlan, in_blocks
from tierbed.dist.wire import Wire, swap_numbers
from tierbed.errors import UnsupportedError

__all__ = ["Asked", "IndexMessages", "OpenTable", "RankBatch", "open_tables_of", "range_of"]

# Ids [E], offsets [F*B+1] and weights [E] of a rank's samples.
RankBatch = tuple[Tensor, Tensor, Tensor | None]
# What each rank tells each other one, before numbers of ids: whether it trains, and which of the
# announced batches it looks up.
_WORDS = 2


@dataclass(frozen=True, kw_only=True)
class OpenTable:
    """A table of open vocabulary, as one rank knows it.

    Args:
        config: The table.
        features: Numbers of its features among those of the batch.
        index_rank: The rank that keeps its index.
        table: What the store of this rank calls it; None where it holds nothing of it.
        index: Its rows and its index in that store.
        blocks: Where ranks take turns in holding blocks of rows: the first one that this rank
            holds, ranks, and rows of a block.
    """

    config: EmbeddingBagConfig
    features: range
    index_rank: int
    table: int | None = None
    index: NativeIndex | None = None
    blocks: tuple[int, int, int] | None = None

    def only_held(self, rows: Tensor) -> Tensor:
        """Returns those of ``rows`` ``[N]`` i64 that this rank holds."""
        return rows if self.blocks is None else rows[in_blocks(rows, self.blocks)]


def open_tables_of(
    configs: Sequence[EmbeddingBagConfig],
    plan: ShardingPlan,
    rank: int,
    native: NativeStore,
    held: Mapping[str, int],
) -> list[OpenTable]:
    """Returns the tables of open vocabulary.

    Args:
        configs: All tables.
        plan: Who holds what.
        rank: This rank.
        native: Its store.
        held: What this rank holds: names of tables, and what its store calls them.
    """
    found: list[OpenTable] = []
    first = 0
    for config in configs:
        features = range(first, first + len(config.feature_names))
        first = features.stop
        if config.num_embeddings is not None:
            continue
        table = held.get(config.name)
        found.append(
            OpenTable(
                config=config,
                features=features,
                index_rank=plan.index_rank(config, len(found)),
                table=table,
                index=None if table is None else NativeIndex(native, table),
                blocks=plan.blocks_of(config, rank),
            )
        )
    return found


@dataclass(kw_only=True)
class Asked:
    """What a rank asks of the indexes, for one batch."""

    # Per table: distinct ids in the order of their first use, and the number of each id.
    ids: list[Tensor] = field(default_factory=list)
    numbers: list[Tensor] = field(default_factory=list)
    # Positions of the first id of the table, and behind the last.
    ranges: list[tuple[int, int]] = field(default_factory=list)
    # New ids by feature.
    counts: list[list[int]] = field(default_factory=list)


class IndexMessages:
    """What one rank says to all others about the ids of open vocabularies.

    All ranks make the same calls in the same order.

    Args:
        native: The store of this rank.
        tables: The tables.
        ranks: All ranks, each as a node of its own.
        wire: To the other ranks.
    """

    def __init__(
        self, native: NativeStore, tables: Sequence[OpenTable], ranks: Nodes, wire: Wire
    ) -> None:
        self._native = native
        self._tables = list(tables)
        self._ranks = ranks
        self._wire = wire
        self.sent_bytes = 0
        # Rows for which there is room, of tables whose index another rank keeps.
        self._rooms: dict[str, int] = {
            one["name"]: one["row_count"] for one in native.schema()["tables"]
        }

    def ask(self, batch: RankBatch, feature_count: int) -> Asked:
        """Lists the distinct ids of each table."""
        ids, offsets, _ = batch
        samples = (offsets.numel() - 1) // feature_count
        asked = Asked()
        for table in self._tables:
            start, end = range_of(table, offsets, feature_count)
            ends = [int(offsets[(at + 1) * samples]) - start for at in table.features]
            found, numbers = torch.empty(end - start, dtype=torch.int64), ids[start:end].clone()
            counts = distinct(ids[start:end], ends, found, numbers)
            asked.ids.append(found[: sum(counts)])
            asked.numbers.append(numbers)
            asked.ranges.append((start, end))
            asked.counts.append(counts)
        return asked

    def swap_numbers(self, asked: Asked, words: tuple[int, int]) -> Tensor:
        """Tells each rank how many ids are asked of it, feature by feature, behind ``words``."""
        numbers = torch.zeros(
            (self._ranks.count, _WORDS + sum(map(len, asked.counts))), dtype=torch.int64
        )
        numbers[:, :_WORDS] = torch.tensor(words)
        at = _WORDS
        for table, counts in zip(self._tables, asked.counts, strict=True):
            numbers[table.index_rank, at : at + len(counts)] = torch.tensor(counts)
            at += len(counts)
        self.sent_bytes += 8 * numbers.shape[1] * (self._ranks.count - 1)
        return swap_numbers(self._wire, self._ranks, numbers)

    def swap_ids(self, asked: Asked, told: Tensor) -> list[Tensor]:
        """Returns, by rank, the ids ``[N]`` i64 that are asked of this one, table by table."""
        own, none = self._ranks.rank, torch.empty(0, dtype=torch.int64)
        to = [none] * self._ranks.count
        for table, ids in zip(self._tables, asked.ids, strict=True):
            to[table.index_rank] = torch.cat([to[table.index_rank], ids])
        kept, to[own] = to[own], none
        come = (8 * told[:, _WORDS:].sum(1)).tolist()
        come[own] = 0
        came = [ids.view(torch.int64) for ids in self._swap(to, come)]
        came[own] = kept
        return came

    def answers(self, told: Tensor, ids: list[Tensor], *, trains: bool) -> list[Tensor]:
        """Returns what each rank is told: rows of each table indexed here, then those of its ids.

        Args:
            told: ``[R, 2 + F]`` i64, numbers of ids by rank and feature.
            ids: By rank, table by table and feature by feature.
            trains: Whether new ids get rows.
        """
        parts = [
            iter(torch.split(of_rank, counts))
            for of_rank, counts in zip(ids, told[:, _WORDS:].tolist(), strict=True)
        ]
        indexed: list[str] = []
        rows: list[list[Tensor]] = [[] for _ in ids]
        for table in self._tables:
            of_table = [[next(part) for part in parts] for _ in table.features]
            if table.index_rank != self._ranks.rank:
                continue
            # As in one process: feature by feature, samples of rank 0 first.
            found = torch.cat([one for of_feature in of_table for one in of_feature])
            lengths = [one.numel() for of_feature in of_table for one in of_feature]
            assert table.table is not None, "the rank of the index has the table"
            self._native.translate_ids(table.table, found, minutes_now() if trains else None)
            indexed.append(table.config.name)
            for at, of_rank in enumerate(torch.split(found, lengths)):
                rows[at % len(ids)].append(of_rank)
        head = self._rows_given(indexed)
        return [torch.cat([head, *one]) for one in rows]

    def _rows_given(self, tables: Sequence[str]) -> Tensor:
        """Returns how many rows each of ``tables`` ever gave, ``[tables]`` i64."""
        if not tables:
            return torch.empty(0, dtype=torch.int64)
        given = {one["table"]: one["next_row"] for one in self._native.vocabularies()["tables"]}
        for table in tables:
            if given[table] > OPEN_ROWS_MAX:
                raise UnsupportedError(
                    f"table {table!r} has {given[table]} rows, more than the {OPEN_ROWS_MAX} that "
                    "a table of open vocabulary has over ranks",
                    {"table": table},
                )
        return torch.tensor([given[table] for table in tables])

    def swap_rows(self, asked: Asked, told: Tensor, answers: list[Tensor]) -> list[Tensor]:
        """Returns, by table, the rows ``[N]`` i64 of the ids that were asked for."""
        own, count = self._ranks.rank, self._ranks.count
        come = [0] * count
        for table, ids in zip(self._tables, asked.ids, strict=True):
            come[table.index_rank] += 4 * (1 + ids.numel())
        come[own] = 0
        # Rows fit 32 bits.
        narrow = [rows.to(torch.int32) for rows in answers]
        narrow[own] = narrow[own][:0]
        came = [
            one.view(torch.int32).to(torch.int64) & 0xFFFFFFFF for one in self._swap(narrow, come)
        ]
        came[own] = answers[own]
        tables_at = [0] * count
        for table in self._tables:
            tables_at[table.index_rank] += 1
        heads = [iter(one[:tables].tolist()) for one, tables in zip(came, tables_at, strict=True)]
        starts = list(tables_at)
        found = []
        for table, ids in zip(self._tables, asked.ids, strict=True):
            self._make_room(table, next(heads[table.index_rank]))
            start = starts[table.index_rank]
            starts[table.index_rank] = end = start + ids.numel()
            found.append(came[table.index_rank][start:end])
        return found

    def _make_room(self, table: OpenTable, row_count: int) -> None:
        """Lets the table have ``row_count`` rows, where this rank holds some of them."""
        if table.index is None or table.index_rank == self._ranks.rank:
            return
        if row_count > self._rooms[table.config.name]:
            table.index.grow(row_count)
            schema = self._native.schema()["tables"]
            room = next(one["row_count"] for one in schema if one["name"] == table.config.name)
            self._rooms[table.config.name] = room

    def _swap(self, to: Sequence[Tensor], come_bytes: Sequence[int]) -> list[Tensor]:
        """Sends each rank numbers; returns those that came, by rank, as bytes."""
        sent = [numbers.contiguous().view(-1).view(torch.uint8) for numbers in to]
        lengths = [one.numel() for one in sent]
        self.sent_bytes += sum(lengths)
        came = self._wire.swap(torch.cat(sent), lengths, come_bytes)
        return list(torch.split(came, list(come_bytes)))

    def evict(self, table: OpenTable, now: int) -> tuple[int, int]:
        """Takes the rows of ids of one table; returns ids with a row, and without."""
        own, rank = self._ranks.rank, table.index_rank
        counts, freed = torch.zeros(3, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        if own == rank:
            ids, waiting, raw = _index_of(table).evict(now, table.blocks)
            freed = torch.frombuffer(raw, dtype=torch.int64) if raw else freed
            counts = torch.tensor([ids, waiting, freed.numel()])
        told = swap_numbers(self._wire, self._ranks, counts.expand(self._ranks.count, 3))[rank]
        nothing = [0] * self._ranks.count
        if own == rank:
            self._swap(
                [freed if other != own else freed[:0] for other in self._ranks.rail], nothing
            )
        else:
            come = [8 * int(told[2]) if other == rank else 0 for other in self._ranks.rail]
            (freed,) = self._swap([freed] * self._ranks.count, come)[rank : rank + 1]
            if table.index is not None:
                table.index.reset(table.only_held(freed.view(torch.int64)))
        return int(told[0]), int(told[1])


def _index_of(table: OpenTable) -> NativeIndex:
    assert table.index is not None, "the rank of the index has the table"
    return table.index


def range_of(table: OpenTable, offsets: Tensor, feature_count: int) -> tuple[int, int]:
    """Returns the position of the table's first id in the batch, and the one behind its last."""
    samples = (offsets.numel() - 1) // feature_count
    first, end = table.features.start * samples, table.features.stop * samples
    return int(offsets[first]), int(offsets[end])
