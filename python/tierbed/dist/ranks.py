"""Ranks, and memory that they share."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tierbed._native import NativeHeap
from tierbed.config.words import DeviceHeapKind, ExchangeKind, check_word
from tierbed.dist.device.heap import DeviceHeap
from tierbed.dist.device.host_heap import HostHeap
from tierbed.dist.device.local_heap import LocalHeap
from tierbed.dist.device.messages import GroupMessages, Messages, WireMessages
from tierbed.dist.device.reach import (
    CudaMachine,
    HostMachine,
    Seat,
    agree_on_nodes,
    gpu_uuid,
    nodes_of_devices,
)
from tierbed.dist.device.torch_heap import TorchHeap
from tierbed.dist.nodes import Nodes, find_nodes, share_heap
from tierbed.dist.wire import Connected, LocalNetwork, LocalWire, TorchWire, Wire
from tierbed.errors import InvalidError, TierbedError, UnsupportedError

# How long ranks of a process wait for each other where no time-out was given.
GATHER_SECONDS = 600.0

__all__ = ["LocalRank", "ProcessRank", "Rank", "local_ranks"]


class Rank(Protocol):
    """One rank among others."""

    @property
    def rank(self) -> int:
        """Its number, from 0."""

    @property
    def count(self) -> int:
        """How many there are."""

    def find_nodes(self, kind: ExchangeKind) -> Nodes:
        """Returns which ranks share memory, as far as ``kind`` uses it; all call this together."""

    def share_heap(self, region_bytes: int, nodes: Nodes) -> NativeHeap:
        """Returns memory that the ranks of this node share; all call this together."""

    def wire(self, nodes: Nodes, timeout_s: float) -> Wire:
        """Returns the way to the other nodes; all call this together."""

    def find_device_nodes(self, kind: ExchangeKind, device: torch.device) -> Nodes:
        """Returns one node where all devices write each other's memory, else one for each rank.

        All call this together, and all decide alike.
        """

    def share_device_heap(self, device: torch.device) -> DeviceHeap:
        """Returns memory that the devices of all ranks write; all call this together."""

    def device_messages(self, nodes: Nodes, device: torch.device, timeout_s: float) -> Messages:
        """Returns collective calls between devices; all call this together."""

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, that of rank 0 first; all call this together."""


