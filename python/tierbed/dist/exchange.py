"""How do vectors and gradients travel between ranks?

``one_sided`` writes them where they are needed, in memory that the ranks of a machine share.
``collective`` does what training systems usually do, with ``torch.distributed``: gather the ids,
pool for all samples, all-to-all, unpack; for ranks on several machines, and to compare.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tierbed._native import FeaturePlan, NativeExchange, NativeExchangePlan, NativeHeap, NativeStore
from tierbed.errors import InvalidError, UnsupportedError

__all__ = ["Collective", "Exchange", "OneSided"]


class Exchange(Protocol):
    """One rank's part; all ranks make the same calls in the same order."""

    def forward(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, wants: tuple[bool, bool]
    ) -> tuple[int, Tensor]:
        """Looks up a batch; ``wants`` a backward, and gradients of weights.

        Returns:
            The step's number and the output ``[B, D]``.
        """

    def backward(self, step: int, grad: Tensor, weights_grad: Tensor | None) -> None:
        """Steps the rows of ``step``; fills ``weights_grad`` ``[E]``."""

    def close(self) -> None:
        """Leaves together with all other ranks."""


class OneSided:
    """Over shared memory.

    Args:
        native: This rank's store.
        plan: Who holds what.
        heap: The shared memory.
        rank: This rank.
        groups: What this rank looks up together.
        timeout_s: How long another rank may be silent.
        copies_outputs: Whether outputs are copied out of the shared memory.
    """

    def __init__(
        self,
        native: NativeStore,
        plan: NativeExchangePlan,
        heap: NativeHeap,
        rank: int,
        groups: list[FeaturePlan],
        *,
        timeout_s: float,
        copies_outputs: bool,
    ) -> None:
        self._native = native
        self._dim = plan.output_dim
        self._copies = copies_outputs
        self._exchange = NativeExchange(plan, heap, rank, int(timeout_s * 1000), groups)
        # The memory must outlive tensors that lie in it.
        self._heap = heap
        self._lent: list[weakref.ref[ctypes.Array[ctypes.c_float]]] = []

    def forward(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, wants: tuple[bool, bool]
    ) -> tuple[int, Tensor]:
        """As :meth:`Exchange.forward`; the output is valid until the forward after the next."""
        if len(self._lent) == 2 and self._lent.pop(0)() is not None:
            raise InvalidError(
                "the output of two lookups ago is still in use, and its memory is needed; clone "
                "what is kept, or pass copies_outputs=True"
            )
        step, address, samples = self._exchange.forward(
            self._native, indices, offsets, weights, *wants
        )
        if samples * self._dim == 0:
            return step, torch.empty((samples, self._dim))
        values = (ctypes.c_float * (samples * self._dim)).from_address(address)
        values._heap = self._heap  # type: ignore[attr-defined]
        out = torch.frombuffer(values, dtype=torch.float32).view(samples, self._dim)
        if self._copies:
            return step, out.clone()
        self._lent.append(weakref.ref(values))
        return step, out

    def backward(self, step: int, grad: Tensor, weights_grad: Tensor | None) -> None:
        """As :meth:`Exchange.backward`."""
        self._exchange.backward(self._native, step, grad, weights_grad)

    def close(self) -> None:
        """As :meth:`Exchange.close`."""
        self._exchange.close()


