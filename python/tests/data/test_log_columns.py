"""Logs of columns: the queries of a loop, in bounded memory, from files, frames and buckets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tierbed as tb
from tierbed.cli import main
from tierbed.errors import InvalidError
from tierbed.placement import LogOptions, log_of_columns
from tierbed.placement.log_columns import parse_columns

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

GROUPS = 40
SIZES = {"seen": 50, "site": 7}


def records(count: int) -> dict[str, list[Any]]:
    seen: list[Any] = [[(at * 7 + k) % 50 for k in range(at % 4)] for at in range(count)]
    site: list[Any] = [at % 7 for at in range(count)]
    for at in range(0, count, 11):
        seen[at] = None
    for at in range(0, count, 5):
        site[at] = None
    return {"seen": seen, "site": site}


def by_loop(columns: dict[str, list[Any]]) -> list[list[int]]:
    queries = []
    for seen, site in zip(columns["seen"], columns["site"], strict=True):
        rows = set(seen or ()) | (set() if site is None else {50 + site})
        if rows:
            queries.append(sorted(rows))
    return queries


def queries(log: tb.QueryLog) -> list[list[int]]:
    return [sorted(log[at]) for at in range(len(log))]


def written(folder: Path, columns: dict[str, list[Any]], files: int = 2) -> Path:
    table = pyarrow.table(columns)
    each = -(-table.num_rows // files)
    for at in range(files):
        part = table.slice(at * each, each)
        parquet.write_table(part, folder / f"day-{at}.parquet", row_group_size=64)
    return folder


def test_records_are_the_queries_of_a_loop(tmp_path: Path) -> None:
    columns = records(1000)
    folder = written(tmp_path, columns)
    wanted = by_loop(columns)
    of_files = log_of_columns(str(folder / "*.parquet"), SIZES)
    assert of_files.row_count == 57
    assert queries(of_files) == wanted
    assert queries(log_of_columns(pyarrow.table(columns), SIZES)) == wanted
    counted = log_of_columns(str(folder / "*.parquet"), dict.fromkeys(SIZES))
    assert (counted.row_count, queries(counted)) == (57, wanted)
    limits = LogOptions(query_count_max=100, query_rows_max=2)
    first = log_of_columns(pyarrow.table(columns), {"seen": 50}, limits)
    longer = [one for one in by_loop({**columns, "site": [None] * 1000}) if one]
    assert len(first) == 100
    assert [len(one) for one in queries(first)] == [min(2, len(one)) for one in longer[:100]]


def test_a_frame_of_polars_is_streamed(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    columns = records(1000)
    folder = written(tmp_path, columns)
    frame = polars.scan_parquet(folder / "*.parquet")
    if not hasattr(frame, "collect_batches"):
        pytest.skip("this Polars streams no LazyFrame")
    assert queries(log_of_columns(frame, SIZES)) == by_loop(columns)
    some = frame.filter(polars.col("site") == 3)
    found = log_of_columns(some, dict.fromkeys(SIZES))
    assert found.row_count == log_of_columns(some, {"seen": None}).row_count + 4
    assert all(found.row_count - 1 in query for query in queries(found))


def test_a_sample_does_not_depend_on_batches(tmp_path: Path) -> None:
    table = pyarrow.table(records(5000))
    options = LogOptions(sample=0.25, seed=3)
    one = log_of_columns(table, SIZES, options)
    folder = tmp_path / "log"
    folder.mkdir()
    parquet.write_table(table, folder / "a.parquet", row_group_size=17)
    assert queries(log_of_columns(str(folder / "a.parquet"), SIZES, options)) == queries(one)
    assert 0.2 < len(one) / 5000 < 0.3
    assert queries(log_of_columns(table, SIZES, LogOptions(sample=0.25, seed=4))) != queries(one)


MEMORY = """
import resource, sys
import tierbed as tb
from tierbed.placement import LogOptions, log_of_columns
if sys.argv[2] == "polars":
    import polars
    source = polars.scan_parquet(sys.argv[1])
else:
    source = sys.argv[1]
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10
log_of_columns(sys.argv[3], {"seen": 1000}, LogOptions(sample=0.01))
before = peak()
log = log_of_columns(source, {"seen": 1000}, LogOptions(sample=0.01))
print(len(log), peak() - before)
"""


@pytest.mark.parametrize("by", ["arrow", pytest.param("polars", marks=pytest.mark.slow)])
def test_memory_is_bounded_whatever_the_size(by: str, tmp_path: Path) -> None:
    if by == "polars":
        pytest.importorskip("polars")
    large, small = tmp_path / "large.parquet", tmp_path / "small.parquet"
    each = 100_000
    lists = pyarrow.ListArray.from_arrays(
        pyarrow.array(range(0, 8 * each + 1, 8), pyarrow.int32()),
        pyarrow.array([at % 1000 for at in range(8 * each)], pyarrow.int64()),
    )
    table = pyarrow.table({"seen": lists})
    parquet.write_table(table.slice(0, each // 10), small, row_group_size=each // 10)
    with parquet.ParquetWriter(large, table.schema) as writer:
        # 256 MB of ids.
        for _ in range(GROUPS):
            writer.write_table(table, row_group_size=each // 10)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(large), by, str(small)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    count, grown_mib = map(int, done.stdout.split())
    assert 0.009 < count / (GROUPS * each) < 0.011
    assert grown_mib < 130, f"{grown_mib} MiB beyond a small log, of 244 MiB of ids"


def test_the_command_places_what_columns_say(tmp_path: Path) -> None:
    columns = records(2000)
    folder = written(tmp_path, columns)
    text = tmp_path / "log.txt"
    text.write_text("\n".join(" ".join(map(str, query)) for query in by_loop(columns)) + "\n")
    shared = ("--rows-per-page", "4", "--method", "shp", "--ratio", "0", "--quiet")
    made = []
    for name, source in (
        ("columns", ("--log", str(folder / "*.parquet"), "--columns", "seen,site=7")),
        ("text", ("--log", str(text), "--rows", "57")),
    ):
        assert main(["place", *source, *shared, "--out", str(tmp_path / name)]) == 0
        made.append((tmp_path / name / "placement.tbp").read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("columns", "sizes", "told"),
    [
        ({"seen": [["a"]]}, {"seen": 5}, "columns of whole numbers"),
        ({"seen": [[5]]}, {"seen": 5}, "the id 5, which is no row of 5"),
        ({"seen": [-1]}, {"seen": None}, "no row"),
        ({"seen": [1]}, {"site": 5}, "site"),
    ],
)
def test_columns_of_no_rows_are_refused(
    columns: dict[str, Any], sizes: dict[str, int | None], told: str
) -> None:
    with pytest.raises(InvalidError, match=told):
        log_of_columns(pyarrow.table(columns), sizes)


@pytest.mark.parametrize("text", ["", "a,,b", "a,a", "a=0", "a=many", "=5"])
def test_wrong_words_for_columns_are_refused(text: str) -> None:
    with pytest.raises(InvalidError, match="--columns are"):
        parse_columns(text)
    assert parse_columns("a, b=5") == {"a": None, "b": 5}
