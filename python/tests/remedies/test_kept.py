"""Remedies of checkpoints that are kept, of quotas, and of publishing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed.testing import random_bags
from tierbed.train import checkpoints

from .kit import (
    ROWS,
    bags,
    collection,
    flip,
    opened,
    put_back,
    refused,
    rows_of,
    step,
    table,
    trained,
)
from .test_order import epoch


def test_a_name_that_is_taken_is_dropped_or_another_is_chosen(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        emb = collection(store)
        step(emb)
        store.checkpoint("mine", keep=True)
        with refused(tb.InvalidError, "drop it first, or choose another name"):
            store.checkpoint("mine", keep=True)
        step(emb)
        store.checkpoint("other", keep=True)
        store.drop_checkpoint("mine")
        store.checkpoint("mine", keep=True)
        assert sorted(kept.name for kept in store.checkpoints()) == ["mine", "other"]


def test_a_store_in_memory_keeps_checkpoints_when_it_has_a_path(tmp_path: Path) -> None:
    with opened(None, backend="memory") as store:
        step(collection(store))
        with refused(tb.UnsupportedError, "open it with a path"):
            store.checkpoint("mine", keep=True)
    with opened(tmp_path / "store", backend="memory") as store:
        step(collection(store))
        store.checkpoint("mine", keep=True)
        rows = rows_of(store)
    with opened(tmp_path / "store", backend="memory") as store:
        assert torch.equal(rows_of(store), rows)


@pytest.mark.parametrize("way", ["drop", "raise"])
def test_a_kept_checkpoint_beyond_the_quota(tmp_path: Path, way: str) -> None:
    path = tmp_path / "store"
    with opened(path, disk_quota="320KiB") as store:
        emb = collection(store)
        step(emb, 0, ROWS)
        store.checkpoint("one", keep=True)
        with refused(tb.NoSpaceError, "raise disk_quota, or drop a checkpoint"):
            store.checkpoint("two", keep=True)
        names = [kept.name for kept in store.checkpoints()]
        if way == "drop":
            for name in names:
                store.drop_checkpoint(name)
            store.checkpoint("again", keep=True)
    if way == "raise":
        with opened(path, disk_quota="20MiB") as store:
            step(collection(store), 0, ROWS)
            store.checkpoint("again", keep=True)
            assert [kept.name for kept in store.checkpoints()] == [*names, "again"]


def test_a_store_at_its_quota_is_opened_with_more(tmp_path: Path) -> None:
    path = tmp_path / "store"
    many = table(rows=1_000_000)
    remedy = "raise disk_quota and reopen the store at its last checkpoint"
    store = opened(path, dram_budget="1MiB", disk_quota="2MiB")
    emb = collection(store, many)
    emb(bags(1, 2, 3)).values().sum().backward()
    store.checkpoint("good")
    with refused(tb.NoSpaceError, remedy):
        for seed in range(400):
            emb(random_bags({"item": 1_000_000}, 512, seed=seed)).values().sum().backward()
            store.checkpoint(str(seed))
    store.close()
    with opened(path, dram_budget="1MiB", disk_quota="64MiB") as store:
        assert store.last_checkpoint() is not None
        assert store.verify() >= 0
        emb = collection(store, many)
        emb(random_bags({"item": 1_000_000}, 512, seed=999)).values().sum().backward()
        store.checkpoint("on")


@pytest.mark.parametrize("way", ["last", "back", "drop"])
def test_a_kept_checkpoint_with_a_damaged_file(tmp_path: Path, way: str) -> None:
    path, copy = tmp_path / "store", tmp_path / "copy"
    rows = trained(path, keep="old")
    shutil.copytree(path, copy)
    with opened(copy, checkpoint="old") as store:
        old = rows_of(store)
    shutil.rmtree(copy)
    shutil.copytree(path, copy)
    told = set()
    for file in sorted(path.glob("kept*")):
        flip(file)
        with pytest.raises(tb.CorruptionError) as caught:
            opened(path, checkpoint="old")
        told.add(caught.value.context["remedy"])
        if way == "back":
            shutil.copy(copy / file.name, file)
            continue
        with opened(path) as store:
            assert torch.equal(rows_of(store), rows)
            if way == "drop":
                store.drop_checkpoint("old")
                assert store.checkpoints() == []
        put_back(copy, path)
    assert told == {
        "open the store at its last checkpoint, or bring the file back from a copy",
        "drop this checkpoint, or bring the file back from a copy",
    }
    if way == "back":
        with opened(path, checkpoint="old") as store:
            assert torch.equal(rows_of(store), old)


def _half_restored(path: Path, what: bytes) -> torch.Tensor:
    """A store whose going back to ``old`` was cut short; returns the rows it had last."""
    rows = trained(path, keep="old")
    (path / "RESTORE").write_bytes(what)
    return rows


def test_a_restore_that_was_cut_short_is_finished_before_repair(tmp_path: Path) -> None:
    path = tmp_path / "store"
    rows = _half_restored(path, b"old")
    with refused(tb.InvalidError, "open the store, which finishes it"):
        checkpoints.put_in_force(path, 1)
    opened(path).close()
    found = [one for one in checkpoints.find_commits(path) if not one.is_kept]
    assert [one.is_whole for one in found] == [True]
    checkpoints.put_in_force(path, found[0].number)
    with opened(path) as store:
        assert not torch.equal(rows_of(store), rows)


def test_publishing_goes_into_an_empty_folder(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        step(collection(store))
        rows = rows_of(store)
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "cat.jpg").write_bytes(b"meow")
        with refused(tb.InvalidError, "choose a new or empty folder"):
            store.publish(tmp_path / "full")
        (tmp_path / "empty").mkdir()
        for out in ("new", "empty"):
            store.publish(tmp_path / out)
    for out in ("new", "empty"):
        with tb.Snapshot.open(tmp_path / out) as snapshot:
            ids = torch.arange(ROWS)
            every = tb.KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids))
            assert torch.equal(snapshot.lookup(every)["item"], rows)


@pytest.mark.parametrize("order", ["window", "forward"])
def test_publishing_that_was_stopped_is_done_again(tmp_path: Path, order: str) -> None:
    with opened(tmp_path / "store", order=order) as store:
        emb = collection(store)
        if order == "forward":
            epoch(emb)
        else:
            step(emb)

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises((KeyboardInterrupt, tb.ClosedError)):
            store.publish(tmp_path / "out", progress=stop)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        store.publish(tmp_path / "out")
        tb.Snapshot.open(tmp_path / "out").close()


@pytest.mark.parametrize("way", ["last", "kept"])
def test_a_damaged_note_of_a_restore_is_left_behind_by_repair(tmp_path: Path, way: str) -> None:
    path = tmp_path / "store"
    rows = trained(path, keep="old")
    (path / "RESTORE").write_bytes(b"tierbed-restore 1 00000000\n{}")
    with refused(tb.CorruptionError, "see `tierbed repair FOLDER` for the commits that are whole"):
        opened(path)
    last, kept = sorted(checkpoints.find_commits(path), key=lambda commit: commit.is_kept)
    assert last.is_whole
    assert kept.is_whole
    assert kept.name == "old"
    checkpoints.put_in_force(path, last.number)
    with opened(path) as store:
        assert torch.equal(rows_of(store), rows)
    if way == "kept":
        with opened(path, checkpoint="old") as store:
            assert not torch.equal(rows_of(store), rows)


def test_a_damaged_note_of_the_last_step_is_written_anew_by_repair(tmp_path: Path) -> None:
    path = tmp_path / "store"
    rows = trained(path, backend="lsm", durability="step")
    flip(path / "steps.mark")
    remedy = "see `tierbed repair FOLDER`, which accepts what the log holds"
    with refused(tb.CorruptionError, remedy):
        opened(path, backend="lsm", durability="step")
    (last,) = checkpoints.find_commits(path)
    checkpoints.put_in_force(path, last.number)
    with opened(path, backend="lsm", durability="step") as store:
        assert torch.equal(rows_of(store), rows)
