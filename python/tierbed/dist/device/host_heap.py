"""Pinned host memory that a GPU writes and a process on a CPU reads.

Processes map one file without a name, as the CPU exchange does; a rank with a GPU registers the
map with CUDA, and its kernels then write it over PCIe, at the same addresses. Without a GPU it is
plain shared memory, and kernels write it in Triton's interpreter.

Registering, and kernels that write what was registered, never ran on a GPU so far.
"""

from __future__ import annotations

import mmap
import secrets
import sys
import weakref
from typing import Any

import torch
from torch import Tensor

from tierbed._native import NativeHeap
from tierbed.dist.device.heap import LINE_BYTES, DeviceHeap, Hosts, Region
from tierbed.errors import InvalidError, TierbedError, UnsupportedError

__all__ = ["HostHeap"]

# cudaHostRegisterPortable | cudaHostRegisterMapped
REGISTER_FLAGS = 3
# Where a heap says which one it is.
TOKEN_AT = 8


class HostHeap(DeviceHeap):
    """Memory of the host that the devices of all ranks write.

    Args:
        hosts: This rank among the threads or processes.
        device: Where this rank's kernels run: a CUDA device or the CPU.
        runtime: CUDA's runtime, or what stands in for it in a test.

    Raises:
        InvalidError: A CUDA device, and there is none.
    """

    # Each look crosses the link.
    cuda_spins = 64

    def __init__(self, hosts: Hosts, device: torch.device, runtime: Any = None) -> None:
        super().__init__(hosts, device)
        if device.type == "cuda" and runtime is None:
            if not torch.cuda.is_available():
                raise InvalidError(
                    "this machine has no CUDA device that could write pinned memory; keep rows in "
                    "a tierbed.Store, or give DeviceStore device='cpu' to interpret the kernels"
                )
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._runtime = runtime
        self._registered: list[Tensor] = []
        # A heap that nobody closes must not leave memory registered that is mapped no more.
        self._forget = weakref.finalize(self, _unregister, runtime, self._registered)

    def _alloc(self, count: int, dtype: torch.dtype) -> Region:
        region_bytes = -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        # The file begins with a page of its own.
        made, token = None, 0
        if self._rank == 0:
            token = secrets.randbits(64)
            made = NativeHeap.create(self._count, region_bytes + mmap.PAGESIZE, token)
        path, token = self.gather((None if made is None else made.path, token))[0]
        whole, failure = None, None
        try:
            whole = self._map(str(path), token)
        except (OSError, TierbedError) as error:
            failure = f"rank {self._rank}: {error}"
        # Also keeps rank 0's file open until everybody has mapped it.
        failures = [told for told in self.gather(failure) if told is not None]
        if whole is None or failures:
            raise UnsupportedError(f"ranks cannot share memory of the host: {failures[0]}")
        buffers = [
            whole[mmap.PAGESIZE + rank * region_bytes :][: count * dtype.itemsize].view(dtype)
            for rank in range(self._count)
        ]
        return Region(buffers=buffers)

    def _map(self, path: str, token: int) -> Tensor:
        """Maps the file, ``[bytes]``, for this process and its device."""
        with open(path, "r+b") as file:
            # The tensor keeps the map, and the map the memory.
            mapped = mmap.mmap(file.fileno(), 0)
        if mapped[TOKEN_AT : TOKEN_AT + 8] != token.to_bytes(8, sys.byteorder):
            # Containers number processes each from 1.
            raise UnsupportedError(f"another process has the path {path} of the shared memory")
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        if whole.data_ptr() % LINE_BYTES:
            raise UnsupportedError("a map does not begin with a line of memory")
        if self._runtime is not None:
            status = int(
                self._runtime.cudaHostRegister(whole.data_ptr(), whole.nbytes, REGISTER_FLAGS)
            )
            if status != 0:
                raise UnsupportedError(
                    f"CUDA cannot register {whole.nbytes} bytes of shared memory (error {status}); "
                    "make samples_max and indices_max smaller"
                )
            self._registered.append(whole)
        return whole

    def _release(self) -> None:
        self._forget()


def _unregister(runtime: Any, registered: list[Tensor]) -> None:
    while registered:
        runtime.cudaHostUnregister(registered.pop().data_ptr())
