"""The way of vectors and gradients between a store, on the host, and a device.

Vectors go up and gradients come down on streams of their own, so that a copy neither waits for
computations that do not touch it nor makes them wait. The update of a batch runs in a worker as
soon as its gradient has come down, beside the rest of the backward; what the program asks of the
store next waits for it.

```text
host    lookup ──▶ pinned ─────────┐         ┌──▶ pinned ──▶ update (worker)
copies                └─ up ─▶     │   down ─┘
device                         dense forward, backward ── rest of the backward, optimizer ──▶
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from tierbed.ops.streams import CudaStreams, Streams

__all__ = [
    "Arriving",
    "Link",
    "Reserving",
    "as_device",
    "default_device",
    "device_after",
    "link_of",
]


class Arriving:
    """A tensor on its way to the host.

    Args:
        streams: What copies it.
        host: Where it comes to.
        copied: The event of its arrival.
    """

    def __init__(self, streams: Streams, host: Tensor, copied: Any) -> None:
        self._streams = streams
        self._host = host
        self._copied = copied

    def wait(self) -> Tensor:
        """Waits for the tensor, and returns it."""
        self._streams.finish(self._copied)
        return self._host


class Reserving(Protocol):
    """A store, as far as updates have places in the order of its calls."""

    def reserve_update(self) -> int:
        """Takes the next place for an update; calls made after it wait."""

    def end_update(self, ticket: int, failure: BaseException | None = None) -> None:
        """Tells that the update was made, or why not, which the next call raises."""


class Link:
    """Copies between the host and one device, and the worker of its updates.

    Args:
        streams: Those of the device.
    """

    def __init__(self, streams: Streams) -> None:
        self.device = streams.device
        self._streams = streams
        self._up = streams.new()
        self._down = streams.new()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tierbed-updates")

    def host_floats(self, rows: int, columns: int) -> Tensor:
        """Returns memory ``[rows, columns]`` f32 to fill for :meth:`to_device`."""
        return self._streams.host_floats(rows, columns)

    def to_device(self, host: Tensor) -> Tensor:
        """Returns ``host`` on the device, for computations of the current stream.

        The host does not wait, and ``host`` is not to be written again.
        """
        streams = self._streams
        out = streams.copy_up(self._up, host)
        current = streams.current()
        streams.wait(current, streams.record(self._up))
        streams.keep(out, current)
        return out

    def numbers_to_fill(self, count: int, dtype: torch.dtype) -> Tensor:
        """As :meth:`host_floats`, ``[count]`` of integers."""
        return self._streams.host_numbers(count, dtype)

    def copy_up(self, host: Tensor, device: Tensor, after: Any) -> None:
        """Copies ``host`` to ``device`` for the current stream, both memory of somebody else.

        Args:
            host: It stays as it is until the device has done with it.
            device: Of the same shape.
            after: An event of :meth:`mark` that the copy follows, or None.
        """
        streams = self._streams
        if after is not None:
            streams.wait(self._up, after)
        streams.copy_into(self._up, host, device)
        streams.wait(streams.current(), streams.record(self._up))

    def copy_down(self, device: Tensor, host: Tensor) -> Any:
        """Begins to copy a result of the current stream, both memory of somebody else.

        Returns:
            An event: that it is there.
        """
        streams = self._streams
        streams.wait(self._down, streams.record(streams.current()))
        streams.copy_into(self._down, device, host)
        return streams.record(self._down)

    def finish_copies(self) -> None:
        """Waits until all that was begun by :meth:`copy_down` is there."""
        self._streams.finish(self._streams.record(self._down))

    def mark(self) -> Any:
        """Returns an event: that all work of the current stream until now is done."""
        return self._streams.record(self._streams.current())

    def follow(self, event: Any) -> None:
        """Lets later work of the current stream follow an event of :meth:`mark`."""
        self._streams.wait(self._streams.current(), event)

    def register(self, address: int, size_bytes: int) -> bool:
        """Lets the device copy memory of the host by itself; tells whether it can."""
        return self._streams.register(address, size_bytes)

    def unregister(self, address: int) -> None:
        """Takes back what :meth:`register` did, before that memory is freed."""
        self._streams.unregister(address)

    def to_host(self, tensor: Tensor) -> Arriving:
        """Begins to copy a result of the current stream to the host."""
        streams = self._streams
        streams.wait(self._down, streams.record(streams.current()))
        host = streams.copy_down(self._down, tensor)
        streams.keep(tensor, self._down)
        return Arriving(streams, host, streams.record(self._down))

    def update_later(self, store: Reserving, update: Callable[[int], None]) -> Future[None]:
        """Has the worker make an update of ``store``, at the place that it has in the order now.

        Args:
            store: What later calls must find updated.
            update: Makes the update, by the ticket of its place. What it raises, the next call of
                the store raises.
        """
        ticket = store.reserve_update()

        def make() -> None:
            try:
                update(ticket)
            except BaseException as error:
                store.end_update(ticket, error)
            else:
                store.end_update(ticket)

        try:
            return self._worker.submit(make)
        except BaseException as error:
            # Without a worker, at the end of the interpreter, later calls would wait for ever.
            store.end_update(ticket, error)
            raise


def as_device(device: torch.device | str) -> torch.device:
    """Returns ``device`` with its index: ``cuda`` and ``cuda:0`` are not equal to torch."""
    named = torch.device(device)
    if str(named) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return named


def default_device() -> torch.device | None:
    """Returns where torch makes tensors by default; None where that is the CPU."""
    found = torch.get_default_device()
    return None if found.type == "cpu" else as_device(found)


def device_after(fn: Any, device: torch.device | None) -> torch.device | None:
    """Returns where outputs go after ``Module._apply(fn)``, as ``to()`` and ``cuda()`` make it.

    Args:
        fn: What it does to tensors.
        device: Where they went before; None: where ids are.
    """
    before = torch.device("cpu") if device is None else device
    found = fn(torch.empty(0, device=before)).device
    # On the device without memory parameters only wait to be loaded.
    return device if found == before or found.type == "meta" else as_device(found)


@functools.cache
def link_of(device: torch.device) -> Link | None:
    """Returns the link to ``device``; None where torch copies by itself, and waits."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return Link(CudaStreams(as_device(device)))
