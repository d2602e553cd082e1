"""Power loss: what a real process did to its disk is recorded, and cut at any place.

The process is traced, so calls made past libc and writes through the rings of io_uring are seen.
What is written through a mapping is not: the ``mmap`` backend is left out, which refuses what a
power loss left unless nothing had changed.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from . import training as tr
from .disk import Disk
from .kills import Life, victim
from .outcome import Outcome
from .processes import call
from .traced import Event, Traced, build, events

STATES = 60
LEFT_OUT = ("mmap", "file workers")


def run_case(number: int, luck: random.Random, scratch: Path) -> Iterator[Outcome]:
    """Records one run and rebuilds states of it, of both models of a file system in turn."""
    settings = [one for one in tr.SETTINGS.values() if one.name not in LEFT_OUT]
    setting = settings[number % len(settings)]
    tracer, why = build(scratch)
    if tracer is None:
        yield Outcome(label="power loss", came="skipped", text=why)
        return
    oracle = call(lambda: tr.oracle(setting))
    if oracle.value is None:
        yield Outcome(label="oracle", came="wrong", text=oracle.error, setting=setting.name)
        return
    live = scratch / "live"
    live.mkdir()
    own = random.Random(luck.random())
    try:
        traced = Traced(
            tracer, live, scratch / "log", lambda tell: victim(setting, live, own, tell)
        )
    except PermissionError as error:
        yield Outcome(label="power loss", came="skipped", text=f"no tracing: {error}")
        return
    found = traced.collect(120)
    if found.came or found.error:
        text = f"{found.kind}: {found.error}"
        came = found.came or "wrong"
        yield Outcome(label="recorded run", came=came, text=text, setting=setting.name)
        return
    seen = list(events(scratch / "log"))
    yield from _states(setting, oracle.value, seen, live, scratch, luck)


def _states(
    setting: tr.Setting,
    oracle: list[dict[str, str]],
    seen: list[Event],
    live: Path,
    scratch: Path,
    luck: random.Random,
) -> Iterator[Outcome]:
    """Cuts the power behind drawn events; half of the cuts are near what names a commit."""
    is_strict = luck.random() < 0.5
    label = f"power loss, {'strict POSIX' if is_strict else 'ext4'}"
    ring = " through io_uring" if any(event.what == "U" for event in seen) else ""
    near = [at for at, event in enumerate(seen) if event.what in "RLXS"] or [0]
    cuts = sorted(
        luck.choice(near) + luck.randint(-2, 3)
        if luck.random() < 0.5
        else luck.randrange(len(seen))
        for _ in range(STATES)
    )
    disk, done = Disk(live, is_strict), 0
    life = Life(setting, oracle, luck, scratch / "cut")
    for cut in cuts:
        for event in seen[done : max(done, min(cut, len(seen)))]:
            disk.follow(event)
            if event.what == "M":
                life._follow([_line(line) for line in event.one.splitlines()])
        done = max(done, min(cut, len(seen)))
        allowed = set(life.allowed)
        shutil.rmtree(scratch / "cut", ignore_errors=True)
        disk.leave(scratch / "cut", luck)
        life._compare(label + ring)
        yield from life.taken()
        life.allowed = allowed


def _line(raw: bytes) -> object:
    import json

    return json.loads(raw)
