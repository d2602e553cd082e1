"""Two versions on one folder: old files open and train on, new ones are right or refused by name.

Without another build at hand (``--other``, the folder that holds its package ``tierbed``) only
the kept fixtures of earlier versions are opened.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import tierbed as tb

from . import training as tr
from .outcome import Outcome
from .processes import call

#: Where the other build's package lies; set by the program's option.
OTHER: Path | None = None
_TESTS = Path(__file__).resolve().parents[1]


def run_case(number: int, luck: random.Random, scratch: Path) -> list[Outcome]:
    """A fixture, and a setting that two builds train in turn."""
    outcomes = [_fixture(number, scratch)]
    settings = [one for one in tr.SETTINGS.values() if not one.workers]
    setting = settings[number % len(settings)]
    if OTHER is None:
        text = "no other build; name one with --other"
        outcomes.append(Outcome(label="two builds", came="skipped", text=text))
        return outcomes
    oracle = call(lambda: tr.oracle(setting)).value
    for first, label in ((OTHER, "written by the other build"), (None, "read by the other build")):
        path = scratch / ("old" if first else "new")
        came, text = _in_turn(setting, path, first, oracle)
        outcomes.append(Outcome(label=label, came=came, text=text, setting=setting.name))
    return outcomes


def _fixture(number: int, scratch: Path) -> Outcome:
    from formats import test_formats as kept

    version, name = kept.FIXTURES[number % len(kept.FIXTURES)]

    def check() -> bool:
        kept.test_what_an_earlier_version_wrote_is_read(version, name, scratch / "fixture")
        return True

    (scratch / "fixture").mkdir()
    found = call(check, 120)
    label = f"fixture of {version}"
    if found.value:
        return Outcome(label=label, came="right", setting=name)
    return Outcome(
        label=label, came=found.came or "lost", text=f"{found.kind} {found.error}", setting=name
    )


def _in_turn(setting: tr.Setting, path: Path, first: Path | None, oracle: Any) -> tuple[str, str]:
    """One build trains half of a run, the other the rest."""
    half = tr.END // 2
    second = OTHER if first is None else None
    made = _train(setting, path, half, first)
    if "error" in made:
        return "wrong", f"the first build: {made['error']}"
    found = _train(setting, path, tr.END, second)
    if "error" in found:
        # An older build may know no newer format, and must say so by name.
        is_named = second is not None and found["kind"] in ("InvalidError", "UnsupportedError")
        return ("refused" if is_named else "lost"), f"{found['kind']}: {found['error']}"
    is_right = [made["whole"], found["whole"]] == [oracle[half]["whole"], oracle[tr.END]["whole"]]
    return ("right", "") if is_right else ("silent", "other rows")


def _train(setting: tr.Setting, path: Path, last: int, build: Path | None) -> dict[str, Any]:
    """Trains to step ``last`` in a new process of a build; None is the one at hand."""
    own = Path(tb.__file__).resolve().parents[1]
    paths = [str(build or own), str(_TESTS)]
    done = subprocess.run(
        [sys.executable, "-m", "campaign.versions", setting.name, str(path), str(last)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode != 0:
        return {"error": done.stderr[-400:], "kind": "process"}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def _main(name: str, path: str, last: str) -> None:
    setting = tr.SETTINGS[name]
    try:
        run = tr.Run(setting, Path(path))
        for done in run.steps(run.position(), int(last)):
            if done % setting.checkpoint_steps == 0 or done == int(last):
                run.save(done)
        told = tr.digest(run.store, setting)
        run.store.close()
    except tb.TierbedError as error:
        told = {"error": str(error), "kind": type(error).__name__}
    print(json.dumps(told))


if __name__ == "__main__":
    _main(*sys.argv[1:])
