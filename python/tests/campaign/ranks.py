"""Ranks that are killed while they save: what has the name is whole, and goes on to the same bits.

Two ranks are threads of one process that saves after every step and is killed. One rank loads
what is there and trains on; one process trained all the way is the oracle.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierbed as tb
from tierbed import dist as tbd

from . import training as tr
from .outcome import Outcome
from .processes import Child, call, ended

STEPS, TRIES = 6, 4
TABLES = {"a": 400, "b": 60}
SHARDINGS = {
    "rows": lambda: {name: tbd.RowWise() for name in TABLES},
    "tables": lambda: {"a": tbd.TableWise(1), "b": tbd.TableWise(0)},
    "mirrored": lambda: {"a": tbd.RowWise(), "b": tbd.Mirrored()},
}


def run_case(number: int, luck: random.Random, scratch: Path) -> list[Outcome]:
    """One sharding: killed, loaded on one rank, and trained on."""
    name = list(SHARDINGS)[number % len(SHARDINGS)]
    oracle = call(lambda: _on_ranks(1, name, range(STEPS), None, None, lambda _: None))
    outcomes = []
    for at in range(TRIES):
        folder = scratch / f"ranks-{at}"
        folder.mkdir()
        came, label, text = _kill_once(name, folder, luck, oracle.value)
        outcomes.append(Outcome(label=label, came=came, text=text, setting=name))
    return outcomes


def _kill_once(name: str, folder: Path, luck: random.Random, oracle: Any) -> tuple[str, str, str]:
    child = Child(lambda tell: _on_ranks(2, name, range(STEPS), None, folder, tell))
    wanted, deadline = luck.randrange(1, 2 * STEPS), time.monotonic() + 60
    while len(child.told) < wanted and time.monotonic() < deadline and child.listen(0.5):
        pass
    time.sleep(luck.random() ** 2 * 0.03)
    child.kill()
    found = ended(child, child.wait())
    phase, saved = "training", 0
    for line in child.told:
        if isinstance(line, list):
            phase = "a save" if line[0] == "begin" else "training"
            saved = line[1] if line[0] == "end" else saved
    if found.signal != 9 and found.error:
        return found.came or "wrong", "ranks", f"{found.kind}: {found.error}"
    is_killed = found.signal == 9
    label = f"kill of ranks in {phase}" if is_killed else "ranks that ended before their kill"
    names = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    if saved and (not names or max(names) < saved):
        return "lost", label, f"saved at {saved}, there are {names}"
    if not names:
        return "right", label, "nothing was saved"
    last = max(names)
    again = call(
        lambda: _on_ranks(1, name, range(last, STEPS), folder / str(last), None, lambda _: None)
    )
    if again.value is None:
        return again.came or "lost", label, f"{again.kind}: {again.error}"
    return ("right" if again.value == oracle else "silent"), label, f"went on from {last}"


def _on_ranks(
    count: int,
    name: str,
    steps: range,
    load: Path | None,
    save: Path | None,
    tell: Callable[[Any], None],
) -> str:
    """Trains on ``count`` ranks, saving after each step; returns a digest of all rows."""
    ways = SHARDINGS[name]() if count > 1 else {table: tbd.TableWise(0) for table in TABLES}
    plan = tbd.ShardingPlan(count, ways)
    failures: list[BaseException] = []
    stores: list[tb.Store] = [
        tb.Store.open(backend="memory", dram_budget="16MiB") for _ in range(count)
    ]

    def work(rank: tbd.LocalRank) -> None:
        tables = [
            tb.EmbeddingBagConfig(name=table, num_embeddings=rows, embedding_dim=tr.DIMS[table])
            for table, rows in TABLES.items()
        ]
        with tbd.ShardedEmbeddingBagCollection(
            tables, store=stores[rank.rank], plan=plan, ranks=rank, optimizer=tb.Adam(lr=0.05)
        ) as part:
            if load is not None:
                part.load(load)
            for step in steps:
                bags = tr.draw(list(TABLES), 2 * step + rank.rank) if count > 1 else _both(step)
                pooled = part(bags).values()
                (pooled * (pooled.detach() * 0.3 + 0.1)).sum().backward()
                if save is not None:
                    if rank.rank == 0:
                        tell(["begin", step + 1])
                    part.save(save / str(step + 1), extra={"step": step + 1})
                    if rank.rank == 0:
                        tell(["end", step + 1])

    def guarded(rank: tbd.LocalRank) -> None:
        try:
            work(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in tbd.local_ranks(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    if count > 1:
        return ""
    found = hashlib.sha256()
    for table, rows in TABLES.items():
        for part in stores[0].read_rows_and_state(table, 0, rows):
            found.update(part.numpy().tobytes())
    return found.hexdigest()


def _both(step: int) -> tb.KeyedJaggedTensor:
    """Joins what two ranks draw: samples of rank 0 first."""
    parts = [tr.draw(list(TABLES), 2 * step + rank) for rank in range(2)]
    joined = {
        name: tb.JaggedTensor(
            torch.cat([one[name].values() for one in parts]),
            lengths=torch.cat([one[name].lengths() for one in parts]),
        )
        for name in TABLES
    }
    return tb.KeyedJaggedTensor.from_jt_dict(joined)
