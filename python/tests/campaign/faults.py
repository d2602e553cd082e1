"""Calls that fail: EIO, ENOSPC, EDQUOT, EMFILE out of writes, reads, syncs, names and rings.

The run may end with an error or go on; afterwards, on a disk that works again, the last
acknowledged checkpoint is there, and training reaches its end.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from pathlib import Path

from . import training as tr
from .kills import Life, victim
from .outcome import Outcome
from .processes import call
from .traced import Fault, Traced, build, events

#: Class of calls, what is told of it, and the errors it may give.
CLASSES = {
    "w": ("write", (errno.EIO, errno.ENOSPC, errno.EDQUOT)),
    "r": ("read", (errno.EIO,)),
    "s": ("sync", (errno.EIO, errno.ENOSPC)),
    "m": ("name or size", (errno.EIO, errno.ENOSPC, errno.EMFILE)),
    "u": ("ring", (errno.EBADF,)),
}
LEFT_OUT = ("file workers",)


def run_case(number: int, luck: random.Random, scratch: Path) -> Iterator[Outcome]:
    """One life with a failing call in each of some runs, then to its end without."""
    settings = [one for one in tr.SETTINGS.values() if one.name not in LEFT_OUT]
    setting = settings[number % len(settings)]
    tracer, why = build(scratch)
    if tracer is None:
        yield Outcome(label="fault", came="skipped", text=why)
        return
    oracle = call(lambda: tr.oracle(setting))
    if oracle.value is None:
        yield Outcome(label="oracle", came="wrong", text=oracle.error, setting=setting.name)
        return
    live = scratch / "live"
    live.mkdir()
    life = Life(setting, oracle.value, luck, live)
    try:
        for _ in range(8):
            _one_fault(life, tracer, scratch)
            yield from life.taken()
            if life.is_over:
                return
    except PermissionError as error:
        yield Outcome(label="fault", came="skipped", text=f"no tracing: {error}")
        return
    life.reach_end()
    yield from life.taken()


def _one_fault(life: Life, tracer: Path, scratch: Path) -> None:
    luck = random.Random(life.luck.random())
    kind = luck.choice(list(CLASSES))
    word, codes = CLASSES[kind]
    fault = Fault(
        kind=kind,
        at=int(luck.random() ** 2 * 150) + 1,
        errno=luck.choice(codes),
        once=luck.random() < 0.6,
    )
    setting, live = life.setting, life.folder
    own = random.Random(luck.random())
    traced = Traced(
        tracer, live, scratch / "log", lambda tell: victim(setting, live, own, tell), fault
    )
    found = traced.collect(120)
    life._follow(traced.child.told)
    count = sum(event.what == "F" for event in events(scratch / "log"))
    label = f"{word} fails with {errno.errorcode[fault.errno]}" if count else "no call failed"
    if found.came:
        life._add(label, found.came, f"{found.kind}: {found.error} ({fault})")
    elif found.error and not count:
        life._add(label, "wrong", f"{found.kind}: {found.error}")
    else:
        life._compare(label)
