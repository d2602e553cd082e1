"""Shared memory of GPUs of one machine: torch's symmetric memory, over NVLink.

This is the only file that knows ``torch.distributed._symmetric_memory``, which torch keeps to
itself and may change; it is written for torch 2.11. Each process has one GPU and maps the others'
memory by virtual addresses that differ from rank to rank.

Never run on a GPU so far: tests drive it through a stand-in for torch's module.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tierbed.dist.device.heap import DeviceHeap, Hosts, Region
from tierbed.errors import InvalidError, UnsupportedError

__all__ = ["TorchHeap", "symmetric_memory", "why_no_heap"]

# NVSHMEM's allocations make collective calls when they are freed, from Python's collector
# (pytorch #195500); those of this backend do not.
BACKEND = "CUDA"
# Before this version, groups are made known to it first, and handles have no such tensors.
OLDEST = (2, 11)


def symmetric_memory() -> Any:
    """Returns torch's module.

    Raises:
        UnsupportedError: A torch without it.
    """
    try:
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        raise UnsupportedError(
            f"torch {torch.__version__} has no symmetric memory; install torch 2.11, or keep "
            "regions in pinned memory: ProcessRank(device_heap='pinned')"
        ) from error
    return _symmetric_memory


def why_no_heap() -> str | None:
    """Returns why this torch gives no such memory; None where it does."""
    if _version() < OLDEST:
        return f"torch {torch.__version__} has another symmetric memory than 2.11"
    try:
        symmetric_memory()
    except UnsupportedError as error:
        return str(error).partition(";")[0]
    return None


class TorchHeap(DeviceHeap):
    """Memory of GPUs, one for each process, that all of them can write.

    Args:
        hosts: This rank among the processes.
        group: The process group; None for that of all ranks.
        device: This process's GPU.
        module: Torch's module, or what stands in for it in a test.

    Raises:
        InvalidError: Not a CUDA device.
        UnsupportedError: A torch without symmetric memory.
    """

    def __init__(
        self,
        hosts: Hosts,
        group: dist.ProcessGroup | None,
        device: torch.device,
        module: Any = None,
    ) -> None:
        if device.type != "cuda" and module is None:
            raise InvalidError(
                f"torch's symmetric memory lies on CUDA devices, not on {device}; keep regions in "
                "memory of the host: ProcessRank(device_heap='pinned')"
            )
        super().__init__(hosts, device)
        if module is None and _version() < OLDEST:
            raise UnsupportedError(
                f"torch {torch.__version__} has another symmetric memory than 2.11; install torch "
                "2.11, or keep regions in pinned memory: ProcessRank(device_heap='pinned')"
            )
        self._group = group
        self._module = symmetric_memory() if module is None else module
        if self._module.get_backend(device) != BACKEND:
            self._module.set_backend(BACKEND)

    def _alloc(self, count: int, dtype: torch.dtype) -> Region:
        own = self._module.empty(count, dtype=dtype, device=self._device)
        group = dist.group.WORLD if self._group is None else self._group
        handle = self._module.rendezvous(own, group)
        own.zero_()
        buffers = [handle.get_remote_tensor(rank, (count,), dtype) for rank in range(self._count)]
        if buffers[self._rank].data_ptr() != own.data_ptr():
            raise UnsupportedError(
                f"torch {torch.__version__} places symmetric memory otherwise than 2.11; install "
                "that, or keep regions in pinned memory: ProcessRank(device_heap='pinned')"
            )
        # Tensors of peers' memory own nothing: the handle keeps the mappings. An output that is
        # lent keeps it too, as memory that is unmapped under a kernel ends the process.
        return Region(buffers=buffers, owner=(handle, own))

    def _release(self) -> None:
        # The memory goes with the last reference to what owns it.
        return


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
