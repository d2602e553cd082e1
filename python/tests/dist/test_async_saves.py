"""Checkpoints that are written while training goes on: as of the step at which they began."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ranks import SHARDINGS, TABLES, all_rows, draw, run_ranks, train

import tierbed as tb
from tierbed import dist as tbd
from tierbed.dist import checkpoint_async, checkpoint_places

WAIT_S = 60.0


def collection(
    rank: tbd.LocalRank, folder: Path | None, **options: Any
) -> tbd.ShardedEmbeddingBagCollection:
    path = None if folder is None else folder / f"rank{rank.rank}"
    backend: Any = "memory" if folder is None else options.pop("backend", "file")
    return tbd.ShardedEmbeddingBagCollection(
        TABLES,
        store=tb.Store.open(path, backend=backend, dram_budget="16MiB"),
        plan=tbd.ShardingPlan(rank.count, SHARDINGS["mixed"](rank.count)),
        ranks=rank,
        optimizer=tb.Adam(lr=0.05),
    )


def rows_of(one: tbd.ShardedEmbeddingBagCollection) -> list[torch.Tensor]:
    assert isinstance(one.store, tb.Store)
    there = {table["name"] for table in one.store.tables()}
    held = [config for config in TABLES if config.name in there]
    return [tensor for config in held for tensor in all_rows(one.store, config)]


def load(path: str, count: int) -> tuple[list[torch.Tensor], Any]:
    def work(rank: tbd.LocalRank) -> Any:
        with collection(rank, None) as one:
            return one.load(path), rows_of(one)

    found = run_ranks(count, work)
    return found[0][1], found[0][0]


@pytest.mark.parametrize("count", [1, 2])
def test_a_checkpoint_has_the_rows_of_the_step_it_began_at(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"file://{tmp_path}/saved"
    may_go = threading.Event()
    written_of = checkpoint_async.written_of

    def late(*given: Any) -> Any:
        assert may_go.wait(WAIT_S)
        return written_of(*given)

    monkeypatch.setattr(checkpoint_async, "written_of", late)
    trained = threading.Barrier(count)

    def work(rank: tbd.LocalRank) -> Any:
        with collection(rank, tmp_path / "stores") as one:
            train(one, [draw(rank.rank, 9, False)])
            extra = {"step": torch.tensor(1)}
            done = one.async_save(path, extra)
            then = rows_of(one)
            extra["step"] += 1
            train(one, [draw(10 + rank.rank, 9, False)])
            one.store.checkpoint("another")  # The kept one stays.
            trained.wait(WAIT_S)
            may_go.set()
            done.result(WAIT_S)
            assert not one.store.checkpoints(), "what was kept for it is dropped"
            assert not all(map(torch.equal, rows_of(one), then))
            one.store.close()
        return then

    then = run_ranks(count, work)
    found, extra = load(path, 1)
    assert extra == {"step": torch.tensor(1)}
    if count == 1:
        assert all(map(torch.equal, found, then[0]))
    else:
        a, b, c = slice(0, 2), slice(2, 4), slice(4, 6)
        for place in (b, c):
            assert all(map(torch.equal, found[place], then[0][place]))
        for whole, first, second in zip(found[a], then[0][a], then[1][a], strict=True):
            assert torch.equal(whole, torch.cat([first[:30], second[30:]]))
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert not [name for name in names if name.startswith("part-")]


def test_all_ranks_learn_that_one_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_of = checkpoint_async.written_of
    fails = threading.Event()

    def failing(place: Any, own: Any, store: Any, steps: Any) -> Any:
        if own.ranks.rank == 1 and fails.is_set():
            raise OSError("the disk is gone")
        return written_of(place, own, store, steps)

    monkeypatch.setattr(checkpoint_async, "written_of", failing)

    def work(rank: tbd.LocalRank) -> list[str]:
        told = []
        with collection(rank, tmp_path / "stores") as one:
            train(one, [draw(rank.rank, 9, False)])
            fails.set()
            failed = one.async_save(f"file://{tmp_path}/saved").exception(WAIT_S)
            told.append(str(failed))
            rank.gather(None)
            fails.clear()
            rank.gather(None)
            # The same again is whole, and what failed leaves nothing behind.
            one.async_save(f"file://{tmp_path}/saved").result(WAIT_S)
            one.store.close()
        return told

    first, second = run_ranks(2, work)
    assert "rank 1 failed: the disk is gone" in first[0]
    assert "the disk is gone" in second[0]
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert "manifest.json" in names
    assert not [name for name in names if name.startswith("part-")]


def test_a_rank_that_says_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell = checkpoint_async._tell

    def silent(place: Any, save: Any, what: Any) -> None:
        if save.own.ranks.rank == 0:
            tell(place, save, what)

    monkeypatch.setattr(checkpoint_async, "_tell", silent)

    def work(rank: tbd.LocalRank) -> str:
        with collection(rank, tmp_path / "stores") as one:
            done = one.async_save(f"file://{tmp_path}/saved", timeout_s=0.3)
            error = done.exception(WAIT_S)
            rank.gather(None)
            monkeypatch.setattr(checkpoint_async, "_tell", tell)
            rank.gather(None)
            assert not (tmp_path / "saved" / "manifest.json").exists()
            one.async_save(f"file://{tmp_path}/saved").result(WAIT_S)
            one.store.close()
            return str(error)

    told = run_ranks(2, work)
    assert "rank 1 did not write its part" in told[0]
    assert "save again" in told[0]
    load(f"file://{tmp_path}/saved", 2)


def test_what_a_killed_save_kept_is_dropped_by_the_next(tmp_path: Path) -> None:
    (rank,) = tbd.local_ranks(1)
    with collection(rank, tmp_path / "stores") as one:
        train(one, [draw(1, 9, False)])
        one.store.checkpoint("saving-0123", keep=True)
        one.store.checkpoint("mine", keep=True)
        one.async_save(f"file://{tmp_path}/saved").result(WAIT_S)
        assert [kept.name for kept in one.store.checkpoints()] == ["mine"]
        one.store.close()


def test_a_store_may_be_closed_before_its_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rank,) = tbd.local_ranks(1)
    is_closed = threading.Event()
    put = checkpoint_places.ObjectsPlace.put

    def late(self: Any, name: str, raw: bytes) -> bool:
        assert is_closed.wait(WAIT_S)
        return put(self, name, raw)

    monkeypatch.setattr(checkpoint_places.ObjectsPlace, "put", late)
    with collection(rank, tmp_path / "stores") as one:
        train(one, [draw(1, 9, False)])
        then = rows_of(one)
        done = one.async_save(f"file://{tmp_path}/saved", {"step": 1})
    one.store.close()
    is_closed.set()
    done.result(WAIT_S)
    found, _ = load(f"file://{tmp_path}/saved", 1)
    assert all(map(torch.equal, found, then))
    with tb.Store.open(tmp_path / "stores" / "rank0", dram_budget="16MiB") as again:
        assert not again.checkpoints()


def test_a_store_in_memory_keeps_no_checkpoint_to_write(tmp_path: Path) -> None:
    (rank,) = tbd.local_ranks(1)
    with (
        collection(rank, None) as one,
        pytest.raises(tb.UnsupportedError, match="open the store with a path"),
    ):
        one.async_save(f"file://{tmp_path}/saved")
    with collection(rank, tmp_path / "stores") as one:
        one.async_save(f"file://{tmp_path}/saved").result(WAIT_S)
        one.store.close()


def test_a_kept_checkpoint_is_looked_at_while_training_goes_on(tmp_path: Path) -> None:
    table = tb.EmbeddingBagConfig(50, 4, "a")
    bags = tb.KeyedJaggedTensor(["a"], torch.arange(50), lengths=torch.ones(50).long())
    with tb.Store.open(tmp_path / "store", backend="file", dram_budget="8MiB") as store:
        emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=0.1))
        emb(bags).values().sum().backward()
        then = store.read_rows("a", 0, 50)
        store.checkpoint("then", keep=True)
        looked_at = tb.Store.open(
            tmp_path / "store", checkpoint="then", read_only=True, dram_budget="8MiB"
        )
        with looked_at:
            for step in range(3):
                emb(bags).values().sum().backward()
                store.checkpoint(f"later-{step}")
                assert torch.equal(looked_at.read_rows("a", 0, 50), then)
            with pytest.raises(tb.UnsupportedError, match="read only"):
                looked_at.checkpoint("no")
        assert not torch.equal(store.read_rows("a", 0, 50), then)
        with pytest.raises(tb.InvalidError, match="no kept checkpoint of that name"):
            tb.Store.open(tmp_path / "store", checkpoint="none", read_only=True, dram_budget="8MiB")
