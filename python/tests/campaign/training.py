"""What is trained, in which setting, and what must a store hold after each step?

Batches come from whole numbers alone, so every process draws the same ones. The oracle is the
same run on a store in memory, digested after each step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import tierbed as tb

try:
    from tierbed.data import BatchOrder
except ImportError:  # a build of before the package had rooms: see ``campaign.versions``
    from tierbed.order import BatchOrder

_WORD = (1 << 64) - 1
SAMPLES, END, EPOCH = 8, 24, 8
ROWS: dict[str, int | None] = {"a": 400, "b": 60, "item": None}
DIMS = {"a": 9, "b": 17, "item": 6}


def mixed(*numbers: int) -> int:
    """Returns 64 bits of ``numbers`` by SplitMix64."""
    word = 0x9E3779B97F4A7C15
    for number in numbers:
        word = (word + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
        word ^= word >> 31
    return word


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a store is opened and trained."""

    name: str
    backend: str | None = None
    durability: str = "checkpoint"
    order: str = "window"
    is_open: bool = False
    shards: int | None = None
    io_engine: str = "auto"
    workers: int = 0
    unplanned: int | None = None
    dram: str = "16MiB"

    @property
    def tables(self) -> list[str]:
        return ["item", "b"] if self.is_open else ["a", "b"]

    @property
    def keeps(self) -> bool:
        """Whether checkpoints can be kept."""
        return self.shards is None and self.backend is not None

    @property
    def checkpoint_steps(self) -> int:
        return 1 if self.durability == "step" else 3

    def open(self, path: Path | None, **more: Any) -> tb.Store:
        options: dict[str, Any] = {
            "dram_budget": self.dram,
            "backend": self.backend,
            "durability": self.durability,
            "seed": 3,
        }
        # An older build, which `versions` runs, names the engine alone.
        is_grouped = hasattr(tb, "IoOptions")
        options |= (
            {"io": tb.IoOptions(engine=self.io_engine)}
            if is_grouped
            else {"io_engine": self.io_engine}
        )
        if self.backend is None:
            options |= {"order": self.order, "shards": self.shards}
            if self.unplanned is not None:
                options["on_mismatch"] = "fallback"
        return tb.Store.open(path, **{**options, **more})


def _settings() -> Iterator[Setting]:
    for backend in ("file", "cold", "lsm", "lsm_plain", "hashdb", "mmap", "memory"):
        yield Setting(name=backend, backend=backend)
    for backend in ("file", "cold", "lsm", "hashdb"):
        yield Setting(name=f"{backend} open", backend=backend, is_open=True)
    for backend in ("lsm", "lsm_plain"):
        yield Setting(name=f"{backend} step", backend=backend, durability="step")
    yield Setting(name="lsm step open", backend="lsm", durability="step", is_open=True)
    for backend in ("file", "cold", "lsm"):
        yield Setting(name=f"{backend} pread", backend=backend, io_engine="pread")
    yield Setting(name="file workers", backend="file", workers=2)
    yield Setting(name="forward", order="forward")
    yield Setting(name="forward tight", order="forward", dram="1MiB")
    yield Setting(name="forward shards", order="forward", shards=2, dram="24MiB")
    yield Setting(name="window shards", order="window", shards=2, dram="24MiB")
    yield Setting(name="fallback", order="auto", unplanned=11)


SETTINGS = {setting.name: setting for setting in _settings()}


def draw(names: list[str], step: int, seed: int = 0) -> tb.KeyedJaggedTensor:
    """Draws the batch of one step: bags of 0 to 3 ids, half of them of few rows."""
    values, lengths = [], []
    for at, name in enumerate(names):
        rows = ROWS[name]
        for sample in range(SAMPLES):
            count = mixed(seed, step, at, sample) % 4
            lengths.append(count)
            for place in range(count):
                drawn = mixed(seed, step, at, sample, place)
                if rows is None:
                    values.append((1 + drawn % 90) * 2**40)
                else:
                    values.append((drawn >> 8) % (10 if drawn % 2 else rows))
    return tb.KeyedJaggedTensor(
        names,
        torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        stride=SAMPLES,
    )


class _Steps(Dataset[Any]):
    def __init__(self, setting: Setting, first: int, last: int) -> None:
        self.setting, self.first, self.last = setting, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, at: int) -> Any:
        return batch_at(self.setting, self.first + at)


class _Epoch:
    """A loader that tells its order."""

    def __init__(self, names: list[str], start: int) -> None:
        self.names, self.start = names, start

    def epoch(self) -> Iterator[Any]:
        return (draw(self.names, at) for at in range(EPOCH))

    def __iter__(self) -> Iterator[Any]:
        return (draw(self.names, at) for at in range(self.start, EPOCH))

    def known_order(self) -> BatchOrder:
        return BatchOrder("campaign", self.epoch, self.start, EPOCH)


