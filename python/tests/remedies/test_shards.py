"""Remedies of shards: dividing a publish, and opening what was divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierbed as tb
from tierbed.cli import main
from tierbed.placement import ShardOptions, divide_rows

from .kit import ROWS, bags, collection, opened, refused, step, table


def log() -> tb.QueryLog:
    ids = torch.arange(ROWS)
    return tb.QueryLog.from_batches(ROWS, [(ids, torch.arange(0, ROWS + 1, 4))])


def test_a_model_is_divided_by_what_was_placed_with_as_many_shards(tmp_path: Path) -> None:
    placed = tmp_path / "placement.tbp"
    with opened(tmp_path / "store") as store:
        step(collection(store))
        shards = tb.Shards(count=4, by={"item": placed})
        with refused(tb.InvalidError, "place again with --shards, or divide by hash or rows"):
            store.publish(tmp_path / "none", shards=shards)
        divide_rows(log(), ShardOptions(shards=2)).write(placed)
        with refused(tb.InvalidError, "place the log of these tables with as many shards"):
            store.publish(tmp_path / "two", shards=shards)
        divide_rows(log(), ShardOptions(shards=4)).write(placed)
        assert store.publish(tmp_path / "four", shards=shards).shard_count == 4
        by_hash = tb.Shards(count=4, by="hash", everywhere=0)
        assert store.publish(tmp_path / "hash", shards=by_hash).shard_count == 4


def test_shards_are_published_in_full_and_opened_one_by_one(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        step(collection(store))
        store.publish(tmp_path / "whole")
        shards = tb.Shards(count=2, everywhere=0)
        with refused(tb.UnsupportedError, "publish in full, with --shards"):
            store.publish(tmp_path / "delta", base=tmp_path / "whole", shards=shards)
        with refused(tb.InvalidError, "publish with --shards, into a new or empty folder"):
            tb.ShardMap.open(tmp_path / "whole")
        store.publish(tmp_path / "shards", shards=shards)
        rows = store.read_rows("item", 0, ROWS)
    with refused(tb.InvalidError, "open the folder of one shard, or serve all of them"):
        tb.Snapshot.open(tmp_path / "shards", dram_budget="8MiB")
    where = tb.ShardMap.open(tmp_path / "shards")
    at, row = where.locate("item", torch.tensor([5]))
    folder = tmp_path / "shards" / where.shards[int(at)].folder
    with tb.Snapshot.open(folder, dram_budget="8MiB") as snapshot:
        assert torch.equal(snapshot.lookup(bags(int(row)))["item"][0], rows[5])


def test_open_vocabularies_are_published_whole(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        step(collection(store, table(rows=None)))
        remedy = "publish it whole, and serve it by several equal servers"
        with refused(tb.UnsupportedError, remedy):
            store.publish(tmp_path / "shards", shards=tb.Shards(count=2))
        assert store.publish(tmp_path / "whole").row_count > 0


def test_the_command_says_into_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path / "store") as store:
        step(collection(store))
        store.checkpoint("last")
    call = ["publish", "--store", str(tmp_path / "store"), "--shard-by", "rows"]
    call += ["--dram-budget", "8MiB", "--out"]
    assert main([*call, str(tmp_path / "a")]) != 0
    assert "say into how many by --shards" in capsys.readouterr().err
    assert main([*call, str(tmp_path / "a"), "--shards", "2", "--everywhere", "1KiB"]) == 0
    assert [one.divided_by for one in tb.ShardMap.open(tmp_path / "a").tables] == ["rows"]
