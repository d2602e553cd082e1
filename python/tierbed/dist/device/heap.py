"""Symmetric heaps: memory that the devices of all ranks write.

Every rank asks for the same tensors in the same order; each gets one of its own, and the addresses
of everybody's. A tensor has two buffers, taken in turn, so that one may be written while what was
written last is still in use. Kernels see addresses only, so that one source serves every heap.
Source: PGAS §III, the symmetric heap of NVSHMEM. Differs: two buffers instead of a barrier more,
and closing is a call, because a collective call from a destructor waits for ranks that are gone.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tierbed.errors import ClosedError, InvalidError

__all__ = ["BUFFERS", "LINE_BYTES", "DeviceHeap", "Region", "SymmetricTensor"]

# Buffers of a tensor, taken in turn.
BUFFERS = 2
# Buffers begin at multiples of it, so that no two share a line.
LINE_BYTES = 128


class Hosts(Protocol):
    """What a heap needs of :class:`tierbed.dist.ranks.Rank`."""

    @property
    def rank(self) -> int:
        """Its number, from 0."""

    @property
    def count(self) -> int:
        """How many there are."""

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks; all call this together."""


class SymmetricTensor:
    """A tensor of each rank, of one shape and type, two buffers each.

    Args:
        rank: This rank.
        buffers: ``[BUFFERS, *shape]`` of each rank, as this rank reads and writes it.
        addresses: ``[BUFFERS, ranks]`` i64 on the device: where this rank's kernels write them.
        owner: What keeps the memory: outputs that are lent outlive the heap.
    """

    def __init__(
        self, rank: int, buffers: Sequence[Tensor], addresses: Tensor, owner: object = None
    ) -> None:
        self._rank = rank
        self._buffers = list(buffers)
        self._addresses = addresses
        self._owner = owner

    def local(self, turn: int) -> Tensor:
        """Returns this rank's buffer of ``turn``, which counts on and on."""
        return self.peer(self._rank, turn)

    def peer(self, rank: int, turn: int) -> Tensor:
        """Returns the buffer of ``rank``, to read what it signalled to be there."""
        return self._buffers[rank][turn % BUFFERS]

    def peer_ptrs(self, turn: int) -> Tensor:
        """Returns ``[ranks]`` i64 on the device: where the buffers of all ranks begin."""
        return self._addresses[turn % BUFFERS]


@dataclass(frozen=True, kw_only=True)
class Region:
    """Memory of all ranks, as one of them reads and writes it.

    Args:
        buffers: Of each rank, ``[count]``; their addresses are those of this rank's device.
        owner: What keeps the memory, where the buffers themselves do not.
    """

    buffers: list[Tensor]
    owner: object = None


class DeviceHeap(abc.ABC):
    """Memory of one rank's device that the devices of all ranks can write.

    Args:
        hosts: This rank among the threads or processes.
        device: Where kernels of this rank run.
    """

    # Looks of a kernel on a GPU before the host looks at its clock: some ten milliseconds.
    cuda_spins: ClassVar[int] = 1 << 16

    def __init__(self, hosts: Hosts, device: torch.device) -> None:
        self._hosts = hosts
        self._rank = hosts.rank
        self._count = hosts.count
        # "cuda" is the current device, and not equal to "cuda:0".
        index: int | None = device.index
        if device.type == "cuda" and index is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._is_closed = False

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self._count

    @property
    def device(self) -> torch.device:
        """Where kernels of this rank run."""
        return self._device

    @property
    def spins(self) -> int:
        """Looks a waiting kernel may take before the host looks at its clock.

        One where ranks take turns, on a stream or in the interpreter: a kernel that waits would
        keep others from running.
        """
        return self.cuda_spins if self._device.type == "cuda" else 1

    def alloc(self, shape: Sequence[int], dtype: torch.dtype) -> SymmetricTensor:
        """Makes a tensor of zeros on every rank; all call this together, with equal arguments.

        Raises:
            ClosedError: After :meth:`close`.
            InvalidError: Ranks asked for different tensors; all of them learn it.
        """
        self._check()
        asked = (tuple(shape), str(dtype))
        told = self.gather(asked)
        if any(other != asked for other in told):
            raise InvalidError(f"ranks asked for different tensors: {told}")
        # Whole lines, so that the second buffer is aligned as the first.
        numel = torch.Size(shape).numel()
        words = LINE_BYTES // dtype.itemsize
        count = -(-max(1, numel) // words) * words
        region = self._alloc(BUFFERS * count, dtype)
        # Nobody writes before everybody has zeros.
        self.quiet()
        self.gather(None)
        turns = torch.arange(BUFFERS).view(-1, 1) * (count * dtype.itemsize)
        begins = torch.tensor([buffer.data_ptr() for buffer in region.buffers])
        addresses = turns + begins.view(1, -1)
        rest = torch.empty(shape, device="meta").stride()
        shaped = [flat.as_strided((BUFFERS, *shape), (count, *rest)) for flat in region.buffers]
        return SymmetricTensor(self._rank, shaped, addresses.to(self._device), region.owner)

    @abc.abstractmethod
    def _alloc(self, count: int, dtype: torch.dtype) -> Region:
        """Returns ``[count]`` zeros of each rank."""

    def gather(self, value: object) -> list[Any]:
        """Returns the values of all ranks, by way of the hosts; all call this together."""
        return self._hosts.gather(value)

    def near(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor`` on the device: a copy of what does not lie there."""
        return tensor.to(self._device)

    def quiet(self) -> None:
        """Returns when everything this rank launched is done, stores to peers included."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Gives the memory back; all ranks call this together, and nobody from a destructor.

        Calling it again does nothing.
        """
        if self._is_closed:
            return
        self.quiet()
        # Nobody's memory goes while others may write it.
        self.gather(None)
        self._is_closed = True
        self._release()

    @abc.abstractmethod
    def _release(self) -> None:
        """Lets go of what :meth:`_alloc` kept."""

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError("the heap is closed")
