"""Shared memory of ranks that are threads: tensors of one device."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tierbed.dist.device.heap import LINE_BYTES, DeviceHeap

__all__ = ["Hosts", "LocalHeap"]


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


class LocalHeap(DeviceHeap):
    """Memory of one device for all ranks of a process: to test, and to try shardings.

    Args:
        hosts: This rank among the threads.
        device: The device they share: a CUDA device, or the CPU with Triton's interpreter.
    """

    def __init__(self, hosts: Hosts, device: torch.device) -> None:
        super().__init__(hosts.rank, hosts.count, device)
        self._hosts = hosts

    @property
    def spins(self) -> int:
        """One look: the ranks share a stream, or take turns in the interpreter."""
        return 1

    def _alloc(self, count: int, dtype: torch.dtype) -> tuple[list[Tensor], list[int]]:
        # A CPU's tensors begin with half a line.
        spare = LINE_BYTES // dtype.itemsize
        whole = torch.zeros(count + spare, dtype=dtype, device=self._device)
        skipped = -whole.data_ptr() % LINE_BYTES // dtype.itemsize
        own = whole[skipped : skipped + count]
        buffers = self._hosts.gather(own)
        return buffers, [buffer.data_ptr() for buffer in buffers]

    def gather(self, value: object) -> list[object]:
        """As :meth:`DeviceHeap.gather`."""
        return self._hosts.gather(value)

    def _release(self) -> None:
        # Tensors go with the last reference to them.
        return
