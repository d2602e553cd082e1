"""Messages between the ranks of a rail: what moves bytes from node to node."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tierbed.dist.nodes import Nodes
from tierbed.errors import ClosedError, IoError

__all__ = [
    "Connected",
    "LocalNetwork",
    "LocalWire",
    "LostRankError",
    "TorchWire",
    "Wire",
    "swap_numbers",
]


class LostRankError(IoError):
    """A rank of another node does not answer.

    Args:
        nodes: Which ranks there are.
        rank: The rank.
        cause: What was noticed.
    """

    def __init__(self, nodes: Nodes, rank: int, cause: object) -> None:
        super().__init__(
            f"{nodes.name(rank)} does not answer rank {nodes.rank}: {cause}; that host or rank "
            "was lost, or needs a longer timeout_s. Restart all ranks: stores continue at their "
            "checkpoints",
            {"rank": str(rank), "waiting_rank": str(nodes.rank)},
        )
        self.rank = rank


class Wire(Protocol):
    """Moves bytes between the ranks of a rail; all make the same calls in the same order."""

    def swap(self, sent: Tensor, sent_bytes: Sequence[int], come_bytes: Sequence[int]) -> Tensor:
        """Sends each node its bytes of ``sent`` and returns those that came, one behind the other.

        Args:
            sent: ``[sum of sent_bytes]`` u8.
            sent_bytes: To each node; 0 to the own.
            come_bytes: From each node.

        Raises:
            LostRankError: A rank does not answer in time.
        """

    def close(self) -> None:
        """Leaves, when nothing more is sent."""

    def abort(self) -> None:
        """Leaves at once: ranks that wait for this one get an error. Nothing is waited for."""


def swap_numbers(wire: Wire, nodes: Nodes, numbers: Tensor) -> Tensor:
    """Tells each node some numbers; returns what each told, and the own row for this node.

    Args:
        wire: To the other nodes.
        nodes: Which ranks there are.
        numbers: ``[nodes, N]`` i64.

    Returns:
        ``[nodes, N]`` i64.
    """
    is_other = torch.arange(nodes.count) != nodes.own
    each = numbers.shape[1] * 8
    row_bytes = [each if other else 0 for other in is_other.tolist()]
    sent = numbers[is_other].contiguous().view(-1).view(torch.uint8)
    came = wire.swap(sent, row_bytes, row_bytes).view(torch.int64)
    told = numbers.clone()
    told[is_other] = came.view(-1, numbers.shape[1])
    return told


class Connected:
    """A group beside one of the program, whose collectives run at the same time.

    It is kept for later collections: a new one of the same ranks would find the addresses of this
    one. Each collection has a tag of its own.

    Args:
        program: The group of the program; None for that of all ranks.
        backend: What moves its bytes.
        timeout_s: How long its collectives may take; by default what torch allows.
    """

    kept: ClassVar[dict[tuple[dist.ProcessGroup | None, str, float | None], Connected]] = {}

    def __init__(
        self, program: dist.ProcessGroup | None, backend: str, timeout_s: float | None
    ) -> None:
        self.world = dist.group.WORLD
        # Their numbers in the program, by those in the group.
        self.ranks = dist.get_process_group_ranks(program)
        self.group: dist.ProcessGroup | None = dist.new_group(
            self.ranks,
            backend=backend,
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
            use_local_synchronization=program is not None,
        )
        self.tags = itertools.count()

    @classmethod
    def beside(
        cls,
        program: dist.ProcessGroup | None,
        backend: str = "gloo",
        timeout_s: float | None = None,
    ) -> Connected:
        """Returns that of ``program``; all of its ranks call this together."""
        key = (program, backend, timeout_s)
        found = cls.kept.get(key)
        if found is None or found.group is None or found.world is not dist.group.WORLD:
            found = cls.kept[key] = cls(program, backend, timeout_s)
        return found

    def cut(self) -> None:
        """Closes the connections, so that the others get an error."""
        group, self.group = self.group, None
        if group is not None and self.world is dist.group.WORLD:
            dist.destroy_process_group(group)


class TorchWire:
    """Over ``torch.distributed``, from rank to rank.

    Args:
        nodes: Which ranks there are.
        group: The process group of all ranks; None for that of the program.
        timeout_s: How long another rank may be silent.
    """

    def __init__(self, nodes: Nodes, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._nodes = nodes
        self._timeout = timedelta(seconds=timeout_s)
        self._connected = Connected.beside(group)
        self._tag = next(self._connected.tags)

    def swap(self, sent: Tensor, sent_bytes: Sequence[int], come_bytes: Sequence[int]) -> Tensor:
        """As :meth:`Wire.swap`."""
        came = torch.empty(sum(come_bytes), dtype=torch.uint8)
        works = []
        parts = zip(self._nodes.rail, torch.split(came, list(come_bytes)), strict=True)
        for rank, part in parts:
            if part.numel():
                with self._naming(rank):
                    works.append((rank, dist.irecv(part, *self._to(rank))))
        for rank, part in zip(self._nodes.rail, torch.split(sent, list(sent_bytes)), strict=True):
            if part.numel():
                with self._naming(rank):
                    works.append((rank, dist.isend(part, *self._to(rank))))
        for rank, work in works:
            with self._naming(rank):
                if work is not None:
                    work.wait(self._timeout)
        return came

    def silent_ranks(self) -> list[int]:
        """Returns the other ranks that do not answer; all that noticed a failure call this."""
        others = [rank for rank in self._nodes.rail if rank != self._nodes.rank]
        bytes_of = torch.zeros(2, len(others), 1, dtype=torch.uint8)
        works: list[tuple[int, dist.Work | None]] = []
        silent = set()
        for call, row in zip((dist.irecv, dist.isend), bytes_of, strict=True):
            for rank, byte in zip(others, row, strict=True):
                try:
                    works.append((rank, call(byte, *self._to(rank))))
                except RuntimeError:
                    silent.add(rank)
        for rank, work in works:
            try:
                # What came is there, even when another rank let the time run out before.
                if work is not None:
                    work.wait(self._timeout)
            except RuntimeError:
                silent.add(rank)
        return sorted(silent)

    def close(self) -> None:
        """As :meth:`Wire.close`."""

    def abort(self) -> None:
        """As :meth:`Wire.abort`."""
        self._connected.cut()

    def _to(self, rank: int) -> tuple[int, dist.ProcessGroup, int]:
        """Returns the number of ``rank`` in the program, the group, and the tag of messages."""
        connected = self._connected
        if connected.group is None:
            raise ClosedError("the connections to other nodes were closed after an error")
        return connected.ranks[rank], connected.group, self._tag

    @contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostRankError(self._nodes, rank, error) from error


class LocalNetwork:
    """Messages between threads of a process: for tests, and to try shardings."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: dict[tuple[int, int], deque[Tensor]] = {}
        self._left: set[int] = set()
        self.bytes_sent = 0

    def leave(self, rank: int) -> None:
        """Lets those that wait for ``rank`` know that nothing more comes."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def send(self, sender: int, receiver: int, message: Tensor) -> None:
        """Leaves a message for ``receiver``."""
        with self._changed:
            self._messages.setdefault((sender, receiver), deque()).append(message)
            self.bytes_sent += message.numel()
            self._changed.notify_all()

    def receive(self, sender: int, receiver: int, timeout_s: float) -> Tensor | None:
        """Returns the next message; None when none comes in time."""
        with self._changed:
            box = self._messages.setdefault((sender, receiver), deque())
            self._changed.wait_for(lambda: len(box) > 0 or sender in self._left, timeout_s)
            return box.popleft() if box else None


class LocalWire:
    """Between threads of this process, which share memory only where they are of one node.

    Args:
        nodes: Which ranks there are.
        network: What the ranks of the process share.
        timeout_s: How long another rank may be silent.
    """

    def __init__(self, nodes: Nodes, network: LocalNetwork, timeout_s: float) -> None:
        self._nodes = nodes
        self._network = network
        self._timeout_s = timeout_s

    def swap(self, sent: Tensor, sent_bytes: Sequence[int], come_bytes: Sequence[int]) -> Tensor:
        """As :meth:`Wire.swap`."""
        rail, own = self._nodes.rail, self._nodes.rank
        for rank, part in zip(rail, torch.split(sent, list(sent_bytes)), strict=True):
            if rank != own:
                self._network.send(own, rank, part.clone())
        came = []
        for rank, count in zip(rail, come_bytes, strict=True):
            if rank == own:
                continue
            message = self._network.receive(rank, own, self._timeout_s)
            if message is None or message.numel() != count:
                found = "nothing" if message is None else f"{message.numel()} bytes"
                raise LostRankError(self._nodes, rank, f"{found} came of {count} bytes")
            came.append(message)
        return torch.cat([torch.empty(0, dtype=torch.uint8), *came])

    def close(self) -> None:
        """As :meth:`Wire.close`."""

    def abort(self) -> None:
        """As :meth:`Wire.abort`."""
        self._network.leave(self._nodes.rank)
