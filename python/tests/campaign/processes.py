"""Runs a function in a process of its own, and says truly how that process ended.

All processes are forked from one that has torch loaded and never opened a store.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Ended:
    """How a process ended.

    Attributes:
        value: What the function returned, or None.
        error: What it raised, as text; empty when it raised nothing.
        kind: Name of the exception's type.
        signal: What killed it; 0 when it ended by itself.
        is_late: It was killed because its time was up.
    """

    value: Any = None
    error: str = ""
    kind: str = ""
    signal: int = 0
    is_late: bool = False

    @property
    def came(self) -> str:
        """Returns ``hang``, ``signal``, ``panic``, or nothing of these as an empty text."""
        if self.is_late:
            return "hang"
        if self.signal:
            return "signal"
        return "panic" if "Panic" in self.kind else ""


def call(work: Callable[[], Any], seconds: float = 60) -> Ended:
    """Calls ``work`` in a child and returns its result, which JSON must hold."""
    child = Child(lambda tell: tell({"value": work()}))
    return child.collect(time.monotonic() + seconds)


class Child:
    """A forked process that tells lines of JSON.

    Args:
        work: Called in the child with the function that tells.
    """

    def __init__(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _be_child(work, writing)
        os.close(writing)
        self._reading = reading
        self._rest = b""
        self.told: list[Any] = []
        self.status: int | None = None

    def listen(self, seconds: float) -> bool:
        """Takes in what is told within ``seconds``; False when the child closed its end."""
        ready, _, _ = select.select([self._reading], [], [], max(0.0, seconds))
        if not ready:
            return True
        raw = os.read(self._reading, 1 << 16)
        *lines, self._rest = (self._rest + raw).split(b"\n")
        self.told += [json.loads(line) for line in lines]
        return bool(raw)

    def kill(self) -> None:
        # A zombie that nobody waited for yet takes a signal and stays what it was.
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Waits for the child, takes in all that was told, and returns its status."""
        while self.status is None and self.listen(0.2):
            self._look()
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        # A grandchild may hold the pipe open: what the child told is in it already.
        while select.select([self._reading], [], [], 0)[0] and self.listen(0):
            pass
        os.close(self._reading)
        return self.status

    def _look(self) -> None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.status = status

    def collect(self, deadline: float) -> Ended:
        """Waits for the end or the deadline, and returns what came of it."""
        is_late = False
        while self.status is None and self.listen(min(0.2, deadline - time.monotonic())):
            self._look()
            if self.status is None and time.monotonic() >= deadline:
                is_late = True
                self.kill()
                break
        return ended(self, self.wait(), is_late)


def ended(child: Child, status: int, is_late: bool = False) -> Ended:
    """Puts what a child told and how it ended together."""
    found = Ended(is_late=is_late, signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
    for line in child.told:
        if isinstance(line, dict) and "value" in line:
            found.value = line["value"]
        if isinstance(line, dict) and "error" in line:
            found.error, found.kind = line["error"], line["kind"]
    return found


def _be_child(work: Callable[[Callable[[Any], None]], None], writing: int) -> None:
    def tell(what: Any) -> None:
        os.write(writing, json.dumps(what).encode() + b"\n")

    # How a child ends is told by its status; pytest's handler would print its stack besides.
    faulthandler.disable()
    status = 1
    try:
        work(tell)
        status = 0
    except BaseException as error:
        where = "" if hasattr(error, "context") else traceback.format_exc()[-600:]
        tell({"error": f"{error}"[:600] + where, "kind": type(error).__name__})
    os._exit(status)


def free_folder(path: Path) -> Path:
    """Returns ``path`` as an empty folder."""
    import shutil

    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def copy_folder(source: Path, target: Path) -> None:
    """Copies a store with its holes."""
    import shutil
    import subprocess

    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-r", "--sparse=always", str(source), str(target)], check=True)
