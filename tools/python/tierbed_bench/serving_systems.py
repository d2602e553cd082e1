"""Servers that answer the same rows: Tierbed, Redis, memcached with and without its disk, Triton.

Each is a process of its own, bound to the first processor where there are several: the generator
of load has the second one. Redis and memcached are found on the path, or where
``scripts/bench-deps`` unpacks them, Triton where ``scripts/client-deps`` brings it; what is not
there is left out, with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tierbed import _native
from tierbed._util.bytes import size_text
from tierbed_bench.serving_process import (
    START_S,
    AbsentError,
    end_process,
    free_port,
    on_first_core,
)
from tierbed_bench.serving_triton import rows_served

__all__ = [
    "PEERS",
    "AbsentError",
    "Rows",
    "Served",
    "System",
    "command",
    "find_binary",
    "served",
    "started",
    "unpacked_environment",
]

Row = dict[str, Any]
PEERS = ("redis", "memcached", "extstore", "triton")
MODEL = "tierbed"
TIERBED_SERVE = (sys.executable, "-m", "tierbed.cli", "serve")
MIB = 1 << 20
# Where scripts/bench-deps unpacks servers that are not installed.
UNPACKED = Path(__file__).parents[3] / ".tools" / "peers"
# What memcached needs in memory at least to write to its disk.
EXTSTORE_MIB = 64


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows that all systems have.

    Args:
        folder: What is written goes here.
        shape: Rows, their length, ids of a request, and how uneven these are.
    """

    folder: Path
    shape: Row

    @property
    def snapshot(self) -> Path:
        """Where the snapshot is, once it is written."""
        return self.folder / "snapshot"

    @property
    def byte_count(self) -> int:
        """Bytes of all rows."""
        return 4 * int(self.shape["row_count"]) * int(self.shape["dim"])

    def write(self) -> None:
        """Writes the snapshot."""
        command("write", out=str(self.snapshot), shape=self.shape)


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to ask a running server.

    Args:
        name: In results.
        target: How the generator asks.
        pids: The server's processes.
        may_lose: It is a cache: rows that it has no room for are gone, and no answer has them.
    """

    name: str
    target: Row
    pids: tuple[int, ...]
    may_lose: bool = False


def command(do: str, **fields: Any) -> Row:
    """Carries out one command of ``tierbed_bench::serve``."""
    answer: Row = json.loads(_native.bench_serve(json.dumps({"do": do, **fields})))
    return answer


@contextlib.contextmanager
def started(
    name: str,
    rows: Rows,
    *,
    dram_bytes: int,
    protocols: Sequence[str] = (),
    deltas: Path | None = None,
) -> Iterator[list[System]]:
    """Starts a server and gives the ways to ask it; ends it afterwards.

    Args:
        name: ``tierbed``, or one of :data:`PEERS`.
        rows: What it serves. A server with memory for all of them has them there.
        dram_bytes: Memory for rows; what is no cache takes what it needs.
        protocols: Of Tierbed: ``lookup``, ``infer``, ``grpc``.
        deltas: Of Tierbed: the folder of deltas that it follows.

    Raises:
        AbsentError: The server is not installed.
    """
    if name == "triton":
        with rows_served(rows.snapshot, rows.folder / "triton", int(rows.shape["id_count"])) as it:
            target = {"protocol": "infer", "address": it.http, "model": f"{MODEL}.rows"}
            yield [System(name=name, target=target, pids=it.pids)]
        return
    if name == "tierbed":
        process, targets = _tierbed(rows, dram_bytes, deltas)
        asked = {f"tierbed_{protocol}": targets[protocol] for protocol in protocols}
        filling = targets["lookup"]
    else:
        process, filling = _redis(rows) if name == "redis" else _memcached(name, rows, dram_bytes)
        asked = {name: filling}
    try:
        if name != "tierbed":
            _wait(filling["address"], process)
        if name != "tierbed" or dram_bytes > rows.byte_count:
            command("fill", target=filling, shape=rows.shape)
        pids = (process.pid,)
        yield [System(name=one, target=target, pids=pids) for one, target in asked.items()]
    finally:
        end_process(process)


def generator_core() -> int | None:
    """The processor that the generator has for itself; None where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[1] if len(cores) > 1 else None


def _popen(call: Sequence[str], log: IO[str], **options: Any) -> subprocess.Popen[str]:
    with on_first_core():
        return subprocess.Popen(call, stderr=log, text=True, **options)


def _tierbed(
    rows: Rows, dram_bytes: int, deltas: Path | None
) -> tuple[subprocess.Popen[str], dict[str, Row]]:
    log = rows.folder / "tierbed.log"
    options = ["--grpc-address", "127.0.0.1:0"]
    options += ["--deltas", str(deltas)] if deltas else []
    process, http, grpc = _serve(rows.snapshot, log, dram_bytes, options)
    addresses = {"lookup": http, "infer": http, "grpc": grpc}
    return process, {
        protocol: {"protocol": protocol, "address": address, "model": f"{MODEL}.rows"}
        for protocol, address in addresses.items()
    }


