"""Phases of ``bench big`` as processes: progress with time left, kills, and disk in use."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tierbed._util.progress import Progress
from tierbed.errors import TierbedError
from tierbed_bench.big.data import Shape
from tierbed_bench.big.worker import work

__all__ = ["Kill", "Outcome", "disk_bytes", "run_phase"]

#: Between two lines of progress where standard error is no terminal.
LINE_EVERY_S = 10.0
#: Loaded once, before the processes of phases are forked; the last are what steps load.
PRELOADED = [
    "tierbed_bench.big.worker",
    "tierbed_bench.big.training",
    "tierbed_bench.big.model",
    "tierbed_bench.big.windows",
    "tierbed_bench.big.serving",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
]


@dataclass(frozen=True)
class Kill:
    """When a phase is ended by signal 9.

    Args:
        moment: What the phase tells.
        delay_s: Seconds after it.
    """

    moment: str
    delay_s: float = 0.0


@dataclass
class Outcome:
    """What became of a phase.

    Args:
        row: Its result; empty when it was killed.
        curve: Points of share done, seconds and rate.
        is_killed: Whether it was ended on purpose.
        disk_peak_bytes: The most that was in use in its folder.
    """

    row: dict[str, Any] = field(default_factory=dict)
    curve: list[list[float]] = field(default_factory=list)
    is_killed: bool = False
    disk_peak_bytes: int = 0


def disk_bytes(folder: Path) -> int:
    """Returns the bytes that all files below a folder take on disk."""
    found = 0
    for at, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.stat(os.path.join(at, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # scratch files come and go
    return found


def run_phase(
    phase: str,
    shape: Shape,
    folder: Path,
    given: Mapping[str, Any],
    *,
    label: str = "",
    kill: Kill | None = None,
) -> Outcome:
    """Runs a phase in a process of its own.

    Args:
        phase: Its name.
        shape: Of the tables.
        folder: For its files.
        given: Its own numbers.
        label: What to call it in the progress.
        kill: When to end it.

    Raises:
        TierbedError: The phase failed, or ended before the moment at which to kill it.
    """
    asked = {
        "phase": phase,
        "shape": shape.as_dict(),
        "folder": str(folder),
        "given": dict(given),
    }
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=work, args=(asked, theirs), daemon=True)
    outcome, failure = Outcome(), ""
    process.start()
    theirs.close()
    try:
        with _Shown(label or phase) as shown:
            while not outcome.is_killed and (told := _next(ours)) is not None:
                outcome.disk_peak_bytes = max(outcome.disk_peak_bytes, disk_bytes(folder))
                if told["tell"] == "progress":
                    shown.show(float(told["done"]), float(told["total"]), str(told["unit"]))
                elif told["tell"] == "row":
                    outcome.row, outcome.curve = told["row"], told["curve"]
                elif told["tell"] == "failure":
                    failure = str(told["text"])
                elif kill is not None and told["name"] == kill.moment:
                    time.sleep(kill.delay_s)
                    outcome.is_killed = True
    finally:
        # Also when this process is interrupted: no phase outlives the suite.
        if not outcome.row or outcome.is_killed:
            process.kill()
        process.join()
        ours.close()
    if outcome.is_killed != (kill is not None) or not (outcome.row or outcome.is_killed):
        told_last = failure.strip() or f"it ended with {process.exitcode}"
        raise TierbedError(f"{label or phase} did not come to its end: {told_last}")
    return outcome


def _next(pipe: Connection) -> dict[str, Any] | None:
    """Returns what a phase tells next; None when it has ended."""
    try:
        told: dict[str, Any] = pipe.recv()
    except EOFError:
        return None
    return told


class _Shown:
    """Progress on standard error: a bar, or lines where it is no terminal."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Progress | None = None
        self._begun_s = self._said_s = time.perf_counter()

    def show(self, done: float, total: float, unit: str) -> None:
        """Shows how far it is, and when it will be done."""
        if Progress.is_quiet:
            return
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = Progress(self._label, round(total), unit).__enter__()
            self._bar.set(round(done), round(total))
            return
        now = time.perf_counter()
        if now - self._said_s < LINE_EVERY_S:
            return
        self._said_s = now
        left_s = max(0.0, (now - self._begun_s) * (total - done) / max(done, 1e-9))
        line = f"{self._label}: {done:,.0f} of {total:,.0f} {unit}, {left_s:,.0f} s left"
        print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.__exit__()
