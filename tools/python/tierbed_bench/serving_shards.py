"""What a gateway costs, and what a lost server does to it.

- ``gateway``: a gateway over two shards beside one server of all rows: latency at half of the
  gateway's saturation, and processor time of all processes for a request.
- ``lost_replica``: two servers of each shard; one is killed under an open loop. Requests that
  failed, and the time until the 99th percentile of a second is again within twice that of before.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from threading import Timer
from typing import TYPE_CHECKING, Any

from tierbed_bench.serving_systems import MODEL, Served, System, command, served, started

if TYPE_CHECKING:
    from tierbed_bench.serving_bench import Bench

__all__ = ["gateway", "lost_replica"]

Row = dict[str, Any]
SHARDS = 2
# Seconds before and after a server is killed.
BEFORE, AFTER = 4, 6
# Latency is itself again when it is within this factor.
RECOVERED_FACTOR = 2.0


def gateway(bench: Bench, dram_bytes: int) -> None:
    """Tells latency and processor time of a gateway beside those of one server."""
    one_server = started("tierbed", bench.rows, dram_bytes=dram_bytes, protocols=("lookup",))
    with one_server as [one], _gateway(bench, dram_bytes, replicas=1) as (through, _):
        saturation = bench.sweep("gateway_sweep", through)
        if not saturation:
            bench.absent["gateway"] = "it kept up with no rate"
            return
        rate, seconds = saturation / 2, bench.options.seconds
        runs: dict[str, list[Row]] = {one.name: [], through.name: []}
        for number in range(bench.options.rounds):
            order = (one, through) if number % 2 else (through, one)
            for system in order:
                [_, phase] = bench.load(system, [rate, rate], seconds / 2)
                runs[system.name].append(phase)
        for name, phases in runs.items():
            phases.sort(key=lambda phase: phase["good_us"]["p99"])
            shown = phases[len(phases) // 2]
            cpu_us = median(_cpu_us(phase) for phase in phases)
            bench.tell("gateway", name, {**shown, "cpu_us": cpu_us}, saturation=saturation)


def lost_replica(bench: Bench, dram_bytes: int) -> None:
    """Kills one of two servers of a shard under load."""
    with _gateway(bench, dram_bytes, replicas=2) as (through, replicas):
        saturation = bench.sweep("gateway_sweep", through)
        if not saturation:
            bench.absent["lost_replica"] = "the gateway kept up with no rate"
            return
        rate = saturation / 2
        scale = min(1.0, bench.options.seconds / (BEFORE + AFTER))
        spans = [{"rate": rate, "seconds": scale} for _ in range(BEFORE + AFTER)]
        timer = Timer(scale * BEFORE, os.kill, (replicas[0].pid, signal.SIGKILL))
        timer.start()
        told = bench.ask(through, spans)
        timer.join()
    before = median(phase["good_us"]["p99"] for phase in told[1:BEFORE])
    behind = told[BEFORE:]
    slow = [phase["good_us"]["p99"] > RECOVERED_FACTOR * before for phase in behind]
    recovered = max((at + 1 for at, is_slow in enumerate(slow) if is_slow), default=0)
    failed = sum(phase["offered"] - phase["good"] for phase in told)
    shown = max(behind, key=lambda phase: phase["good_us"]["p99"])
    bench.tell(
        "lost_replica",
        through.name,
        shown,
        failed=failed,
        steady_p99_us=before,
        recovered_s=recovered * scale,
        saturation=saturation,
    )


def _cpu_us(phase: Row) -> float:
    return float(phase["server_cpu_us"] / max(phase["good"], 1))


@contextlib.contextmanager
def _gateway(
    bench: Bench, dram_bytes: int, *, replicas: int
) -> Iterator[tuple[System, list[Served]]]:
    """Starts servers of all shards and a gateway before them; gives both."""
    rows = bench.rows
    folder = rows.folder / f"shards-{replicas}"
    command("shards", out=str(folder), shape=rows.shape, count=SHARDS)
    with contextlib.ExitStack() as running:
        servers: list[Served] = []
        members: list[Row] = []
        for shard in range(SHARDS):
            own = []
            for replica in range(replicas):
                log = folder / f"{shard}-{replica}.log"
                place = folder / f"shard.{shard}"
                options = ["--grpc-address", "127.0.0.1:0"]
                server = running.enter_context(served(place, log, dram_bytes // SHARDS, options))
                servers.append(server)
                own.append(server.grpc)
            members.append({"replicas": own})
        named = folder / "members.json"
        named.write_text(json.dumps({"shard": members}))
        options = ["--route", str(folder), "--members", str(named)]
        gateway = running.enter_context(_routed(folder / "gateway.log", options, dram_bytes))
        target = {"protocol": "lookup", "address": gateway.http, "model": f"{MODEL}.rows"}
        # The first one is killed where there are several: its time cannot be read to the end.
        counted = servers if replicas == 1 else servers[1:]
        pids = (gateway.pid, *(server.pid for server in counted))
        yield System(name="tierbed_gateway", target=target, pids=pids), servers


@contextlib.contextmanager
def _routed(log: Path, options: list[str], dram_bytes: int) -> Iterator[Served]:
    with served(None, log, dram_bytes, [*options, "--model-name", MODEL]) as gateway:
        yield gateway
