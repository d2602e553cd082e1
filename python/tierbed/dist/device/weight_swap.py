"""Where gradients of weights lie on their way to the ranks whose weights they are.

Who holds a row computes the gradient of each weight that it was multiplied with. A buffer has those
for rank 0 first; among them groups follow each other, in a group features, and in those ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tierbed.dist.device.plan import DevicePlan, Group
from tierbed.dist.device.row_wise import holders_of
from tierbed.dist.joined import RankBatch, join_batches

__all__ = ["WeightSwap"]

WORD_BYTES = 4


@dataclass(frozen=True)
class WeightSwap:
    """The gradients that a rank sends, and those that it gets.

    Args:
        sent: ``[sum of sends]`` f32, the buffer.
        sends: How many each rank gets.
        comes: How many come from each.
        order: ``[E]`` i64, the ids of this rank whose gradients come, in that order.
        places: Of each group, ``[E_group]`` i64: the address for each joined id, 0 for those that
            another rank answers.
    """

    sent: Tensor
    sends: list[int]
    comes: list[int]
    order: Tensor
    places: list[Tensor]

    @classmethod
    def of(cls, plan: DevicePlan, rank: int, batches: Sequence[RankBatch]) -> WeightSwap:
        """Makes one for the samples of all ranks.

        Args:
            plan: Who holds what.
            rank: This rank.
            batches: Of all ranks.
        """
        own = plan.groups[rank]
        asked = [
            [_positions(group, batch, rank, is_own=at == rank) for group in own]
            for at, batch in enumerate(batches)
        ]
        sends = [sum(found.numel() for found in of_rank) for of_rank in asked]
        sent = torch.empty(sum(sends), device=batches[0].indices.device)
        address = sent.data_ptr()
        placed: list[list[RankBatch]] = [[] for _ in own]
        for batch, of_rank in zip(batches, asked, strict=True):
            for group, positions in enumerate(of_rank):
                place = torch.zeros_like(batch.indices)
                numbers = torch.arange(positions.numel(), device=place.device)
                place[positions] = address + WORD_BYTES * numbers
                address += WORD_BYTES * positions.numel()
                placed[group].append(dataclasses.replace(batch, indices=place, weights=None))
        found = [
            [_positions(group, batches[rank], at, is_own=at == rank) for group in groups]
            for at, groups in enumerate(plan.groups)
        ]
        return cls(
            sent=sent,
            sends=sends,
            comes=[sum(part.numel() for part in of_rank) for of_rank in found],
            order=torch.cat([part for of_rank in found for part in of_rank]),
            places=[
                join_batches(of_group, group.features).indices
                for of_group, group in zip(placed, own, strict=True)
            ],
        )


def _positions(group: Group, batch: RankBatch, holder: int, *, is_own: bool) -> Tensor:
    """Returns the ids of ``batch`` whose gradients ``holder`` of ``group`` sends, in order."""
    near = batch.indices.device
    ranges = [torch.empty(0, dtype=torch.int64, device=near)]
    if is_own or not group.is_mirrored:
        for feature in group.features:
            first, end = batch.bounds[feature], batch.bounds[feature + 1]
            ranges.append(torch.arange(first, end, device=near))
    found = torch.cat(ranges)
    if group.is_row_wise:
        found = found[holders_of(group, join_batches([batch], group.features)) == holder]
    return found
