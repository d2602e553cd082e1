"""One batch of those of several ranks, by feature, samples of rank 0 first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["JoinedBags", "RankBatch", "join_batches"]


@dataclass(frozen=True)
class RankBatch:
    """The samples of one rank.

    Args:
        samples: How many.
        bounds: ``[F+1]``, where each feature's ids begin.
        indices: ``[E]`` i64.
        offsets: ``[F*samples+1]`` i64.
        weights: ``[E]`` f32, or None.
        longest: ``[F]``, ids of each feature's longest bag, or None where that is not known.
    """

    samples: int
    bounds: Sequence[int]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    longest: Sequence[int] | None = None

    @classmethod
    def of(
        cls, indices: Tensor, offsets: Tensor, weights: Tensor | None, feature_count: int
    ) -> RankBatch:
        """Makes one of a batch as the engine takes it, feature after feature."""
        samples = (offsets.numel() - 1) // feature_count
        starts = torch.arange(feature_count + 1, device=offsets.device) * samples
        lengths = torch.diff(offsets).view(feature_count, samples)
        longest = lengths.amax(dim=1) if samples else lengths.new_zeros(feature_count)
        # All numbers at once: a device is waited for but one time.
        told = torch.cat([offsets[starts], longest]).tolist()
        bounds, longest_of = told[: feature_count + 1], told[feature_count + 1 :]
        return cls(samples, bounds, indices, offsets, weights, longest_of)


@dataclass(frozen=True)
class JoinedBags:
    """Some features of the samples of several ranks.

    Args:
        samples: Of each rank.
        indices: ``[E]`` i64.
        offsets: ``[F*B+1]`` i64.
        weights: ``[E]`` f32, or None.
        is_single: Whether it is known that no bag has more than one id.
        whole_lengths: ``[F*B]`` i64, ids of each bag where some are left out here; else None.
    """

    samples: Sequence[int]
    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    is_single: bool = False
    whole_lengths: Tensor | None = None


def join_batches(batches: Sequence[RankBatch], features: Sequence[int]) -> JoinedBags:
    """Joins ``features`` of ``batches``, in that order; copies what it takes."""
    like = batches[0].indices
    ids, lengths, weights = [like.new_empty(0)], [like.new_empty(0)], []
    lengths_of = [torch.diff(batch.offsets) for batch in batches]
    for feature in features:
        for batch, of_batch in zip(batches, lengths_of, strict=True):
            start, end = batch.bounds[feature], batch.bounds[feature + 1]
            ids.append(batch.indices[start:end])
            lengths.append(of_batch[feature * batch.samples : (feature + 1) * batch.samples])
            if batch.weights is not None:
                weights.append(batch.weights[start:end])
    ends = torch.cumsum(torch.cat(lengths), dim=0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    return JoinedBags(
        [batch.samples for batch in batches],
        torch.cat(ids),
        offsets,
        torch.cat(weights) if weights else None,
        is_single=all(
            batch.longest is not None and all(batch.longest[feature] <= 1 for feature in features)
            for batch in batches
        ),
    )
