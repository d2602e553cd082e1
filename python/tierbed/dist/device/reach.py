"""One decision of all ranks: do their devices write each other's memory, or call collectively?

Every rank tells where its device is, then which devices of others it reaches. All see the same
answers before any memory is made, and so all decide alike, or all get the same error.

What a :class:`CudaMachine` asks CUDA was never asked on a machine with several GPUs so far.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tierbed._native import NativeHeap
from tierbed.config.words import ExchangeKind
from tierbed.dist.device.heap import Hosts
from tierbed.dist.device.torch_heap import why_no_heap
from tierbed.dist.nodes import NODE_VARIABLE, Nodes, opens
from tierbed.errors import UnsupportedError

__all__ = [
    "CudaMachine",
    "HostMachine",
    "Machine",
    "Seat",
    "agree_on_nodes",
    "gpu_uuid",
    "nodes_of_devices",
]

# Pairs of ranks that an error lists.
PAIRS_MAX = 4
# Torch shares a GPU between processes only for tests.
OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where the device of a rank is, as others know it.

    Args:
        host: Name of its machine.
        memory: Whose memory ranks would write: ``"device"`` or ``"host"``.
        device: The GPU, or the path of some memory of the host.
        token: What that memory begins with.
        node: Splits ranks for tests: those with other values do not reach each other.
        refusal: Why this rank can share no memory; empty where it can.
    """

    host: str
    memory: str
    device: str
    token: int = 0
    node: str | None = None
    refusal: str = ""


class Machine(Protocol):
    """What a rank knows of its own device, and of those of others."""

    def seat(self) -> Seat:
        """Returns where its device is."""

    def reaches(self, other: Seat) -> bool:
        """Returns whether this rank's kernels can write the memory of ``other``."""


class HostMachine:
    """Memory of the host, which all devices of the host write."""

    def __init__(self) -> None:
        self._token = secrets.randbits(64)
        # It is kept until everybody has tried to open it.
        self._made = NativeHeap.create(1, 1, self._token)

    def seat(self) -> Seat:
        """As :meth:`Machine.seat`."""
        return Seat(
            host=socket.gethostname(),
            memory="host",
            device=str(self._made.path),
            token=self._token,
            node=os.environ.get(NODE_VARIABLE),
        )

    def reaches(self, other: Seat) -> bool:
        """As :meth:`Machine.reaches`."""
        return opens(other.device, other.token)


class CudaMachine:
    """A GPU that other GPUs of the machine may write.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seat(self) -> Seat:
        """As :meth:`Machine.seat`."""
        return Seat(
            host=socket.gethostname(),
            memory="device",
            device=gpu_uuid(self._device),
            node=os.environ.get(NODE_VARIABLE),
            refusal=why_no_heap() or "",
        )

    def reaches(self, other: Seat) -> bool:
        """As :meth:`Machine.reaches`; a GPU that this process does not see is not reached."""
        if other.host != socket.gethostname():
            return False
        if other.device == gpu_uuid(self._device):
            return os.environ.get(OVERLAP_VARIABLE) == "1"
        for index in range(torch.cuda.device_count()):
            if gpu_uuid(torch.device("cuda", index)) == other.device:
                return torch.cuda.can_device_access_peer(self._device, index)
        return False


def agree_on_nodes(hosts: Hosts, kind: ExchangeKind, machine: Machine) -> Nodes:
    """Decides how vectors travel between devices; all ranks call this together.

    Args:
        hosts: This rank among the others.
        kind: What the user asked for.
        machine: What this rank knows.

    Returns:
        One node of all ranks where their devices write each other's memory, else one for each.

    Raises:
        UnsupportedError: As :func:`nodes_of_devices`; all ranks get it.
    """
    seats = hosts.gather(machine.seat())
    own = seats[hosts.rank]
    reached = [
        at == hosts.rank
        or (other.node == own.node and other.memory == own.memory and machine.reaches(other))
        for at, other in enumerate(seats)
    ]
    return nodes_of_devices(hosts.rank, kind, seats, hosts.gather(reached))


def nodes_of_devices(
    rank: int, kind: ExchangeKind, seats: Sequence[Seat], reached: Sequence[Sequence[bool]]
) -> Nodes:
    """Decides how vectors travel, from what all ranks told: alike on all of them.

    Args:
        rank: This rank.
        kind: What the user asked for.
        seats: Of all ranks.
        reached: Per rank, whose device its own reaches.

    Returns:
        As :func:`agree_on_nodes`.

    Raises:
        UnsupportedError: ``"one_sided"``, and not all devices reach each other; or ranks whose
            memory is of different kinds.
    """
    count, names = len(seats), [seat.host for seat in seats]
    if len({seat.memory for seat in seats}) > 1:
        told = {f"rank {at}": seat.memory for at, seat in enumerate(seats)}
        raise UnsupportedError(
            f"ranks would share memory of different kinds: {told}; give all a DeviceStore of one "
            "kind of device, and the same ProcessRank(device_heap=...)"
        )
    apart = [
        (one, other)
        for one, other in itertools.combinations(range(count), 2)
        if not (reached[one][other] and reached[other][one])
    ]
    refusals = [(at, seat.refusal) for at, seat in enumerate(seats) if seat.refusal]
    each = Nodes(rank=rank, count=count, ranks_each=1, hosts=names)
    if kind == "collective":
        return each
    if not apart and not refusals:
        return Nodes(rank=rank, count=1, ranks_each=count, hosts=names)
    if kind == "auto":
        return each
    raise UnsupportedError(
        f"devices of all ranks must write each other's memory for exchange='one_sided', but "
        f"{_told(each, apart, refusals)}; use exchange='auto', or let all processes of one host "
        "see all its GPUs, or share pinned memory of one host: ProcessRank(device_heap='pinned')"
    )


def _told(
    nodes: Nodes, apart: Sequence[tuple[int, int]], refusals: Sequence[tuple[int, str]]
) -> str:
    """Says who reaches whom not, and why."""
    found = [f"{nodes.name(at)}: {why}" for at, why in refusals[:1]]
    found += [
        f"{nodes.name(one)} and {nodes.name(other)} do not reach each other"
        for one, other in apart[:PAIRS_MAX]
    ]
    if len(apart) > PAIRS_MAX:
        found.append(f"nor do {len(apart) - PAIRS_MAX} other pairs")
    return ", ".join(found)


def gpu_uuid(device: torch.device) -> str:
    """Returns what a GPU is called by every process that sees it."""
    return str(torch.cuda.get_device_properties(device).uuid)
