"""SIGKILL while versions are cut, pushed, promoted and pruned: what do channels name then?

Each version carries the step it was cut at. Behind every kill each channel must name a whole
version, whose rows are those of that step of a run in memory, and none older than what its
publisher was told is there. The next life goes on from the store's last checkpoint.
"""

from __future__ import annotations

import hashlib
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
from .processes import Child, call, ended

Tell = Callable[[Any], None]
KILLS = 10
NAMES = ("file", "cold", "lsm", "file open", "forward", "forward shards", "window shards")
SETTINGS = [tr.SETTINGS[name] for name in NAMES]


def run_case(number: int, luck: random.Random, scratch: Path) -> Iterator[Outcome]:
    """One store and its location through their kills."""
    setting = SETTINGS[number % len(SETTINGS)]
    found = call(lambda: oracle(setting))
    if found.value is None:
        yield Outcome(label="oracle", came="wrong", text=found.error, setting=setting.name)
        return
    life = Life(setting, found.value, luck, scratch)
    for _ in range(KILLS):
        outcome = life.kill_once()
        yield outcome
        if outcome.came in ("lost", "hang", "wrong", "panic", "signal", "silent"):
            return


def ids_of(name: str) -> torch.Tensor:
    """Returns what is asked of a table: all rows, or all ids that are drawn."""
    rows = tr.ROWS[name]
    return torch.arange(1, 91) * 2**40 if rows is None else torch.arange(rows)


def answers(lookup: Callable[[tb.KeyedJaggedTensor], Any], setting: tr.Setting) -> str:
    """Digests what is answered for every row."""
    found = hashlib.sha256()
    for name in setting.tables:
        ids = ids_of(name)
        bags = tb.KeyedJaggedTensor([name], ids, lengths=torch.ones_like(ids))
        found.update(lookup(bags)[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def oracle(setting: tr.Setting) -> list[str]:
    """Returns the answers of a run in memory after each step."""
    like = tr.Setting(name="oracle", backend="memory", is_open=setting.is_open, dram="64MiB")
    run = tr.Run(like, None)
    found = [_published(run, like)]
    for step in range(tr.END):
        run._step(tr.batch_at(setting, step))
        if setting.is_open and (step + 1) % 7 == 5:
            run.store.evict(now_mins=1000)
        found.append(_published(run, like))
    run.store.close()
    return found


def _published(run: tr.Run, setting: tr.Setting) -> str:
    """Answers from a whole snapshot, which is what rows and ids of a version must come to."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run.store.publish(Path(folder) / "whole")
        with tb.Snapshot.open(Path(folder) / "whole", dram_budget="8MiB") as snapshot:
            return answers(snapshot.lookup, setting)


def victim(setting: tr.Setting, folder: Path, luck: random.Random, tell: Tell) -> None:
    """Trains to the end and publishes all along, telling every phase as it begins."""
    tell(["begin", "open", 0])
    run = tr.Run(setting, folder / "store")
    first = done = run.position()
    commits = luck.random() < 0.5
    publisher = tb.Publisher(
        run.store,
        None,
        folder / "models" / "ads",
        delta_every=0,
        full_every=None,
        keep="0s" if luck.random() < 0.5 else None,
        checkpoint=(lambda: run.save(done)) if commits else None,
        attachments=lambda: {"step": str(done).encode()},
        on_error="raise",
    )
    tell(["begin", "train", done])
    for done in run.steps(first, tr.END):
        tell(["begin", "publish", done])
        if luck.random() < 0.7:
            publisher.step()
        else:
            version = publisher.publish_now(full=True if luck.random() < 0.3 else None)
            tell(["at", version.version])
        if luck.random() < 0.3:
            tell(["begin", "checkpoint", done])
            run.save(done)
        if luck.random() < 0.2 and publisher.stats().version is not None:
            tell(["begin", "promote", done])
            publisher.promote("stable")
    tell(["begin", "close", done])
    publisher.close()
    run.store.close()


class Life:
    """One store and its location."""

    def __init__(
        self, setting: tr.Setting, answers: list[str], luck: random.Random, scratch: Path
    ) -> None:
        self.setting, self.answers, self.luck, self.folder = setting, answers, luck, scratch
        self.least = 0

    def kill_once(self) -> Outcome:
        """Lets a victim live for a while, kills it, and looks at every channel."""
        luck = random.Random(self.luck.random())
        child = Child(lambda tell: victim(self.setting, self.folder, luck, tell))
        came_to_kill = self._kill_behind(child, self.luck.randrange(2, 40))
        found = ended(child, child.wait())
        phase = self._follow(child.told)
        if not came_to_kill:
            return self._outcome("run without a kill", "hang", "no progress for 60 s")
        if found.error:
            return self._outcome("training", "wrong", f"{found.kind}: {found.error}")
        label = f"kill in {phase}" if found.signal == 9 else "run that ended before its kill"
        examined = call(self._examine)
        if examined.value is None:
            text = f"{examined.kind}: {examined.error}"
            return self._outcome(label, examined.came or "lost", text)
        came, text, self.least = examined.value
        if found.signal != 9:
            # Nothing is left to train: the next one begins anew, beside the same versions.
            shutil.rmtree(self.folder / "store")
        return self._outcome(label, came, text)

    def _kill_behind(self, child: Child, events: int) -> bool:
        """Kills the child some moment behind its ``events``-th telling; False: it never came."""
        deadline = time.monotonic() + 60
        while len(child.told) < events and time.monotonic() < deadline:
            if not child.listen(1.0):
                return True
        is_late = len(child.told) < events
        until = time.monotonic() + self.luck.random() ** 2 * 0.05
        while time.monotonic() < until:
            pass
        child.kill()
        return not is_late

    def _follow(self, told: list[Any]) -> str:
        phase = "open"
        for line in told:
            if isinstance(line, list) and line[0] == "begin":
                phase = line[1]
            if isinstance(line, list) and line[0] == "at":
                self.least = max(self.least, line[1])
        return phase

    def _examine(self) -> tuple[str, str, int]:
        """Serves every channel as a server would."""
        versions = tb.Versions(self.folder / "models" / "ads")
        channels = versions.list().channels
        if not channels:
            return ("right", "", 0) if self.least == 0 else ("lost", "no channel", 0)
        newest = 0
        for channel in channels:
            here = self.folder / "here"
            shutil.rmtree(here, ignore_errors=True)
            pulled = versions.pull(here, channel=channel.name)
            step = int((Path(pulled.folders[-1]) / "att.step").read_bytes())
            whole = Path(pulled.folders[0])
            for at, delta in enumerate(pulled.folders[1:]):
                tb.Snapshot.apply(whole, delta, here / f"whole-{at}", dram_budget="32MiB")
                whole = here / f"whole-{at}"
            with tb.Snapshot.open(whole, dram_budget="8MiB") as snapshot:
                snapshot.verify()
                if answers(snapshot.lookup, self.setting) != self.answers[step]:
                    text = f"other rows in {channel.name} at {channel.chain}, step {step}"
                    return "silent", text, 0
            if channel.name == "canary":
                newest = int(channel.version or 0)
        if newest < self.least:
            return "lost", f"at version {newest}, and was at {self.least}", newest
        return "right", "", newest

    def _outcome(self, label: str, came: str, text: str) -> Outcome:
        return Outcome(label=label, came=came, text=text, setting=self.setting.name)