class Collective:
    """Over ``torch.distributed``: tables that one rank holds whole.

    Args:
        native: This rank's store.
        plan: Who holds what.
        group: The process group; None for that of all ranks.
        groups: What this rank looks up together.

    Raises:
        UnsupportedError: Some table is divided or mirrored.
    """

    def __init__(
        self,
        native: NativeStore,
        plan: NativeExchangePlan,
        group: dist.ProcessGroup | None,
        groups: list[FeaturePlan],
    ) -> None:
        if not plan.is_all_whole:
            raise UnsupportedError(
                "the collective exchange moves tables that one rank holds whole; plan them "
                "TableWise, or use exchange='one_sided'"
            )
        self._native = native
        self._plan = plan
        self._group = group
        self._count = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._features = [plan.features(rank) for rank in range(self._count)]
        self._groups = groups
        self._steps: dict[int, _Gathered] = {}
        self._step = 0

    def forward(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, wants: tuple[bool, bool]
    ) -> tuple[int, Tensor]:
        """As :meth:`Exchange.forward`."""
        if wants[1]:
            raise UnsupportedError(
                "the collective exchange brings no gradients of weights; use "
                "exchange='one_sided'"
            )
        batch = self._gather(indices, offsets, weights)
        width = self._width(self._rank)
        local = torch.empty((sum(batch.samples), width))
        for plan in self._groups:
            self._native.lookup(plan, batch.indices, batch.offsets, batch.weights, local, wants[0])
        own = batch.samples[self._rank]
        sent = [samples * width for samples in batch.samples]
        received = [own * self._width(rank) for rank in range(self._count)]
        blocks = torch.empty(sum(received))
        dist.all_to_all_single(blocks, local.view(-1), received, sent, group=self._group)
        out = torch.empty((own, self._plan.output_dim))
        for rank, block in enumerate(torch.split(blocks, received)):
            matrix = block.view(own, self._width(rank)) if own else block.view(0, 0)
            column = 0
            for _, first, dim in self._features[rank] if own else []:
                out[:, first : first + dim] = matrix[:, column : column + dim]
                column += dim
        self._step += 1
        if wants[0]:
            self._steps = {self._step: batch, **dict(list(self._steps.items())[:1])}
        return self._step, out

    def backward(self, step: int, grad: Tensor, weights_grad: Tensor | None) -> None:
        """As :meth:`Exchange.backward`."""
        batch = self._steps.pop(step)
        own = batch.samples[self._rank]
        parts = [
            torch.cat([grad[:, first : first + dim] for _, first, dim in features], dim=1)
            if features
            else grad[:, :0]
            for features in self._features
        ]
        width = self._width(self._rank)
        sent = [own * self._width(rank) for rank in range(self._count)]
        received = [samples * width for samples in batch.samples]
        grads = torch.empty(sum(received))
        packed = torch.cat([part.reshape(-1) for part in parts])
        dist.all_to_all_single(grads, packed, received, sent, group=self._group)
        for plan in self._groups:
            self._native.update(
                plan, batch.indices, batch.offsets, batch.weights, grads.view(-1, width), None
            )

    def close(self) -> None:
        """As :meth:`Exchange.close`."""
        dist.barrier(group=self._group)

    def _width(self, rank: int) -> int:
        return sum(dim for _, _, dim in self._features[rank])

    def _gather(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> _Gathered:
        """Brings the ids of all ranks, and keeps those of the tables held here."""
        mine = (indices, offsets, weights)
        batches: list[tuple[Tensor, Tensor, Tensor | None]] = [mine] * self._count
        dist.all_gather_object(batches, mine, group=self._group)
        feature_count = sum(len(features) for features in self._features)
        samples = [(bounds.numel() - 1) // feature_count for _, bounds, _ in batches]
        ids, lengths, of_ids = [], [], []
        for feature, _, _ in self._features[self._rank]:
            for (values, bounds, given), count in zip(batches, samples, strict=True):
                span = bounds[feature * count : (feature + 1) * count + 1]
                start, end = int(span[0]), int(span[-1])
                ids.append(values[start:end])
                lengths.append(torch.diff(span))
                if given is not None:
                    of_ids.append(given[start:end])
        none = torch.empty(0, dtype=torch.int64)
        ends = torch.cumsum(torch.cat([none, *lengths]), dim=0)
        return _Gathered(
            samples,
            torch.cat([none, *ids]),
            torch.cat([torch.zeros(1, dtype=torch.int64), ends]),
            torch.cat(of_ids) if of_ids else None,
        )


class _Gathered:
    """A batch of all ranks' samples, for the tables of one rank."""

    def __init__(
        self, samples: list[int], indices: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> None:
        self.samples = samples
        self.indices = indices
        self.offsets = offsets
        self.weights = weights
