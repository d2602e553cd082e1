"""Publishing in shards: the rows of all shards are those of one snapshot."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tierbed.placement import RowShards, ShardOptions, divide_rows
from tierbed.train.shards import parse_by, push_shards

ROWS, DIM = 600, 8


def log_of_groups(queries: int = 2000) -> tb.QueryLog:
    """Queries of five rows of one of 30 groups; the last hundred rows are never asked for."""
    luck = random.Random(1)
    rows = [
        [group + 30 * luck.randrange(16) for _ in range(5)]
        for group in (luck.randrange(30) for _ in range(queries))
    ]
    ids = torch.tensor(rows).flatten()
    return tb.QueryLog.from_batches(ROWS, [(ids, torch.arange(0, len(ids) + 1, 5))])


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with tb.Store.open(tmp_path / "store", dram_budget="32MiB") as opened:
        tables = [
            tb.EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM),
            tb.EmbeddingBagConfig(name="day", num_embeddings=7, embedding_dim=DIM),
        ]
        emb = tb.EmbeddingBagCollection(tables, store=opened, optimizer=tb.SGD(lr=0.1))
        ids = torch.tensor([*range(0, 400, 3), 1, 2])
        lengths = torch.tensor([len(ids) - 2, 2])
        batch = tb.KeyedJaggedTensor(["item", "day"], ids, lengths=lengths)
        emb(batch).values().square().sum().backward()
        yield opened


def every_row(folder: Path, table: str, rows: int) -> torch.Tensor:
    """Reads every row of a table where the map says that it lies."""
    where = tb.ShardMap.open(folder)
    ids = torch.arange(rows)
    shards, local = where.locate(table, ids)
    out = torch.empty(rows, DIM)
    for number, shard in enumerate(where.shards):
        with tb.Snapshot.open(folder / shard.folder, dram_budget="8MiB") as snapshot:
            here = (shards == number) | ((shards == -1) & (ids % len(where.shards) == number))
            out[here] = rows_of(snapshot, table, local[here])
    return out


def rows_of(snapshot: tb.Snapshot, table: str, ids: torch.Tensor) -> torch.Tensor:
    if not len(ids):
        return torch.empty(0, DIM)
    bags = tb.KeyedJaggedTensor([table], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
    return snapshot.lookup(bags).values()


@pytest.mark.parametrize("by", ["hash", "rows", "placement"])
def test_shards_have_the_rows_of_one_snapshot(store: tb.Store, tmp_path: Path, by: str) -> None:
    placement = tmp_path / "placement.tbp"
    given: Any = by
    pages = None
    if by == "placement":
        log = log_of_groups()
        tb.place(log, rows_per_page=9, method="shp", ratio=0.0).write(placement)
        divide_rows(log, ShardOptions(shards=4)).write(placement)
        given = pages = {"item": placement}
    shards = tb.Shards(count=4, replicas=2, by=given, everywhere=7 * DIM * 4)
    report = store.publish(tmp_path / "shards", shards=shards, placement=pages)
    whole = store.publish(tmp_path / "whole")
    assert (report.shard_count, whole.shard_count) == (4, 0)
    assert report.initial_rows == ROWS - whole.row_count + 2
    where = tb.ShardMap.open(tmp_path / "shards")
    assert where.replicas == 2
    kinds = {"hash": "hash", "rows": "rows", "placement": "placed"}
    assert [table.divided_by for table in where.tables] == [kinds[by], "everywhere"]
    with tb.Snapshot.open(tmp_path / "whole", dram_budget="8MiB") as snapshot:
        for table, rows in (("item", ROWS), ("day", 7)):
            expected = rows_of(snapshot, table, torch.arange(rows))
            assert torch.equal(every_row(tmp_path / "shards", table, rows), expected)
    for shard in range(4):
        rows = where.rows_of("item", shard)
        assert 130 <= rows <= 170
        ids = [where.global_of("item", shard, row) for row in range(rows)]
        assert where.global_of("item", shard, rows) is None
        assert len(set(ids)) == rows


def test_shards_are_published_beside_training(store: tb.Store, tmp_path: Path) -> None:
    shards = tb.Shards(count=3, everywhere=0)
    future = store.publish_async(tmp_path / "beside", shards=shards)
    assert future.result().shard_count == 3
    store.publish(tmp_path / "still", shards=shards)
    ways = [tb.ShardMap.open(tmp_path / name) for name in ("beside", "still")]
    # The same rows: the same number, so answers of both may be mixed.
    assert ways[0].publish == ways[1].publish
    assert [table.divided_by for table in ways[0].tables] == ["hash", "hash"]


def test_shards_of_a_location_are_models_of_their_own(store: tb.Store, tmp_path: Path) -> None:
    store.publish(tmp_path / "shards", shards=tb.Shards(count=2))
    told: list[tuple[int, int]] = []
    location = tmp_path / "models"
    pushed = push_shards(
        tmp_path / "shards", location, channel="canary", progress=lambda *at: told.append(at)
    )
    assert pushed.version == 1
    assert told[-1][0] <= told[-1][1]
    pulled = tb.Versions(location).pull(tmp_path / "pulled", channel="canary")
    where = tb.ShardMap.open(pulled.folders[-1])
    for shard in where.shards:
        versions = tb.Versions(location / shard.folder)
        folder = versions.pull(tmp_path / shard.folder, channel="canary").folders[-1]
        with tb.Snapshot.open(folder, dram_budget="8MiB") as snapshot:
            assert snapshot.verify() > 0
    assert {one.state for one in tb.Versions(location).list().versions} == {"whole"}


def test_what_cannot_be_divided_is_refused(store: tb.Store, tmp_path: Path) -> None:
    shards = tb.Shards(count=2)
    store.publish(tmp_path / "whole")
    with pytest.raises(tb.UnsupportedError, match="delta is not divided"):
        store.publish(tmp_path / "delta", base=tmp_path / "whole", shards=shards)
    with pytest.raises(tb.InvalidError, match="has no shards"):
        store.publish(tmp_path / "a", shards=tb.Shards(count=2, by={"item": "none.tbp"}))
    log = log_of_groups(10)
    divide_rows(log, ShardOptions(shards=3)).write(tmp_path / "three.tbp")
    placed = {"item": tmp_path / "three.tbp"}
    with pytest.raises(tb.InvalidError, match="of other rows or shards"):
        store.publish(tmp_path / "b", shards=tb.Shards(count=2, by=placed))
    with pytest.raises(tb.InvalidError, match="one placement"):
        store.publish(tmp_path / "c", shards=tb.Shards(count=2, by="luck"))
    store.publish(tmp_path / "shards", shards=shards)
    with pytest.raises(tb.InvalidError, match="holds shards"):
        tb.Snapshot.open(tmp_path / "shards", dram_budget="8MiB")
    with pytest.raises(tb.InvalidError, match="holds no shards"):
        tb.ShardMap.open(tmp_path / "whole")
    with pytest.raises(tb.InvalidError, match="out of range"):
        tb.ShardMap.open(tmp_path / "shards").locate("item", torch.tensor([ROWS]))


def test_open_vocabularies_are_published_whole(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "store", dram_budget="32MiB") as store:
        table = tb.EmbeddingBagConfig(name="item", num_embeddings=None, embedding_dim=DIM)
        emb = tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=0.1))
        bags = tb.KeyedJaggedTensor(["item"], torch.tensor([7]), lengths=torch.tensor([1]))
        emb(bags).values().sum().backward()
        with pytest.raises(tb.UnsupportedError, match="publish it whole"):
            store.publish(tmp_path / "shards", shards=tb.Shards(count=2))
        store.publish(tmp_path / "whole")


def test_later_queries_need_fewer_shards_by_placement() -> None:
    earlier, later = log_of_groups().split(0.8)
    options = ShardOptions(shards=8)
    placed = divide_rows(earlier, options)
    assert torch.equal(placed.shards(), divide_rows(earlier, ShardOptions(threads=2)).shards())
    hashed = RowShards.by_hash(8, ROWS).reads(later)
    found = placed.reads(later)
    assert found.shards_per_query < 0.6 * hashed.shards_per_query
    assert found.query_count == len(later)
    assert sum(found.rows) == later.pin_count
    # Every row has a shard, and all shards are about equally large.
    assert sum(placed.row_counts()) == ROWS
    assert max(placed.row_counts()) <= 1.05 * ROWS / 8 + 1
    assert max(placed.reads(earlier).rows) <= 1.05 * earlier.pin_count / 8 + 1


def test_words_of_the_command_line() -> None:
    assert parse_by([]) == "hash"
    assert parse_by(["rows"]) == "rows"
    assert parse_by(["placed.tbp"]) == "placed.tbp"
    assert parse_by(["a=x", "b+c=y"]) == {("a",): "x", ("b", "c"): "y"}
    for wrong in (["hash", "rows"], ["a="], ["a+=x", "b=y"]):
        with pytest.raises(tb.InvalidError, match="--shard-by"):
            parse_by(wrong)


def test_a_store_of_several_parts_is_divided_alike(tmp_path: Path) -> None:
    with tb.Store.open(tmp_path / "s", dram_budget="24MiB", shards=2, order="window") as store:
        tables = [
            tb.EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM)
            for name in ("a", "b")
        ]
        tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))
        for name in ("a", "b"):
            store.write_rows(name, 0, torch.rand(ROWS // 2, DIM))
        report = store.publish(tmp_path / "shards", shards=tb.Shards(count=3, everywhere=0))
        assert (report.row_count, report.initial_rows) == (2 * ROWS, ROWS)
        for name in ("a", "b"):
            assert torch.equal(
                every_row(tmp_path / "shards", name, ROWS), store.read_rows(name, 0, ROWS)
            )
