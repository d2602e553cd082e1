"""Damage to every kind of file, then: an error, the right bits, or a documented rollback?

What opens and answers otherwise without an error is silent, and must not be. What the documents
promise nothing for is counted as documented: the ``mmap`` backend, which has no checksums, and
the last entries of a log, behind which the store opens at a step before.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tierbed as tb
from tierbed.placement import Placement, QueryLog, import_tables

from . import training as tr
from .kills import _kept
from .outcome import Outcome
from .processes import Ended, call, copy_folder

TRIES = 40
AT, KEPT = 9, 6
#: What a whole file may suffer; the first letters of a damage name it in the table.
WAYS = ("flip", "bytes", "zeros", "cut", "grow", "swap", "symlink", "folder", "missing")
SETTINGS = [one for one in tr.SETTINGS.values() if not one.workers and "pread" not in one.name]


def run_case(number: int, luck: random.Random, scratch: Path) -> Iterator[Outcome]:
    """Damages a store (two cases of three) or what is served, again and again."""
    if number % 3 == 2:
        yield from _damage_served(number // 3, luck, scratch)
        return
    setting = SETTINGS[(number - number // 3) % len(SETTINGS)]
    made = call(lambda: _make_store(setting, scratch / "whole"))
    oracle = call(lambda: tr.oracle(setting))
    if made.error or oracle.value is None:
        text = made.error or oracle.error
        yield Outcome(label="make", came="wrong", text=text, setting=setting.name)
        return
    for _ in range(TRIES):
        copy_folder(scratch / "whole", scratch / "store")
        what, told = _damage(scratch / "store", luck)
        found = call(lambda: _examine(setting, scratch / "store", oracle.value))
        came, text = _judge(found, setting, what)
        label = f"{told} in a store"
        yield Outcome(label=label, came=came, text=f"{what}: {text}", setting=setting.name)


def _make_store(setting: tr.Setting, path: Path) -> None:
    run = tr.Run(setting, path)
    for done in run.steps(0, AT):
        if done == KEPT and setting.keeps:
            run.save(done, keep=True)
        elif done in (3, KEPT, AT) or setting.durability == "step":
            run.save(done)
    run.store.close()


def _examine(setting: tr.Setting, path: Path, oracle: list[dict[str, str]]) -> Any:
    run = tr.Run(setting, path)
    step = run.position()
    run.store.verify()
    wrong = tr.wrong_beside_rows(run, step)
    is_right = tr.digest(run.store, setting)["whole"] == oracle[step]["whole"] and not wrong
    kept = []
    if setting.keeps:
        # Reading a kept checkpoint comes last: going back to it is a change.
        kept = [name for _, name, _ in _kept(path)]
    run.store.close()
    for name in kept:
        run = tr.Run(setting, path, checkpoint=name)
        at = run.position()
        is_right &= tr.digest(run.store, setting)["whole"] == oracle[at]["whole"]
        run.store.close()
    return [step, is_right, len(kept)]


def _judge(found: Ended, setting: tr.Setting, what: str) -> tuple[str, str]:
    if found.came:
        return found.came, f"{found.kind} {found.error} signal {found.signal}"
    if found.value is None:
        # Anything but an error of ours is a failure that names no remedy.
        is_told = hasattr(tb, found.kind) or found.kind in ("OSError", "UnpicklingError")
        return ("refused" if is_told else "wrong"), f"{found.kind}: {found.error}"
    step, is_right, kept = found.value
    if not is_right:
        # The mapped backend promises no checksums.
        return ("documented" if setting.backend == "mmap" else "silent"), f"other rows at {step}"
    if step == AT:
        if setting.keeps and kept == 0:
            return "rollback", "the kept checkpoint is gone"
        return "right", ""
    if step and what.endswith(".wal") and setting.durability == "step":
        return "rollback", f"at step {step} of {AT}"
    return "silent", f"opened at step {step} of {AT} without a word"


# ---------------------------------------------------------------- damages


def files_below(folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in found if path.name != "LOCK"]


def _damage(folder: Path, luck: random.Random) -> tuple[str, str]:
    """Damages one file below ``folder``; returns its name and what was done to it."""
    files = files_below(folder)
    path = luck.choice(files)
    name = str(path.relative_to(folder))
    way = luck.choice(WAYS if luck.random() < 0.5 else WAYS[:3])
    raw = bytearray(path.read_bytes())
    # Linked files are damaged alone.
    path.unlink()
    if way == "missing":
        return name, way
    if way == "symlink":
        path.symlink_to(folder / "nowhere")
        return name, "dangling symlink"
    if way == "folder":
        path.mkdir()
        return name, "a folder in place of a file"
    if way == "swap":
        other = luck.choice(files)
        path.write_bytes(other.read_bytes() if other != path else bytes(raw[::-1]))
        return name, "another file's bytes"
    path.write_bytes(_harmed(raw, way, luck))
    return name, {"flip": "flipped bit", "bytes": "random bytes", "cut": "truncation"}.get(way, way)


def _harmed(raw: bytearray, way: str, luck: random.Random) -> bytes:
    if way == "grow" or not raw:
        return bytes(raw) + luck.randbytes(luck.randint(1, 5000))
    at = luck.randrange(len(raw))
    length = min(len(raw) - at, luck.choice([1, 8, 512, 4096]))
    if way == "cut":
        return bytes(raw[:at])
    if way == "flip":
        used = [place for place in range(len(raw)) if raw[place]] if len(raw) < 1 << 16 else []
        at = luck.choice(used) if used and luck.random() < 0.7 else at
        raw[at] ^= 1 << luck.randrange(8)
    elif way == "bytes":
        raw[at : at + length] = luck.randbytes(length)
    else:
        raw[at : at + length] = bytes(length)
    return bytes(raw)


# ---------------------------------------------------------------- what is served


def _rows(count: int, dim: int, seed: int) -> torch.Tensor:
    words = [tr.mixed(seed, at) % 4096 - 2048 for at in range(count * dim)]
    return torch.tensor(words, dtype=torch.float32).view(count, dim) / 64


_TABLES = {"a": (60, 6), "b": (24, 6), "wide": (3, 2500)}


def _tables() -> dict[str, torch.Tensor]:
    return {name: _rows(*shape, seed=at) for at, (name, shape) in enumerate(_TABLES.items())}


def _log() -> QueryLog:
    values = torch.tensor([tr.mixed(at) % 84 for at in range(400)])
    return QueryLog.from_batches(84, [(values, torch.arange(0, 401, 4))])


def _make_snapshot(folder: Path) -> None:
    tables = _tables()
    import_tables(tables, folder / "plain")
    placement = tb.place(_log(), rows_per_page=8, method="maxembed", ratio=0.3)
    (folder / "placed").mkdir()
    placement.write(folder / "pages.tbp")
    (folder / "placed").rmdir()
    import_tables(tables, folder / "placed", placement={("a", "b"): folder / "pages.tbp"})
    counts = {name: 1000.0 / (1 + torch.arange(len(rows))) for name, rows in tables.items()}
    tb.plan_tiers(tables, counts, dram_bytes=40_000, tails=("default",)).save(folder / "tiers")


def _rows_of(snapshot: tb.Snapshot, backend_tables: dict[str, torch.Tensor]) -> bool:
    for name, rows in backend_tables.items():
        ids = torch.arange(len(rows))
        bags = tb.KeyedJaggedTensor([name], ids, lengths=torch.ones_like(ids))
        if not torch.equal(snapshot.lookup(bags)[name], rows):
            return False
    return True


def _open_snapshot(folder: Path, kind: str, backend: str) -> bool:
    with tb.Snapshot.open(folder / kind, dram_budget="8MiB", backend=backend) as snapshot:
        return _rows_of(snapshot, _tables())


def _make_delta(folder: Path) -> None:
    store = tb.Store.open(None, backend="memory", dram_budget="64MiB")
    tables = [
        tb.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim)
        for name, (rows, dim) in _TABLES.items()
    ]
    emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))
    for at, name in enumerate(("base", "delta")):
        ids = torch.cat([torch.arange(rows) for rows, _ in _TABLES.values()])
        lengths = torch.zeros(3 * 60, dtype=torch.int64)
        for place, (rows, _) in enumerate(_TABLES.values()):
            lengths[60 * place : 60 * place + rows] = 1
        bags = tb.KeyedJaggedTensor(list(_TABLES), ids, lengths=lengths)
        emb(bags).values().square().sum().backward()
        store.publish(folder / name, base=folder / "base" if at else None)
    torch.save(
        {name: store.read_rows(name, 0, s[0]) for name, s in _TABLES.items()}, folder / "want"
    )


def _apply_delta(folder: Path) -> bool:
    tb.Snapshot.apply(folder / "base", folder / "delta", folder / "out", dram_budget="64MiB")
    with tb.Snapshot.open(folder / "out", dram_budget="8MiB") as snapshot:
        return _rows_of(snapshot, torch.load(folder / "want"))


def _placement_is_right(folder: Path) -> bool:
    def pages(path: Path) -> list[list[int]]:
        found = Placement.read(path)
        return [found.page(at) for at in range(int(found.info().page_count))]

    return pages(folder / "pages.tbp") == pages(folder.parent / "whole" / "pages.tbp")


def _tiers_are_right(folder: Path) -> bool:
    found = tb.TierPlan.load(folder / "tiers")
    wanted = tb.TierPlan.load(folder.parent / "whole" / "tiers")
    return repr(found) == repr(wanted)


#: What is damaged: the part of the folder, how it is made, and how it is read.
_SERVED: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], bool]]] = {
    "snapshot, direct": ("plain", _make_snapshot, lambda f: _open_snapshot(f, "plain", "direct")),
    "snapshot, mmap": ("plain", _make_snapshot, lambda f: _open_snapshot(f, "plain", "mmap")),
    "snapshot, memory": ("plain", _make_snapshot, lambda f: _open_snapshot(f, "plain", "memory")),
    "placed snapshot": ("placed", _make_snapshot, lambda f: _open_snapshot(f, "placed", "direct")),
    "placement": ("pages.tbp", _make_snapshot, _placement_is_right),
    "tier plan": ("tiers", _make_snapshot, _tiers_are_right),
    "delta": ("delta", _make_delta, _apply_delta),
    "base of a delta": ("base", _make_delta, _apply_delta),
}


def _damage_served(number: int, luck: random.Random, scratch: Path) -> Iterator[Outcome]:
    name = list(_SERVED)[number % len(_SERVED)]
    part, make, read = _SERVED[name]
    (scratch / "whole").mkdir()
    made = call(lambda: make(scratch / "whole"))
    if made.error:
        yield Outcome(label="make", came="wrong", text=made.error, setting=name)
        return
    for _ in range(TRIES):
        copy_folder(scratch / "whole", scratch / "copy")
        target = scratch / "copy" / part
        if target.is_file():
            # A part that is one file is damaged in a folder of its own.
            alone = scratch / "copy" / "alone"
            alone.mkdir()
            shutil.move(target, alone / part)
            what, told = _damage(alone, luck)
            for left in alone.iterdir():
                shutil.move(left, target)
        else:
            what, told = _damage(target, luck)
        found = call(lambda: [read(scratch / "copy")])
        came, text = _judge_served(found)
        label = f"{told} in a {name}"
        yield Outcome(label=label, came=came, text=f"{what}: {text}", setting=name)


def _judge_served(found: Ended) -> tuple[str, str]:
    if found.came:
        return found.came, f"{found.kind} {found.error} signal {found.signal}"
    if found.value is None:
        is_told = hasattr(tb, found.kind) or found.kind in ("OSError", "IsADirectoryError")
        return ("refused" if is_told else "wrong"), f"{found.kind}: {found.error}"
    return ("right" if found.value[0] else "silent"), "" if found.value[0] else "other answers"
