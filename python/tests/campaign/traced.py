"""Builds the tracer, starts children under it, and reads what it recorded."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .processes import Child

_SOURCE = Path(__file__).with_name("tracer.c")
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)
_HEAD = struct.Struct("<c3Q2I")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing a process did: a letter of ``tracer.c``, numbers, and texts."""

    what: str
    numbers: tuple[int, int, int]
    one: bytes
    two: bytes

    @property
    def path(self) -> str:
        return (self.two if self.what == "W" else self.one).decode()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Which call of a class fails with which error, once or from then on."""

    kind: str
    at: int
    errno: int
    once: bool

    def words(self) -> list[str]:
        return [self.kind, str(self.at), str(self.errno), str(int(self.once))]


def build(scratch: Path) -> tuple[Path | None, str]:
    """Compiles the tracer; returns it, or why there is none."""
    target = scratch.parent / "tracer"
    if not target.exists():
        own = scratch / "tracer"
        command = ["cc", "-O2", "-Wall", "-o", str(own), str(_SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            return None, "no C compiler"
        if done.returncode != 0:
            return None, f"the tracer does not compile: {done.stderr[:200]}"
        own.rename(target)
    return target, ""


class Traced:
    """A child under the tracer.

    Raises:
        PermissionError: This machine lets nobody trace.
    """

    def __init__(
        self,
        tracer: Path,
        folder: Path,
        log: Path,
        work: Callable[[Callable[[Any], None]], None],
        fault: Fault | None = None,
    ) -> None:
        reading, writing = os.pipe()

        def held(tell: Callable[[Any], None]) -> None:
            os.close(writing)
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
            os.read(reading, 1)
            work(tell)

        self.child = Child(held)
        os.close(reading)
        words = [str(tracer), str(self.child.pid), str(folder), str(log)]
        words += [] if fault is None else fault.words()
        self._tracer = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._tracer.stdout is not None
        is_ready = self._tracer.stdout.readline() == b"ready\n"
        os.close(writing)
        if not is_ready:
            self.child.kill()
            self.child.wait()
            raise PermissionError(self._said())

    def collect(self, seconds: float) -> Any:
        found = self.child.collect(time.monotonic() + seconds)
        try:
            code = self._tracer.wait(20)
        except subprocess.TimeoutExpired:
            self._tracer.send_signal(signal.SIGKILL)
            self._tracer.wait()
            code = -1
        said = self._said()
        if code != 0:
            raise RuntimeError(f"the tracer ended with {code}: {said}")
        return found

    def _said(self) -> str:
        assert self._tracer.stderr is not None
        assert self._tracer.stdout is not None
        text = self._tracer.stderr.read().decode()
        self._tracer.stderr.close()
        self._tracer.stdout.close()
        return text.strip()


def events(log: Path) -> Iterator[Event]:
    """Reads a log of the tracer."""
    raw = log.read_bytes()
    at = 0
    while at + _HEAD.size <= len(raw):
        what, a, b, c, one, two = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        yield Event(
            what=what.decode(),
            numbers=(a, b, c),
            one=raw[at : at + one],
            two=raw[at + one : at + one + two],
        )
        at += one + two
