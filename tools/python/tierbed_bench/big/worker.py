"""One phase of ``bench big`` in a process of its own, so that its peak memory is its own.

Forked from a process that has loaded torch and nothing else, which saves seconds for each. It
tells its parent how far it is, moments at which it may be killed, and at the end its row.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tierbed.train.store import Store
from tierbed_bench.big.data import Shape
from tierbed_bench.common import process_bytes

__all__ = ["WINDOW", "Job", "Told", "memory", "open_store", "work"]

#: Between two lines that tell how far a phase is.
TOLD_EVERY_S = 1.0
#: Batches of look-ahead in forward order, as `lookahead` has by default.
WINDOW = 64


class Told:
    """What a phase tells its parent.

    Args:
        pipe: To the parent.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        #: A phase may tell from two threads.
        self._sends = threading.Lock()
        self._said_s = 0.0

    def progress(self, done: float, total: float, unit: str) -> None:
        """Tells how far it is, now and then."""
        now = time.perf_counter()
        if now - self._said_s >= TOLD_EVERY_S:
            self._said_s = now
            self._send({"tell": "progress", "done": done, "total": total, "unit": unit})

    def moment(self, name: str) -> None:
        """Tells that something begins or is reached, so that a test of kills may end it there."""
        self._send({"tell": "moment", "name": name})

    def row(self, row: Mapping[str, Any], curve: list[list[float]] | None = None) -> None:
        """Tells the result."""
        self._send({"tell": "row", "row": dict(row), "curve": curve or []})

    def _send(self, told: Mapping[str, Any]) -> None:
        with self._sends:
            self._pipe.send(told)

    def failure(self) -> None:
        """Tells the error that ended the phase."""
        self._send({"tell": "failure", "text": traceback.format_exc()})


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to do, and where.

    Args:
        name: The phase.
        shape: Of the tables.
        folder: Of this size; stores, snapshots and files are in it.
        told: What to say meanwhile.
        given: The phase's own numbers.
    """

    name: str
    shape: Shape
    folder: Path
    told: Told
    given: Mapping[str, Any]

    @property
    def budget_bytes(self) -> int:
        """Memory of the store."""
        return int(self.given["budget_bytes"])


Phase = Callable[[Job], None]
_BACKENDS: dict[str, Any] = {"file": "file", "cold": "cold"}


def work(asked: Mapping[str, Any], pipe: Connection) -> None:
    """Does a phase, in the process that was made for it.

    Args:
        asked: ``phase``, ``shape``, ``folder``, and what is ``given`` to it.
        pipe: To the parent.
    """
    from tierbed_bench.big import model, serving, training, windows

    # The other core is that of the thread which moves rows.
    torch.set_num_threads(1)
    kinds = (training, model, windows, serving)
    phases: dict[str, Phase] = {name: run for kind in kinds for name, run in kind.PHASES.items()}
    told = Told(pipe)
    job = Job(
        name=asked["phase"],
        shape=Shape(**asked["shape"]),
        folder=Path(asked["folder"]),
        told=told,
        given=asked["given"],
    )
    try:
        _load_operators()
        phases[job.name](job)
    except Exception:
        told.failure()
        raise SystemExit(1) from None


def _load_operators() -> None:
    """Steps a row once: what torch loads for that is part of no restart, and of every process."""
    shape = Shape(rows=64, tables=1, dim=4, batch=8)
    with Store.open(backend="memory", dram_budget="4MiB") as store:
        values = shape.bags(store)(shape.ids(0)).values()
        torch.autograd.backward(values, torch.zeros_like(values))


def open_store(job: Job) -> Store:
    """Opens the store that the phase works on; the name of its folder says how it keeps rows."""
    name = str(job.given.get("store", "forward"))
    return Store.open(
        job.folder / name,
        dram_budget=job.budget_bytes,
        backend=_BACKENDS.get(name),
        order="window" if name in _BACKENDS else "forward",
        seed=job.shape.seed,
    )


def memory() -> dict[str, int]:
    """Returns the columns of memory of this process."""
    return {"peak_rss_bytes": process_bytes("VmHWM")}
