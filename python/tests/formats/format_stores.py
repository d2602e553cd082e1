"""Makes whole stores, tells what they hold, and finds whether a store still holds it."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from format_recipes import TABLES, Training, mixed, table_names

import tierbed as tb

_ADAM = [{"optimizer": "adam", "tables": ["a", "b", "c"]}]
_FEW = [{"optimizer": "adagrad", "tables": ["c", "d"]}]
_OPEN = [{"optimizer": "adagrad", "tables": ["item", "rare", "c"]}]
_WIDE = [{"optimizer": "adagrad", "tables": ["a", "d", "e", "wide"]}]
_EACH = [
    {"optimizer": "sgd", "tables": ["c"]},
    {"optimizer": "adagrad", "tables": ["a"]},
    {"optimizer": "row_wise_adagrad", "tables": ["b", "wide"]},
    {"optimizer": "adam", "tables": ["d"]},
    {"optimizer": "partial_row_wise_adam", "tables": ["e"]},
]
_STEP = {"backend": "lsm", "durability": "step"}
_FORWARD = {"order": "forward"}


def _recipe(options: dict[str, Any], collections: Any = _ADAM, **more: Any) -> dict[str, Any]:
    plain = {"checkpoints": [3, 5, 7], "stop": 7, "end": 11}
    return {"open": options, "collections": collections, **plain, **more}


def _backends() -> Iterator[tuple[str, dict[str, Any]]]:
    for backend in ("memory", "file", "cold", "lsm", "hashdb", "mmap"):
        options = {"backend": backend}
        yield backend, _recipe(options, _EACH)
        yield f"{backend}_kept", _recipe(options, _FEW, kept=[3, 5])
        if backend != "mmap":
            # A mapped table cannot grow, and belongs to the machine's boot while it changes.
            yield f"{backend}_open", _recipe(options, _OPEN, evict_after=4)
            # As a process leaves it that dies between two checkpoints.
            yield f"{backend}_killed", _recipe(options, lost=2)
    for backend in ("lsm_plain", "rocksdb", "rocksdb_universal"):
        yield backend, _recipe({"backend": backend})


RECIPES: dict[str, dict[str, Any]] = {
    **dict(_backends()),
    "lsm_step": _recipe(_STEP, checkpoints=[1, 2, 3, 4, 5, 6, 7]),
    "lsm_step_open": _recipe(_STEP, _OPEN, checkpoints=[1, 2, 3, 4, 5, 6, 7], evict_after=4),
    "lsm_plain_step_killed": _recipe(
        {"backend": "lsm_plain", "durability": "step"}, checkpoints=[2, 4, 5, 6, 7], lost=2
    ),
    "forward_middle": _recipe(_FORWARD, epoch=9, end=20),
    "forward_end": _recipe(_FORWARD, epoch=7, end=20),
    "forward_second_epoch": _recipe(_FORWARD, epoch=4, end=11),
    "forward_tight": _recipe({**_FORWARD, "dram_budget": "1MiB"}, _WIDE, epoch=9, end=20),
    "forward_killed": _recipe(_FORWARD, epoch=9, end=20, lost=2),
    "forward_two_shards": _recipe({**_FORWARD, "shards": 2}, epoch=9, end=20),
    "window_two_shards": _recipe({"order": "window", "shards": 2}),
    "fallback": _recipe({"on_mismatch": "fallback"}, epoch=9, unplanned=[5]),
    "fallback_cold": _recipe({"on_mismatch": "fallback_cold"}, epoch=9, unplanned=[5]),
    "undecided": _recipe({}),
}


def open_store(recipe: dict[str, Any], path: Path | None, **more: Any) -> tb.Store:
    options = {"dram_budget": "64MiB", "seed": 5, **recipe["open"], **more}
    return tb.Store.open(path, **options)


def oracle(recipe: dict[str, Any], last: int) -> tb.Store:
    """Returns a store in memory that did the first ``last`` steps of the recipe."""
    store = tb.Store.open(backend="memory", dram_budget="64MiB", seed=5)
    Training(recipe, store).run(0, last)
    return store


# ---------------------------------------------------------------- what a store holds


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def held(store: tb.Store, recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns hashes of rows, state and use counts of every table, and its steps."""
    found: dict[str, Any] = {}
    vocabularies = store.vocabularies()
    for name in table_names(recipe):
        count = TABLES[name][0]
        if count is None:
            count = int(vocabularies[name]["next_row"])
        rows, state = store.read_rows_and_state(name, 0, count)
        found[name] = {
            "row_count": count,
            "rows": digest(rows),
            "state": digest(state),
            "use_counts": digest(store.use_counts(name, 0, count)),
            "steps": store.steps_done(name),
            "first": rows[:2, :3].flatten().tolist(),
        }
        if TABLES[name][0] is None:
            ids = torch.arange(1, 51) * 2**40 + list(TABLES).index(name)
            found[name]["ids"] = store.translate(name, ids).tolist()
            told = vocabularies[name]
            found[name]["counts"] = [
                told[word] for word in ("id_count", "waiting_count", "free_count")
            ]
    return found