def batch_at(setting: Setting, step: int) -> tb.KeyedJaggedTensor:
    """Returns the batch that step ``step`` of a run trains on."""
    if step == setting.unplanned:
        return draw(setting.tables, step, seed=9)
    return draw(setting.tables, step % EPOCH)


class Run:
    """A store that trains."""

    def __init__(self, setting: Setting, path: Path | None, **more: Any) -> None:
        self.setting = setting
        self.store = setting.open(path, **more)
        tables = [
            tb.EmbeddingBagConfig(name=name, num_embeddings=ROWS[name], embedding_dim=DIMS[name])
            for name in setting.tables
        ]
        self.part = tb.EmbeddingBagCollection(tables, store=self.store, optimizer=tb.Adam(lr=0.05))

    def steps(self, first: int, last: int) -> Iterator[int]:
        """Does steps ``first`` to ``last - 1``; yields how many are done."""
        is_planned = self.setting.backend is None and self.setting.order != "window"
        for done in self._planned(first, last) if is_planned else self._plain(first, last):
            if self.setting.is_open and done % 7 == 5:
                self.store.evict(now_mins=1000)
            yield done

    def _plain(self, first: int, last: int) -> Iterator[int]:
        loader: Any = (batch_at(self.setting, step) for step in range(first, last))
        if self.setting.workers and self.store.path is not None:
            steps = _Steps(self.setting, first, last)
            loader = DataLoader(steps, batch_size=None, num_workers=self.setting.workers)
        for done, batch in enumerate(loader, first + 1):
            self._step(batch)
            yield done

    def _planned(self, first: int, last: int) -> Iterator[int]:
        done = first
        while done < last:
            loader: Any = _Epoch(self.setting.tables, done % EPOCH)
            for _ in tb.lookahead(loader, self.part, window=3, key=lambda batch: batch):
                self._step(batch_at(self.setting, done))
                done += 1
                yield done
                if done == last:
                    return

    def _step(self, batch: tb.KeyedJaggedTensor) -> None:
        pooled = self.part(batch).values()
        (pooled * (pooled.detach() * 0.3 + 0.1)).sum().backward()

    def save(self, done: int, **more: Any) -> None:
        torch.manual_seed(1000 + done)
        extra = {"step": done, "dense": torch.arange(3.0) + done}
        self.store.checkpoint(f"step-{done}", extra=extra, attachments={"note": note(done)}, **more)

    def position(self) -> int:
        extra = self.store.load_extra()
        return 0 if extra is None else int(extra["step"])


def note(done: int) -> bytes:
    return bytes(mixed(done, at) % 256 for at in range(100))


def row_count(store: tb.Store, name: str) -> int:
    rows = ROWS[name]
    return int(store.vocabularies()[name]["next_row"]) if rows is None else rows


def digest(store: tb.Store, setting: Setting) -> dict[str, str]:
    """Returns hashes of weights alone, and of all a store keeps of its tables."""
    weights, whole = hashlib.sha256(), hashlib.sha256()
    for name in setting.tables:
        count = row_count(store, name)
        rows, state = store.read_rows_and_state(name, 0, count)
        weights.update(rows.numpy().tobytes())
        for part in (rows, state, store.use_counts(name, 0, count)):
            whole.update(part.numpy().tobytes())
        whole.update(f"{name} {count} {store.steps_done(name)}".encode())
        if ROWS[name] is None:
            ids = torch.arange(1, 91) * 2**40
            whole.update(store.translate(name, ids).numpy().tobytes())
    return {"weights": weights.hexdigest(), "whole": whole.hexdigest()}


def oracle(setting: Setting) -> list[dict[str, str]]:
    """Returns the digest of a run in memory after each step, 0 to ``END``."""
    like = Setting(name="oracle", backend="memory", is_open=setting.is_open, dram="64MiB")
    run = Run(like, None)
    found = [digest(run.store, like)]
    for step in range(END):
        run._step(batch_at(setting, step))
        if setting.is_open and (step + 1) % 7 == 5:
            run.store.evict(now_mins=1000)
        found.append(digest(run.store, like))
    run.store.close()
    return found


def wrong_beside_rows(run: Run, done: int) -> str:
    """Returns what beside the rows is not that of the checkpoint at ``done``; empty: nothing."""
    if done == 0:
        return ""
    extra = run.store.load_extra()
    if extra is None or not torch.equal(extra["dense"], torch.arange(3.0) + done):
        return "extra"
    if run.store.attachment("note") != note(done):
        return "attachment"
    torch.manual_seed(1000 + done)
    wanted = torch.rand(3)
    if not run.store.restore_rng() or not torch.equal(torch.rand(3), wanted):
        return "random state"
    return ""
