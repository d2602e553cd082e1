"""What a process did on its cores, counted, and a model of more cores made of the counts.

Speed on ``p`` cores is the time in which they work, divided by the work of a unit. So what is lost
against ``p`` times the speed of one core is lost in two ways: cores that idle, since threads wait,
and work that a unit takes more of, since caches and locks are shared.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CoreCounts", "Event", "Scaling", "scaling_of"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """An event of Linux' ``perf_event_open``.

    Args:
        kind: 0 for events of the processor, 1 for those of the kernel.
        number: Its number there.
    """

    kind: int
    number: int


#: What the processor counts outside the kernel, where the machine lets it.
EVENTS = {"cycles": Event(0, 0), "instructions": Event(0, 1), "cache_misses": Event(0, 3)}
_SYSCALLS = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTE_BYTES = 64
_INHERIT = 1 << 1
# Without privileges a process may count only what it does outside the kernel.
_EXCLUDE_KERNEL = 1 << 5
_EXCLUDE_HV = 1 << 6


class CoreCounts:
    """Counts the process's work from :meth:`begin` on, all threads together.

    To be made before the threads that are counted.

    Args:
        events: Events by name; what the machine does not count is left out.
    """

    def __init__(self, events: Mapping[str, Event] = EVENTS) -> None:
        opened = {name: _open(event) for name, event in events.items()}
        self._files = {name: file for name, file in opened.items() if file >= 0}
        self._before = self._now()

    def begin(self) -> None:
        """Counts from now on."""
        self._before = self._now()

    def row(self, cores: int, units: int) -> Row:
        """Returns what a unit took since then.

        Args:
            cores: Cores of the process.
            units: Units of work that were done.

        Returns:
            ``per_s``; ``cpu_ns``, processor time of a unit; ``idle_share`` of the cores' time;
            ``waits_per_1000`` and ``preemptions_per_1000``, switches of threads that waited and
            that others took the core of; and ``<event>_per_unit`` of each event counted.
        """
        now = self._now()
        grown = {name: now[name] - before for name, before in self._before.items()}
        return {
            "per_s": units / grown["seconds"],
            "cpu_ns": 1e9 * grown["cpu_s"] / units,
            "idle_share": 1.0 - grown["cpu_s"] / (cores * grown["seconds"]),
            "waits_per_1000": 1000 * grown["waits"] / units,
            "preemptions_per_1000": 1000 * grown["preemptions"] / units,
            **{f"{name}_per_unit": grown[name] / units for name in self._files},
        }

    def _now(self) -> dict[str, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        counted = {
            name: struct.unpack("q", os.read(file, 8))[0] for name, file in self._files.items()
        }
        return {
            "seconds": time.perf_counter(),
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "waits": usage.ru_nvcsw,
            "preemptions": usage.ru_nivcsw,
            **counted,
        }


def _open(event: Event) -> int:
    """Returns a file that counts an event for this thread and those it makes; -1 without."""
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        return -1
    flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HV
    # type, size, config, sample_period, sample_type, read_format, flags
    told = struct.pack("IIQQQQQ", event.kind, _ATTRIBUTE_BYTES, event.number, 0, 0, 0, flags)
    attribute = ctypes.create_string_buffer(told.ljust(_ATTRIBUTE_BYTES, b"\0"))
    # This process, on every core, in no group.
    return int(ctypes.CDLL(None).syscall(number, attribute, 0, -1, -1, 0))


@dataclass(frozen=True)
class Scaling:
    """How work scales: ``speedup`` is ``cores * busy_factor * work_factor``.

    Args:
        cores: Most cores that were measured.
        speedup: Speed on them over that on one.
        busy_factor: Share of the cores' time that they work, over that of the one.
        work_factor: Processor time of a unit on one core, over that on these.
        serial_share: Share of the work of one core that does not divide.
        model_error: Speed by a model made of half as many cores, over the measured one, less 1;
            None with fewer than three numbers of cores.
    """

    cores: int
    speedup: float
    busy_factor: float
    work_factor: float
    serial_share: float
    model_error: float | None

    def at(self, cores: int) -> float:
        """Returns the speed on ``cores`` over that on one, by Amdahl's law."""
        return _amdahl(self.serial_share, cores)

    @property
    def half_cores(self) -> float | None:
        """Cores on which speed is half of its limit; None where nothing limits it.

        Twice as many add only a third to the speed.
        """
        return 1.0 / self.serial_share - 1.0 if self.serial_share > 0.0 else None

    def row(self, part: str, cores: Sequence[int]) -> Row:
        """Returns a row of the table of models, with the speed on each of ``cores``."""
        return {
            "part": part,
            "cores": self.cores,
            "speedup": self.speedup,
            "busy_factor": self.busy_factor,
            "work_factor": self.work_factor,
            "serial_share": self.serial_share,
            "half_cores": self.half_cores,
            "model_error": self.model_error,
            **{f"model_{count}": self.at(count) for count in cores},
        }


def scaling_of(rows: Sequence[Row]) -> Scaling | None:
    """Makes a model of the measurements of one part; None without one core and another number.

    Args:
        rows: Of each number of cores ``cores``, ``per_s``, ``cpu_ns`` and ``idle_share``.

    Source: Karp and Flatt, "Measuring parallel processor performance", 1990.
    """
    by_cores = {int(row["cores"]): row for row in rows}
    if 1 not in by_cores or len(by_cores) < 2:
        return None
    one, most = by_cores[1], max(by_cores)
    last, half = by_cores[most], most // 2
    speedup = last["per_s"] / one["per_s"]
    model_error = None
    if half > 1 and half in by_cores:
        share = _serial_share(by_cores[half]["per_s"] / one["per_s"], half)
        model_error = _amdahl(share, most) / speedup - 1.0
    return Scaling(
        cores=most,
        speedup=speedup,
        busy_factor=(1.0 - last["idle_share"]) / (1.0 - one["idle_share"]),
        work_factor=one["cpu_ns"] / last["cpu_ns"],
        serial_share=_serial_share(speedup, most),
        model_error=model_error,
    )


def _serial_share(speedup: float, cores: int) -> float:
    """Returns the share that a speed on some cores shows; 0 for a speed above linear."""
    return max(0.0, (1.0 / speedup - 1.0 / cores) / (1.0 - 1.0 / cores))


def _amdahl(serial_share: float, cores: int) -> float:
    return cores / (1.0 + serial_share * (cores - 1))
