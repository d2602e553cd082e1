"""Batches of ids that ranks publish to the holders of rows.

A rank checks its batch, writes it once into its own symmetric memory and signals; or all gather the
batches of all. Holders read the bounds of all batches first, on the host, because shapes of tensors
are made there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tierbed.dist.device.heap import DeviceHeap
from tierbed.dist.device.messages import Messages
from tierbed.dist.exchange import ExchangeOptions
from tierbed.dist.joined import RankBatch
from tierbed.errors import InvalidError

__all__ = ["GatheredBatches", "PublishedBatches", "check_batch"]


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
                    self._heap.near(self._ids.peer(rank, turn)[: bounds[-1]]),
                    self._heap.near(self._offsets.peer(rank, turn)[: self._features * samples + 1]),
                    None
                    if self._weights is None
                    else self._heap.near(self._weights.peer(rank, turn)[: bounds[-1]]),
                    longest,
                )
            )
        return batches, any(wants for _, wants, *_ in told)


class GatheredBatches:
    """Every rank's batch, by collective calls.

    Args:
        messages: Between all ranks.
        device: Where the batches are wanted.
        is_weighted: Whether batches have weights.
    """

    def __init__(self, messages: Messages, device: torch.device, *, is_weighted: bool) -> None:
        self._messages = messages
        self._device = device
        self._is_weighted = is_weighted
        self._sent = {"ids": 0, "numbers": 0}

    def share(self, batch: RankBatch, *, wants_weights: bool) -> tuple[list[RankBatch], bool]:
        """Returns the batches of all ranks, and whether one wants gradients of weights.

        Args:
            batch: That of this rank.
            wants_weights: Whether this one does.
        """
        numbers = torch.tensor([batch.samples, wants_weights, *batch.bounds])
        told = self._gather("numbers", numbers).tolist()
        features = len(batch.bounds) - 1
        counts = [(bounds[-1], features * samples + 1) for samples, _, *bounds in told]
        # All give as many as the one with most.
        flat = torch.cat([batch.indices, batch.offsets])
        ids = self._gather("ids", _padded(flat, max(map(sum, counts))))
        weights = None
        if self._is_weighted and batch.weights is not None:
            most = max(count for count, _ in counts)
            weights = self._gather("ids", _padded(batch.weights, most))
        batches = []
        for rank, ((count, ends), (samples, _, *bounds)) in enumerate(
            zip(counts, told, strict=True)
        ):
            batches.append(
                RankBatch(
                    samples,
                    bounds,
                    ids[rank, :count],
                    ids[rank, count : count + ends],
                    None if weights is None else weights[rank, :count],
                )
            )
        return batches, any(wants for _, wants, *_ in told)

    def sent_bytes(self) -> dict[str, int]:
        """Returns the bytes that this rank gave the others, by kind."""
        return dict(self._sent)

    def _gather(self, kind: str, numbers: Tensor) -> Tensor:
        gathered = self._messages.gather(numbers.to(self._device))
        self._sent[kind] += numbers.nbytes * (gathered.shape[0] - 1)
        return gathered


def _padded(numbers: Tensor, count: int) -> Tensor:
    """Returns ``numbers`` and zeros, ``[count]``."""
    return torch.nn.functional.pad(numbers, (0, count - numbers.numel()))
