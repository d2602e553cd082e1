"""Cases of servers on a Ray cluster of two nodes, run in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray_cases import start_cluster

import tierbed as tb
from tierbed.cli import main as tierbed
from tierbed.serve.ray_servers import (
    RayServer,
    ServerOptions,
    ray_servers,
    start_ray_servers,
    stop_ray_servers,
)

PROGRAM = f"{sys.executable} -m tierbed serve"
OPTIONS = ServerOptions(servers=2, name="rows", port=0, cpus=0.5, program=PROGRAM)


def _snapshot(folder: Path) -> Path:
    torch.manual_seed(3)
    tb.placement.import_tables({"item": torch.rand(100, 8)}, folder / "snapshot")
    return folder / "snapshot"


def _rows(server: RayServer) -> int:
    """Asks a server itself, without Ray."""
    with urllib.request.urlopen(f"http://{server.address}/health", timeout=10) as answer:
        return int(json.load(answer)["rows"])


def _await(what: Callable[[list[RayServer]], bool], seconds: float = 90.0) -> list[RayServer]:
    until = time.monotonic() + seconds
    while not what(found := ray_servers("rows")):
        assert time.monotonic() < until, found
        time.sleep(0.1)
    return found


def _lives(pid: int | None) -> bool:
    assert pid is not None
    return Path(f"/proc/{pid}").exists()


def _parent(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _ready_again(before: RayServer) -> Callable[[list[RayServer]], bool]:
    return lambda found: found[0].is_ready and found[0].pid != before.pid


def cases(folder: Path) -> dict[str, Any]:
    """Starts servers, ends one and then an actor, and tells what came of it."""
    snapshot = str(_snapshot(folder))
    told: dict[str, Any] = {}
    first = start_ray_servers([snapshot], OPTIONS)
    told["rows"] = [_rows(one) for one in first]
    told["addresses"] = len({one.address for one in first})
    told["nodes"] = len({one.node for one in first})
    again = start_ray_servers([snapshot], OPTIONS)
    told["stays"] = [one.pid for one in again] == [one.pid for one in first]

    assert first[0].pid is not None
    os.kill(first[0].pid, signal.SIGKILL)
    second = _await(_ready_again(first[0]))
    told["server_killed"] = {
        "starts": second[0].start_count,
        "exit": second[0].last_exit,
        "rows": _rows(second[0]),
        "other_stays": second[1].pid == first[1].pid,
    }

    os.kill(_parent(second[0].pid), signal.SIGKILL)
    third = _await(_ready_again(second[0]))
    told["actor_killed"] = {
        "rows": _rows(third[0]),
        "starts": third[0].start_count,
        "old_lives": _lives(second[0].pid),
        "other_stays": third[1].pid == first[1].pid,
    }

    members = folder / "members"
    asked = ["ray", "status", "--name", "rows", "--members", str(members)]
    told["status"] = tierbed([*asked, "--json", str(folder / "status.json")])
    told["members"] = members.read_text().split() == [one.address for one in third]
    told["more"] = _refused([snapshot], ServerOptions(**{**vars(OPTIONS), "servers": 3}))
    told["larger"] = _refused([snapshot], ServerOptions(**{**vars(OPTIONS), "cpus": 2.0}))
    told["other"] = _refused([snapshot, "--dram-budget", "64MiB"], OPTIONS)
    told["ended"] = stop_ray_servers("rows")
    told["left"] = [_lives(one.pid) for one in third]
    told["status_after"] = tierbed(["ray", "status", "--name", "rows"])
    bad = ServerOptions(**{**vars(OPTIONS), "servers": 1, "program": "false"})
    try:
        start_ray_servers([str(folder / "absent")], bad, wait_s=4.0)
    except tb.TierbedError as error:
        told["absent"] = str(error)
    [tries] = _await(lambda found: found[0].start_count > 1)
    told["tries"] = [tries.start_count, tries.last_exit]
    stop_ray_servers("rows")
    return told


def _refused(words: list[str], options: ServerOptions) -> str:
    try:
        start_ray_servers(words, options)
    except tb.InvalidError as error:
        return str(error)
    return ""


def main() -> None:
    """Starts two nodes, runs the cases, and prints what they found."""
    cluster = start_cluster()
    ray.init(address=cluster.address, namespace="tierbed", log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(cases(Path(folder))))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
