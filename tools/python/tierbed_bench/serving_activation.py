"""What clients notice when the rows change under them.

- ``activation``: at half of a server's saturation, with a share of the rows in memory, a delta
  comes into the folder that the server follows. Latency from five seconds before to ten seconds
  after it stands beside that of a steady run just before. Every checked answer must have the rows
  of one version.
  Triton, where it is one of the peers, loads all rows again in place of the delta: that is its way
  to change them.
- ``activations``: many deltas, one after another, under a light load: the server's memory.
"""

from __future__ import annotations

import os
import shutil
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from threading import Timer
from typing import TYPE_CHECKING, Any

import tierbed as tb
from tierbed_bench.serving_systems import System, command, started
from tierbed_bench.serving_triton import ROWS_MODEL, Triton, rows_served, write_rows

if TYPE_CHECKING:
    from tierbed_bench.serving_bench import Bench

__all__ = ["activation", "activations", "memory_bytes", "reload"]

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
            bench.ask(system, [_phase(bench, saturation)], versions=version - 1)
            at_start = _counters(system)
            steady = _steady(bench, system, saturation, version - 1)
            at_delta = _counters(system)
            arrive = partial(os.rename, delta, deltas / delta.name)
            around = _around(bench, system, saturation, version, arrive)
            at_end = _wait_applied(system, version)
            _tell(
                bench,
                system,
                steady,
                around,
                saturation=saturation,
                steady_hit_share=_hits(at_start, at_delta),
                hit_share=_hits(at_delta, at_end),
            )


def reload(bench: Bench) -> None:
    """Has Triton load all rows again at half load, a few times, as :func:`activation`.

    Raises:
        AbsentError: Triton is not installed.
    """
    rows, folder = bench.rows, bench.rows.folder / "reloaded"
    with rows_served(rows.snapshot, folder, int(rows.shape["id_count"])) as running:
        target = {"protocol": "infer", "address": running.http, "model": ROWS_MODEL}
        # The processes of its models end where these are loaded again.
        system = System(name="triton", target=target, pids=running.pids[:1])
        saturation = bench.sweep("sweep", system)
        if not saturation:
            bench.absent[f"{system.name} activation"] = "it kept up with no rate"
            return
        for version in range(1, bench.options.rounds + 1):
            applied = folder / f"applied-{version}"
            delta = _write(bench, version)
            tb.Snapshot.apply(rows.snapshot, delta, applied)
            write_rows(applied, folder / "next.npy")
            shutil.rmtree(applied)
            shutil.rmtree(delta)
            bench.ask(system, [_phase(bench, saturation)], versions=version - 1)
            steady = _steady(bench, system, saturation, version - 1)
            arrive = partial(_replace_rows, running, folder)
            around = _around(bench, system, saturation, version, arrive)
            _tell(bench, system, steady, around, saturation=saturation)


def _replace_rows(running: Triton, folder: Path) -> None:
    os.rename(folder / "next.npy", folder / "rows.npy")
    running.load(ROWS_MODEL)


def _phase(bench: Bench, saturation: float) -> Row:
    """Half load from before a delta until after it."""
    scale = min(1.0, bench.options.seconds / AFTER_S)
    return {"rate": saturation / 2, "seconds": scale * (BEFORE_S + AFTER_S)}


def _steady(bench: Bench, system: System, saturation: float, versions: int) -> Row:
    [steady] = bench.ask(system, [_phase(bench, saturation)], versions=versions)
    return steady


def _around(
    bench: Bench, system: System, saturation: float, versions: int, arrive: Callable[[], None]
) -> Row:
    """Asks while ``arrive`` brings other rows."""
    phase = _phase(bench, saturation)
    failed: list[BaseException] = []

    def bring() -> None:
        try:
            arrive()
        except BaseException as error:
            failed.append(error)

    timer = Timer(phase["seconds"] * BEFORE_S / (BEFORE_S + AFTER_S), bring)
    timer.start()
    [around] = bench.ask(system, [phase], versions=versions)
    timer.join()
    if failed:
        raise failed[0]
    return around


def _tell(bench: Bench, system: System, steady: Row, around: Row, **more: Any) -> None:
    bench.tell(
        "activation",
        system.name,
        around,
        lost=around["offered"] - around["good"],
        steady_p99_us=steady["good_us"]["p99"],
        p99_ratio=_share(around["good_us"]["p99"], steady["good_us"]["p99"]),
        p999_ratio=_share(around["good_us"]["p999"], steady["good_us"]["p999"]),
        steady_is_void=steady["is_void"],
        **more,
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
            memory.append(memory_bytes(system.pids[0]))
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


def memory_bytes(pid: int) -> int:
    """Anonymous memory of a process: what no file stands behind."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/{pid}/status tells no RssAnon")