def extra_at(step: int) -> dict[str, Any]:
    wide = torch.tensor([mixed(step, at) % 1000 / 8 for at in range(6)]).view(2, 3)
    return {"step": step, "model": {"weight": wide, "deep": [1, "two", None, 2.5]}}


def note_at(step: int) -> bytes:
    return bytes(mixed(step, at, 7) % 256 for at in range(300))


def _seed_generators() -> None:
    torch.manual_seed(11)
    random.seed(12)
    numpy.random.seed(13)


def _drawn() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), numpy.random.random(3).tolist()]


@contextmanager
def _own_generators() -> Iterator[None]:
    """Leaves the generators of this process as they were."""
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        numpy.random.set_state(before[2])


# ---------------------------------------------------------------- make


def make(recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Trains a store into ``folder / "store"``; returns what it holds."""
    path = folder / "live"
    facts: dict[str, Any] = {"kept": {}}
    with _own_generators():
        store = open_store(recipe, path)
        training = Training(recipe, store)
        for done in training.steps(0, recipe["stop"]):
            if done in recipe["checkpoints"]:
                is_kept = done in recipe.get("kept", [])
                _seed_generators()
                store.checkpoint(
                    f"step-{done}",
                    extra=extra_at(done),
                    attachments={"note": note_at(done)},
                    keep=is_kept,
                )
                if is_kept:
                    facts["kept"][f"step-{done}"] = {"step": done, "held": held(store, recipe)}
        facts["held"] = held(store, recipe)
        last = store.last_checkpoint()
        assert last is not None
        facts["last"] = list(last)
        order = store.order()
        facts["order"] = order["kind"]
        _seed_generators()
        facts["drawn"] = _drawn()
        if "lost" in recipe:
            training.run(recipe["stop"], recipe["stop"] + recipe["lost"])
            shutil.copytree(path, folder / "store")
            store.close()
        else:
            store.close()
            shutil.copytree(path, folder / "store")
    shutil.rmtree(path)
    return facts


# ---------------------------------------------------------------- check


def check(recipe: dict[str, Any], facts: dict[str, Any], folder: Path) -> None:
    """Opens a copy of a kept store, compares all it holds, and trains on to the end."""
    path = folder / "store"
    with _own_generators():
        with open_store(recipe, path) as store:
            training = Training(recipe, store)
            assert list(store.last_checkpoint() or ()) == facts["last"]
            assert held(store, recipe) == facts["held"]
            assert store.order()["kind"] == facts["order"]
            _check_parts(store, recipe["stop"])
            assert store.restore_rng()
            assert _drawn() == facts["drawn"]
            assert store.verify() >= 0
            kept = [one["name"] for one in store.checkpoints()]
            assert kept == list(facts["kept"])
            training.run(recipe["stop"], recipe["end"])
            store.checkpoint("end")
        _check_end(recipe, path)
        for name, wanted in facts["kept"].items():
            with open_store(recipe, path, checkpoint=name) as store:
                training = Training(recipe, store)
                assert held(store, recipe) == wanted["held"]
                _check_parts(store, wanted["step"])
                training.run(wanted["step"], recipe["end"])
                store.checkpoint("end")
            _check_end(recipe, path)


def _check_parts(store: tb.Store, step: int) -> None:
    found, wanted = store.load_extra(), extra_at(step)
    assert found is not None
    assert torch.equal(found["model"].pop("weight"), wanted["model"].pop("weight"))
    assert found == wanted
    assert store.attachment("note") == note_at(step)


def _check_end(recipe: dict[str, Any], path: Path) -> None:
    """Compares what was trained on from the kept store with a run that was never stopped."""
    with oracle(recipe, recipe["end"]) as fresh, open_store(recipe, path) as again:
        Training(recipe, again)
        assert held(again, recipe) == held(fresh, recipe)
