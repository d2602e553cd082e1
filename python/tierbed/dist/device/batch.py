"""Batches of ids that ranks publish to the holders of rows.

A rank checks its batch, writes it once into its own symmetric memory and signals. Holders read the
bounds of all batches first, on the host, because shapes of tensors are made there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tierbed.dist.device.heap import DeviceHeap
from tierbed.dist.exchange import ExchangeOptions
from tierbed.dist.joined import RankBatch
from tierbed.errors import InvalidError

__all__ = ["PublishedBatches", "check_batch"]


def check_batch(
    bags: tuple[Tensor, Tensor, Tensor | None],
    row_counts: Sequence[int],
    names: Sequence[str],
    options: ExchangeOptions,
) -> RankBatch:
    """Checks what the kernels take for granted.

    Args:
        bags: ``[E]`` i64 ids, ``[F*B+1]`` i64 offsets, ``[E]`` f32 weights or None.
        row_counts: ``[F]``, rows of each feature's table.
        names: ``[F]``, of the features.
        options: How large it may be.

    Raises:
        InvalidError: A shape, an offset or an id that is wrong; the message says which.
    """
    indices, offsets, weights = bags
    features = len(row_counts)
    if (offsets.numel() - 1) % features:
        raise InvalidError(f"offsets of {features} features must be [F*B+1], not {offsets.numel()}")
    samples, count = (offsets.numel() - 1) // features, indices.numel()
    limits = (("samples", samples, options.samples_max), ("indices", count, options.indices_max))
    for what, found, limit in limits:
        if found > limit:
            raise InvalidError(
                f"a batch of {found} {what} is more than {what}_max={limit}; raise that",
                {what: str(found)},
            )
    is_rising = bool((torch.diff(offsets) >= 0).all())
    if not is_rising or int(offsets[0]) != 0 or int(offsets[-1]) != count:
        raise InvalidError(f"offsets must rise from 0 to the number of ids, {count}")
    if weights is not None and weights.numel() != count:
        raise InvalidError(f"{weights.numel()} weights for {count} ids")
    batch = RankBatch.of(indices, offsets, weights, features)
    near = indices.device
    lengths = torch.diff(torch.tensor(batch.bounds, dtype=torch.int64, device=near))
    counts = torch.tensor(row_counts, device=near)
    rows = torch.repeat_interleave(counts, lengths, output_size=count)
    is_wrong = (indices < 0) | (indices >= rows)
    if bool(is_wrong.any()):
        position = int(is_wrong.nonzero()[0])
        feature = next(at for at in range(features) if position < batch.bounds[at + 1])
        raise InvalidError(
            f"id {int(indices[position])} of feature {names[feature]!r} is not one of its table's "
            f"{row_counts[feature]} rows",
            {"feature": names[feature]},
        )
    return batch


class PublishedBatches:
    """Every rank's batch, where all ranks read it.

    Args:
        heap: Where they lie; all ranks make this together.
        features: Input features.
        options: How large they may be.
        is_weighted: Whether batches have weights.
    """

    def __init__(
        self, heap: DeviceHeap, features: int, options: ExchangeOptions, is_weighted: bool
    ) -> None:
        samples_max, indices_max = options.samples_max, options.indices_max
        self._heap = heap
        self._features = features
        # Samples, whether gradients of weights are wanted, where each feature's ids begin, and how
        # long its longest bag is.
        self._bounds = heap.alloc((2 * features + 3,), torch.int64)
        self._ids = heap.alloc((indices_max,), torch.int64)
        self._offsets = heap.alloc((features * samples_max + 1,), torch.int64)
        self._weights = heap.alloc((indices_max,), torch.float32) if is_weighted else None

    def write(self, turn: int, batch: RankBatch, wants_weights: bool) -> None:
        """Publishes this rank's batch; the signal is the caller's."""
        count = batch.indices.numel()
        # Where it is not known how long bags are, two ids stand for any number.
        longest = [2] * self._features if batch.longest is None else batch.longest
        told = [batch.samples, wants_weights, *batch.bounds, *longest]
        self._bounds.local(turn).copy_(torch.tensor(told))
        self._ids.local(turn)[:count].copy_(batch.indices)
        self._offsets.local(turn)[: batch.offsets.numel()].copy_(batch.offsets)
        if self._weights is not None and batch.weights is not None:
            self._weights.local(turn)[:count].copy_(batch.weights)

    def read(self, turn: int) -> tuple[list[RankBatch], bool]:
        """Returns the batches of all ranks, and whether one wants gradients of weights.

        All have signalled. Batches lie in the memory of their ranks: copy what is needed after
        this step.
        """
        ranks = range(self._heap.count)
        told = torch.stack([self._bounds.peer(rank, turn) for rank in ranks]).tolist()
        batches = []
        for rank, (samples, _, *numbers) in enumerate(told):
            bounds, longest = numbers[: self._features + 1], numbers[self._features + 1 :]
            batches.append(
                RankBatch(
                    samples,
                    bounds,
                    self._near(self._ids.peer(rank, turn)[: bounds[-1]]),
                    self._near(self._offsets.peer(rank, turn)[: self._features * samples + 1]),
                    None
                    if self._weights is None
                    else self._near(self._weights.peer(rank, turn)[: bounds[-1]]),
                    longest,
                )
            )
        return batches, any(wants for _, wants, *_ in told)

    def _near(self, tensor: Tensor) -> Tensor:
        """Copies to the device what does not lie on one."""
        return tensor.to(self._heap.device)
