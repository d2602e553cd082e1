"""How vectors of devices travel is decided alike on all ranks, whatever machines there are."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from test_ranks import run_ranks

import tierbed as tb
from tierbed.dist.device import reach
from tierbed.dist.device.reach import CudaMachine, HostMachine, Seat, agree_on_nodes

# Hosts of four ranks, and the GPUs of the first host that reach no other one there.
MACHINES: dict[str, tuple[str, set[int]]] = {
    "one host": ("aaaa", set()),
    "a GPU without a link": ("aaaa", {2}),
    "two hosts": ("aabb", set()),
    "two hosts in turn": ("abab", set()),
    "three hosts": ("abcc", set()),
    "each its own": ("abcd", set()),
}


@dataclass
class FakeMachine:
    """A machine with GPUs as a test describes it."""

    rank: int
    hosts: str
    alone: Collection[int]
    memory: str
    refusal: str

    def seat(self) -> Seat:
        host = self.hosts[self.rank]
        return Seat(host=host, memory=self.memory, device=str(self.rank), refusal=self.refusal)

    def reaches(self, other: Seat) -> bool:
        is_near = other.host == self.hosts[self.rank]
        # One way is not enough: only this side says that there is no link.
        return is_near and self.rank not in self.alone


def decide(
    hosts: str,
    kind: Any,
    alone: Collection[int] = (),
    memory: Mapping[int, str] = MappingProxyType({}),
    refusal: Mapping[int, str] = MappingProxyType({}),
) -> list[Any]:
    """Returns what each rank decided: how many nodes, or its error."""

    def work(rank: Any) -> Any:
        at = rank.rank
        machine = FakeMachine(at, hosts, alone, memory.get(at, "device"), refusal.get(at, ""))
        try:
            return agree_on_nodes(rank, kind, machine).count
        except tb.UnsupportedError as error:
            return str(error)

    return run_ranks(len(hosts), work)


@pytest.mark.parametrize("name", MACHINES)
def test_all_ranks_decide_alike(name: str) -> None:
    hosts, alone = MACHINES[name]
    is_one = len(set(hosts)) == 1 and not alone
    assert decide(hosts, "auto", alone=alone) == [1 if is_one else 4] * 4
    assert decide(hosts, "collective", alone=alone) == [4] * 4
    told = decide(hosts, "one_sided", alone=alone)
    assert len(set(told)) == 1, told
    if is_one:
        assert told[0] == 1
        return
    apart = [
        f"rank {one} on host '{hosts[one]}' and rank {other} on host '{hosts[other]}'"
        for one, other in itertools.combinations(range(4), 2)
        if hosts[one] != hosts[other] or {one, other} & alone
    ]
    for pair in apart[:4]:
        assert f"{pair} do not reach each other" in told[0]
    assert (f"nor do {len(apart) - 4} other pairs" in told[0]) == (len(apart) > 4)
    assert "use exchange='auto'" in told[0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_ranks_decide_alike(count: int) -> None:
    assert decide("a" * count, "auto") == [1] * count
    assert decide("a" * count, "one_sided") == [1] * count
    assert decide("abc"[:count], "auto") == [count] * count


def test_a_rank_without_symmetric_memory_is_named_on_all() -> None:
    refusal = {1: "torch 2.8.0 has another symmetric memory than 2.11"}
    assert decide("aaa", "auto", refusal=refusal) == [3] * 3
    told = decide("aaa", "one_sided", refusal=refusal)
    assert len(set(told)) == 1
    assert "rank 1 on host 'a': torch 2.8.0 has another" in told[0]


def test_memory_of_different_kinds_is_refused_on_all() -> None:
    for kind in ("auto", "one_sided", "collective"):
        told = decide("aaa", kind, memory={2: "host"})
        assert len(set(told)) == 1
        assert "'rank 2': 'host'" in told[0]
        assert "give all a DeviceStore of one kind of device" in told[0]
    assert decide("aaa", "one_sided", memory=dict.fromkeys(range(3), "host")) == [1] * 3


def test_memory_of_the_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(2, lambda rank: agree_on_nodes(rank, "auto", HostMachine()).count) == [1, 1]
    own = HostMachine()
    seat = own.seat()
    assert own.reaches(seat)
    # Containers number processes each from 1: another one has this path.
    other = Seat(host=seat.host, memory="host", device=seat.device, token=seat.token + 1)
    assert not own.reaches(other)
    # Ranks of other nodes of a test share nothing.
    monkeypatch.setenv("TIERBED_NODE", "second")
    second = HostMachine().seat()
    monkeypatch.delenv("TIERBED_NODE")

    class Second(HostMachine):
        def seat(self) -> Seat:
            return second

    def work(rank: Any) -> int:
        return agree_on_nodes(rank, "auto", Second() if rank.rank else HostMachine()).count

    assert run_ranks(2, work) == [2, 2]


def test_gpus_are_found_among_those_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA is asked, by a stand-in: the process sees GPUs 5 and 7 of the host."""
    seen = ["gpu-5", "gpu-7"]
    asked = []

    def access(own: torch.device, index: int) -> bool:
        asked.append((own.index, index))
        return True

    monkeypatch.setattr(reach, "gpu_uuid", lambda device: seen[device.index])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", access)
    machine = CudaMachine(torch.device("cuda", 1))
    seat = machine.seat()
    assert (seat.memory, seat.device, seat.refusal) == ("device", "gpu-7", "")

    def at(device: str, host: str = seat.host) -> Seat:
        return Seat(host=host, memory="device", device=device)

    assert machine.reaches(at("gpu-5"))
    assert asked == [(1, 0)]
    assert not machine.reaches(at("gpu-6"))
    assert not machine.reaches(at("gpu-5", host="elsewhere"))
    # Two processes of one GPU, which torch allows only for tests.
    monkeypatch.delenv(reach.OVERLAP_VARIABLE, raising=False)
    assert not machine.reaches(at("gpu-7"))
    monkeypatch.setenv(reach.OVERLAP_VARIABLE, "1")
    assert machine.reaches(at("gpu-7"))
