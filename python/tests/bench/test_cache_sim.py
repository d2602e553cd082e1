"""Replays of logs through cache policies: counts by hand, and the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tierbed.cli import main
from tierbed.errors import InvalidError
from tierbed_bench.sim.cache import SimOptions, simulate


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.txt.gz"
    with gzip.open(path, "wt") as out:
        out.write("10 20\n10 30\n10 30\n20 30\n")
    return path


def test_counts_are_those_of_a_replay_by_hand(log: Path) -> None:
    options = SimOptions(policies=("lru",), capacity_shares=(0.7, 1.0))
    result = simulate(log, options)
    assert (result["queries"], result["asked_rows"], result["distinct_rows"]) == (4, 8, 3)
    rows = {(row["policy"], row["capacity_rows"]): row for row in result["rows"]}
    # Two rows fit: hits are 10; 10 and 30; 30.
    assert rows["lru", 2]["hit_rate"] == 4 / 8
    assert rows["lru", 2]["perfect_hit_rate"] == 1 / 4
    assert rows["lru", 2]["misses_per_request"] == 4 / 4
    assert rows["lru", 3]["perfect_hit_rate"] == 2 / 4
    assert rows["belady", 2]["hit_rate"] >= rows["lru", 2]["hit_rate"]
    assert rows["upper-bound", 3]["perfect_hit_rate"] == 2 / 4


def test_counting_may_begin_later(log: Path) -> None:
    options = SimOptions(policies=("group_frequency",), capacity_shares=(1.0,), warm_share=0.5)
    result = simulate(log, options)
    assert result["counted_queries"] == 2
    assert [row["perfect_hit_rate"] for row in result["rows"]] == [1.0]


def test_the_admission_bitmap_keeps_rows_of_one_use_out(log: Path) -> None:
    options = SimOptions(policies=("lru",), capacity_shares=(1.0,), admission_threshold=2)
    # Rows enter at their second use: 10 at the second query, 30 at the third, 20 at the last.
    assert simulate(log, options)["rows"][0]["hit_rate"] == 2 / 8
    with pytest.raises(InvalidError):
        SimOptions(admission_threshold=4)


def test_samples_in_criteo_layout_have_rows_per_column(tmp_path: Path) -> None:
    path = tmp_path / "samples.tsv"
    lines = [["0"] + [""] * 13 + [token] + ["x"] * 25 for token in "aab"]
    path.write_text("".join("\t".join(line) + "\n" for line in lines))
    result = simulate(path, SimOptions(policies=("lru",), capacity_shares=(1.0,)))
    assert (result["distinct_rows"], result["asked_rows"]) == (27, 78)
    assert result["rows"][0]["perfect_hit_rate"] == 1 / 3


def test_every_policy_runs_from_the_command_line(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "sim.json"
    call = ["sim", "cache", "--log", str(log), "--policies", "all", "--capacity", "0.7"]
    code = main([*call, "--json", str(out)])
    assert code == 0
    rows = json.loads(out.read_text())["rows"]
    assert {"lru", "s3_fifo", "ev_lfu", "group_frequency"} <= {row["policy"] for row in rows}
    assert all(row["perfect_hit_rate"] <= 0.5 for row in rows)
    assert out.with_suffix(".png").stat().st_size > 1000


def test_wrong_calls_say_what_to_do(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "cache", "--log", str(log), "--policies", "best"]) == 2
    assert "use one of lru" in capsys.readouterr().err
    assert main(["sim", "cache", "--log", str(log), "--capacity", "5%"]) == 2
    with pytest.raises(InvalidError):
        SimOptions(capacity_shares=(1.5,))
    with pytest.raises(InvalidError):
        SimOptions(warm_share=1.0)
