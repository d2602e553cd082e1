"""What every heap of devices must do, whoever made it; and a stand-in for torch's module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_ranks import run_ranks

import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist.device.heap import LINE_BYTES, DeviceHeap
from tierbed.dist.device.pad import Channel, SignalPad
from tierbed.dist.kernels.put_grads import put_grads

# Steps of the exchange of numbers; more than there are buffers.
STEPS = 6


def run_device_ranks(count: int, work: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Runs ``work`` once per rank, each in a thread of its own that does its own backwards."""

    def alone(rank: tbd.LocalRank) -> Any:
        # All backwards of one GPU share a thread otherwise, and wait for each other.
        with torch.autograd.set_multithreading_enabled(False):
            return work(rank)

    return run_ranks(count, alone, **options)


def check_heap(heap: DeviceHeap) -> None:
    """Checks one rank's heap, together with those of all others, and closes it."""
    check_tensors(heap)
    check_puts(heap)
    check_what_is_refused(heap)
    heap.close()
    heap.close()
    with pytest.raises(tb.ClosedError):
        heap.alloc((4,), torch.float32)


def check_tensors(heap: DeviceHeap) -> None:
    """Tensors of zeros, one behind the other, on whole lines, each with two buffers."""
    for shape, dtype in [((3, 5), torch.float32), ((7,), torch.int64), ((1,), torch.int32)]:
        tensor = heap.alloc(shape, dtype)
        for turn in (0, 1):
            own = tensor.local(turn)
            assert own.shape == shape
            assert own.dtype == dtype
            assert bool((own == 0).all())
            pointers = tensor.peer_ptrs(turn)
            assert pointers.shape == (heap.count,)
            assert pointers.device == heap.device
            assert all(pointer % LINE_BYTES == 0 for pointer in pointers.tolist())
        assert tensor.local(0).data_ptr() != tensor.local(1).data_ptr()
        assert tensor.local(0).data_ptr() == tensor.local(2).data_ptr()
        heap.gather(None)
        tensor.local(0).fill_(heap.rank + 1)
        heap.quiet()
        heap.gather(None)
        for rank in range(heap.count):
            assert bool((tensor.peer(rank, 0) == rank + 1).all())
            assert bool((tensor.peer(rank, 1) == 0).all())


def check_puts(heap: DeviceHeap) -> None:
    """A kernel's stores to all ranks are there after their signal, and stay one more step."""
    tensor = heap.alloc((heap.count, 8), torch.float32)
    pad = SignalPad(heap, 20.0)
    column = torch.arange(8.0, device=heap.device)
    runs = torch.tensor([[0, 0, 8, 8]] * heap.count, device=heap.device)
    senders = torch.arange(heap.count).view(-1, 1)

    def expected(step: int) -> torch.Tensor:
        return 100 * step + 10 * senders + column.cpu()

    for step in range(1, STEPS):
        grad = (100 * step + 10 * heap.rank + column).view(1, 8)
        put_grads(grad, runs, tensor.peer_ptrs(step), heap.rank, 8)
        if step > 1:
            # Others may have put what is next, but only after this rank's next signal more.
            assert torch.equal(tensor.local(step - 1).cpu(), expected(step - 1)), step
        pad.signal(Channel.GRADS, step)
        pad.wait(Channel.GRADS, step)
        assert torch.equal(tensor.local(step).cpu(), expected(step)), step
        pad.wait(Channel.GRADS, step - 1)


def check_what_is_refused(heap: DeviceHeap) -> None:
    """Tensors that differ are an error on every rank; a rank that is silent is named."""
    if heap.count > 1:
        with pytest.raises(tb.InvalidError, match="different tensors"):
            heap.alloc((4 + heap.rank,), torch.float32)
    pad = SignalPad(heap, 0.1)
    last = heap.count - 1
    if heap.rank != last:
        pad.signal(Channel.IDS, 1)
    # Only the last one is late, however busy the machine is.
    heap.quiet()
    heap.gather(None)
    with pytest.raises(tb.IoError, match=f"rank {last} did not answer in time") as caught:
        pad.wait(Channel.IDS, 1)
    assert caught.value.context["rank"] == str(last)
    heap.gather(None)


class StandIn:
    """``torch.distributed._symmetric_memory`` for ranks that are threads of a CPU."""

    def __init__(self, rank: tbd.LocalRank, shift: int = 0) -> None:
        self._rank = rank
        self._shift = shift
        self.backend: str | None = None
        self.freed = 0

    def get_backend(self, device: torch.device) -> str | None:
        return self.backend

    def set_backend(self, name: str) -> None:
        self.backend = name

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # What a GPU's allocator gives is not zeros, and is aligned.
        whole = torch.full((size[0] + 64,), 7, dtype=dtype, device=device)
        skipped = -whole.data_ptr() % LINE_BYTES // dtype.itemsize
        return whole[skipped : skipped + size[0]]

    def rendezvous(self, tensor: torch.Tensor, group: object) -> Any:
        peers = self._rank.gather(tensor)
        return Handle(self, peers, self._shift)


class Handle:
    """What ``rendezvous`` returns; ``shift`` is how far tensors are from where they should be."""

    def __init__(self, module: StandIn, peers: Sequence[torch.Tensor], shift: int) -> None:
        self._module = module
        self._peers = peers
        self._shift = shift

    def get_remote_tensor(
        self, peer: int, sizes: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        tensor = self._peers[peer]
        assert tuple(sizes) == tuple(tensor.shape)
        assert dtype == tensor.dtype
        return tensor[self._shift :]

    def __del__(self) -> None:
        self._module.freed += 1
