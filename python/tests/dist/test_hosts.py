"""Hosts of namespaces: apart like machines, with links that count, and ends that others see."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hosts_kit import MakeHosts

from tierbed.errors import TierbedError
from tierbed_bench.hosts import PROGRAM, sent_bytes

TIMEOUT_S = 3.0
SHARED = Path("/dev/shm")


def look_into_the_memory_of_others() -> list[bool]:
    """Tells whose memory this rank reads, by rank, through /proc and /dev/shm alike."""
    token = secrets.token_bytes(16)
    file = os.memfd_create("rank")
    os.write(file, token)
    named = SHARED / f"rank-{dist.get_rank()}"
    named.write_bytes(token)
    told: list[tuple[str, str, bytes]] = [("", "", b"")] * dist.get_world_size()
    dist.all_gather_object(told, (f"/proc/{os.getpid()}/fd/{file}", str(named), token))
    seen = []
    for unnamed, path, wanted in told:
        found = []
        for one in (unnamed, path):
            # A process of this host may have the number of one elsewhere: content tells.
            try:
                found.append(Path(one).read_bytes() == wanted)
            except OSError:
                found.append(False)
        assert found[0] == found[1]
        seen.append(found[0])
    dist.barrier()
    return seen


@pytest.mark.parametrize("launcher", ["env", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_hosts_share_no_memory_and_ranks_of_one_do(
    make_hosts: MakeHosts, tmp_path: Path, launcher: str
) -> None:
    two = make_hosts(2)
    seen = two.run(
        look_into_the_memory_of_others, folder=tmp_path, local_ranks=2, launcher=launcher
    )
    assert seen == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2
    assert not list(SHARED.glob("rank-*"))


def sent_again() -> int:
    """Returns how many segments this host sent twice: a busy machine answers late."""
    names, numbers = [
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line
    ]
    return int(numbers[names.index("RetransSegs")])


def send(count: int) -> tuple[int, int]:
    """Sends ``count`` bytes from rank 0 to rank 1; returns bytes and segments sent again."""
    values = torch.zeros(count, dtype=torch.uint8)
    dist.barrier()
    before = sent_bytes(), sent_again()
    if dist.get_rank() == 0:
        dist.send(values, 1)
    else:
        dist.recv(values, 0)
    # Of a send that has returned, some bytes may wait in the kernel.
    dist.barrier()
    return sent_bytes() - before[0], sent_again() - before[1]


def test_interfaces_count_what_gloo_sends(make_hosts: MakeHosts, tmp_path: Path) -> None:
    two = make_hosts(2, is_single_frames=True)
    count = 2_000_000
    (sent, again), (answered, _) = two.run(send, count, folder=tmp_path)
    # A frame of 1,514 bytes has 1,448 of payload; what gloo says of a message is small.
    least = count * 1514 / 1448
    assert least <= sent <= least + 10_000 + 1514 * again
    assert answered < 0.1 * count
    outside = two.counters()
    assert outside[0]["sent_bytes"] == outside[1]["received_bytes"] >= sent
    assert outside[1]["sent_bytes"] == outside[0]["received_bytes"]
    assert all(one["dropped_frames"] == 0 for one in outside)


def test_nothing_is_sent_that_no_program_sends(make_hosts: MakeHosts) -> None:
    three = make_hosts(3, rate="1gbit")
    time.sleep(0.3)
    assert [(one["sent_bytes"], one["received_bytes"]) for one in three.counters()] == [(0, 0)] * 3


def wait_for_the_other(folder: Path) -> float:
    """Says that it is there, and sums with the others until that fails; returns after how long."""
    (folder / f"there-{dist.get_rank()}").touch()
    last = time.monotonic()
    try:
        while True:
            dist.all_reduce(torch.ones(1))
            last = time.monotonic()
    except RuntimeError:
        return time.monotonic() - last


# A killed process leaves its connections closed, a cut cable leaves the time-out.
@pytest.mark.parametrize("how", ["kill", pytest.param("cut", marks=pytest.mark.slow)])
def test_a_host_that_is_gone_is_seen_by_the_others(
    make_hosts: MakeHosts, tmp_path: Path, how: str
) -> None:
    two = make_hosts(2)
    ranks = two.start(wait_for_the_other, tmp_path, folder=tmp_path, timeout_s=TIMEOUT_S)
    ranks.await_file("there-0")
    ranks.await_file("there-1")
    getattr(two, how)(1)
    first, second = ranks.results(TIMEOUT_S + 20)
    assert first.is_back
    assert first.error is None, first.error
    assert first.value < TIMEOUT_S + 5
    assert second.is_back == (how == "cut")


def test_hosts_are_made_once_and_end_with_who_asked(tmp_path: Path) -> None:
    name = f"u{os.getpid()}"
    hosts = [str(PROGRAM), "--name", name]
    if subprocess.run([PROGRAM, "check"], capture_output=True).returncode != 0:
        pytest.skip("no hosts here: see scripts/hosts check")

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*hosts, *words], capture_output=True, text=True)

    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        first = ask("up", "2", "--until", str(owner.pid))
        assert first.returncode == 0, first.stderr
        assert "are up" in ask("up", "2").stdout
        other = ask("up", "3")
        assert other.returncode == 1
        assert "give another --name" in other.stderr
        assert ask("run", "1", "sh", "-c", "hostname; exit 7").stdout == f"{name}-1\n"
        assert ask("run", "1", "sh", "-c", "exit 7").returncode == 7
        assert "hosts are 0 to 1" in ask("run", "2", "true").stderr
        ended = ask("run", "0", "sh", "-c", "kill -9 $$")
        assert ended.returncode == 128 + 9
    finally:
        owner.communicate(b"\n")
    until = time.monotonic() + 10
    while "was ended" not in (told := ask("run", "0", "true").stderr):
        assert time.monotonic() < until, told
    assert ask("down").returncode == 0
    assert ask("down").returncode == 0
    assert "no hosts are up" in ask("bytes").stderr


def test_a_rank_that_fails_tells_why(make_hosts: MakeHosts, tmp_path: Path) -> None:
    one = make_hosts(1)
    with pytest.raises(TierbedError, match="rank 0 failed: ZeroDivisionError"):
        one.run(divide, 1, 0, folder=tmp_path)


def divide(left: int, right: int) -> float:
    return left / right
