"""Shared memory of ranks that are threads: tensors of one device."""

from __future__ import annotations

import torch

from tierbed.dist.device.heap import LINE_BYTES, DeviceHeap, Region

__all__ = ["LocalHeap"]


class LocalHeap(DeviceHeap):
    """Memory of one device for all ranks of a process: to test, and to try shardings.

    Args:
        hosts: This rank among the threads.
        device: The device they share: a CUDA device, or the CPU with Triton's interpreter.
    """

    # Ranks share a stream.
    cuda_spins = 1

    def _alloc(self, count: int, dtype: torch.dtype) -> Region:
        # A CPU's tensors begin with half a line.
        spare = LINE_BYTES // dtype.itemsize
        whole = torch.zeros(count + spare, dtype=dtype, device=self._device)
        skipped = -whole.data_ptr() % LINE_BYTES // dtype.itemsize
        own = whole[skipped : skipped + count]
        return Region(buffers=self._hosts.gather(own))

    def _release(self) -> None:
        # Tensors go with the last reference to them.
        return