def _serve(
    place: Path | str | None,
    log_path: Path,
    dram_bytes: int,
    options: Sequence[str],
    call: Sequence[str] = TIERBED_SERVE,
) -> tuple[subprocess.Popen[str], str, str]:
    """Starts ``tierbed serve``; returns its addresses of HTTP and gRPC, too."""
    named = [] if place is None else [f"{MODEL}={place}"]
    words = [*named, "--address", "127.0.0.1:0", *options]
    words += ["--dram-budget", size_text(dram_bytes), "--log-level", "off", "--drain-delay", "0"]
    with log_path.open("w+") as log:
        process = _popen([*call, *words], log, stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait()
            log.seek(0)
            raise RuntimeError(f"{' '.join(call)} did not start: {log.read().strip()}")
    http, _, grpc = line.strip().partition("http://")[2].partition(" and grpc://")
    return process, http, grpc


@dataclass(frozen=True)
class Served:
    """A running ``tierbed serve``.

    Args:
        http: Its address.
        pid: Its process.
        grpc: Its address of gRPC, where it has one.
    """

    http: str
    pid: int
    grpc: str = ""


@contextlib.contextmanager
def served(
    place: Path | str | None,
    log_path: Path,
    dram_bytes: int,
    options: Sequence[str],
    call: Sequence[str] = TIERBED_SERVE,
) -> Iterator[Served]:
    """Serves a snapshot or a channel by HTTP, and ends the server afterwards.

    Args:
        place: The snapshot, or ``LOCATION@CHANNEL``; None for a gateway.
        log_path: Where its standard error goes.
        dram_bytes: Its budget.
        options: Further words of its command line.
        call: What starts it: ``tierbed serve``, or ``tierbed-server``.
    """
    process, http, grpc = _serve(place, log_path, dram_bytes, options, call)
    try:
        yield Served(http, process.pid, grpc)
    finally:
        end_process(process)


def _redis(rows: Rows) -> tuple[subprocess.Popen[str], Row]:
    port = free_port()
    call = [find_binary("redis-server"), "--bind", "127.0.0.1", "--port", str(port)]
    # Rows are in memory only.
    call += ["--save", "", "--appendonly", "no", "--dir", str(rows.folder)]
    return _peer(call, rows), {"protocol": "redis", "address": f"127.0.0.1:{port}"}


def _memcached(name: str, rows: Rows, dram_bytes: int) -> tuple[subprocess.Popen[str], Row]:
    port = free_port()
    call = [find_binary("memcached"), "-l", "127.0.0.1", "-p", str(port), "-c", "8192", "-t", "1"]
    if os.geteuid() == 0:
        call += ["-u", "root"]
    # Keys and headers of items come on top of the rows.
    memory = 4 * rows.byte_count // MIB + 128
    if name == "extstore":
        memory = max(EXTSTORE_MIB, dram_bytes // MIB)
        disk = 2 * rows.byte_count // (64 * MIB) * 64 + 256
        call += ["-o", f"ext_path={rows.folder / 'extstore'}:{disk}m,ext_item_size=64"]
    process = _peer([*call, "-m", str(memory)], rows)
    return process, {"protocol": "memcached", "address": f"127.0.0.1:{port}"}


def _peer(call: Sequence[str], rows: Rows) -> subprocess.Popen[str]:
    with (rows.folder / "peer.log").open("w") as log:
        return _popen(call, log, stdout=subprocess.DEVNULL, env=unpacked_environment())


def unpacked_environment() -> dict[str, str]:
    """The variables with which programs find the libraries that were unpacked with them."""
    folders = [str(folder) for folder in (UNPACKED / "usr" / "lib").glob("*-linux-gnu")]
    known = os.environ.get("LD_LIBRARY_PATH")
    paths = [*folders, *([known] if known else [])]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)} if paths else dict(os.environ)


def find_binary(name: str) -> str:
    """Where a program is, installed or unpacked.

    Raises:
        AbsentError: It is not here.
    """
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED / "usr" / "bin"))
    if found is None:
        raise AbsentError(f"{name} is not here; run scripts/bench-deps")
    return found


def _wait(address: str, process: subprocess.Popen[str]) -> None:
    host, _, port = address.partition(":")
    ends_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError as error:
            code = process.poll()
            if code is not None or time.monotonic() > ends_s:
                raise AbsentError(f"{process.args!r} did not start: {code or error}") from error
            time.sleep(0.02)
        else:
            return
