"""Remedies of the forward order: plans, windows, and batches that were not planned."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.data import BatchOrder

from .kit import DIM, ROWS, bags, collection, opened, refused, rows_of, table

BATCHES, BATCH = 12, 20


class Known:
    """A loader that tells its order: ``BATCHES`` batches of its seed, from ``start`` on."""

    def __init__(self, seed: int = 0, start: int = 0, wide: int = BATCH) -> None:
        self.seed, self.start, self.wide = seed, start, wide

    def epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
        for at in range(BATCHES):
            ids = (torch.arange(self.wide) * 37 + at * 11 + self.seed) % ROWS
            lengths = torch.ones(self.wide, dtype=torch.int64)
            yield tb.KeyedJaggedTensor(["item"], ids, lengths=lengths)

    def __iter__(self) -> Iterator[tb.KeyedJaggedTensor]:
        return iter(list(self.epoch())[self.start :])

    def known_order(self) -> BatchOrder:
        return BatchOrder(f"known {self.seed} {self.wide}", self.epoch, self.start, BATCHES)


def itself(batch: Any) -> Any:
    return batch


def ahead(emb: Any, loader: Known) -> Iterator[tb.KeyedJaggedTensor]:
    return iter(tb.lookahead(loader, emb, window=4, key=itself))


def train(emb: Any, batches: Iterable[tb.KeyedJaggedTensor]) -> None:
    for batch in batches:
        emb(batch).values().square().sum().backward()


def epoch(emb: Any, seed: int = 0, start: int = 0) -> None:
    train(emb, ahead(emb, Known(seed, start)))


def expected(*seeds: int, stop: int = BATCHES) -> torch.Tensor:
    """Rows after epochs in memory; ``stop`` batches of the last one."""
    with opened(None, backend="memory") as store:
        emb = collection(store)
        for seed in seeds[:-1]:
            train(emb, Known(seed).epoch())
        train(emb, list(Known(seeds[-1]).epoch())[:stop])
        return rows_of(store)


def half(path: Path, **options: Any) -> None:
    """A store whose first epoch ended at its half, with a checkpoint."""
    with opened(path, order="forward", **options) as store:
        emb = collection(store)
        batches = ahead(emb, Known())
        for _ in range(BATCHES // 2):
            train(emb, [next(batches)])
        store.checkpoint("half")


def test_batches_of_another_order_follow_a_checkpoint_or_are_those_of_the_plan(
    tmp_path: Path,
) -> None:
    remedy = (
        "call store.checkpoint before the batches of another order, or give the batches of the plan"
    )
    for way in ("checkpoint", "plan"):
        with opened(tmp_path / way, order="auto", on_mismatch="error") as store:
            emb = collection(store)
            batches = ahead(emb, Known())
            for _ in range(BATCHES // 2):
                train(emb, [next(batches)])
            batches.close()  # type: ignore[attr-defined]
            with refused(tb.InvalidError, remedy):
                epoch(emb, seed=5)
            if way == "checkpoint":
                store.checkpoint("half")
                epoch(emb, seed=5)
                assert torch.equal(rows_of(store), _half_then(5))
            else:
                epoch(emb, start=BATCHES // 2)
                assert torch.equal(rows_of(store), expected(0))


def _half_then(seed: int) -> torch.Tensor:
    with opened(None, backend="memory") as store:
        emb = collection(store)
        train(emb, list(Known().epoch())[: BATCHES // 2])
        train(emb, Known(seed).epoch())
        return rows_of(store)


def test_a_batch_that_was_not_planned_gives_way_to_the_planned_one(tmp_path: Path) -> None:
    with opened(tmp_path / "store", order="forward") as store:
        emb = collection(store)
        batches = ahead(emb, Known())
        train(emb, [next(batches)])
        with refused(tb.InvalidError, "feed the batches in the plan's order, or make a new plan"):
            train(emb, [bags(*range(BATCH))])
        train(emb, batches)
        assert torch.equal(rows_of(store), expected(0))
        store.checkpoint("one")
        epoch(emb, seed=3)
        assert torch.equal(rows_of(store), expected(0, 3))


def test_tables_are_added_before_the_first_batch(tmp_path: Path) -> None:
    remedy = "add all tables before the first batch is looked ahead"
    with opened(tmp_path / "a", order="forward") as store:
        emb = collection(store)
        batches = ahead(emb, Known())
        train(emb, [next(batches)])
        with refused(tb.InvalidError, remedy):
            collection(store, table("other"))
        train(emb, batches)
    with opened(tmp_path / "b", order="forward") as store:
        emb = collection(store)
        collection(store, table("other"))
        epoch(emb)
        assert torch.equal(rows_of(store), expected(0))


def test_rows_and_steps_are_set_in_window_order(tmp_path: Path) -> None:
    ones = torch.ones(1, 8)
    path, remedy = tmp_path / "store", 'open the store with order="window"'
    with opened(path, order="forward") as store:
        epoch(collection(store))
        with refused(tb.InvalidError, remedy):
            store.write_rows("item", 0, ones)
        with refused(tb.InvalidError, remedy):
            store.set_steps_done("item", 3)
        store.checkpoint("one")
        rows = rows_of(store)
    with opened(path, order="window") as store:
        collection(store)
        store.write_rows("item", 0, ones)
        store.set_steps_done("item", 3)
        assert torch.equal(rows_of(store), torch.cat([ones, rows[1:]]))


class Both(Known):
    """Batches with an id of either table."""

    def epoch(self) -> Iterator[tb.KeyedJaggedTensor]:
        for batch in super().epoch():
            lengths = torch.ones(2 * self.wide, dtype=torch.int64)
            ids = torch.cat([batch.values(), batch.values().flip(0)])
            yield tb.KeyedJaggedTensor(["item", "user"], ids, lengths=lengths)


@pytest.mark.parametrize("shards", [None, 2])
@pytest.mark.parametrize("order", ["forward", "window"])
def test_every_order_notes_changed_rows(tmp_path: Path, order: str, shards: int | None) -> None:
    tables = [table(), table("user")]
    options: dict[str, Any] = {"order": order, "shards": shards, "dram_budget": "64MiB"}
    with opened(tmp_path / "store", **options) as store:
        emb = collection(store, *tables)
        train(emb, ahead(emb, Both()))
        store.publish(tmp_path / "base")
        train(emb, ahead(emb, Both()))
        store.publish(tmp_path / "delta", base=tmp_path / "base", changes="tracked")
        store.publish(tmp_path / "compared", base=tmp_path / "base", changes="compared")
        counts = store.stats()["changes"]
        assert (counts["deltas_tracked"], counts["deltas_compared"]) == (1, 1)
        store.publish(tmp_path / "full")
    with opened(tmp_path / "store", **options) as store:
        emb = collection(store, *tables)
        with refused(tb.InvalidError, 'publish with changes="auto", which compares all rows'):
            store.publish(tmp_path / "x", base=tmp_path / "base", changes="tracked")
    tb.Snapshot.apply(tmp_path / "base", tmp_path / "delta", tmp_path / "next")
    with tb.Snapshot.open(tmp_path / "full") as full, tb.Snapshot.open(tmp_path / "next") as last:
        for name in ("item", "user"):
            asked = bags(*range(ROWS), name=name)
            assert torch.equal(full.lookup(asked)[name], last.lookup(asked)[name])


@pytest.mark.parametrize("way", ["flip", "missing"])
def test_a_damaged_plan_is_made_again_of_its_batches(tmp_path: Path, way: str) -> None:
    path = tmp_path / "store"
    half(path)
    for file in path.glob("order-*.plan"):
        raw = bytearray(file.read_bytes())
        raw[4096:] = bytes(len(raw) - 4096)
        file.unlink() if way == "missing" else file.write_bytes(raw)
    with opened(path, on_mismatch="error") as store:
        emb = collection(store)
        remedy = "give lookahead the batches of the plan: it is made again and training goes on"
        with pytest.raises(tb.TierbedError, match=re.escape(remedy)):
            train(emb, list(Known().epoch())[BATCHES // 2 :])
        epoch(emb, start=BATCHES // 2)
        assert torch.equal(rows_of(store), expected(0))


def test_too_small_a_budget_of_a_plan_names_the_least(tmp_path: Path) -> None:
    budgets = [150_000]
    while True:
        try:
            path = tmp_path / str(len(budgets))
            with opened(path, dram_budget=budgets[-1], order="forward") as store:
                epoch(collection(store))
                assert torch.equal(rows_of(store), expected(0))
            break
        except tb.InvalidError as error:
            least = int(re.findall(r"raise dram_budget to at least (\d+) bytes", str(error))[0])
            assert least > budgets[-1]
            budgets.append(least)
    assert 2 <= len(budgets) <= 8


def test_a_quota_too_small_for_a_plan_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with opened(path, order="forward", disk_quota="20KiB") as store:
        emb = collection(store)
        with refused(tb.NoSpaceError, "raise disk_quota"):
            epoch(emb)
            store.checkpoint("one")
    with opened(path, order="forward", disk_quota="20MiB") as store:
        emb = collection(store)
        epoch(emb)
        store.checkpoint("one")
        assert torch.equal(rows_of(store), expected(0))


def test_the_forward_order_of_other_batches_is_opened_with_auto(tmp_path: Path) -> None:
    remedy = 'give the batches of the plan, or open with order="auto"'
    rows = torch.ones(3, DIM)
    with opened(tmp_path / "store", order="forward") as store:
        emb = collection(store)
        store.write_rows("item", 0, rows)
        with refused(tb.InvalidError, remedy) as told:
            epoch(emb)
        # That reason has an answer of its own.
        assert "call store.checkpoint" in str(told.value)
        store.checkpoint("written")
        epoch(emb)
        assert store.order()["kind"] == "forward"
    with opened(tmp_path / "auto", order="auto") as store:
        emb = collection(store)
        store.write_rows("item", 0, rows)
        epoch(emb)
        assert store.order()["kind"] == "window"


def test_a_store_that_left_its_order_comes_back_where_it_is_insisted_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    with opened(path, order="auto", on_mismatch="fallback") as store:
        emb = collection(store)
        batches = ahead(emb, Known())
        train(emb, [next(batches)])
        train(emb, [bags(1, 2, 3)])
        store.checkpoint("moved")
        rows = rows_of(store)
    with opened(path, order="auto") as store:
        next(ahead(collection(store), Known()))
        assert 'open it with order="forward" for another one' in caplog.text
        assert torch.equal(rows_of(store), rows)
    with opened(path, order="forward") as store:
        emb = collection(store)
        batches = ahead(emb, Known())
        first = next(batches)
        assert torch.equal(rows_of(store), rows)
        train(emb, [first, *batches])
        assert store.order()["kind"] == "forward"


def test_a_step_has_a_plan_or_the_store_needs_none(tmp_path: Path) -> None:
    remedy = (
        "iterate tierbed.lookahead(loader, model) for the batches, or open the store with "
        'order="auto"'
    )
    for name, shards in (("one", None), ("two", 2)):
        both = (table(), table("other"))
        with opened(tmp_path / name, order="forward", shards=shards) as store:
            emb = collection(store, *both)
            with refused(tb.InvalidError, remedy):
                _train_both(emb, Known().epoch())
            store.checkpoint("nothing")
        with opened(tmp_path / name, order="auto", shards=shards) as store:
            _train_both(collection(store, *both), Known().epoch())
            assert torch.equal(rows_of(store), expected(0))
    with opened(tmp_path / "three", order="forward") as store:
        emb = collection(store)
        with refused(tb.InvalidError, remedy):
            train(emb, Known().epoch())
        epoch(emb)
        assert torch.equal(rows_of(store), expected(0))


def _train_both(emb: Any, batches: Iterable[tb.KeyedJaggedTensor]) -> None:
    for batch in batches:
        ids, lengths = batch.values(), batch.lengths()
        both = tb.KeyedJaggedTensor(["item", "other"], ids.repeat(2), lengths=lengths.repeat(2))
        emb(both).values().square().sum().backward()


def test_shards_with_a_table_each_follow_a_plan_of_one_collection(tmp_path: Path) -> None:
    remedy = (
        "put all tables of the store into one collection, or open a new store with fewer shards"
    )
    both = [table("item"), table("other", feature_names=["item"])]
    with opened(tmp_path / "a", shards=2, order="forward") as store:
        collection(store, both[1])
        alone = collection(store, both[0])
        with refused(tb.InvalidError, remedy):
            epoch(alone)
    with opened(tmp_path / "b", shards=2, order="forward") as store:
        epoch(collection(store, *both))
        assert torch.equal(rows_of(store), expected(0))
    with opened(tmp_path / "c", shards=1, order="forward") as store:
        collection(store, both[1])
        epoch(collection(store, both[0]))
        assert torch.equal(rows_of(store), expected(0))


def test_shards_of_the_forward_order_are_opened_with_auto(tmp_path: Path) -> None:
    path = tmp_path / "store"
    both = [table("item"), table("other", feature_names=["item"])]
    with opened(path, shards=2, order="forward") as store:
        emb = collection(store, *both)
        epoch(emb)
        store.checkpoint("one")
        rows = rows_of(store)
    with refused(tb.UnsupportedError, 'open the store with order="auto"'):
        opened(path, order="window")
    with opened(path, order="auto") as store:
        collection(store, *both)
        assert torch.equal(rows_of(store), rows)


def test_going_back_behind_the_plan_is_done_in_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with opened(path, order="auto", on_mismatch="fallback") as store:
        emb = collection(store)
        batches = ahead(emb, Known())
        for _ in range(6):
            train(emb, [next(batches)])
        store.checkpoint("planned", keep=True)
        rows = rows_of(store)
        train(emb, [bags(1, 2, 3)])
        store.checkpoint("later", keep=True)
        moved = rows_of(store)
    remedy = "go back in a copy of the folder, after dropping that checkpoint there"
    with refused(tb.InvalidError, remedy):
        opened(path, checkpoint="planned")
    shutil.copytree(path, tmp_path / "copy")
    with opened(tmp_path / "copy") as store:
        store.drop_checkpoint("later")
    with opened(tmp_path / "copy", checkpoint="planned") as store:
        collection(store)
        assert torch.equal(rows_of(store), rows)
    with opened(path) as store:
        assert torch.equal(rows_of(store), moved)


class Sized(Known):
    """A loader with a length."""

    def __len__(self) -> int:
        return BATCHES


def test_epochs_of_a_plan_have_a_length_and_begin_within_it(tmp_path: Path) -> None:
    with opened(tmp_path / "store", order="forward") as store:
        emb = collection(store)
        with refused(tb.InvalidError, "leave epochs out"):
            tb.lookahead(Known(), emb, window=4, key=itself, epochs=2)
        train(emb, tb.lookahead(Known(), emb, window=4, key=itself))
        assert torch.equal(rows_of(store), expected(0))
        with refused(tb.InvalidError, f"begin at one of them, not at {2 * BATCHES}"):
            next(iter(tb.lookahead(Sized(), emb, 4, itself, start=2 * BATCHES, epochs=2)))
        train(emb, tb.lookahead(Sized(), emb, 4, itself, start=BATCHES, epochs=2))
        assert torch.equal(rows_of(store), expected(0, 0))
