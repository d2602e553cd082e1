"""How long training stands still for a version, for ``tierbed bench fresh``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tierbed import KeyedJaggedTensor, Store
from tierbed_bench.common import zipf_batches
from tierbed_bench.fresh_trainer import STEP_IDS, FreshOptions, Row, Trainer

__all__ = ["measure_pauses"]

#: Steps before a version, which those beside it are compared with.
STEPS_BEFORE = 16


def measure_pauses(folder: Path, options: FreshOptions) -> list[Row]:
    """Publishes whole versions and deltas, with training at rest and beside it."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    trainer = Trainer(folder / "pauses", options)
    with trainer.store as store:
        trainer.train_all()
        batches = _batches(options)
        for number in range(options.rounds):
            base = folder / f"pauses-base-{number}"
            for what in ("whole", "delta"):
                for how in ("foreground", "beside"):
                    out = base if (what, how) == ("whole", "beside") else folder / "pauses-out"
                    given: dict[str, Any] = {} if what == "whole" else {"base": base}
                    trainer.train_share()
                    store.checkpoint("bench")
                    before = [_step(trainer, batches) for _ in range(STEPS_BEFORE)]
                    publish = partial(_publish, store, how, out, given)
                    row = _measure(publish, lambda: _step(trainer, batches), median(before))
                    found.setdefault((what, how), []).append(row)
                    if out != base:
                        _remove(out)
            _remove(base)
    return [
        {
            "part": "pauses",
            "system": f"{what} {how}",
            **{name: median(row[name] for row in rows) for name in rows[0]},
        }
        for (what, how), rows in found.items()
    ]


def _publish(store: Store, how: str, out: Path, given: dict[str, Any]) -> Future[Any]:
    if how == "beside":
        return store.publish_async(out, **given)
    done: Future[Any] = Future()
    done.set_result(store.publish(out, **given))
    return done


def _measure(
    publish: Callable[[], Future[Any]], step: Callable[[], float], before_s: float
) -> dict[str, float]:
    """Trains until the version is written."""
    begun_s = time.perf_counter()
    publishing = publish()
    pause_s = time.perf_counter() - begun_s
    steps = []
    while not publishing.done():
        steps.append(step())
    publishing.result()
    seconds = time.perf_counter() - begun_s
    # The first one after a pause is training again, whether a version is on its way or not.
    steps = steps or [step()]
    return {
        "seconds": seconds,
        "pause_s": pause_s,
        "step_s_max": max(steps),
        "steps_slower": median(steps) / before_s,
    }


def _batches(options: FreshOptions) -> Iterator[KeyedJaggedTensor]:
    number = 0
    while True:
        number += 1
        rows = {"item": options.rows}
        yield from zipf_batches(rows, STEP_IDS, STEPS_BEFORE, seed=options.seed + 7_000 * number)


def _step(trainer: Trainer, batches: Iterator[KeyedJaggedTensor]) -> float:
    batch = next(batches)
    begun_s = time.perf_counter()
    trainer.step(batch)
    return time.perf_counter() - begun_s


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
