"""Pooling and steps of the rows of one group, one launch each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tierbed.dist.device.store import Arena
from tierbed.dist.joined import JoinedBags, RankBatch, join_batches
from tierbed.dist.kernels.pool_to_ranks import pool_to_ranks
from tierbed.dist.kernels.step_rows import StepNumbers, step_rows
from tierbed.dist.kernels.uses import leave_out, sort_uses
from tierbed.dist.kernels.weight_grads import weight_grads

__all__ = ["WORDS_PER_STORE", "GroupRows", "Grouped"]

# Numbers that a store of 128 bits writes.
WORDS_PER_STORE = 4


class Grouped(Protocol):
    """What one launch looks up: features of tables of one width and pooling."""

    @property
    def dim(self) -> int:
        """Columns of a row."""

    @property
    def is_mean(self) -> bool:
        """Whether bags are divided by their number of ids."""

    @property
    def is_mirrored(self) -> bool:
        """Whether every rank looks up its own samples."""

    @property
    def features(self) -> Sequence[int]:
        """Input features, in the order of the input."""

    @property
    def table_of(self) -> Sequence[int]:
        """Per feature, which table of the arena."""

    @property
    def output_columns(self) -> Sequence[int]:
        """Per feature, its first column in an output."""

    @property
    def grad_columns(self) -> Sequence[int]:
        """Per feature, its first column in the matrix of gradients."""


G = TypeVar("G", bound=Grouped)


class GroupRows(Generic[G]):
    """The rows of one group, as the kernels take them.

    Args:
        group: Its tables and features.
        arena: Where they are.
        output_dim: Columns of an output.
    """

    def __init__(self, group: G, arena: Arena, output_dim: int) -> None:
        device = arena.weights.device
        self.group = group
        self.arena = arena
        firsts = [arena.first_rows[table] for table in group.table_of]
        self._first_rows = torch.tensor(firsts, device=device)
        self._output_columns = torch.tensor(group.output_columns, device=device)
        self._grad_columns = torch.tensor(group.grad_columns, device=device)
        self._stride = output_dim
        columns = (group.dim, output_dim, *group.output_columns)
        self._is_aligned = all(column % WORDS_PER_STORE == 0 for column in columns)

    def pool(self, bags: JoinedBags, outputs: Tensor, first_samples: Tensor) -> None:
        """Pools ``bags`` into ``outputs``, addresses of one for each rank."""
        pool_to_ranks(
            self.arena.weights,
            self._first_rows,
            (bags.indices, bags.offsets, bags.weights),
            outputs,
            first_samples,
            self._output_columns,
            self._stride,
            is_mean=self.group.is_mean,
            is_aligned=self._is_aligned,
            is_single=bags.is_single,
        )

    def pool_own(self, batch: RankBatch, outputs: Tensor, rank: int) -> None:
        """Pools this rank's samples into its own output."""
        bags = join_batches([batch], self.group.features)
        bounds = torch.tensor([0, batch.samples], device=outputs.device)
        self.pool(bags, outputs[rank : rank + 1], bounds)

    def compile(self, outputs: Tensor, grads: Tensor, width: int, *, is_weighted: bool) -> None:
        """Calls everything that a step of ranks does, with one id, to compile its kernels.

        Called within :func:`tierbed.dist.kernels.launch.compiling`: nothing is written.
        """
        device, ranks = outputs.device, outputs.numel()
        features, samples = len(self.group.features), ranks
        indices = torch.zeros(1, dtype=torch.int64, device=device)
        offsets = torch.ones(features * samples + 1, dtype=torch.int64, device=device)
        offsets[0] = 0
        weights = torch.ones(1, device=device) if is_weighted else None
        bags = JoinedBags([1] * ranks, indices, offsets, weights)
        self._compile_pool(bags, outputs)
        self.step(bags, grads, width, indices if is_weighted else None)

    def _compile_pool(self, bags: JoinedBags, outputs: Tensor) -> None:
        told = outputs[:1] if self.group.is_mirrored else outputs
        for is_single in (False, True):
            of_ranks = dataclasses.replace(bags, is_single=is_single)
            self.pool(of_ranks, told, torch.arange(told.numel() + 1, device=outputs.device))

    def step(
        self,
        bags: JoinedBags,
        grads: Tensor,
        width: int,
        places: Tensor | None,
        is_allowed: Tensor | None = None,
    ) -> Tensor | None:
        """Steps the rows of ``bags``; ``grads`` is this rank's matrix, ``width`` columns.

        Before, it writes the gradients of weights to ``places``, where there are some.

        Args:
            bags: Ids within the tables.
            grads: ``[B, width]`` f32.
            width: Columns of ``grads``.
            places: ``[E]`` i64, addresses of gradients of weights, or None.
            is_allowed: ``[1]`` bool; where it is false no row is stepped. None: all are.

        Returns:
            ``[1]`` on the device, the number of the last row that is stepped, from 0; -1 where
            none is. None without an id.
        """
        arena, count = self.arena, bags.indices.numel()
        if count == 0:
            return None
        lengths = torch.diff(bags.offsets)
        samples = lengths.numel() // len(self.group.features)
        bag = torch.repeat_interleave(lengths, output_size=count)
        feature, sample = bag // samples, bag % samples
        optimizer = arena.optimizer
        rows = self._first_rows[feature] + bags.indices
        grads_at = sample * width + self._grad_columns[feature]
        whole = lengths if bags.whole_lengths is None else bags.whole_lengths
        counts = whole[bag].to(torch.float32) if self.group.is_mean else None
        if places is not None:
            weight_grads(arena.weights, rows, grads_at, counts, grads, places)
        uses = sort_uses(
            rows,
            grads_at,
            bags.weights,
            counts,
            row_total=arena.weights.shape[0],
            grad_total=grads.numel(),
        )
        if is_allowed is not None:
            leave_out(uses, is_allowed)
        numbers = StepNumbers(
            kind=optimizer.kind,
            lr=float(optimizer.lr),
            eps=float(getattr(optimizer, "eps", 0.0)),
            weight_decay=float(optimizer.weight_decay),
        )
        columns = (width, self.group.dim, *self.group.grad_columns)
        is_aligned = all(column % WORDS_PER_STORE == 0 for column in columns)
        step_rows(
            arena.weights,
            arena.state,
            arena.use_counts,
            uses,
            grads,
            numbers,
            is_aligned=is_aligned,
        )
        return uses.row_of_use[-1:]
