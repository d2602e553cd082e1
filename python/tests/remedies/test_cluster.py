"""Remedies of what plans a cluster, and of logs that lie in columns: each is followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierbed.cli import main
from tierbed.errors import InvalidError
from tierbed.placement import LogOptions, RayQueryLog, log_of_columns, read_columns
from tierbed.placement.log_columns import parse_columns
from tierbed.serve.ray_servers import ServerOptions
from tierbed.serve.recorded_upload import RecordUpload
from tierbed.sizing import Inputs, plan_serving, read_measured

ROWS = ("--table", "1TB")
LOAD = (*ROWS, "--requests-per-s", "1e6")


@pytest.mark.parametrize(
    ("wrong", "remedy", "right"),
    [
        (ROWS, "give --requests-per-s for serving", LOAD),
        (ROWS, "or --samples-per-s or --hosts for training", (*ROWS, "--hosts", "2")),
        (LOAD[2:], "give --table", LOAD),
        ((*LOAD, "--shards", "0"), "give other --shards", (*LOAD, "--shards", "2")),
        ((*LOAD, "--dram-share", "0.001"), "give --pages", (*LOAD, "--pages", "9")),
        ((*ROWS, "--hosts", "20000"), "give other --hosts", (*ROWS, "--hosts", "20")),
        (
            (*LOAD, "--host-dram", "1MB"),
            "give larger --host-dram or --host-ssd",
            (*LOAD, "--host-dram", "1GB"),
        ),
        (
            (*ROWS, "--samples-per-s", "1e9", "--ranks", "1"),
            "give other --ranks, --batch, --host-gbit or --host-ssd",
            (*ROWS, "--samples-per-s", "1e9", "--ranks", "32"),
        ),
    ],
)
def test_a_plan_says_what_it_needs(
    wrong: tuple[str, ...], remedy: str, right: tuple[str, ...], capsys: Any
) -> None:
    assert main(["plan", "cluster", *wrong]) == 2
    assert remedy in capsys.readouterr().err
    assert main(["plan", "cluster", *right]) == 0


def test_measured_files_are_those_of_benchmarks_and_plans(tmp_path: Path) -> None:
    def written(name: str, value: Any) -> Path:
        (tmp_path / name).write_text(json.dumps(value))
        return tmp_path / name

    def of_serve(samples: int, cost: float) -> Path:
        row = {"part": "cost", "system": "tierbed_infer", "cpu_us": cost}
        told = {"suite": "serve", "shape": {"sample_count": samples}, "rows": [row]}
        return written(f"{samples}.json", told)

    with pytest.raises(InvalidError, match="name a JSON file of results"):
        read_measured([tmp_path / "absent.json"])
    with pytest.raises(InvalidError, match="or write inputs as an object `inputs`"):
        read_measured([written("other.json", {"suite": "lookup"})])
    [own] = read_measured([written("own.json", {"inputs": {"request_us": 12}})])
    assert own.values == {"request_us": 12}
    one = of_serve(1, 50.0)
    with pytest.raises(InvalidError, match=r"give a second file of `tierbed bench serve"):
        read_measured([one])
    [both] = read_measured([one, of_serve(11, 150.0)])
    assert both.values == {"sample_us": 10.0, "request_us": 40.0}


def test_pages_are_given_where_none_were_measured() -> None:
    load = {"table": 1e12, "requests_per_s": 1e3, "dram_share": 0.001}
    with pytest.raises(InvalidError, match="give --pages"):
        plan_serving(Inputs(load))
    assert plan_serving(Inputs({**load, "pages": 10})).iops == 2e4


def _columns(folder: Path, **columns: list[Any]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), folder / "log.parquet")
    return str(folder / "log.parquet")


def test_columns_are_named_with_their_rows() -> None:
    with pytest.raises(InvalidError, match="write user_items,site or, with the rows of tables"):
        parse_columns("user_items=five")
    assert parse_columns("user_items,site") == {"user_items": None, "site": None}
    rows = parse_columns("user_items=5000000,site=1000")
    assert rows == {"user_items": 5_000_000, "site": 1000}


def test_columns_say_their_rows(tmp_path: Path) -> None:
    source = _columns(tmp_path, user=[1, 5])
    with pytest.raises(InvalidError, match="leave out --rows, and write COLUMN=ROWS"):
        log_of_columns(source, {"user": None}, LogOptions(row_count=9))
    assert log_of_columns(source, {"user": 9}).row_count == 9
    with pytest.raises(InvalidError, match="give more rows with the column, or hash ids"):
        log_of_columns(source, {"user": 5})
    assert log_of_columns(source, {"user": 6}).row_count == 6


def test_columns_are_whole_numbers(tmp_path: Path) -> None:
    source = _columns(tmp_path, user=[1, 5], name=["a", "b"])
    with pytest.raises(InvalidError, match="name columns of whole numbers or of lists of them"):
        log_of_columns(source, {"name": None})
    assert len(log_of_columns(source, {"user": None})) == 2


def test_a_source_that_is_read_once_is_given_rows() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"user": [1, 5]})
    with pytest.raises(InvalidError, match="give them with the columns"):
        log_of_columns(table.to_reader(), {"user": None})
    assert len(log_of_columns(table.to_reader(), {"user": 6})) == 2


def test_a_log_is_one_that_there_is(tmp_path: Path) -> None:
    source = _columns(tmp_path, user=[1, 5])
    absent = f"file://{tmp_path}/absent/log.parquet"
    with pytest.raises(InvalidError, match="name files that there are"):
        read_columns(absent, {"user": None})
    assert len(read_columns(f"file://{source}", {"user": None})) == 2


def test_blocks_of_a_cluster_are_whole_logs_without_a_cache(tmp_path: Path, capsys: Any) -> None:
    source = _columns(tmp_path, user=[[1, 5], [2]])
    sampled = LogOptions(sample=0.5)
    with pytest.raises(InvalidError, match="leave out --sample and --rows, or build without --ray"):
        RayQueryLog.read(None, source, {"user": 6}, sampled)
    assert len(log_of_columns(source, {"user": 6}, sampled)) <= 2
    with pytest.raises(InvalidError, match="no column site; name some of user"):
        RayQueryLog.read(None, source, {"site": 6})
    asked = ["place", "--log", source, "--columns", "user=6", "--out", str(tmp_path / "out")]
    asked += ["--rows-per-page", "4", "--method", "shp", "--ratio", "0", "--cache-share", "0.5"]
    assert main([*asked, "--ray", "local"]) == 2
    assert "leave out --cache-share, or --ray" in capsys.readouterr().err
    assert main(asked) == 0
    shards = [*asked[:-2], "--shards", "2"]
    assert main([*shards, "--ray", "local"]) == 2
    assert "leave out --shards, or --ray" in capsys.readouterr().err
    assert main(shards) == 0


def test_queries_are_recorded_where_one_may_write(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(InvalidError, match="name one that may be written") as error:
        RecordUpload("nowhere://user:secret@logs/queries?key=secret")
    assert "secret" not in str(error.value)
    with RecordUpload(f"file://{tmp_path}/logs") as upload:
        (upload.folder / "a").mkdir()
        (upload.folder / "a" / "queries-00000001.txt").write_text("1\n")
    assert upload.uploaded_count == 1


def test_servers_of_a_cluster_have_plain_names() -> None:
    with pytest.raises(InvalidError, match="write ads"):
        ServerOptions(name="Ads!")
    assert ServerOptions(name="ads").name == "ads"
