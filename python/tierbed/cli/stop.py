"""Interruption of long commands.

Before the first step a SIGINT or SIGTERM ends the command, which says that nothing was trained.
From then on the first asks it to stop at the next step, where it keeps what it has; the second
ends it at once, as signals do.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

import typer

__all__ = ["StopSignal"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Whether the command was asked to stop; also a context manager, within which it listens.

    Args:
        early: What to say of a command that is stopped before :meth:`begin`.
    """

    def __init__(self, early: str) -> None:
        self._early = early
        self._has_begun = False
        self._asked: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def begin(self) -> None:
        """Says that from now on the command stops by itself when it was asked to."""
        self._has_begun = True

    def is_asked(self) -> bool:
        """Whether a signal came."""
        return self._asked is not None

    def exit(self, message: str) -> None:
        """Says ``message`` and ends the command with the signal's exit code, if one came."""
        if self._asked is not None:
            print(f"stopped by {self._asked.name}: {message}", file=sys.stderr, flush=True)
            raise typer.Exit(128 + self._asked)

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._asked = signal.Signals(number)
        self._restore()
        if not self._has_begun:
            raise KeyboardInterrupt
        print(
            f"{self._asked.name}: stopping at the next step, with a checkpoint; once more ends it "
            "at once",
            file=sys.stderr,
            flush=True,
        )

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def __enter__(self) -> StopSignal:
        # Python hears signals in its main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        self._restore()
        if isinstance(error, KeyboardInterrupt) and not self._has_begun:
            self.exit(self._early)
