"""Training in a memory cgroup: within its budget and some room, the kernel ends nobody.

The child is forked with torch loaded, so the group counts what training itself takes.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from . import training as tr
from .outcome import Outcome
from .processes import Ended, call

GROUPS = Path("/sys/fs/cgroup/memory")
#: Beyond the store's budget: tensors, and what a forked interpreter writes over.
ROOM_BYTES = 192 << 20


def run_case(number: int, luck: random.Random, scratch: Path) -> list[Outcome]:
    """One setting with a budget drawn between 8 and 64 MiB."""
    settings = [one for one in tr.SETTINGS.values() if one.backend not in (None, "mmap")]
    setting = settings[number % len(settings)]
    budget = luck.choice([8, 16, 32, 64]) << 20
    group = GROUPS / f"tierbed-campaign-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(budget + ROOM_BYTES))
    except OSError as error:
        return [Outcome(label="memory limit", came="skipped", text=f"no memory cgroup: {error}")]
    try:
        oracle = call(lambda: tr.oracle(setting))
        found = call(lambda: _train(setting, scratch / "store", group, budget), 120)
        came, text = _judge(found, oracle.value)
        return [Outcome(label="memory limit", came=came, text=text, setting=setting.name)]
    finally:
        group.rmdir()


def _train(setting: tr.Setting, path: Path, group: Path, budget: int) -> dict[str, Any]:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    run = tr.Run(setting, path, dram_budget=budget)
    for done in run.steps(0, tr.END):
        if done % setting.checkpoint_steps == 0:
            run.save(done)
    told = tr.digest(run.store, setting)
    peak = int((group / "memory.max_usage_in_bytes").read_text())
    run.store.close()
    return {"whole": told["whole"], "peak": peak}


def _judge(found: Ended, oracle: Any) -> tuple[str, str]:
    if found.value is None or oracle is None:
        return found.came or "wrong", f"{found.kind}: {found.error} signal {found.signal}"
    is_right = found.value["whole"] == oracle[tr.END]["whole"]
    return "right" if is_right else "silent", f"peak {found.value['peak'] >> 20} MiB"
