"""Bars of long steps: those that are mostly short are shown only when they last."""

from __future__ import annotations

import sys
import time

import pytest

from tierbed._util.progress import Progress


class _Terminal:
    """A standard error that counts as a terminal and keeps what is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    shown = _Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(Progress, "is_quiet", False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return shown


def test_a_step_that_ends_soon_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with Progress("moving rows", None, "moves", after_s=30.0) as bar:
        bar.advance()
    assert terminal.text == ""


def test_a_step_that_lasts_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with Progress("moving rows", None, "moves", after_s=0.01) as bar:
        ends_s = time.perf_counter() + 20.0
        # Updates while the other thread makes the bar.
        while "moving rows" not in terminal.text and time.perf_counter() < ends_s:
            bar.advance()
            time.sleep(0.001)
    assert "moving rows" in terminal.text
