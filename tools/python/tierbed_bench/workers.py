"""How does the bench talk to a system in another process? A line of JSON each way.

Every system has a process of its own, so that its peak memory is its own and a system that hangs
or dies takes nobody along.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tierbed import _native
from tierbed.errors import TierbedError

__all__ = ["Worker", "WorkerError", "answer_commands"]


class WorkerError(RuntimeError):
    """A command failed, or the worker is gone.

    Args:
        message: What the worker said.
        kind: Kind of the error, as in :mod:`tierbed.errors`; ``"gone"`` without an answer.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Worker:
    """A process that measures one system.

    Args:
        seconds_max: Longest time for one answer; then the process is ended.
        module: Python module to run in place of the native worker.
    """

    def __init__(self, seconds_max: float = 900.0, module: str | None = None) -> None:
        self._seconds_max = seconds_max
        self._process = subprocess.Popen(
            _native_command() if module is None else [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer.

        Raises:
            WorkerError: the command failed, took too long, or the process ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise WorkerError("the worker has no pipes", "gone")
        timer = threading.Timer(self._seconds_max, self._process.kill)
        timer.start()
        try:
            stdin.write(json.dumps({"do": command, **fields}, default=str) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            code = self._process.wait()
            raise WorkerError(
                f"no answer to {command!r}: the process ended with {code}"
                f" (it has {self._seconds_max:.0f} s for an answer)",
                "gone",
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(str(answer["error"]), str(answer.get("kind", "io")))
        return answer

    def close(self) -> None:
        """Ends the process and waits for it."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def answer_commands(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The other side: answers commands from standard input until it ends.

    Errors that Tierbed or torch raise become answers; a system that is not there is of kind
    ``"unsupported"``. Whatever else is printed goes to standard error, not between the answers.
    """
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        told: dict[str, Any]
        try:
            told = answer(json.loads(line))
        except (TierbedError, MemoryError, RuntimeError, OSError) as error:
            kind = "unsupported" if isinstance(error, NotImplementedError) else "invalid"
            told = {"error": str(error) or type(error).__name__, "kind": kind}
        print(json.dumps(told), file=answers, flush=True)


def _native_command() -> Sequence[str]:
    child = Path(__file__).with_name("child.py")
    return [sys.executable, "-I", str(child), str(_native.__file__)]
