"""Progress of long steps: how far, how fast, until when.

A bar on standard error with count, rate and time left; silent when standard error is not a
terminal, or when a machine reads the output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Progress", "track"]

T = TypeVar("T")


class Progress:
    """A progress bar as a context manager.

    Args:
        what: The step, for people.
        total: Units in all; None when unknown.
        unit: What is counted.
        is_quiet: Show nothing. By default when standard error is no terminal.
    """

    def __init__(
        self, what: str, total: int | None, unit: str = "rows", is_quiet: bool | None = None
    ) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.done = 0
        self.started_s = time.perf_counter()
        self._is_quiet = not sys.stderr.isatty() if is_quiet is None else is_quiet
        self._bar: Any = None
        self._task: Any = None

    def advance(self, count: int = 1, note: str = "") -> None:
        """Counts ``count`` more units."""
        self.done += count
        self._show(note)

    def set(self, done: int, total: int | None = None) -> None:
        """Sets the count, as callbacks of the engine report it."""
        self.done = done
        self.total = self.total if total is None else total
        self._show("")

    @property
    def rate_per_s(self) -> float:
        """Units per second so far."""
        return self.done / max(1e-9, time.perf_counter() - self.started_s)

    def _show(self, note: str) -> None:
        if self._bar is not None:
            rate = f"{self.rate_per_s:,.0f} {self.unit}/s {note}"
            self._bar.update(self._task, completed=self.done, total=self.total, rate=rate)

    def __enter__(self) -> Self:
        self.started_s = time.perf_counter()
        if not self._is_quiet:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress as RichProgress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(self.what, total=self.total, rate="")
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def track(
    items: Iterable[T], what: str, total: int | None = None, unit: str = "batches"
) -> Iterator[T]:
    """Yields ``items`` and shows how far it is."""
    with Progress(what, total, unit) as bar:
        for item in items:
            yield item
            bar.advance()
