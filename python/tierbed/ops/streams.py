"""Streams of a device: queues of copies that run beside its computations.

What :mod:`tierbed.ops.links` needs of ``torch.cuda``, and no more, so that tests can put queues in
its place that run copies as late and in as odd an order as streams may.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CudaStreams", "HostStreams", "Streams"]

# cudaHostRegisterPortable: known to all devices of the process.
_PORTABLE = 1


class Streams(Protocol):
    """Streams of one device, and memory that they copy between.

    Work of one stream runs in order. Work of two has no order but by :meth:`wait`.
    """

    @property
    def device(self) -> torch.device:
        """Whose streams they are."""

    def new(self) -> Any:
        """Returns a stream of its own."""

    def current(self) -> Any:
        """Returns the stream of this thread's computations."""

    def record(self, stream: Any) -> Any:
        """Returns an event: that all work of ``stream`` until now is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Lets later work of ``stream`` follow ``event``; the host does not wait."""

    def finish(self, event: Any) -> None:
        """Waits for ``event`` on the host, without Python's lock."""

    def copy_up(self, stream: Any, source: Tensor) -> Tensor:
        """Has ``stream`` copy host memory to new memory of the device, which is returned."""

    def copy_down(self, stream: Any, source: Tensor) -> Tensor:
        """Has ``stream`` copy memory of the device to new host memory, which is returned."""

    def copy_into(self, stream: Any, source: Tensor, target: Tensor) -> None:
        """Has ``stream`` copy memory between host and device, both of which somebody else owns."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keeps memory of the device from being used anew before ``stream`` has done with it."""

    def host_floats(self, rows: int, columns: int) -> Tensor:
        """Returns host memory ``[rows, columns]`` f32 that the device copies by itself.

        Where the device still copies an earlier tensor's memory, that memory is not given out.
        """

    def host_numbers(self, count: int, dtype: torch.dtype) -> Tensor:
        """As :meth:`host_floats`, ``[count]`` of integers."""

    def register(self, address: int, size_bytes: int) -> bool:
        """Lets the device copy memory of the host by itself; tells whether it can."""

    def unregister(self, address: int) -> None:
        """Takes back what :meth:`register` did, before that memory is freed."""


class HostStreams:
    """Streams of a CPU that stands in for a device: what is asked for is done at once."""

    @property
    def device(self) -> torch.device:
        """As :attr:`Streams.device`."""
        return torch.device("cpu")

    def new(self) -> None:
        """As :meth:`Streams.new`."""

    def current(self) -> None:
        """As :meth:`Streams.current`."""

    def record(self, stream: None) -> None:
        """As :meth:`Streams.record`."""

    def wait(self, stream: None, event: None) -> None:
        """As :meth:`Streams.wait`."""

    def finish(self, event: None) -> None:
        """As :meth:`Streams.finish`."""

    def copy_up(self, stream: None, source: Tensor) -> Tensor:
        """As :meth:`Streams.copy_up`."""
        return source.clone()

    def copy_down(self, stream: None, source: Tensor) -> Tensor:
        """As :meth:`Streams.copy_down`."""
        return source.clone()

    def copy_into(self, stream: None, source: Tensor, target: Tensor) -> None:
        """As :meth:`Streams.copy_into`."""
        target.copy_(source)

    def keep(self, tensor: Tensor, stream: None) -> None:
        """As :meth:`Streams.keep`."""

    def host_floats(self, rows: int, columns: int) -> Tensor:
        """As :meth:`Streams.host_floats`."""
        return torch.empty(rows, columns, dtype=torch.float32, device="cpu")

    def host_numbers(self, count: int, dtype: torch.dtype) -> Tensor:
        """As :meth:`Streams.host_numbers`."""
        return torch.empty(count, dtype=dtype, device="cpu")

    def register(self, address: int, size_bytes: int) -> bool:
        """As :meth:`Streams.register`."""
        return True

    def unregister(self, address: int) -> None:
        """As :meth:`Streams.unregister`."""


class CudaStreams:
    """Streams of a CUDA device; host memory is pinned and comes from torch's own allocator.

    Args:
        device: The device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        """As :attr:`Streams.device`."""
        return self._device

    def new(self) -> torch.cuda.Stream:
        """As :meth:`Streams.new`."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        """As :meth:`Streams.current`."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """As :meth:`Streams.record`."""
        event: torch.cuda.Event = stream.record_event()
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """As :meth:`Streams.wait`."""
        stream.wait_event(event)

    def finish(self, event: torch.cuda.Event) -> None:
        """As :meth:`Streams.finish`."""
        event.synchronize()

    def copy_up(self, stream: torch.cuda.Stream, source: Tensor) -> Tensor:
        """As :meth:`Streams.copy_up`."""
        # Memory of the copy's own stream: that of another would first have to be done with.
        with torch.cuda.stream(stream):
            return source.to(self._device, non_blocking=True)

    def copy_down(self, stream: torch.cuda.Stream, source: Tensor) -> Tensor:
        """As :meth:`Streams.copy_down`."""
        with torch.cuda.stream(stream):
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            return host.copy_(source, non_blocking=True)

    def copy_into(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> None:
        """As :meth:`Streams.copy_into`."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """As :meth:`Streams.keep`."""
        tensor.record_stream(stream)

    def host_floats(self, rows: int, columns: int) -> Tensor:
        """As :meth:`Streams.host_floats`."""
        return torch.empty(rows, columns, dtype=torch.float32, pin_memory=True)

    def host_numbers(self, count: int, dtype: torch.dtype) -> Tensor:
        """As :meth:`Streams.host_numbers`."""
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def register(self, address: int, size_bytes: int) -> bool:
        """As :meth:`Streams.register`."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(runtime.cudaHostRegister(address, size_bytes, _PORTABLE)) == 0

    def unregister(self, address: int) -> None:
        """As :meth:`Streams.unregister`."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(address)
