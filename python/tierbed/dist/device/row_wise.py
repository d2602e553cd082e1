"""Rows of tables that are divided by rows: sent one by one, pooled where they arrive.

Partial sums would not have the bits of one process. So who holds a row writes it where the rank
that asked reads it, in the order of holders, and that rank adds rows in the order of its ids. Who
steps a row needs the gradients of all bags: ranks put them into the matrices of all holders.

One kernel does both: a row is a bag of one id for the one who sends it, and a row of a table for
the one who pools.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tierbed.dist.device.group_rows import WORDS_PER_STORE, GroupRows
from tierbed.dist.device.heap import DeviceHeap
from tierbed.dist.device.plan import Group
from tierbed.dist.device.store import Arena
from tierbed.dist.joined import JoinedBags, RankBatch, join_batches
from tierbed.dist.kernels.pool_to_ranks import pool_to_ranks

__all__ = ["AskedRows", "RowInbox", "RowWiseRows", "holders_of", "rows_of"]

WORD_BYTES = 4


@dataclass(frozen=True)
class AskedRows:
    """What all ranks ask of a group in one step.

    Args:
        launch: The rows of the group.
        bags: Of all ranks, with the ids that this rank holds, counted from its first row.
        is_held: ``[E]`` bool, which of the joined ids those are.
        sent: ``[N]`` i64, rows of the arena that this rank sends, those for rank 0 first.
        counts: How many rows each rank gets of each holder.
        own: The ids of this rank; in place of each, which of the rows that come is its.
    """

    launch: RowWiseRows
    bags: JoinedBags
    is_held: Tensor
    sent: Tensor
    counts: list[list[int]]
    own: JoinedBags

    def sends(self, rank: int) -> list[int]:
        """Returns how many rows ``rank`` sends to each rank."""
        return [of_rank[rank] for of_rank in self.counts]


class RowWiseRows(GroupRows[Group]):
    """The rows of a group of row-wise tables.

    Args:
        group: Its tables and features.
        arena: Where the rows are that this rank holds.
        output_dim: Columns of an output.
        rank: This rank.
    """

    def __init__(self, group: Group, arena: Arena, output_dim: int, rank: int) -> None:
        super().__init__(group, arena, output_dim)
        self._rank = rank
        device = arena.weights.device
        starts = [group.row_bounds[table][rank] for table in group.table_of]
        self._starts = torch.tensor(starts, device=device)
        self._none = torch.zeros(len(group.features), dtype=torch.int64, device=device)

    def ask(self, batches: Sequence[RankBatch], joined: JoinedBags) -> AskedRows:
        """Finds who holds what the ranks ask for.

        Args:
            batches: Of all ranks.
            joined: The features of the group, of all ranks.
        """
        group, rank, count = self.group, self._rank, len(batches)
        lengths = torch.diff(joined.offsets)
        bag = torch.repeat_interleave(lengths, output_size=joined.indices.numel())
        samples = max(1, sum(joined.samples))
        feature, sample = bag // samples, bag % samples
        ends = torch.tensor(joined.samples, device=bag.device).cumsum(0)
        asker = torch.searchsorted(ends, sample, right=True)
        holder = holders_of(group, joined)
        pairs = torch.bincount(asker * count + holder, minlength=count * count)
        is_held = holder == rank
        rows = (joined.indices - self._starts[feature])[is_held]
        order = torch.argsort(asker[is_held], stable=True)
        held = torch.bincount(bag[is_held], minlength=lengths.numel())
        bags = JoinedBags(
            joined.samples,
            rows,
            torch.cat([held.new_zeros(1), held.cumsum(0)]),
            None if joined.weights is None else joined.weights[is_held],
            whole_lengths=lengths,
        )
        own = join_batches([batches[rank]], group.features)
        arrival = torch.empty_like(own.indices)
        by_holder = torch.argsort(holders_of(group, own), stable=True)
        arrival[by_holder] = torch.arange(arrival.numel(), device=arrival.device)
        return AskedRows(
            self,
            bags,
            is_held,
            (self._first_rows[feature[is_held]] + rows)[order],
            pairs.view(count, count).tolist(),
            JoinedBags(own.samples, arrival, own.offsets, own.weights),
        )

    def _compile_pool(self, bags: JoinedBags, outputs: Tensor) -> None:
        ranks, device = outputs.numel(), outputs.device
        own = dataclasses.replace(bags, samples=[1], offsets=bags.offsets[: len(self._none) + 1])
        each = [[1] * ranks for _ in range(ranks)]
        sent = torch.zeros(ranks, dtype=torch.int64, device=device)
        asked = AskedRows(self, bags, sent.bool(), sent, each, own)
        # Rows come behind those of other groups, so that they may lie anywhere.
        came = torch.zeros(4 * self.group.dim + 1, device=device)
        for first in (0, 1):
            self.send(asked, outputs, is_aligned=first == 0)
            self.pool_arrived(asked, came[first:][: self.group.dim].view(1, -1), outputs[:1])

    def send(self, asked: AskedRows, places: Tensor, *, is_aligned: bool) -> None:
        """Writes rows to who asked for them.

        Args:
            asked: The rows.
            places: ``[ranks]`` i64, the address of the first row that each rank gets.
            is_aligned: Whether those are multiples of 16.
        """
        device = places.device
        bounds = [0, *itertools.accumulate(asked.sends(self._rank))]
        each = torch.arange(bounds[-1] + 1, device=device)
        pool_to_ranks(
            self.arena.weights,
            self._none[:1],
            (asked.sent, each, None),
            places,
            torch.tensor(bounds, device=device),
            self._none[:1],
            self.group.dim,
            is_aligned=is_aligned and self.group.dim % WORDS_PER_STORE == 0,
        )

    def pool_arrived(self, asked: AskedRows, rows: Tensor, output: Tensor) -> None:
        """Pools the rows of this rank's ids into its own output.

        Args:
            asked: What it asked for.
            rows: ``[N, dim]`` f32, those that came, of holder 0 first.
            output: ``[1]`` i64, its address.
        """
        bags = asked.own
        pool_to_ranks(
            rows,
            self._none,
            (bags.indices, bags.offsets, bags.weights),
            output,
            torch.tensor([0, *bags.samples], device=output.device),
            self._output_columns,
            self._stride,
            is_mean=self.group.is_mean,
            is_aligned=self._is_aligned,
        )


class RowInbox:
    """Memory of all ranks that rows of row-wise tables arrive in.

    Args:
        heap: Where it lies; all ranks make this together.
        indices_max: Most ids of a rank's batch.
        dims: Columns of each group of row-wise tables.
    """

    def __init__(self, heap: DeviceHeap, indices_max: int, dims: Sequence[int]) -> None:
        self._rank = heap.rank
        self._rows = heap.alloc((indices_max * max(dims),), torch.float32)
        self._is_aligned = all(dim % WORDS_PER_STORE == 0 for dim in dims)

    def send(self, asked: Sequence[AskedRows], turn: int) -> None:
        """Writes the rows of all groups to the ranks that asked; the signal is the caller's."""
        begins = [0] * len(asked[0].counts)
        for of_group in asked:
            dim = of_group.launch.group.dim
            # Behind the rows of earlier groups, and those of earlier holders.
            words = [
                begin + dim * sum(counts[: self._rank])
                for begin, counts in zip(begins, of_group.counts, strict=True)
            ]
            begins = [
                begin + dim * sum(counts)
                for begin, counts in zip(begins, of_group.counts, strict=True)
            ]
            pointers = self._rows.peer_ptrs(turn)
            places = pointers + WORD_BYTES * torch.tensor(words, device=pointers.device)
            of_group.launch.send(of_group, places, is_aligned=self._is_aligned)

    def pool(self, asked: Sequence[AskedRows], turn: int, output: Tensor) -> None:
        """Pools what came of all groups; all ranks have signalled."""
        words = self._rows.local(turn)
        for of_group in asked:
            dim, count = of_group.launch.group.dim, sum(of_group.counts[self._rank])
            of_group.launch.pool_arrived(of_group, words[: dim * count].view(count, dim), output)
            words = words[dim * count :]


def rows_of(group: Group, arena: Arena, output_dim: int, rank: int) -> GroupRows[Group]:
    """Returns the rows of any group, as the kernels take them.

    Args:
        group: Its tables and features.
        arena: Where its rows are.
        output_dim: Columns of an output.
        rank: This rank.
    """
    if group.is_row_wise:
        return RowWiseRows(group, arena, output_dim, rank)
    return GroupRows(group, arena, output_dim)


def holders_of(group: Group, bags: JoinedBags) -> Tensor:
    """Returns ``[E]`` i64, who holds the row of each id of ``bags``.

    Args:
        group: A group of row-wise tables.
        bags: Its features, of any ranks.
    """
    ids = bags.indices
    ends = [group.row_bounds[table][1:] for table in group.table_of]
    lengths = torch.diff(bags.offsets).view(len(group.features), -1).sum(dim=1)
    feature = torch.repeat_interleave(lengths, output_size=ids.numel())
    ends_of = torch.tensor(ends, device=ids.device)[feature]
    return (ids.view(-1, 1) >= ends_of).sum(dim=1)
