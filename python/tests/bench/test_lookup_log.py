"""Queries of a log against placed snapshots: what is counted must be what a placement promises."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tierbed.cli import main
from tierbed_bench import LogOptions, lookup_log, run_lookup_log
from tierbed_bench.lookup_log import quick


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Circles of six rows, 50 apart, of which four are asked for together."""
    draw = random.Random(1)
    lines = []
    for _ in range(1500):
        circle = draw.randrange(50)
        lines.append(" ".join(str(circle + 50 * at) for at in draw.sample(range(6), 4)))
    path = tmp_path / "queries.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_snapshot_is_asked_when_the_device_is_itself_again(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = [90.0, 5.0, 40.0, 80.0, 1.0]
    bench = lookup_log._Bench(LogOptions(log=log), tmp_path)
    monkeypatch.setattr(bench, "_raw", lambda path: {"reads_per_s": speeds.pop(0)})
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    bench._settle(tmp_path)
    assert speeds == [5.0, 40.0, 80.0, 1.0]
    bench._settle(tmp_path)
    assert speeds == [1.0]
    # One that never comes back is asked all the same, after a while.
    monkeypatch.setattr(lookup_log, "SETTLE_SECONDS_MAX", 0.0)
    assert bench._settle(tmp_path) > 0.0


def test_fewer_pages_are_read_where_rows_were_placed(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = LogOptions(log=log, table_bytes=1 << 20, ratios=(0.0, 0.4), caches=(0.0, 0.5))
    small = quick(options)
    assert small.table_bytes == 16 << 20
    options = LogOptions(
        log=log,
        table_bytes=1 << 20,
        ratios=(0.0, 0.4),
        caches=(0.0, 0.5),
        threads=2,
        calls=50,
        scratch=tmp_path / "not" / "there",
        head_rows=("10%",),
    )
    run_lookup_log(tmp_path / "out", options, path)
    result = json.loads(path.read_text())
    assert result["clones"] > 10
    pages = {
        (row["method"], row["ratio"], row["cache_share"]): row["pages_per_query"]
        for row in result["rows"]
        if row["what"] == "direct"
    }
    assert pages["shp", 0.0, 0.0] < pages["random", 0.0, 0.0]
    for cache in (0.0, 0.5):
        assert pages["grown", 0.4, cache] <= 1.01 * pages["shp", 0.0, cache]
    assert ("random", 0.0, 0.5) not in pages
    assert all(check["value"] > 0 for check in result["checks"].values())
    rows = result["rows"]
    kinds = {row["what"] for row in rows}
    assert kinds == {
        *("direct", "saturated", "device", "mmap", "memory"),
        *("index limit", "greedy", "not pipelined", "by_use", "tail"),
    }
    for row in rows:
        if row["what"] == "saturated":
            assert row["batch"] == 32
            assert row["pages_per_query"] < pages[row["method"], row["ratio"], 0.0]
            assert row["device_share"] > 0
    # A map reads the pages that the same snapshot reads without a cache, bounded or not.
    mapped = {row["cache_share"]: row for row in rows if row["what"] == "mmap"}
    assert set(mapped) == {0.5, 1.0}
    assert {row["pages_per_query"] for row in mapped.values()} == {pages["shp", 0.0, 0.0]}
    # What is chosen among does not change what is held.
    held = {row["placement_index_bytes"] for row in result["rows"] if row["what"] == "index limit"}
    assert len(held) == 1
    assert min(held) > 0
    cpu = [row["selection_cpu_share"] for row in result["rows"] if "selection_cpu_share" in row]
    assert cpu
    assert all(share > 0 for share in cpu)


def test_a_log_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert main(["bench", "lookup", "--log", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
