"""SIGKILL in every phase of a run, then: is what was acknowledged there, and nothing else?

A life is one store that is trained, killed, opened and compared again and again, until it reaches
its end through all of it. A kill counts only when the process died of it, in the phase that its
own pipe told last.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tierbed as tb

from . import training as tr
from .outcome import Outcome
from .processes import Child, Ended, call, copy_folder, ended

Tell = Callable[[Any], None]
KILLS = 10


def run_case(number: int, luck: random.Random, scratch: Path) -> Iterator[Outcome]:
    """One life of one setting."""
    setting = list(tr.SETTINGS.values())[number % len(tr.SETTINGS)]
    found = call(lambda: tr.oracle(setting))
    if found.value is None:
        yield Outcome(label="oracle", came="wrong", text=found.error, setting=setting.name)
        return
    life = Life(setting, found.value, luck, scratch)
    for _ in range(KILLS):
        life.kill_once()
        yield from life.taken()
        if life.is_over:
            return
    life.reach_end()
    yield from life.taken()


def victim(setting: tr.Setting, folder: Path, luck: random.Random, tell: Tell) -> None:
    """Opens, goes back sometimes, and trains to the end, telling every phase as it begins."""
    path = folder / "store"
    kept = [] if not path.is_dir() else [name for _, name, _ in _kept(path)]
    if kept and luck.random() < 0.25:
        name = luck.choice(kept)
        tell(["begin", "restore", int(name.removeprefix("kept-"))])
        run = tr.Run(setting, path, checkpoint=name)
        tell(["end", "restore", int(name.removeprefix("kept-"))])
    else:
        tell(["begin", "open", 0])
        run = tr.Run(setting, path)
        tell(["end", "open", 0])
    for done in run.steps(run.position(), tr.END):
        tell(["step", "train", done])
        if done % setting.checkpoint_steps == 0 or done == tr.END:
            _save(run, setting, done, luck, tell)
        if done % 5 == 4 and luck.random() < 0.5:
            target = folder / f"snapshot-{done}"
            shutil.rmtree(target, ignore_errors=True)
            tell(["begin", "publish", done])
            run.store.publish(target)
            tell(["end", "publish", done])
    tell(["begin", "close", tr.END])
    run.store.close()
    tell(["end", "close", tr.END])


def _kept(path: Path) -> list[tuple[int, str, int]]:
    return tb._native.kept_checkpoints(str(path))


def _save(run: tr.Run, setting: tr.Setting, done: int, luck: random.Random, tell: Tell) -> None:
    names = [one.name for one in run.store.checkpoints()] if setting.keeps else []
    if setting.keeps and luck.random() < 0.3 and f"kept-{done}" not in names:
        tell(["begin", "keep", done])
        torch.manual_seed(1000 + done)
        extra = {"step": done, "dense": torch.arange(3.0) + done}
        note = {"note": tr.note(done)}
        run.store.checkpoint(f"kept-{done}", extra=extra, attachments=note, keep=True)
        tell(["end", "keep", done])
    else:
        tell(["begin", "checkpoint", done])
        run.save(done)
        tell(["end", "checkpoint", done])
    if len(names) > 2:
        tell(["begin", "drop", done])
        run.store.drop_checkpoint(names[0])
        tell(["end", "drop", done])


class Life:
    """One store through its kills."""

    def __init__(
        self, setting: tr.Setting, oracle: list[dict[str, str]], luck: random.Random, scratch: Path
    ) -> None:
        self.setting, self.oracle, self.luck, self.folder = setting, oracle, luck, scratch
        self.outcomes: list[Outcome] = []
        self.is_over = False
        self.allowed = {0}
        self.published: dict[int, bool] = {}

    def kill_once(self) -> None:
        """Trains, kills at a drawn instant, reopens and compares."""
        if self.allowed == {tr.END}:
            # At its end there is nothing left to kill: another run begins.
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            self.allowed = {0}
        luck = random.Random(self.luck.random())
        child = Child(lambda tell: victim(self.setting, self.folder, luck, tell))
        if not self._kill_behind(child, self.luck.randrange(1, 30)):
            self._add("run without a kill", "hang", "no progress for 60 s")
            return
        status = child.wait()
        found = ended(child, status)
        phase = self._follow(child.told)
        if found.signal != 9:
            self._ended_alone(found)
            return
        self._compare(f"kill in {phase}")

    def taken(self) -> list[Outcome]:
        """Returns what came since the last call."""
        found, self.outcomes = self.outcomes, []
        return found

    def _kill_behind(self, child: Child, events: int) -> bool:
        """Kills the child some moment behind its ``events``-th telling; False: it never came."""
        deadline = time.monotonic() + 60
        while len(child.told) < events and time.monotonic() < deadline:
            if not child.listen(1.0):
                return True
        is_late = len(child.told) < events
        until = time.monotonic() + self.luck.random() ** 2 * 0.02
        while time.monotonic() < until:
            pass
        child.kill()
        return not is_late

    def _follow(self, told: list[Any]) -> str:
        """Learns from what was told what may be found; returns the phase of the kill."""
        phase, allowed = "train", self.allowed
        for line in told:
            if not isinstance(line, list):
                continue
            what, phase_of, done = line
            if what == "begin":
                phase = phase_of
                if phase_of in ("checkpoint", "keep", "restore"):
                    allowed = allowed | {done}
                if phase_of == "publish":
                    self.published[done] = False
            elif what == "end":
                phase = "train"
                if phase_of in ("checkpoint", "keep", "restore"):
                    allowed = {done}
                if phase_of == "publish":
                    self.published[done] = True
        self.allowed = allowed
        return phase

    def _ended_alone(self, found: Ended) -> None:
        if found.signal or found.error:
            self._add("training", found.came or "wrong", f"{found.kind}: {found.error}")
        else:
            self._compare("run that ended before its kill")

    def reach_end(self) -> None:
        """Lets the run reach its end and compares it with the run in memory."""
        luck = random.Random(1)
        child = Child(lambda tell: victim(self.setting, self.folder, luck, tell))
        found = child.collect(time.monotonic() + 120)
        self._follow(child.told)
        if found.came or found.error:
            self._add("run to the end", found.came or "wrong", f"{found.kind}: {found.error}")
            return
        self.allowed = {tr.END}
        self._compare("run to the end")

    def _compare(self, label: str) -> None:
        allowed, published = sorted(self.allowed), dict(self.published)
        with_kept = self.luck.random() < 0.3
        found = call(lambda: self._examine(allowed, published, with_kept))
        if found.value is None:
            came = found.came or "lost"
            self._add(label, came, f"does not open: {found.kind}: {found.error}")
            return
        self.allowed = {found.value["step"]}
        for came, text in found.value["found"]:
            self._add(label if came != "refused" else "snapshot cut by a kill", came, text)
        self.published = {}

    def _examine(
        self, allowed: list[int], published: dict[int, bool], with_kept: bool
    ) -> dict[str, Any]:
        """Reopens the store, in a process of its own, and finds what it holds."""
        path = self.folder / "store"
        run, text = _opened(self.setting, path)
        step = run.position()
        found = []
        wrong = tr.wrong_beside_rows(run, step)
        run.store.verify()
        if step not in allowed:
            found.append(("lost", f"at step {step}, of {allowed}"))
        elif tr.digest(run.store, self.setting)["whole"] != self.oracle[step]["whole"]:
            found.append(("silent", f"other rows at step {step}"))
        elif wrong:
            found.append(("silent", f"other {wrong} at step {step}"))
        elif text:
            found.append(("wrong", text))
        else:
            found.append(("unacked" if step != allowed[0] and len(allowed) > 1 else "right", ""))
        run.store.close()
        for done, is_whole in published.items():
            found += self._examine_snapshot(done, is_whole)
        if with_kept and path.is_dir():
            for _, name, _ in _kept(path):
                found += self._examine_kept(name)
        return {"step": step, "found": found}

    def _examine_kept(self, name: str) -> list[tuple[str, str]]:
        done = int(name.removeprefix("kept-"))
        copy = self.folder / "kept"
        copy_folder(self.folder / "store", copy)
        run = tr.Run(self.setting, copy, checkpoint=name)
        is_right = tr.digest(run.store, self.setting)["whole"] == self.oracle[done]["whole"]
        run.store.close()
        return [] if is_right else [("silent", f"other rows in the kept checkpoint {name}")]

    def _examine_snapshot(self, done: int, is_whole: bool) -> list[tuple[str, str]]:
        """A snapshot answers the oracle's rows, or, when it was cut, is refused."""
        path = self.folder / f"snapshot-{done}"
        try:
            snapshot = tb.Snapshot.open(path, dram_budget="8MiB")
        except tb.TierbedError as error:
            shutil.rmtree(path, ignore_errors=True)
            return [("lost" if is_whole else "refused", f"snapshot {done}: {error}")]
        with snapshot:
            snapshot.verify()
            is_right = self.setting.is_open or self._answers(snapshot) == self._weights(done)
        shutil.rmtree(path)
        return [] if is_right else [("silent", f"other rows in snapshot {done}")]

    def _answers(self, snapshot: tb.Snapshot) -> str:
        import hashlib

        found = hashlib.sha256()
        for name in self.setting.tables:
            ids = torch.arange(int(tr.ROWS[name] or 0))
            bags = tb.KeyedJaggedTensor([name], ids, lengths=torch.ones_like(ids))
            found.update(snapshot.lookup(bags)[name].numpy().tobytes())
        return found.hexdigest()

    def _weights(self, done: int) -> str:
        return self.oracle[done]["weights"]

    def _add(self, label: str, came: str, text: str) -> None:
        self.outcomes.append(Outcome(label=label, came=came, text=text, setting=self.setting.name))
        self.is_over = self.is_over or came in ("lost", "hang", "wrong", "panic", "signal")


def _opened(setting: tr.Setting, path: Path) -> tuple[tr.Run, str]:
    """Opens the store; a lock that a dead owner's workers hold for a while is told."""
    began = time.monotonic()
    waited, told = 0.0, ""
    while True:
        try:
            run = tr.Run(setting, path)
        except tb.ClosedError as error:
            waited, told = time.monotonic() - began, str(error)
            if waited > 10:
                raise
            time.sleep(0.05)
            continue
        # Opening alone may be slow on a busy machine; only waiting for a lock is a finding.
        return run, f"locked for {waited:.1f} s by nobody: {told}" if waited > 1 else ""
