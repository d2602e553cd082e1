"""Streams of a device: queues of copies that run beside its computations.

What :mod:`tierbed.ops.links` needs of ``torch.cuda``, and no more, so that tests can put queues in
its place that run copies as late and in as odd an order as streams may.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CudaStreams", "Streams"]


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

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keeps memory of the device from being used anew before ``stream`` has done with it."""

    def host_floats(self, rows: int, columns: int) -> Tensor:
        """Returns host memory ``[rows, columns]`` f32 that the device copies by itself.

        Where the device still copies an earlier tensor's memory, that memory is not given out.
        """


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

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """As :meth:`Streams.keep`."""
        tensor.record_stream(stream)

    def host_floats(self, rows: int, columns: int) -> Tensor:
        """As :meth:`Streams.host_floats`."""
        return torch.empty(rows, columns, dtype=torch.float32, pin_memory=True)
