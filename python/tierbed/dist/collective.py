"""An exchange by collectives, as training systems usually do it.

With ``torch.distributed``: gather the ids, pool for all samples, all-to-all, unpack. For ranks on
several machines, and to compare.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tierbed._native import FeaturePlan, NativeCodedTables, NativeExchangePlan, NativeStore
from tierbed.dist.exchange import Serving
from tierbed.dist.joined import JoinedBags, RankBatch, join_batches
from tierbed.errors import UnsupportedError

__all__ = ["Collective"]


class Collective:
    """Over ``torch.distributed``: tables that one rank holds whole.

    Args:
        native: This rank's store, or its tables of codes.
        plan: Who holds what.
        group: The process group; None for that of all ranks.
        groups: What this rank looks up together.
        dtype: What outputs are.

    Raises:
        UnsupportedError: Some table is divided or mirrored.
    """

    def __init__(
        self,
        native: NativeStore | NativeCodedTables,
        plan: NativeExchangePlan,
        group: dist.ProcessGroup | None,
        groups: list[FeaturePlan],
        *,
        dtype: torch.dtype,
    ) -> None:
        if not plan.is_all_whole:
            raise UnsupportedError(
                "the collective exchange moves tables that one rank holds whole; plan them "
                "TableWise, or use exchange='one_sided'"
            )
        self._native = native
        self._plan = plan
        self._dtype = dtype
        self._group = group
        self._count = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._features = [plan.features(rank) for rank in range(self._count)]
        self._groups = groups
        self._steps: dict[int, JoinedBags] = {}
        self._step = 0

    @property
    def is_trainable(self) -> bool:
        """As :attr:`Exchange.is_trainable`."""
        return isinstance(self._native, NativeStore)

    def forward(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, wants: tuple[bool, bool]
    ) -> tuple[int, Tensor]:
        """As :meth:`Exchange.forward`."""
        if wants[1]:
            raise UnsupportedError(
                "the collective exchange brings no gradients of weights; use exchange='one_sided'"
            )
        batch = self._gather(indices, offsets, weights)
        width = self._width(self._rank)
        local = torch.empty((sum(batch.samples), width))
        for plan in self._groups:
            self._native.lookup(plan, batch.indices, batch.offsets, batch.weights, local, wants[0])
        own = batch.samples[self._rank]
        sent = [samples * width for samples in batch.samples]
        received = [own * self._width(rank) for rank in range(self._count)]
        blocks = self._all_to_all(local.view(-1), received, sent)
        out = torch.empty((own, self._plan.output_dim), dtype=self._dtype)
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

    def forward_parts(self, *_: object) -> tuple[int, list[Tensor], Serving]:
        """Refuses: blocks of an all-to-all arrive together."""
        raise UnsupportedError("parts complete on their own with exchange='one_sided' only")

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
        packed = torch.cat([part.reshape(-1) for part in parts])
        grads = self._all_to_all(packed, received, sent).to(torch.float32)
        for plan in self._groups:
            self._native.update(
                plan, batch.indices, batch.offsets, batch.weights, grads.view(-1, width), None
            )

    def close(self) -> None:
        """As :meth:`Exchange.close`."""
        dist.barrier(group=self._group)

    def _all_to_all(self, values: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Sends blocks of ``values`` in the type of outputs; returns those that came."""
        narrow = values.to(self._dtype)
        blocks = torch.empty(sum(received), dtype=self._dtype)
        # As bytes: not every transport knows every type.
        width = self._dtype.itemsize
        dist.all_to_all_single(
            blocks.view(torch.uint8),
            narrow.view(torch.uint8),
            [width * count for count in received],
            [width * count for count in sent],
            group=self._group,
        )
        return blocks

    def _width(self, rank: int) -> int:
        return sum(dim for _, _, dim in self._features[rank])

    def _gather(self, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> JoinedBags:
        """Brings the ids of all ranks, and keeps those of the tables held here."""
        mine = (indices, offsets, weights)
        told: list[tuple[Tensor, Tensor, Tensor | None]] = [mine] * self._count
        dist.all_gather_object(told, mine, group=self._group)
        feature_count = sum(len(features) for features in self._features)
        batches = [RankBatch.of(*batch, feature_count) for batch in told]
        held = [feature for feature, _, _ in self._features[self._rank]]
        return join_batches(batches, held)
