"""How much memory may a measured process use, its share of the page cache included?

A memory cgroup, version 1 or 2, which only root may make on most machines.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tierbed.errors import UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MemoryGroup"]

_ROOT = Path("/sys/fs/cgroup")
#: Folder of the root, and the names of: the limit, the bytes in use, the part that is page cache.
_VERSIONS = (
    (_ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "cache"),
    (_ROOT, "memory.max", "memory.current", "file"),
)


class MemoryGroup:
    """A memory cgroup; as a context manager it is removed at the end.

    Args:
        folder: Its folder, made by :meth:`make`.

    Raises:
        UnsupportedError: No memory cgroup is there.
    """

    def __init__(self, folder: Path) -> None:
        for _, limit, usage, cached in _VERSIONS:
            if (folder / limit).is_file():
                self.folder = folder
                self._limit, self._usage, self._cached = folder / limit, folder / usage, cached
                return
        raise UnsupportedError(f"{folder} is no memory cgroup", {"path": str(folder)})

    @classmethod
    def make(cls, name: str) -> Self:
        """Makes a group called ``name``.

        Raises:
            UnsupportedError: There are no memory cgroups, or this user may not make one.
        """
        reasons = []
        for root, limit, *_ in _VERSIONS:
            folder = root / name
            try:
                folder.mkdir()
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror}")
                continue
            if (folder / limit).is_file():
                return cls(folder)
            folder.rmdir()
            reasons.append(f"{folder}: no {limit}")
        raise UnsupportedError(
            "memory cgroups cannot be made here, which takes root on most machines: "
            + "; ".join(reasons)
        )

    def add(self, pid: int) -> None:
        """Puts a process into it; what the process uses from then on counts."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def used_bytes(self) -> int:
        """Bytes in use, page cache left out."""
        lines = (self.folder / "memory.stat").read_text().splitlines()
        told = dict(line.split(maxsplit=1) for line in lines)
        return int(self._usage.read_text()) - int(told[self._cached])

    def allow(self, limit_bytes: int) -> None:
        """Allows so many bytes, page cache included; 0 is no limit.

        Raises:
            UnsupportedError: More is in use and cannot be given back.
        """
        wanted = str(limit_bytes) if limit_bytes else ("max" if self._cached == "file" else "-1")
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
