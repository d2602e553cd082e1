"""Progress of long steps: how far, how fast, until when.

A bar on standard error with count, rate and time left; silent where standard error is no
terminal.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, ClassVar

__all__ = ["Progress"]


class Progress:
    """A progress bar as a context manager.

    Args:
        what: The step, for people.
        total: Units in all; None when unknown.
        unit: What is counted.
        after_s: Seconds before the bar is shown, for a step that is mostly short.
    """

    #: No bar is shown, wherever the output goes.
    is_quiet: ClassVar[bool] = False

    def __init__(
        self, what: str, total: int | None, unit: str = "rows", after_s: float = 0.0
    ) -> None:
        self.what = what
        self._begin = threading.Timer(after_s, self._start) if after_s > 0 else None
        self.total = total
        self.unit = unit
        self.done = 0
        self.started_s = time.perf_counter()
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

    def _show(self, note: str) -> None:
        if self._bar is not None:
            per_s = self.done / max(1e-9, time.perf_counter() - self.started_s)
            rate = f"{per_s:,.0f} {self.unit}/s {note}"
            self._bar.update(self._task, completed=self.done, total=self.total, rate=rate)

    def __enter__(self) -> Progress:
        self.started_s = time.perf_counter()
        if sys.stderr.isatty() and not self.is_quiet:
            if self._begin is None:
                self._start()
            else:
                self._begin.start()
        return self

    def _start(self) -> None:
        # `import tierbed` loads this file, and rich takes longer than the bar is worth.
        from rich import console, progress

        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=30),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            progress.TimeRemainingColumn(),
            console=console.Console(stderr=True),
        )
        self._task = bar.add_task(self.what, total=self.total, rate="")
        bar.start()
        # Last: with `after_s` this is another thread, and a bar that is there is updated.
        self._bar = bar

    def __exit__(self, *_: object) -> None:
        if self._begin is not None and self._begin.ident is not None:
            self._begin.cancel()
            self._begin.join()
        if self._bar is not None:
            self._bar.stop()
