"""Nodes: ranks that share memory.

Names of hosts say little: containers of one host may share no memory. So each rank makes some, and
all try to open it.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tierbed._native import NativeHeap
from tierbed.errors import InvalidError, TierbedError

__all__ = ["NODE_VARIABLE", "Nodes", "find_nodes", "one_node", "opens", "share_heap"]

# Splits ranks that share memory, for tests: those with other values are on other nodes.
NODE_VARIABLE = "TIERBED_NODE"

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Which ranks share memory: nodes of equally many ranks, numbered one after the other.

    Args:
        rank: This rank.
        count: Nodes.
        ranks_each: Ranks of a node.
        hosts: What errors call the host of each rank.
    """

    rank: int
    count: int
    ranks_each: int
    hosts: Sequence[str] = ()

    @property
    def own(self) -> int:
        """The node of this rank."""
        return self.rank // self.ranks_each

    @property
    def rail(self) -> list[int]:
        """The ranks, one of each node, that this one exchanges messages with, itself too."""
        local = self.rank % self.ranks_each
        return [node * self.ranks_each + local for node in range(self.count)]

    def ranks(self) -> range:
        """Returns the ranks of this node."""
        return range(self.own * self.ranks_each, (self.own + 1) * self.ranks_each)

    def name(self, rank: int) -> str:
        """Returns what an error calls ``rank``."""
        host = f" on host {self.hosts[rank]!r}" if self.hosts else ""
        return f"rank {rank}{host}"


def one_node(rank: int, count: int) -> Nodes:
    """Returns the one node of all ranks."""
    return Nodes(rank=rank, count=1, ranks_each=count)


def find_nodes(rank: int, count: int, gather: Gather, *, shares_memory: bool = True) -> Nodes:
    """Finds which ranks share memory; all call this together.

    Args:
        rank: This rank.
        count: Ranks.
        gather: Returns the values of all ranks.
        shares_memory: Without, each rank is a node of its own.

    Raises:
        InvalidError: Ranks of a node do not follow each other, or nodes have unequal numbers.
    """
    if not shares_memory:
        hosts = gather(socket.gethostname())
        return Nodes(rank=rank, count=count, ranks_each=1, hosts=hosts)
    token = secrets.randbits(64)
    made = NativeHeap.create(1, 1, token)
    node = os.environ.get(NODE_VARIABLE)
    told = gather((made.path, token, node, socket.gethostname()))
    reached = [
        at == rank or (other[2] == node and opens(str(other[0]), other[1]))
        for at, other in enumerate(told)
    ]
    # Also keeps the memory of each until everybody has tried.
    found = gather(reached)
    return nodes_of(rank, found, [other[3] for other in told])


def nodes_of(rank: int, reached: Sequence[Sequence[bool]], hosts: Sequence[str]) -> Nodes:
    """Returns the nodes of ranks that reach each other's memory.

    Args:
        rank: This rank.
        reached: Per rank, whose memory it can open.
        hosts: Of each rank.
    """
    count = len(reached)
    first = [next(at for at, opens in enumerate(row) if opens) for row in reached]
    groups: dict[int, list[int]] = {}
    for at, leader in enumerate(first):
        groups.setdefault(leader, []).append(at)
    is_mutual = all(
        reached[one][other] == (first[one] == first[other])
        for one in range(count)
        for other in range(count)
    )
    each = count // len(groups)
    nodes = sorted(groups.values())
    expected = [list(range(at * each, (at + 1) * each)) for at in range(len(groups))]
    if not is_mutual or nodes != expected:
        raise InvalidError(
            f"the ranks that share memory are {nodes}; every host needs equally many, whose "
            "numbers follow each other. Start them with torchrun --nnodes and an equal "
            "--nproc-per-node, or pass exchange='collective'"
        )
    return Nodes(rank=rank, count=len(nodes), ranks_each=each, hosts=hosts)


def share_heap(region_bytes: int, nodes: Nodes, gather: Gather) -> NativeHeap:
    """Returns memory of the first rank of this node that its other ranks open.

    Args:
        region_bytes: Bytes for each rank.
        nodes: Which ranks share memory.
        gather: Returns the values of all ranks.

    Raises:
        TierbedError: Some rank cannot open it; all ranks get an error then.
    """
    heap, failure, told = None, None, None
    leader = nodes.ranks()[0]
    if nodes.rank == leader:
        token = secrets.randbits(64)
        heap = NativeHeap.create(nodes.ranks_each, region_bytes, token)
        told = (heap.path, token)
    found = gather(told)[leader]
    if heap is None:
        try:
            heap = NativeHeap.open(str(found[0]), nodes.ranks_each, found[1])
        except TierbedError as error:
            failure = f"{nodes.name(nodes.rank)}: {error}"
    # Also keeps the file of the first rank open until everybody has opened it.
    failures = [text for text in gather(failure) if text is not None]
    if heap is None or failures:
        raise TierbedError(f"ranks of a node cannot share memory: {failures[0]}")
    return heap


def opens(path: str, token: int) -> bool:
    """Returns whether this process reaches the memory of another one at ``path``."""
    try:
        NativeHeap.open(path, 1, token)
    except TierbedError:
        return False
    return True
