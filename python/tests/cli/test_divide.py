"""`place --shards`, `publish --shards` and `bench shards`, as a user types them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed as tb
from tests.conftest import REAL_LOG
from tierbed.cli import main
from tierbed_bench.shards import ShardsOptions, run_shards

ROWS = 480
REAL = REAL_LOG.parent.parent / "queries"


def tierbed(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queries of one of 40 groups; that of a row is its remainder."""
    luck = random.Random(1)
    path = tmp_path_factory.mktemp("log") / "groups.txt"
    rows = [[group + 40 * luck.randrange(12) for _ in range(5)] for group in range(40)] * 50
    luck.shuffle(rows)
    path.write_text("".join(" ".join(map(str, row)) + "\n" for row in [*rows, [ROWS - 1]]))
    return path


def test_shards_of_a_placement_are_published(log: Path, tmp_path: Path) -> None:
    out, told = tmp_path / "placed", tmp_path / "told.json"
    call = ("--rows-per-page", 8, "--method", "shp", "--split", 0.8, "--ratio", 0)
    assert tierbed("place", "--log", log, "--out", out, *call, "--shards", 4, "--json", told) == 0
    found = json.loads(told.read_text())
    assert found["shards_per_query"] < 0.6 * found["shards_per_query_by_hash"]
    assert sum(found["shard_row_counts"]) == ROWS
    assert found["shards"] == 4
    with tb.Store.open(tmp_path / "store", dram_budget="16MiB") as store:
        table = tb.EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=8)
        tb.EmbeddingBagCollection([table], store=store, optimizer=tb.SGD(lr=0.1))
        store.write_rows("item", 0, torch.rand(ROWS, 8))
        store.checkpoint("last")
    call = ("--store", tmp_path / "store", "--shards", 4, "--everywhere", "1KiB")
    by = ("--shard-by", f"item={out / 'placement.tbp'}")
    assert tierbed("publish", *call, *by, "--replicas", 2, "--out", tmp_path / "shards") == 0
    where = tb.ShardMap.open(tmp_path / "shards")
    assert (where.replicas, where.tables[0].divided_by) == (2, "placed")
    shards, _ = where.locate("item", torch.arange(ROWS))
    assert torch.equal(shards, tb.placement.RowShards.read(out / "placement.tbp").shards())
    assert tierbed("inspect", tmp_path / "shards", "--json", told) == 0
    found = json.loads(told.read_text())
    assert sum(found["tables"][0]["rows_of_shards"]) == ROWS
    assert found["publish"] == where.publish
    assert tierbed("verify", tmp_path / "shards", "--dram-budget", "8MiB") == 0
    pages = next((tmp_path / "shards" / "shard.2").glob("rows.pages"))
    pages.write_bytes(pages.read_bytes()[:-1] + b"!")
    assert tierbed("verify", tmp_path / "shards", "--dram-budget", "8MiB") != 0
    location = tmp_path / "models"
    assert tierbed("publish", *call, "--to", location, "--channel", "stable") == 0
    assert tb.Versions(location / "shard.3").channel("stable") is not None
    assert not list((tmp_path / "store").glob("shards.*"))


def test_the_bench_counts_shards_of_later_queries(log: Path, tmp_path: Path) -> None:
    options = ("--shards", "4,8", "--samples", 2000, "--rows", 5000)
    assert (
        tierbed("bench", "shards", "--log", log.parent, "--log", log, *options, "--out", tmp_path)
        == 0
    )
    found = json.loads((tmp_path / "shards.json").read_text())
    assert {row["log"] for row in found["rows"]} == {"groups", "generated"}
    assert {"machine", "date", "command", "ratios"} <= found.keys()
    assert found["ratios"]["placement_vs_hash_8_groups"] < 0.6
    for row in found["rows"]:
        assert 1.0 <= row["shards_per_query"] <= row["shards"]
        assert row["rows_imbalance"] <= 1.07
        assert row["load_imbalance"] >= 1.0
    assert (tmp_path / "shards.png").is_file()


@pytest.mark.skipif(not REAL.is_dir(), reason="no real log beside the repository")
def test_real_logs_are_measured(tmp_path: Path) -> None:
    log = REAL / "gitcochange.txt.gz"
    options = ShardsOptions(logs=[log], shards=(8,), samples=0, queries_max=20_000)
    found = json.loads(run_shards(tmp_path, options).read_text())
    assert found["logs"][0]["order"] == "time"
    assert found["ratios"]["placement_vs_hash_8"] < 1.0
