"""Counts over time, and the file that tells other processes how far a training run is.

A store that is trained writes ``<its folder>.progress`` beside its folder, about once a second
while batches are looked up: JSON, replaced at once, never synced. ``tierbed top`` and reports of
folders read it. It is no part of the store: without it nothing is lost.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierbed.errors import InvalidError
from tierbed.report.counts import Counts

__all__ = ["History", "ProgressFile", "is_alive", "progress_path", "read_progress"]

PROGRESS_FORMAT = "tierbed-progress 1"
# A line over the width of a page has no more points than this.
POINT_COUNT_MAX = 240


class History:
    """Counts at moments, in bounded memory: the longer it goes, the further apart they are.

    Args:
        start_s: The first moment, in seconds since 1970.
    """

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.columns: dict[str, list[float]] = {"at_s": []}
        self.spacing_s = 0.0
        """Least time between two moments."""

    def __len__(self) -> int:
        return len(self.columns["at_s"])

    def add(self, at_s: float, counts: Counts) -> None:
        """Adds the counts of a moment, unless the last one is too near.

        Args:
            at_s: Seconds since 1970, later than before.
            counts: What was counted until then.
        """
        moments = self.columns["at_s"]
        if moments and at_s - moments[-1] < self.spacing_s:
            return
        values = {"at_s": round(at_s, 3), **counts.columns()}
        for name in values.keys() - self.columns.keys():
            self.columns[name] = [0.0] * len(moments)
        for name, column in self.columns.items():
            column.append(values.get(name, column[-1] if column else 0.0))
        if len(moments) > POINT_COUNT_MAX:
            self.columns = {name: column[::2] for name, column in self.columns.items()}
            moments = self.columns["at_s"]
            self.spacing_s = 2 * (moments[-1] - moments[0]) / POINT_COUNT_MAX


def progress_path(folder: str | os.PathLike[str]) -> Path:
    """Returns where the progress of the store in ``folder`` is told."""
    path = Path(os.path.abspath(folder))
    return path.with_name(f"{path.name}.progress")


class ProgressFile:
    """The file beside a store that tells how far its training is.

    Args:
        folder: The store's folder.
    """

    def __init__(self, folder: str) -> None:
        self._path = progress_path(folder)
        self._about = {
            "format": PROGRESS_FORMAT,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        self.error: OSError | None = None
        """Why it is not written any more."""

    def write(self, history: History, now: Mapping[str, Any], state: str) -> None:
        """Replaces the file; where that fails, once, it says so and stops.

        Args:
            history: The counts over time.
            now: The newest ones, and what is in force.
            state: ``"running"`` or ``"closed"``.
        """
        if self.error is not None:
            return
        told = {**self._about, "state": state, "start_s": history.start_s, **now}
        text = json.dumps({**told, "points": history.columns}, separators=(",", ":"))
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        try:
            temporary.write_text(text)
            temporary.replace(self._path)
        except OSError as error:
            self.error = error
            logging.getLogger("tierbed").warning(
                "tierbed top will not see this run: %s cannot be written (%s)", self._path, error
            )


def read_progress(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Reads what the training of the store in ``folder`` told last; None when nothing is there.

    Raises:
        InvalidError: The file is of another version, or no such file.
    """
    path = progress_path(folder)
    try:
        told: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        told = None
    if not isinstance(told, dict) or told.get("format") != PROGRESS_FORMAT:
        raise InvalidError(
            f"{path} is no file of progress that this version reads; remove it, training writes "
            "it anew",
            {"path": str(path)},
        )
    return told


def is_alive(told: Mapping[str, Any]) -> bool | None:
    """Tells whether the process that wrote the progress runs; None on another machine."""
    if told["host"] != socket.gethostname():
        return None
    try:
        os.kill(int(told["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
