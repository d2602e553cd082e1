"""Runs the campaign: cases of each kind until its time is up, two at a time, and tells counts."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

# The first call of an operator of ours imports this, which takes seconds: once here, not once in
# every child.
import torch._dynamo

from . import versions
from .outcome import Case, Outcome, Tally
from .processes import Child, ended
from .training import mixed

#: Kind, and its share of the time. A damaged file is the cheapest to miss and takes the longest:
#: every format, backend and place in a file is one of its cases.
KINDS = {
    "kills": 4,
    "publishing": 2,
    "power": 3,
    "faults": 2,
    "damage": 10,
    "requests": 2,
    "forks": 1,
    "ranks": 1,
    "limits": 1,
    "versions": 1,
}
#: A case that tells nothing for so long hangs; the calls within it have shorter limits.
SILENT_SECONDS = 300
#: Cases under way when the time is up may go on for so long; what they told counts.
GRACE_SECONDS = 30


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.other:
        versions.OTHER = Path(options.other).resolve()
    kinds = list(KINDS) if options.kind == "all" else options.kind.split(",")
    for kind in kinds:
        if kind not in KINDS:
            sys.stderr.write(f"no kind {kind!r}; there are {', '.join(KINDS)}\n")
            return 2
    tally = Tally()
    base = Path(tempfile.mkdtemp(prefix="tierbed-campaign-", dir=options.scratch))
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"campaign: seed {options.seed}, {options.minutes:g} minutes", flush=True)
    try:
        _run_kinds(kinds, options, base, tally)
    except KeyboardInterrupt:
        print("stopped; counts so far:")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print(tally.table())
    for (kind, text), count in sorted(tally.notes.items()):
        print(f"skipped x{count} {kind}: {text}")
    for failure in tally.failures():
        print(failure)
    print(f"verdict: {tally.verdict()} (seed {options.seed})")
    if options.out:
        seconds = round(time.monotonic() - began, 1)
        tally.write(Path(options.out), seed=options.seed, seconds=seconds, verdict=tally.verdict())
    return 1 if tally.bad else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("--kind", default="all", help=f"all, or some of {', '.join(KINDS)}")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", type=int, default=None, help="this case alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", default=None, help="where folders are made")
    parser.add_argument("--other", default=None, help="folder of another build's package")
    parser.add_argument("--out", default=None, help="counts as JSON")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 30)
    return options


def _run_kinds(kinds: list[str], options: Any, base: Path, tally: Tally) -> None:
    whole = sum(KINDS[kind] for kind in kinds)
    for kind in kinds:
        seconds = 60 * options.minutes * KINDS[kind] / whole
        room = importlib.import_module(f"campaign.{kind}")
        first = time.monotonic()
        _run_kind(kind, room.run_case, options, seconds, base, tally)
        cases, bad = tally.cases[kind], sum(one["kind"] == kind for one in tally.bad)
        spent = time.monotonic() - first
        print(f"  {kind}: {cases} cases, {bad} bad, {spent:.0f} s", flush=True)


def _run_kind(
    kind: str, run_case: Any, options: Any, seconds: float, base: Path, tally: Tally
) -> None:
    """Keeps ``workers`` cases going until the time is up; each has a folder and a process group."""
    deadline = time.monotonic() + seconds
    going: dict[int, _Going] = {}
    number = 0 if options.case is None else options.case
    try:
        while True:
            is_due = options.case is None or number == options.case
            has_time = time.monotonic() < deadline
            # At least a case for each worker, however short the time.
            if is_due and len(going) < options.workers and (has_time or number < options.workers):
                going[number] = _Going(kind, number, options.seed, run_case, base)
                number += 1
                continue
            if not going:
                return
            is_over = options.case is None and time.monotonic() > deadline + GRACE_SECONDS
            for at, one in list(going.items()):
                if one.is_done(is_over):
                    tally.add(one.finish())
                    del going[at]
    finally:
        for one in going.values():
            one.stop()


class _Going:
    """A case under way."""

    def __init__(self, kind: str, number: int, seed: int, run_case: Any, base: Path) -> None:
        self.kind, self.number, self.seed = kind, number, seed
        self.folder = base / f"{kind}-{number}"
        self.folder.mkdir()
        self.heard, self.lines = time.monotonic(), 0
        self.is_late = self.is_cut = False
        luck = random.Random(mixed(seed, number, *kind.encode()))

        def work(tell: Any) -> None:
            os.setpgid(0, 0)
            for one in run_case(number, luck, self.folder):
                tell({"outcome": asdict(one)})
            tell({"value": True})

        self.child = Child(work)

    def is_done(self, is_over: bool) -> bool:
        """Listens; True when the case ended, or is ended because it hangs or its time is up."""
        is_open = self.child.listen(0.05)
        if len(self.child.told) > self.lines:
            self.heard, self.lines = time.monotonic(), len(self.child.told)
        self.is_late = time.monotonic() > self.heard + SILENT_SECONDS
        # However busy the machine, a case comes to one outcome at least.
        self.is_cut = is_open and is_over and self.lines > 0 and not self.is_late
        if self.is_late or self.is_cut:
            self._kill_group()
            return True
        return not is_open

    def finish(self) -> Case:
        found = ended(self.child, self.child.wait(), self.is_late)
        self.stop()
        told = [line["outcome"] for line in self.child.told if "outcome" in line]
        outcomes = [Outcome(**one) for one in told]
        if found.value is None and not self.is_cut:
            text = f"the case itself: {found.kind} {found.error} signal {found.signal}"
            came = found.came or "wrong"
            outcomes.append(Outcome(label="case", came=came, text=text))
        return Case(kind=self.kind, number=self.number, seed=self.seed, outcomes=outcomes)

    def stop(self) -> None:
        self._kill_group()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
