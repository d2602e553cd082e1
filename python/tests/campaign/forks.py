"""A child forked from a process with an open store: it is told so, and harms nobody.

The child tries everything; each call must be an error of ours or right. The parent then trains
on to the bits of a run in memory. Afterwards the store is closed and opened again while another
forked child lives on.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierbed as tb

from . import training as tr
from .outcome import Outcome
from .processes import call

SECONDS = 20


def run_case(number: int, luck: random.Random, scratch: Path) -> list[Outcome]:
    """One setting: a child that touches the store, and one that outlives it."""
    setting = list(tr.SETTINGS.values())[number % len(tr.SETTINGS)]
    oracle = call(lambda: tr.oracle(setting))
    found = call(lambda: _parent(setting, scratch / "store", luck), 120)
    if oracle.value is None or found.value is None:
        text = f"{oracle.error} {found.kind}: {found.error} signal {found.signal}"
        return [Outcome(label="parent", came=found.came or "lost", text=text, setting=setting.name)]
    outcomes = [
        Outcome(label=label, came=came, text=text, setting=setting.name)
        for label, came, text in found.value["outcomes"]
    ]
    is_right = found.value["whole"] == oracle.value[tr.END]["whole"]
    outcomes.append(
        Outcome(
            label="parent trains on",
            came="right" if is_right else "silent",
            text="" if is_right else "other rows at the end",
            setting=setting.name,
        )
    )
    return outcomes


def _parent(setting: tr.Setting, path: Path, luck: random.Random) -> dict[str, Any]:
    run = tr.Run(setting, path)
    for done in run.steps(0, 9):
        if done % 3 == 0:
            run.save(done)
    names = list(_attempts(run))
    luck.shuffle(names)
    outcomes = []
    for name in names:
        came, text = _in_fork(_attempts(run)[name])
        if came == "right" and name in ("step", "checkpoint"):
            came, text = "wrong", "a forked child changed the store"
        outcomes.append((f"forked child: {name}", came, text))
    for done in run.steps(9, tr.END):
        if done % 3 == 0:
            run.save(done)
    whole = tr.digest(run.store, setting)["whole"]
    outcomes.append(("reopened while a forked child lives", *_reopen(setting, path, run)))
    return {"outcomes": outcomes, "whole": whole}


def _attempts(run: tr.Run) -> dict[str, Callable[[], Any]]:
    rows = run.store.read_rows(run.setting.tables[-1], 0, 20)

    def read() -> None:
        found = run.store.read_rows(run.setting.tables[-1], 0, 20)
        if not torch.equal(found, rows):
            raise AssertionError("other rows")

    return {
        "read": read,
        "lookup": lambda: run.part(tr.batch_at(run.setting, 9)),
        "step": lambda: run._step(tr.batch_at(run.setting, 9)),
        "checkpoint": lambda: run.save(8),
        "statistics": run.store.stats,
        "close": run.store.close,
        "end": lambda: None,
    }


def _in_fork(attempt: Callable[[], Any]) -> tuple[str, str]:
    """Makes an attempt in a forked child; returns what came of it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
            told = "right"
        except tb.TierbedError as error:
            told = f"refused {error}"
        except BaseException as error:
            told = f"wrong {type(error).__name__} {error}"
        os.write(writing, told[:400].encode())
        os._exit(0)
    os.close(writing)
    until = time.monotonic() + SECONDS
    status = None
    while status is None and time.monotonic() < until:
        ended, code = os.waitpid(pid, os.WNOHANG)
        status = code if ended else None
        time.sleep(0.005)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        return "hang", f"no answer within {SECONDS} s"
    told = os.read(reading, 1000).decode()
    os.close(reading)
    if os.WIFSIGNALED(status):
        return "signal", f"signal {os.WTERMSIG(status)}"
    came, _, text = told.partition(" ")
    return came, text


def _reopen(setting: tr.Setting, path: Path, run: tr.Run) -> tuple[str, str]:
    pid = os.fork()
    if pid == 0:
        time.sleep(SECONDS)
        os._exit(0)
    try:
        run.store.close()
        tr.Run(setting, path).store.close()
        return "right", ""
    except tb.TierbedError as error:
        return "wrong", str(error)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
