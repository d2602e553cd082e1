"""How much memory may a measured process use, its share of the page cache included?

A memory cgroup, version 1 or 2, which only root may make on most machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierbed.errors import UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MemoryGroup"]

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class _Version:
    """Files of a version: limit, bytes in use now and at most, kills; the name of page cache."""

    root: Path
    limit: str
    usage: str
    peak: str
    events: str
    cached: str


_VERSIONS = (
    _Version(
        root=_ROOT / "memory",
        limit="memory.limit_in_bytes",
        usage="memory.usage_in_bytes",
        peak="memory.max_usage_in_bytes",
        events="memory.oom_control",
        cached="cache",
    ),
    _Version(
        root=_ROOT,
        limit="memory.max",
        usage="memory.current",
        peak="memory.peak",
        events="memory.events",
        cached="file",
    ),
)


class MemoryGroup:
    """A memory cgroup; as a context manager it is removed at the end.

    Args:
        folder: Its folder, made by :meth:`make`.

    Raises:
        UnsupportedError: No memory cgroup is there.
    """

    def __init__(self, folder: Path) -> None:
        for version in _VERSIONS:
            if (folder / version.limit).is_file():
                self.folder, self._version = folder, version
                self._limit = folder / version.limit
                return
        raise UnsupportedError(f"{folder} is no memory cgroup", {"path": str(folder)})

    @classmethod
    def make(cls, name: str) -> Self:
        """Makes a group called ``name``.

        Raises:
            UnsupportedError: There are no memory cgroups, or this user may not make one.
        """
        reasons = []
        for version in _VERSIONS:
            folder = version.root / name
            try:
                folder.mkdir()
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror}")
                continue
            if (folder / version.limit).is_file():
                return cls(folder)
            folder.rmdir()
            reasons.append(f"{folder}: no {version.limit}")
        raise UnsupportedError(
            "memory cgroups cannot be made here, which takes root on most machines: "
            + "; ".join(reasons)
        )

    def add(self, pid: int) -> None:
        """Puts a process into it; what the process uses from then on counts."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def used_bytes(self) -> int:
        """Bytes in use, page cache left out."""
        usage = int((self.folder / self._version.usage).read_text())
        return usage - self._told("memory.stat")[self._version.cached]

    def peak_bytes(self) -> int | None:
        """Most bytes that were in use, page cache included; None before Linux 5.19, version 2."""
        file = self.folder / self._version.peak
        return int(file.read_text()) if file.is_file() else None

    def killed_count(self) -> int:
        """Processes that the kernel ended because there was no memory left for them."""
        return self._told(self._version.events).get("oom_kill", 0)

    def end_processes(self) -> None:
        """Ends all processes that are in it."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _told(self, name: str) -> dict[str, int]:
        lines = (self.folder / name).read_text().splitlines()
        return {word: int(value) for word, value in (line.split() for line in lines)}

    def allow(self, limit_bytes: int) -> None:
        """Allows so many bytes, page cache included; 0 is no limit.

        Raises:
            UnsupportedError: More is in use and cannot be given back.
        """
        wanted = (
            str(limit_bytes) if limit_bytes else ("max" if self._version.cached == "file" else "-1")
        )
        for attempt in range(20):
            try:
                self._limit.write_text(wanted)
                return
            except OSError as error:
                if attempt == 19:
                    raise UnsupportedError(
                        f"a limit of {limit_bytes} bytes was refused: {error.strerror}"
                    ) from error
                time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for _ in range(100):
            try:
                os.rmdir(self.folder)
                return
            except OSError:
                # A process that ended is counted for a moment longer.
                time.sleep(0.02)
