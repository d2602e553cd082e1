"""Does the campaign itself run, count truly, and notice what it is there to notice?"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from . import publishing, training as tr
from .disk import Disk
from .kills import Life
from .outcome import BAD, Case, Outcome, Tally
from .processes import Child, call, ended, free_folder
from .traced import Event

_TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute_of_every_kind_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "campaign", "--minutes", "1", "--seed", "11"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out.json"), "--scratch", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(_TESTS)},
        capture_output=True,
        text=True,
    )
    told = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == 0, done.stdout
    assert told["bad"] == []
    assert {"kills", "damage", "requests"} <= set(told["cases"])
    assert not list(tmp_path.glob("tierbed-campaign-*")), "scratch was left behind"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_kills_of_publishers_leave_whole_versions(tmp_path: Path) -> None:
    kills = 0
    for number in range(100):
        scratch = free_folder(tmp_path / "life")
        for outcome in publishing.run_case(number, random.Random(number), scratch):
            assert outcome.came == "right", outcome
            kills += outcome.label.startswith("kill in")
        if kills >= 100:
            return
    pytest.fail(f"only {kills} kills")


def test_other_rows_of_a_channel_are_silent(tmp_path: Path) -> None:
    setting = publishing.SETTINGS[0]
    answers = call(lambda: publishing.oracle(setting)).value
    life = publishing.Life(setting, answers, random.Random(1), tmp_path)
    told = Child(lambda tell: publishing.victim(setting, tmp_path, random.Random(2), tell))
    assert ended(told, told.wait()).error == ""
    life._follow(told.told)
    assert life.least > 0
    examined = call(life._examine)
    assert examined.value is not None, examined
    assert examined.value[0] == "right"
    life.answers = ["" for _ in answers]
    assert call(life._examine).value[0] == "silent"
    life.least = 99
    life.answers = answers
    assert call(life._examine).value[0] == "lost"


def _life(tmp_path: Path, trained: int, told: list[list[object]]) -> Life:
    setting = tr.SETTINGS["file"]

    def make() -> None:
        run = tr.Run(setting, tmp_path / "store")
        for done in run.steps(0, trained):
            if done % 3 == 0:
                run.save(done)
        run.store.close()

    assert call(make).error == ""
    life = Life(setting, call(lambda: tr.oracle(setting)).value, random.Random(1), tmp_path)
    life._follow(told)
    life._compare("kill")
    return life


def test_an_older_checkpoint_than_the_acknowledged_one_is_lost(tmp_path: Path) -> None:
    life = _life(tmp_path, 3, [["end", "checkpoint", 6]])
    assert [one.came for one in life.outcomes] == ["lost"]


def test_other_rows_are_silent(tmp_path: Path) -> None:
    life = _life(tmp_path, 3, [["end", "checkpoint", 3]])
    assert [one.came for one in life.outcomes] == ["right"]
    life.oracle[3] = {"weights": "", "whole": ""}
    life._compare("kill")
    assert life.outcomes[-1].came == "silent"


def test_a_child_ends_as_it_is_told() -> None:
    assert call(lambda: 7).value == 7
    assert call(lambda: os.kill(os.getpid(), 11)).came == "signal"
    assert call(lambda: {}["x"]).kind == "KeyError"

    def wait() -> None:
        import time

        time.sleep(30)

    assert call(wait, 0.3).came == "hang"


def test_bad_outcomes_come_with_the_command_that_repeats_them() -> None:
    tally = Tally()
    found = [Outcome(label="kill", came=came) for came in ("right", "right", "lost")]
    tally.add(Case(kind="kills", number=3, seed=9, outcomes=found))
    assert "2 right" in tally.table()
    assert "1 LOST" in tally.table()
    assert tally.verdict().startswith("1 lost, 0 silent")
    assert "make campaign KIND=kills SEED=9 CASE=3" in next(iter(tally.failures()))
    assert set(BAD).isdisjoint({"right", "refused"})


def _event(what: str, inode: int, number: int, other: int, one: bytes, two: bytes = b"") -> Event:
    return Event(what=what, numbers=(inode, number, other), one=one, two=two)


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_power_loss_takes_what_was_not_synced(tmp_path: Path, is_strict: bool) -> None:
    disk = Disk(Path("/f"), is_strict)
    for event in (
        _event("O", 5, 0, 1, b"/f/a"),
        _event("W", 5, 0, 3, b"old", b"/f/a"),
        _event("S", 5, 0, 0, b"/f/a"),
        _event("W", 5, 0, 3, b"new", b"/f/a"),
        _event("R", 0, 0, 0, b"/f/a", b"/f/b"),
    ):
        disk.follow(event)
    seen = set()
    for at in range(60):
        target = tmp_path / str(at)
        disk.leave(target, random.Random(at))
        seen.add(tuple((path.name, path.read_bytes()) for path in sorted(target.iterdir())))
    # Synced bytes are old or new; without a sync of the folder the name itself may be missing.
    both = {((name, raw),) for name in ("a", "b") for raw in (b"old", b"new")}
    assert seen == (both | {()} if is_strict else both)
