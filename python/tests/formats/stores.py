"""Fixtures of training stores: every backend, order and kind of table."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

import tierbed as tb

from .kit import (
    Case,
    Facts,
    Loader,
    digest,
    one_step,
    open_store,
    rows_of,
    save,
    saved,
    train,
    train_planned,
    trained_in_memory,
)

BACKENDS = ("file", "memory", "cold", "lsm", "lsm_plain", "hashdb", "mmap")
KEPT_AT, SAVED_AT, END = 4, 8, 12


def _write_backend(folder: Path, backend: str) -> Facts:
    with open_store(folder / "store", backend) as store:
        train(store, 0, KEPT_AT)
        save(store, "kept", KEPT_AT, keep=True)
        kept = rows_of(store)
        train(store, KEPT_AT, SAVED_AT)
        save(store, "last", SAVED_AT)
        return {"kept": kept, "last": rows_of(store)}


def _check_backend(folder: Path, facts: Facts, backend: str) -> None:
    with open_store(folder / "store", backend) as store:
        assert [kept.name for kept in store.checkpoints()] == ["kept"]
        last = store.last_checkpoint()
        assert last is not None
        assert last[1] == "last"
        saved(store, SAVED_AT)
        train(store, 0, 0)
        assert rows_of(store) == facts["last"]
        store.verify()
        train(store, SAVED_AT, END)
        save(store, "end", END)
    with open_store(folder / "store", backend) as store:
        train(store, 0, 0)
        assert rows_of(store) == trained_in_memory(END)
    with open_store(folder / "store", backend, checkpoint="kept") as store:
        saved(store, KEPT_AT)
        train(store, 0, 0)
        assert rows_of(store) == facts["kept"]
        store.drop_checkpoint("kept")


def _write_steps(folder: Path, backend: str) -> Facts:
    with open_store(folder / "store", backend, durability="step") as store:
        train(store, 0, 1)
        save(store, "first", 1)
        for step in range(1, SAVED_AT):
            train(store, step, step + 1)
            save(store, f"step-{step}", step + 1, capture_rng=step + 1 == SAVED_AT)
        return {"last": rows_of(store)}


def _check_steps(folder: Path, facts: Facts, backend: str) -> None:
    with open_store(folder / "store", backend, durability="step") as store:
        saved(store, SAVED_AT)
        train(store, 0, 0)
        assert rows_of(store) == facts["last"]
        train(store, SAVED_AT, END)
        assert rows_of(store) == trained_in_memory(END)


# ---------------------------------------------------------------- forward order

EPOCH = 12


def _write_planned(folder: Path, last: int, shards: int | None) -> Facts:
    with open_store(folder / "store", order="forward", shards=shards) as store:
        train_planned(store, Loader(EPOCH), last)
        save(store, "last", last)
        return {"last": rows_of(store)}


def _check_planned(folder: Path, facts: Facts, last: int, shards: int | None) -> None:
    with open_store(folder / "store", order="forward", shards=shards) as store:
        saved(store, last)
        train_planned(store, Loader(EPOCH, last % EPOCH), EPOCH)
        save(store, "epoch", EPOCH)
        # From the epoch's end on, training goes through the same batches once more.
        steps = list(range(EPOCH)) + ([] if last < EPOCH else list(range(EPOCH)))
        assert rows_of(store) == _in_memory(steps)
    del facts


def _check_planned_rows(folder: Path, facts: Facts, last: int, shards: int | None) -> None:
    with open_store(folder / "store", order="forward", shards=shards) as store:
        train(store, 0, 0)
        assert rows_of(store) == facts["last"]
        store.verify()
    _check_planned(folder, facts, last, shards)


def _in_memory(steps: list[int]) -> Facts:
    with open_store(None, "memory") as store:
        for step in steps:
            train(store, step, step + 1)
        return rows_of(store)


def _write_changes(folder: Path) -> Facts:
    with open_store(folder / "store", "file") as store:
        train(store, 0, KEPT_AT)
        store.publish(folder / "base")
        train(store, KEPT_AT, SAVED_AT)
        save(store, "last", SAVED_AT)
        return {"changed": store.stats()["changes"]["row_count"]}


def _check_changes(folder: Path, facts: Facts) -> None:
    with open_store(folder / "store", "file") as store:
        assert store.stats()["changes"]["row_count"] == facts["changed"] > 0
        train(store, SAVED_AT, END)
        for changes in ("tracked", "compared"):
            store.publish(folder / changes, base=folder / "base", changes=changes)
    files = [sorted((folder / changes).iterdir()) for changes in ("tracked", "compared")]
    for tracked, compared in zip(*files, strict=True):
        assert tracked.name == compared.name
        assert tracked.read_bytes() == compared.read_bytes()


def _write_fallback(folder: Path, backend: str) -> Facts:
    on_mismatch = "fallback" if backend == "file" else "fallback_cold"
    with open_store(folder / "store", order="forward", on_mismatch=on_mismatch) as store:
        train_planned(store, Loader(EPOCH), KEPT_AT)
        # Not the planned batch: all rows move to where they are read by number.
        train(store, KEPT_AT + 1, KEPT_AT + 2)
        save(store, "last", KEPT_AT + 1)
        assert store.order()["fallback_count"] == 1
        return {"last": rows_of(store)}


def _check_fallback(folder: Path, facts: Facts) -> None:
    with open_store(folder / "store") as store:
        saved(store, KEPT_AT + 1)
        train(store, 0, 0)
        assert rows_of(store) == facts["last"]
        train(store, END, END + 1)
        assert rows_of(store) == _in_memory([*range(KEPT_AT), KEPT_AT + 1, END])


# ---------------------------------------------------------------- open vocabularies

FACTOR = 2**40 + 7


def _open_collection(store: tb.Store) -> tb.EmbeddingBagCollection:
    config = tb.EmbeddingBagConfig(
        name="item",
        num_embeddings=None,
        embedding_dim=6,
        init=tb.Uniform(-0.5, 0.5),
        admission_strategy=tb.FrequencyAdmissionStrategy(2),
    )
    return tb.EmbeddingBagCollection([config], store=store, optimizer=tb.Adagrad(lr=0.1))


def _open_train(store: tb.Store, first: int, last: int) -> None:
    emb = _open_collection(store)
    for step in range(first, last):
        ids = torch.arange(step, 3 * step + 30) * FACTOR
        one_step(emb, tb.KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids)))


def _open_rows(store: tb.Store) -> Facts:
    rows, state = store.read_rows_and_state("item", 0, 1024)
    places = store.translate("item", torch.arange(200) * FACTOR)
    return {"rows": digest(rows), "state": digest(state), "places": digest(places)}


def _write_open(folder: Path, backend: str) -> Facts:
    with open_store(folder / "store", backend) as store:
        _open_train(store, 0, SAVED_AT)
        save(store, "last", SAVED_AT)
        return {"last": _open_rows(store), "ids": store.vocabularies()["item"]["id_count"]}


def _check_open(folder: Path, facts: Facts, backend: str) -> None:
    with open_store(folder / "store", backend) as store:
        saved(store, SAVED_AT)
        _open_train(store, 0, 0)
        assert store.vocabularies()["item"]["id_count"] == facts["ids"]
        assert _open_rows(store) == facts["last"]
        _open_train(store, SAVED_AT, END)
        with open_store(None, "memory") as other:
            _open_train(other, 0, END)
            assert _open_rows(store) == _open_rows(other)


def _planned(name: str, last: int, shards: int | None) -> Case:
    given: dict[str, Any] = {"last": last, "shards": shards}
    return Case(name, partial(_write_planned, **given), partial(_check_planned_rows, **given))


CASES = [
    *(
        Case(
            f"store-{backend}",
            partial(_write_backend, backend=backend),
            partial(_check_backend, backend=backend),
        )
        for backend in BACKENDS
    ),
    *(
        Case(
            f"store-{backend}-steps",
            partial(_write_steps, backend=backend),
            partial(_check_steps, backend=backend),
        )
        for backend in ("lsm", "lsm_plain")
    ),
    Case("changed-rows", _write_changes, _check_changes),
    _planned("forward-in-epoch", KEPT_AT, None),
    _planned("forward-epoch-end", EPOCH, None),
    _planned("forward-shards", KEPT_AT, 2),
    *(
        Case(f"fallback-{backend}", partial(_write_fallback, backend=backend), _check_fallback)
        for backend in ("file", "cold")
    ),
    *(
        Case(
            f"open-vocabulary-{backend}",
            partial(_write_open, backend=backend),
            partial(_check_open, backend=backend),
        )
        for backend in ("file", "cold", "lsm", "hashdb")
    ),
]
