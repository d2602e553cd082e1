"""Launches of kernels for the features of a collection, over the rows of one window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierbed.config.optim import SGD, Adagrad, Optimizer, RowWiseAdagrad
from tierbed.dist.device.group_rows import GroupRows
from tierbed.dist.device.store import Arena
from tierbed.dist.joined import JoinedBags, RankBatch, join_batches
from tierbed.ops.windows.layout import Kind, Window

__all__ = ["OPTIMIZERS", "FeatureTables", "Launch", "Numbers", "launches_of"]

Numbers = tuple[float, float, float]
"""Learning rate, eps and weight decay."""
# Those that the kernels know.
OPTIMIZERS: dict[str, type[Any]] = {kind.kind: kind for kind in (SGD, Adagrad, RowWiseAdagrad)}


@dataclass(frozen=True)
class FeatureTables:
    """The features of a collection, and what their tables are.

    Args:
        tables: Table id of each feature.
        poolings: ``"sum"`` or ``"mean"`` of each feature, or ``"none"`` of all.
        dims: Columns of each feature.
        optimizers: Name of the optimizer of each feature's table.
    """

    tables: Sequence[int]
    poolings: Sequence[str]
    dims: Sequence[int]
    optimizers: Sequence[str]

    @property
    def is_pooled(self) -> bool:
        """Whether a sample has one vector, or each id."""
        return "none" not in self.poolings

    @property
    def output_dim(self) -> int:
        """Columns of an output."""
        return sum(self.dims) if self.is_pooled else self.dims[0]


@dataclass(frozen=True)
class Group:
    """What the kernels are told of the features of a launch: :class:`Grouped`."""

    dim: int
    is_mean: bool
    features: tuple[int, ...]
    table_of: tuple[int, ...]
    output_columns: tuple[int, ...]
    is_mirrored: bool = False

    @property
    def grad_columns(self) -> tuple[int, ...]:
        """As in the output."""
        return self.output_columns


class Launch:
    """Features of rows of one kind that are pooled and stepped alike.

    Args:
        features: Their places in the input, in its order.
        of: All features.
        kind: Of their rows.
        window: The window that has the rows.
    """

    def __init__(self, features: list[int], of: FeatureTables, kind: Kind, window: Window) -> None:
        self.features = features
        self._is_pooled = of.is_pooled
        self._is_whole = len(features) == len(of.tables)
        self._kind = of.optimizers[features[0]]
        self._firsts = [window.first_rows[of.tables[at]] for at in features]
        rows = window.rows[kind]
        columns = [0]
        for dim in of.dims:
            columns.append(columns[-1] + dim)
        # An id without a bag is a bag of its own, of one feature that is all tables of the kind.
        count = len(features) if self._is_pooled else 1
        group = Group(
            dim=kind.dim,
            is_mean=of.poolings[features[0]] == "mean",
            features=tuple(features[:count]),
            table_of=tuple(range(count)),
            output_columns=tuple(columns[at] for at in features) if self._is_pooled else (0,),
        )
        arena = Arena(
            weights=rows.weights,
            state=rows.state,
            use_counts=rows.use_counts,
            optimizer=self._optimizer((0.0, 0.0, 0.0)),
            first_rows=self._firsts if self._is_pooled else [0],
        )
        self._rows = GroupRows(group, arena, of.output_dim)

    def pool(self, batch: RankBatch, out: Tensor, head: Tensor) -> None:
        """Looks the features up.

        Args:
            batch: Entries of all features.
            out: ``[B, D]`` f32, or ``[E, D]`` without pooling.
            head: i64 on the device: the address of ``out``, 0, and its rows.
        """
        if self._is_pooled or self._is_whole:
            self._rows.pool(self._bags(batch), head[:1], head[1:])
            return
        counts = [batch.bounds[at + 1] - batch.bounds[at] for at in self.features]
        own = out.new_empty(sum(counts), out.shape[1])
        told = torch.tensor([own.data_ptr(), 0, len(own)], device=out.device)
        self._rows.pool(self._bags(batch), told[:1], told[1:])
        for at, rows in zip(self.features, torch.split(own, counts), strict=True):
            out[batch.bounds[at] : batch.bounds[at + 1]] = rows

    def step(
        self,
        batch: RankBatch,
        grad: Tensor,
        numbers: Numbers,
        places: Tensor | None,
        is_allowed: Tensor,
    ) -> Tensor | None:
        """Steps the features' rows, as :meth:`GroupRows.step`.

        Args:
            batch: Entries of all features.
            grad: Of the output.
            numbers: Those of the optimizer.
            places: ``[E]`` i64, addresses of gradients of weights, or None.
            is_allowed: ``[1]`` bool: whether rows are stepped at all.
        """
        self._rows.arena.optimizer = self._optimizer(numbers)
        grads = grad if self._is_pooled else self.part(batch, grad)
        of_weights = None if places is None else self.part(batch, places)
        bags, width = self._bags(batch), grad.shape[1]
        return self._rows.step(bags, grads.view(-1), width, of_weights, is_allowed)

    def part(self, batch: RankBatch, values: Tensor) -> Tensor:
        """Returns those of ``values``, one for each id, that are of the features."""
        if self._is_whole:
            return values
        bounds = batch.bounds
        return torch.cat([values[bounds[at] : bounds[at + 1]] for at in self.features])

    def _bags(self, batch: RankBatch) -> JoinedBags:
        if not self._is_pooled:
            parts = zip(self.features, self._firsts, strict=True)
            bounds = batch.bounds
            rows = [batch.indices[bounds[at] : bounds[at + 1]] + first for at, first in parts]
            ids = torch.cat(rows)
            offsets = torch.arange(len(ids) + 1, device=ids.device)
            return JoinedBags([len(ids)], ids, offsets, None, is_single=True)
        if not self._is_whole:
            return join_batches([batch], self.features)
        is_single = batch.longest is not None and max(batch.longest) <= 1
        bags = (batch.indices, batch.offsets, batch.weights)
        return JoinedBags([batch.samples], *bags, is_single=is_single)

    def _optimizer(self, numbers: Numbers) -> Optimizer:
        lr, eps, weight_decay = numbers
        more = {} if self._kind == "sgd" else {"eps": eps}
        made: Optimizer = OPTIMIZERS[self._kind](lr=lr, weight_decay=weight_decay, **more)
        return made


def launches_of(of: FeatureTables, numbers: list[Numbers], window: Window) -> list[Launch]:
    """Parts features by all that one launch takes alike; without those of no row in the window."""
    members: dict[tuple[Any, ...], list[int]] = {}
    for at, (table, pooling) in enumerate(zip(of.tables, of.poolings, strict=True)):
        kind = window.kinds[table]
        if kind in window.rows:
            key = (kind, of.optimizers[at], pooling, numbers[at])
            members.setdefault(key, []).append(at)
    return [Launch(features, of, key[0], window) for key, features in members.items()]