class LocalRank:
    """A rank that is a thread of this process: for tests, and to try shardings.

    See :func:`local_ranks`.

    Args:
        rank: Its number.
        count: How many there are.
        process: What the ranks of this process share.
        device_heap: How ranks share memory of devices; see :func:`local_ranks`.
    """

    def __init__(
        self, rank: int, count: int, process: _Process, device_heap: DeviceHeapKind = "auto"
    ) -> None:
        self._rank = rank
        self._count = count
        self._process = process
        check_word("device_heap", device_heap, DeviceHeapKind)
        self._device_heap = device_heap
        self._taken = 0
        self._wires = 0

    @property
    def rank(self) -> int:
        """Its number, from 0."""
        return self._rank

    @property
    def count(self) -> int:
        """How many there are."""
        return self._count

    def find_nodes(self, kind: ExchangeKind) -> Nodes:
        """Returns the nodes that :func:`local_ranks` was asked for.

        Args:
            kind: ``"collective"`` makes each rank a node of its own.

        Raises:
            UnsupportedError: ``"one_sided"``, and there are several nodes.
        """
        count = self._count if kind == "collective" else self._process.node_count
        nodes = Nodes(rank=self._rank, count=count, ranks_each=self._count // count)
        return _allowed(nodes, kind)

    def share_heap(self, region_bytes: int, nodes: Nodes) -> NativeHeap:
        """Returns the next heap of the node; whoever comes first makes it.

        Args:
            region_bytes: Bytes for each rank.
            nodes: Which ranks share memory.
        """
        with self._process.lock:
            heaps = self._process.heaps.setdefault((nodes.count, nodes.own), [])
            if self._taken == len(heaps):
                heaps.append(NativeHeap.local(nodes.ranks_each, region_bytes))
            heap = heaps[self._taken]
            self._taken += 1
            return heap

    def wire(self, nodes: Nodes, timeout_s: float) -> Wire:
        """Returns messages between threads.

        Args:
            nodes: Which ranks share memory.
            timeout_s: How long another rank may be silent.
        """
        with self._process.lock:
            networks = self._process.networks
            if self._wires == len(networks):
                networks.append(LocalNetwork())
            network = networks[self._wires]
            self._wires += 1
        return LocalWire(nodes, network, timeout_s)

    def find_device_nodes(self, kind: ExchangeKind, device: torch.device) -> Nodes:
        """Returns one node where :func:`local_ranks` was asked for one.

        Args:
            kind: ``"collective"`` makes each rank a node of its own.
            device: Where rows are.

        Raises:
            UnsupportedError: ``"one_sided"``, and there are several nodes.
        """
        each = self._count // self._process.node_count
        nodes = [rank // each for rank in range(self._count)]
        seats = [Seat(host=f"node {node}", memory="device", device=str(device)) for node in nodes]
        reached = [[one == other for other in nodes] for one in nodes]
        return nodes_of_devices(self._rank, kind, seats, reached)

    def device_messages(self, nodes: Nodes, device: torch.device, timeout_s: float) -> Messages:
        """Returns messages between threads.

        Args:
            nodes: Every rank as a node of its own.
            device: Where tensors are.
            timeout_s: How long another rank may be silent.
        """
        return WireMessages(nodes, self.wire(nodes, timeout_s))

    def share_device_heap(self, device: torch.device) -> DeviceHeap:
        """Returns memory of the device that all ranks of the process share.

        Args:
            device: Where its memory is.
        """
        return HostHeap(self, device) if self._device_heap == "pinned" else LocalHeap(self, device)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, that of rank 0 first.

        Args:
            value: That of this rank; it can be pickled.

        Raises:
            TierbedError: Some rank did not call this within :data:`GATHER_SECONDS`.
        """
        process = self._process
        process.values[self._rank] = value
        try:
            process.barrier.wait(GATHER_SECONDS)
            found = list(process.values)
            # Nobody gathers again before all have looked.
            process.barrier.wait(GATHER_SECONDS)
        except threading.BrokenBarrierError as error:
            raise TierbedError(f"a rank did not join rank {self._rank} in time") from error
        return found


class _Process:
    """What the ranks of a process share."""

    def __init__(self, count: int, node_count: int) -> None:
        self.node_count = node_count
        self.heaps: dict[tuple[int, int], list[NativeHeap]] = {}
        self.networks: list[LocalNetwork] = []
        self.lock = threading.Lock()
        self.values: list[Any] = [None] * count
        self.barrier = threading.Barrier(count)


def local_ranks(
    count: int, *, nodes: int = 1, device_heap: DeviceHeapKind = "auto"
) -> list[LocalRank]:
    """Makes ``count`` ranks of one process, one for each thread.

    Args:
        count: Ranks.
        nodes: Nodes to divide them into, as if each were a host: only ranks of a node share memory.
        device_heap: For a :class:`tierbed.dist.DeviceStore`: ``"auto"`` shares memory of the
            device, ``"pinned"`` that of the host.

    Raises:
        InvalidError: Ranks that cannot be divided into so many nodes of equally many.
    """
    if nodes < 1 or count % nodes:
        raise InvalidError(f"{count} ranks cannot be divided into {nodes} nodes of equally many")
    process = _Process(count, nodes)
    return [LocalRank(rank, count, process, device_heap) for rank in range(count)]


class ProcessRank:
    """This process of a ``torch.distributed`` group, as ``torchrun`` starts it.

    Args:
        group: The process group; by default that of all ranks.
        device_heap: For a :class:`tierbed.dist.DeviceStore`: ``"auto"`` is torch's symmetric
            memory on GPUs, and memory of the host on CPUs; ``"pinned"`` is memory of the host on
            both, for GPUs that cannot write each other's.

    Raises:
        InvalidError: ``torch.distributed`` is not initialised.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, device_heap: DeviceHeapKind = "auto"
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidError(
                "torch.distributed is not initialised; start with torchrun and call "
                'torch.distributed.init_process_group("gloo") first'
            )
        self.group = group
        check_word("device_heap", device_heap, DeviceHeapKind)
        self._device_heap = device_heap

    @property
    def rank(self) -> int:
        """Its number, from 0."""
        return dist.get_rank(self.group)

    @property
    def count(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    def find_nodes(self, kind: ExchangeKind) -> Nodes:
        """Finds which ranks share memory.

        Args:
            kind: ``"collective"`` makes each rank a node of its own.

        Raises:
            UnsupportedError: ``"one_sided"``, and not all ranks share memory.
            InvalidError: Ranks of a node do not follow each other, or nodes have unequal numbers.
        """
        shares_memory = kind != "collective"
        nodes = find_nodes(self.rank, self.count, self.gather, shares_memory=shares_memory)
        return _allowed(nodes, kind)

    def share_heap(self, region_bytes: int, nodes: Nodes) -> NativeHeap:
        """Returns memory of the first rank of this node that its other ranks open.

        Args:
            region_bytes: Bytes for each rank.
            nodes: Which ranks share memory.

        Raises:
            TierbedError: Some rank cannot open it; all ranks get an error then.
        """
        return share_heap(region_bytes, nodes, self.gather)

    def wire(self, nodes: Nodes, timeout_s: float) -> Wire:
        """Returns messages over ``torch.distributed``, by gloo.

        Args:
            nodes: Which ranks share memory.
            timeout_s: How long another rank may be silent.
        """
        return TorchWire(nodes, self.group, timeout_s)

    def find_device_nodes(self, kind: ExchangeKind, device: torch.device) -> Nodes:
        """Decides how vectors travel between devices, alike on all ranks.

        Args:
            kind: ``"collective"`` makes each rank a node of its own.
            device: That of this rank.

        Raises:
            UnsupportedError: ``"one_sided"``, and not all devices reach each other; the message
                names those ranks.
        """
        is_host = self._device_heap == "pinned" or device.type == "cpu"
        return agree_on_nodes(self, kind, HostMachine() if is_host else CudaMachine(device))

    def device_messages(self, nodes: Nodes, device: torch.device, timeout_s: float) -> Messages:
        """Returns collective calls of ``torch.distributed``.

        NCCL between GPUs where the group has it and each rank a GPU of its own; gloo between CPUs.
        Else tensors of GPUs go through memory of the host, by gloo.

        Args:
            nodes: Every rank as a node of its own.
            device: That of this rank.
            timeout_s: How long another rank may be silent.
        """
        wire = TorchWire(nodes, self.group, timeout_s)
        is_cpu = device.type == "cpu"
        backend = "gloo" if is_cpu else "nccl"
        has_backend = is_cpu or f"cuda:{backend}" in str(dist.get_backend_config(self.group))
        told = self.gather((has_backend, "" if is_cpu else gpu_uuid(device)))
        # NCCL takes no GPU twice.
        is_distinct = is_cpu or len({gpu for _, gpu in told}) == self.count
        if not is_distinct or not all(has for has, _ in told):
            return WireMessages(nodes, wire)
        # A call of gloo that nobody ends would keep its group from being closed. One of NCCL that
        # took too long would end the process before the rank is named.
        connected = Connected.beside(self.group, backend, timeout_s if is_cpu else None)
        return GroupMessages(nodes, connected, wire, timeout_s, is_queued=not is_cpu)

    def share_device_heap(self, device: torch.device) -> DeviceHeap:
        """Returns memory that the devices of all ranks write.

        Args:
            device: Where its memory is.
        """
        if self._device_heap == "pinned" or device.type == "cpu":
            return HostHeap(self, device)
        return TorchHeap(self, self.group, device)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, that of rank 0 first.

        Args:
            value: That of this rank; it can be pickled.
        """
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found


def _allowed(nodes: Nodes, kind: ExchangeKind) -> Nodes:
    if kind == "one_sided" and nodes.count > 1:
        raise UnsupportedError(
            f"the ranks are on {nodes.count} nodes that share no memory, and exchange='one_sided' "
            "needs that of all; use exchange='auto'"
        )
    return nodes
