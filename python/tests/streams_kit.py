"""Streams of a device that is not there: queues that run late, and in an order drawn by a seed.

Device memory is memory of the CPU here. What is copied holds NaN until its copy has run; memory of
the device that is given up while a stream still reads it is filled with NaN, as by its next owner.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Broken = Literal["wait", "keep", "finish"] | None


class Event:
    """Whether all work of a stream before it is done."""

    def __init__(self) -> None:
        self.is_done = False


class Stream:
    """Work in order; an event in it lets it wait."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None] | Event] = deque()

    def can_run(self) -> bool:
        head = self.queue[0] if self.queue else None
        return head is not None and (not isinstance(head, Event) or head.is_done)

    def run_one(self) -> None:
        head = self.queue.popleft()
        if not isinstance(head, Event):
            head()


class SimulatedStreams:
    """:class:`tierbed.ops.streams.Streams` without a device.

    Args:
        seed: Of the order that queues run in.
        delay_s: Longest time that the host waits for an event beyond what is queued.
        broken: What does nothing, to show that it is needed.
    """

    def __init__(self, seed: int = 0, delay_s: float = 0.0, broken: Broken = None) -> None:
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._broken = broken
        self._turn = threading.RLock()
        self._streams: list[Stream] = []
        self._current = self.new()
        self.copies = 0
        self.registered: set[int] = set()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def new(self) -> Stream:
        self._streams.append(Stream())
        return self._streams[-1]

    def current(self) -> Stream:
        return self._current

    def compute(self, work: Callable[[], None]) -> None:
        """Queues work of the current stream, which torch does at once on a CPU."""
        self._current.queue.append(work)

    def record(self, stream: Stream) -> Event:
        event = Event()

        def note() -> None:
            event.is_done = True

        stream.queue.append(note)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        if self._broken == "wait":
            return
        stream.queue.append(event)
        if stream is self._current:
            # Torch goes on at once, with work that follows the event.
            self._run(lambda: not stream.queue)

    def finish(self, event: Event) -> None:
        if self._delay_s:
            time.sleep(self._random.uniform(0.0, self._delay_s))
        if self._broken != "finish":
            self._run(lambda: event.is_done)

    def copy_up(self, stream: Stream, source: Tensor) -> Tensor:
        return self._copy(stream, source)

    def copy_down(self, stream: Stream, source: Tensor) -> Tensor:
        return self._copy(stream, source)

    def copy_into(self, stream: Stream, source: Tensor, target: Tensor) -> None:
        self.copies += 1

        def copy() -> None:
            target.copy_(source)

        stream.queue.append(copy)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        if self._broken != "keep":
            kept = [tensor]
            stream.queue.append(kept.clear)

    def host_floats(self, rows: int, columns: int) -> Tensor:
        return torch.full((rows, columns), torch.nan)

    def host_numbers(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.full((count,), -1, dtype=dtype)

    def register(self, address: int, size_bytes: int) -> bool:
        self.registered.add(address)
        return True

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def _copy(self, stream: Stream, source: Tensor) -> Tensor:
        self.copies += 1
        target = torch.full_like(source, _nothing(source))
        # Another tensor of the same memory: the queue keeps no object of the program's alive.
        memory = source.detach()

        def copy() -> None:
            target.copy_(memory)

        given_up = weakref.finalize(source, lambda: memory.fill_(_nothing(memory)))
        given_up.atexit = False
        stream.queue.append(copy)
        stream.queue.append(lambda: given_up.detach() and None)
        return target

    def _run(self, is_enough: Callable[[], bool]) -> None:
        with self._turn:
            while not is_enough():
                ready = [stream for stream in self._streams if stream.can_run()]
                assert ready, "streams wait for each other"
                self._random.choice(ready).run_one()


def _nothing(tensor: Tensor) -> float:
    return torch.nan if tensor.is_floating_point() else -1


def run_all(streams: SimulatedStreams) -> None:
    """Runs what is queued, to the end."""
    streams._run(lambda: not any(stream.queue for stream in streams._streams))


def any_of(work: Callable[[int], Any], seeds: int = 20) -> bool:
    """Tells whether ``work`` is true for a seed."""
    return any(work(seed) for seed in range(seeds))
