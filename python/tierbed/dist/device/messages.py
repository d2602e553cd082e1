"""Collective calls of ranks whose devices cannot write each other's memory.

Over a process group of torch: NCCL between GPUs, gloo where kernels are interpreted. Over the
messages of the CPU exchange where there is no such group: between threads, and for GPUs without
NCCL, whose tensors then go through memory of the host.

NCCL was never met so far: tests have gloo, and a stand-in for what NCCL does otherwise.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tierbed.dist.nodes import Nodes
from tierbed.dist.wire import Connected, LostRankError, TorchWire, Wire
from tierbed.errors import ClosedError, IoError

__all__ = ["GroupMessages", "Messages", "WireMessages"]

# How long the host sleeps between looks at a call of a GPU.
SLEEP_S = 0.0002


class Messages(Protocol):
    """Moves numbers between all ranks; all make the same calls in the same order."""

    def swap(self, sent: Tensor, sends: Sequence[int], comes: Sequence[int]) -> Tensor:
        """Sends each rank its numbers of ``sent``, and returns those that came.

        Args:
            sent: ``[sum of sends]``, those for rank 0 first.
            sends: How many each rank gets, this one too.
            comes: How many come from each.

        Returns:
            ``[sum of comes]``, those of rank 0 first.

        Raises:
            IoError: A rank, named where that is known, does not answer in time.
        """

    def gather(self, numbers: Tensor) -> Tensor:
        """Returns ``[ranks, N]``, the ``numbers`` ``[N]`` of each rank.

        Raises:
            IoError: As :meth:`swap`.
        """

    def close(self) -> None:
        """Leaves, when nothing more is sent."""

    def abort(self) -> None:
        """Leaves at once: ranks that wait for this one get an error. Nothing is waited for."""


class WireMessages:
    """Messages by a :class:`~tierbed.dist.wire.Wire`, which names who is lost.

    Args:
        nodes: Every rank as a node of its own.
        wire: Between them.
    """

    def __init__(self, nodes: Nodes, wire: Wire) -> None:
        self._nodes = nodes
        self._wire = wire

    def swap(self, sent: Tensor, sends: Sequence[int], comes: Sequence[int]) -> Tensor:
        """As :meth:`Messages.swap`."""
        own, item = self._nodes.rank, sent.dtype.itemsize
        parts = list(torch.split(sent, list(sends)))
        kept = parts.pop(own)
        raw = torch.cat([sent.new_empty(0), *parts]).cpu().view(torch.uint8)
        counts = [0 if rank == own else count for rank, count in enumerate(comes)]
        sent_bytes = [0 if rank == own else count * item for rank, count in enumerate(sends)]
        came = self._wire.swap(raw, sent_bytes, [count * item for count in counts])
        found = list(torch.split(came.view(sent.dtype).to(sent.device), counts))
        found[own] = kept
        return torch.cat(found)

    def gather(self, numbers: Tensor) -> Tensor:
        """As :meth:`Messages.gather`."""
        each = [numbers.numel()] * self._nodes.count
        came = self.swap(numbers.repeat(self._nodes.count), each, each)
        return came.view(self._nodes.count, numbers.numel())

    def close(self) -> None:
        """As :meth:`Messages.close`."""
        self._wire.close()

    def abort(self) -> None:
        """As :meth:`Messages.abort`."""
        self._wire.abort()


class GroupMessages:
    """Collective calls of ``torch.distributed``.

    A call does not say which rank was lost. So all ranks that see one fail send each other a byte
    over a group of gloo beside, and name who is silent there.

    Args:
        nodes: Every rank as a node of its own.
        connected: The process group, of its own for these calls. Calls that are not queued take
            no longer than its time-out.
        wire: Beside it.
        timeout_s: How long another rank may be silent.
        is_queued: Whether calls only queue work for a device, as those of NCCL do: the host waits
            until it is done.
    """

    def __init__(
        self,
        nodes: Nodes,
        connected: Connected,
        wire: TorchWire,
        timeout_s: float,
        *,
        is_queued: bool,
    ) -> None:
        self._nodes = nodes
        self._connected = connected
        self._wire = wire
        self._timeout_s = timeout_s
        self._is_queued = is_queued

    def swap(self, sent: Tensor, sends: Sequence[int], comes: Sequence[int]) -> Tensor:
        """As :meth:`Messages.swap`."""
        came = sent.new_empty(sum(comes))

        def call(group: dist.ProcessGroup) -> Any:
            return dist.all_to_all_single(
                came, sent, list(comes), list(sends), group=group, async_op=True
            )

        self._run(call)
        return came

    def gather(self, numbers: Tensor) -> Tensor:
        """As :meth:`Messages.gather`."""
        came = numbers.new_empty(self._nodes.count * numbers.numel())

        def call(group: dist.ProcessGroup) -> Any:
            return dist.all_gather_into_tensor(came, numbers, group=group, async_op=True)

        if numbers.numel():
            self._run(call)
        return came.view(self._nodes.count, numbers.numel())

    def close(self) -> None:
        """As :meth:`Messages.close`."""
        self._wire.close()

    def abort(self) -> None:
        """As :meth:`Messages.abort`."""
        self._cut()
        self._wire.abort()

    def _cut(self) -> None:
        # Work that a GPU has queued is not waited for: the process ends with it.
        if not self._is_queued:
            self._connected.cut()

    def _run(self, call: Callable[[dist.ProcessGroup], Any]) -> None:
        """Makes a call and returns when it is done, on the device too."""
        if self._connected.group is None:
            raise ClosedError("the connections to other ranks were closed after an error")
        with self._naming():
            wait_for(call(self._connected.group), self._timeout_s, is_queued=self._is_queued)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # Only neighbours of a lost rank notice it: that they leave tells the others. Their
            # connections close with the last reference to the group.
            traceback.clear_frames(error.__traceback__)
            self._cut()
            silent = self._wire.silent_ranks()
            if silent:
                raise LostRankError(self._nodes, silent[0], error) from error
            raise IoError(
                f"all ranks answer rank {self._nodes.rank}, but a call of all of them failed: "
                f"{error}; start all ranks again"
            ) from error


def wait_for(work: Any, timeout_s: float, *, is_queued: bool) -> None:
    """Returns when a call of ``torch.distributed`` is done.

    Args:
        work: What the call returned.
        timeout_s: How long to wait for queued work.
        is_queued: As of :class:`GroupMessages`.

    Raises:
        RuntimeError: It failed, or took too long.
    """
    # Of queued work only the stream waits here. Other work has the time-out of its group.
    work.wait()
    if not is_queued:
        return
    end = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"nothing came in {timeout_s:g} s")
        time.sleep(SLEEP_S)
