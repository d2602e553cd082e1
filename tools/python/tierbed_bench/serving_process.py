"""Processes that are measured: bound to a processor, ended, and not here."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["START_S", "AbsentError", "awake", "end_process", "free_port", "on_first_core"]

# Who holds this open says how long a processor may take to wake up, in microseconds.
CPU_LATENCY = Path("/dev/cpu_dma_latency")

# Time to start, and to end.
START_S = 60.0


class AbsentError(Exception):
    """A system is not here; the message says what to do."""


def end_process(process: subprocess.Popen[str]) -> None:
    """Ends a process, and waits for it."""
    process.terminate()
    try:
        process.wait(timeout=START_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextlib.contextmanager
def awake() -> Iterator[bool]:
    """Keeps idle processors from sleeping meanwhile, where this process may; tells whether.

    Waking one takes longer than a lookup, and differs from machine to machine. The profile
    ``latency-performance`` of ``tuned`` does the same to a server.
    """
    try:
        held = CPU_LATENCY.open("wb", buffering=0)
    except OSError:
        yield False
        return
    with held:
        held.write(struct.pack("i", 0))
        yield True


@contextlib.contextmanager
def on_first_core() -> Iterator[None]:
    """What is started within is bound to the first processor, from its first thread on."""
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        yield
        return
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def free_port() -> int:
    """A port that nobody listened to a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
