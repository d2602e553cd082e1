"""What all suites need: skewed batches, medians over interleaved rounds, flat counters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tierbed.errors import TierbedError
from tierbed.jagged import KeyedJaggedTensor

__all__ = [
    "DeviceBytes",
    "Measured",
    "StolenTime",
    "counts",
    "flat_counters",
    "interleave",
    "least_stolen",
    "long_tail_batch",
    "measured_apart",
    "percentile",
    "process_bytes",
    "ratio",
    "zipf_batches",
    "zipf_ranks",
]


@dataclass
class Measured:
    """One system: how to run a round of it, and what the rounds took.

    Args:
        name: The system, in snake_case.
        run: Runs a round, given its number; all systems see the same batches in a round.
        parameters: What was varied; becomes columns.
        counters: Returns cumulative counters; their growth per round is reported.
    """

    name: str
    run: Callable[[int], None]
    parameters: dict[str, Any] = field(default_factory=dict)
    counters: Callable[[], Mapping[str, float]] = dict
    seconds: list[float] = field(default_factory=list)
    growth: dict[str, float] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """Median seconds of a round."""
        return median(self.seconds)


def interleave(systems: Sequence[Measured], rounds: int) -> None:
    """Runs one round of every system in turn, ``rounds`` times, after round 0, not counted.

    Neighbours' load then falls on all systems alike.
    """
    for system in systems:
        system.run(0)
    before = [dict(system.counters()) for system in systems]
    for number in range(1, rounds + 1):
        for system in systems:
            started_s = time.perf_counter()
            system.run(number)
            system.seconds.append(time.perf_counter() - started_s)
    for system, start in zip(systems, before, strict=True):
        end = system.counters()
        system.growth = {name: (value - start.get(name, 0)) / rounds for name, value in end.items()}


def zipf_batches(
    features: Mapping[str, int], batch_size: int, count: int, *, seed: int, skew: float = 1.05
) -> list[KeyedJaggedTensor]:
    """Draws batches of one id per bag with zipf-like popularity.

    Ids are spread over the table by a fixed permutation (a multiplication modulo the size), so
    that popular rows do not share pages by accident of numbering.

    Args:
        features: Rows of the table of each feature.
        batch_size: ``B``.
        count: Batches.
        seed: Equal seeds draw equal batches.
        skew: Exponent of the popularity; larger is more skewed.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    lengths = torch.ones(len(features) * batch_size, dtype=torch.int64)
    for _ in range(count):
        columns = []
        for rows in features.values():
            uniform = torch.rand(batch_size, generator=generator, dtype=torch.float64)
            rank = zipf_ranks(uniform, rows, skew)
            columns.append(rank * 2_654_435_761 % rows)
        batches.append(
            KeyedJaggedTensor(
                list(features), torch.cat(columns), lengths=lengths, stride=batch_size
            )
        )
    return batches


def zipf_ranks(uniform: torch.Tensor, rows: int, skew: float) -> torch.Tensor:
    """Returns ranks from 0, the most popular, by the continuous power law on ``[1, rows + 1)``.

    Args:
        uniform: Numbers from 0 to 1, f64.
        rows: How many ranks there are.
        skew: Exponent of the popularity.
    """
    if abs(skew - 1.0) < 1e-9:
        rank = torch.exp(uniform * torch.log(torch.tensor(rows + 1.0, dtype=torch.float64)))
    else:
        power = 1.0 - skew
        rank = ((rows + 1.0) ** power * uniform + (1.0 - uniform)) ** (1.0 / power)
    return rank.to(torch.int64).clamp(1, rows) - 1


def flat_counters(stats: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Flattens nested statistics to ``part_name: number``; what is no number is left out."""
    flat: dict[str, float] = {}
    for name, value in stats.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat.update(flat_counters(value, f"{key}_"))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[key] = float(value)
    return flat


def counts(growth: Mapping[str, float]) -> dict[str, float]:
    """Keeps what is counted while running: I/O, pages, rows, hits. Levels and sizes are not."""
    kinds = ("_io_", "pages_", "rows_", "hit", "miss", "evict", "written_back")
    return {
        name: value
        for name, value in growth.items()
        if not name.startswith(("budget_", "contents_")) and any(kind in name for kind in kinds)
    }


#: A measurement is repeated where others had more of the machine than this.
STOLEN_MAX = 0.01
STOLEN_TRIES = 4
STOLEN_PAUSE_S = 15.0


class StolenTime:
    """Counts the time that the host of a virtual machine gave to others, from its making on.

    Measurements differ several times with it, and nothing in the machine shows who else ran.
    """

    def __init__(self) -> None:
        self._before = self._ticks()

    def share(self) -> float:
        """Returns the share of all processors' time since then."""
        stolen, total = (now - then for now, then in zip(self._ticks(), self._before, strict=True))
        return stolen / total if total else 0.0

    @staticmethod
    def _ticks() -> tuple[int, int]:
        line = Path("/proc/stat").read_text().partition("\n")[0]
        # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user and nice.
        ticks = [int(word) for word in line.split()[1:9]]
        return ticks[7], sum(ticks)


def least_stolen(
    measure: Callable[[], dict[str, Any]], pause_s: float = STOLEN_PAUSE_S
) -> dict[str, Any]:
    """Measures again where the host gave the machine's time to others; returns the best try.

    Args:
        measure: Returns a row with ``stolen_share``, or with a ``note`` why nothing was measured.
        pause_s: Between two tries.

    Returns:
        The row, with ``tries``.
    """
    tries: list[dict[str, Any]] = []
    while len(tries) < STOLEN_TRIES:
        if tries:
            time.sleep(pause_s)
        found = measure()
        if "note" in found:
            return found
        tries.append(found)
        if found["stolen_share"] <= STOLEN_MAX:
            break
    best = min(tries, key=lambda row: float(row["stolen_share"]))
    return {**best, "tries": len(tries)}


def ratio(value: float, baseline: float) -> float:
    """Divides; NaN when the baseline is zero."""
    return value / baseline if baseline else float("nan")


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which ``share`` of ``values`` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def process_bytes(name: str) -> int:
    """Returns what the kernel counts of this process.

    Args:
        name: As in ``/proc/self/status``: ``VmRSS`` for memory now, ``VmHWM`` for the most.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"the kernel tells {name}")


@dataclass(frozen=True)
class DeviceBytes:
    """What all threads of this process had devices move.

    Args:
        read: Bytes read.
        written: Bytes written.
    """

    read: int
    written: int

    @classmethod
    def now(cls) -> DeviceBytes:
        """Counts them until now."""
        lines = Path("/proc/self/io").read_text().splitlines()
        counted = dict(line.split(": ") for line in lines)
        return cls(int(counted["read_bytes"]), int(counted["write_bytes"]))


def long_tail_batch(
    features: Sequence[str], rows: int, batch_len: int, generator: torch.Generator
) -> KeyedJaggedTensor:
    """Returns ids below ``rows`` with a long tail, one per feature and sample."""
    count = len(features) * batch_len
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    ids = (drawn.pow(4) * rows).long()
    lengths = torch.ones(count, dtype=torch.int64)
    return KeyedJaggedTensor(list(features), ids, lengths=lengths, stride=batch_len)


def measured_apart(module: str, arguments: Sequence[str], what: str) -> dict[str, Any]:
    """Measures in a process of its own.

    Args:
        module: What the process runs; the last line that it prints is the row, as JSON.
        arguments: Its arguments.
        what: What is measured, for errors.

    Raises:
        TierbedError: The process failed.
    """
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise TierbedError(f"measuring {what} failed: {last}")
    row: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return row
