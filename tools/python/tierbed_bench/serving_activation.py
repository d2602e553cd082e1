"""What clients notice when the rows change under them.

- ``activation``: at half of a server's saturation, with a share of the rows in memory, a delta
  comes into the folder that the server follows. Latency from five seconds before to ten seconds
  after it stands beside that of a steady run just before. Every checked answer must have the rows
  of one version.
- ``activations``: many deltas, one after another, under a light load: the server's memory.
"""

from __future__ import annotations

import os
import time
import urllib.request
from pathlib import Path
from statistics import median
from threading import Timer
from typing import TYPE_CHECKING, Any

from tierbed_bench.serving_systems import System, command, started

if TYPE_CHECKING:
    from tierbed_bench.serving import Bench

__all__ = ["activation", "activations"]

Row = dict[str, Any]
# Before and after a delta, seconds.
BEFORE_S, AFTER_S = 5.0, 10.0
# Deltas until memory is expected to stay where it is.
SETTLED_AFTER = 10
APPLY_S_MAX = 60.0


def activation(bench: Bench, dram_bytes: int) -> None:
    """Brings a delta at half load, a few times; tells latencies beside those of steady runs."""
    options = bench.options
    deltas = _folder(bench)
    scale = min(1.0, options.seconds / AFTER_S)
    before_s, after_s = scale * BEFORE_S, scale * AFTER_S
    # Counters are asked for at the same address, over HTTP.
    protocol = next((one for one in options.protocols if one != "grpc"), "infer")
    with started(
        "tierbed", bench.rows, dram_bytes=dram_bytes, protocols=(protocol,), deltas=deltas
    ) as [system]:
        saturation = bench.sweep("limited", system)
        if not saturation:
            bench.absent[f"{system.name} activation"] = "it kept up with no rate"
            return
        for version in range(1, options.rounds + 1):
            delta = _write(bench, version)
            phases = {"rate": saturation / 2, "seconds": before_s + after_s}
            versions = version - 1
            bench.ask(system, [phases], versions=versions)
            at_start = _counters(system)
            [steady] = bench.ask(system, [phases], versions=versions)
            at_delta = _counters(system)
            timer = Timer(before_s, os.rename, (delta, deltas / delta.name))
            timer.start()
            [around] = bench.ask(system, [phases], versions=version)
            timer.join()
            at_end = _wait_applied(system, version)
            bench.tell(
                "activation",
                system.name,
                around,
                saturation=saturation,
                lost=around["offered"] - around["good"],
                steady_p99_us=steady["good_us"]["p99"],
                p99_ratio=_share(around["good_us"]["p99"], steady["good_us"]["p99"]),
                p999_ratio=_share(around["good_us"]["p999"], steady["good_us"]["p999"]),
                steady_is_void=steady["is_void"],
                steady_hit_share=_hits(at_start, at_delta),
                hit_share=_hits(at_delta, at_end),
            )


def activations(bench: Bench, dram_bytes: int, count: int) -> None:
    """Brings many deltas, and tells the server's memory after some of them and after all."""
    deltas = _folder(bench)
    with started(
        "tierbed", bench.rows, dram_bytes=dram_bytes, protocols=("lookup",), deltas=deltas
    ) as [system]:
        phase = {"rate": float(bench.options.first_rate) / 4, "seconds": 0.25}
        memory, applied_s, lost = [], [], 0
        for version in range(1, count + 1):
            delta = _write(bench, version)
            os.rename(delta, deltas / delta.name)
            start_s = time.monotonic()
            _wait_applied(system, version)
            applied_s.append(time.monotonic() - start_s)
            [told] = bench.ask(system, [phase], versions=version)
            lost += told["offered"] - told["good"]
            memory.append(_memory_bytes(system.pids[0]))
        settled = memory[min(SETTLED_AFTER, count) - 1]
        bench.told.append(
            {
                "part": "activations",
                "system": system.name,
                "deltas": count,
                "lost": lost,
                "seen_after_s": median(applied_s),
                "settled_bytes": settled,
                "memory_bytes": memory[-1],
                "memory_grown_bytes": memory[-1] - settled,
            }
        )


def _folder(bench: Bench) -> Path:
    """A new folder that a server can follow."""
    number = sum(1 for _ in bench.rows.folder.glob("deltas*"))
    deltas = bench.rows.folder / f"deltas-{number}"
    deltas.mkdir()
    return deltas


def _write(bench: Bench, version: int) -> Path:
    """Writes a delta against the snapshot, beside the folders that are followed."""
    delta = bench.rows.folder / f"delta-{version}"
    rows = bench.rows
    command("delta", out=str(delta), snapshot=str(rows.snapshot), shape=rows.shape, version=version)
    return delta


def _counters(system: System) -> dict[str, float]:
    """All numbers of ``/metrics`` that have no labels."""
    url = f"http://{system.target['address']}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.split(" ") for line in lines if line and line[0] != "#" and "{" not in line)
    return {name: float(value) for name, value in pairs}


def _wait_applied(system: System, version: int) -> dict[str, float]:
    ends_s = time.monotonic() + APPLY_S_MAX
    while True:
        counters = _counters(system)
        if counters["tierbed_generation"] >= version:
            return counters
        if time.monotonic() > ends_s:
            raise RuntimeError(f"version {version} does not answer after {APPLY_S_MAX} s")
        time.sleep(0.05)


def _hits(start: dict[str, float], end: dict[str, float]) -> float | None:
    """Share of the rows that were found in the cache between two looks."""
    hits, misses = (
        end[f"tierbed_cache_{name}_total"] - start[f"tierbed_cache_{name}_total"]
        for name in ("hits", "misses")
    )
    return _share(hits, hits + misses)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _memory_bytes(pid: int) -> int:
    """Anonymous memory of a process: what no file stands behind."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/{pid}/status tells no RssAnon")
