"""Ranks, and memory that they share."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tierbed._native import NativeHeap
from tierbed.config.words import DeviceHeapKind, check_word
from tierbed.dist.device.heap import DeviceHeap
from tierbed.dist.device.host_heap import HostHeap
from tierbed.dist.device.local_heap import LocalHeap
from tierbed.dist.device.torch_heap import TorchHeap
from tierbed.errors import InvalidError, TierbedError, UnsupportedError

# How long ranks of a process wait for each other where no time-out was given.
GATHER_SECONDS = 600.0

__all__ = ["LocalRank", "ProcessRank", "Rank", "local_ranks"]


class Rank(Protocol):
    """One rank among others."""

    @property
    def rank(self) -> int:
        """Its number, from 0."""

    @property
    def count(self) -> int:
        """How many there are."""

    def share_heap(self, region_bytes: int) -> NativeHeap:
        """Returns memory that all ranks share; all call this together, with equal sizes."""

    def share_device_heap(self, device: torch.device) -> DeviceHeap:
        """Returns memory that the devices of all ranks write; all call this together."""

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, that of rank 0 first; all call this together."""


class LocalRank:
    """A rank that is a thread of this process: for tests, and to try shardings.

    See :func:`local_ranks`.

    Args:
        rank: Its number.
        count: How many there are.
        process: What the ranks of this process share.
        device_heap: How ranks share memory of devices; see :func:`local_ranks`.
    """

    def __init__(
        self, rank: int, count: int, process: _Process, device_heap: DeviceHeapKind = "auto"
    ) -> None:
        self._rank = rank
        self._count = count
        self._process = process
        check_word("device_heap", device_heap, DeviceHeapKind)
        self._device_heap = device_heap
        self._taken = 0

    @property
    def rank(self) -> int:
        """Its number, from 0."""
        return self._rank

    @property
    def count(self) -> int:
        """How many there are."""
        return self._count

    def share_heap(self, region_bytes: int) -> NativeHeap:
        """Returns the next heap of the process; whoever comes first makes it.

        Args:
            region_bytes: Bytes for each rank.
        """
        heaps = self._process.heaps
        with self._process.lock:
            if self._taken == len(heaps):
                heaps.append(NativeHeap.local(self._count, region_bytes))
            heap = heaps[self._taken]
            self._taken += 1
            return heap

    def share_device_heap(self, device: torch.device) -> DeviceHeap:
        """Returns memory of the device that all ranks of the process share.

        Args:
            device: Where its memory is.
        """
        return HostHeap(self, device) if self._device_heap == "pinned" else LocalHeap(self, device)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, that of rank 0 first.

        Args:
            value: That of this rank; it can be pickled.

        Raises:
            TierbedError: Some rank did not call this within :data:`GATHER_SECONDS`.
        """
        process = self._process
        process.values[self._rank] = value
        try:
            process.barrier.wait(GATHER_SECONDS)
            found = list(process.values)
            # Nobody gathers again before all have looked.
            process.barrier.wait(GATHER_SECONDS)
        except threading.BrokenBarrierError as error:
            raise TierbedError(f"a rank did not join rank {self._rank} in time") from error
        return found


class _Process:
    """What the ranks of a process share."""

    def __init__(self, count: int) -> None:
        self.heaps: list[NativeHeap] = []
        self.lock = threading.Lock()
        self.values: list[Any] = [None] * count
        self.barrier = threading.Barrier(count)


def local_ranks(count: int, *, device_heap: DeviceHeapKind = "auto") -> list[LocalRank]:
    """Makes ``count`` ranks of one process, one for each thread.

    Args:
        count: Ranks.
        device_heap: For a :class:`tierbed.dist.DeviceStore`: ``"auto"`` shares memory of the
            device, ``"pinned"`` that of the host.
    """
    process = _Process(count)
    return [LocalRank(rank, count, process, device_heap) for rank in range(count)]


class ProcessRank:
    """This process of a ``torch.distributed`` group, as ``torchrun`` starts it.

    Args:
        group: The process group; by default that of all ranks.
        device_heap: For a :class:`tierbed.dist.DeviceStore`: ``"auto"`` is torch's symmetric
            memory on GPUs, and memory of the host on CPUs; ``"pinned"`` is memory of the host on
            both, for GPUs that cannot write each other's.

    Raises:
        InvalidError: ``torch.distributed`` is not initialised.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, device_heap: DeviceHeapKind = "auto"
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidError(
                "torch.distributed is not initialised; start with torchrun and call "
                'torch.distributed.init_process_group("gloo") first'
            )
        self.group = group
        check_word("device_heap", device_heap, DeviceHeapKind)
        self._device_heap = device_heap

    @property
    def rank(self) -> int:
        """Its number, from 0."""
        return dist.get_rank(self.group)

    @property
    def count(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    def share_heap(self, region_bytes: int) -> NativeHeap:
        """Returns memory of rank 0 that the others open.

        Args:
            region_bytes: Bytes for each rank.

        Raises:
            UnsupportedError: Some rank cannot open it; all ranks get this error then.
        """
        heap, failure = None, None
        made = NativeHeap.create(self.count, region_bytes) if self.rank == 0 else None
        told = [str(made.path) if made is not None else None]
        source = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        dist.broadcast_object_list(told, src=source, group=self.group)
        try:
            heap = made or NativeHeap.open(str(told[0]), self.count)
        except TierbedError as error:
            failure = str(error)
        failures: list[str | None] = [None] * self.count
        # Also keeps rank 0's file open until everybody has opened it.
        dist.all_gather_object(failures, failure, group=self.group)
        if heap is None or any(failures):
            first = next(text for text in failures if text is not None)
            raise UnsupportedError(
                f"ranks cannot share memory: {first}; use exchange='collective' for ranks on "
                "several machines"
            )
        return heap

    def share_device_heap(self, device: torch.device) -> DeviceHeap:
        """Returns memory that the devices of all ranks write.

        Args:
            device: Where its memory is.
        """
        if self._device_heap == "pinned" or device.type == "cpu":
            return HostHeap(self, device)
        return TorchHeap(self, self.group, device)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, that of rank 0 first.

        Args:
            value: That of this rank; it can be pickled.
        """
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found
