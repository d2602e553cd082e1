"""How little memory has another cache's hits: by hand, and in the order that codecs promise."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tierbed import _native
from tierbed.cli import main
from tierbed.errors import InvalidError
from tierbed_bench.sim.memory import MatchOptions, _Search, generated_log, match_memory


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six rows of 4,000 a query, low numbers most often."""
    draw = random.Random(3)
    lines = [" ".join(str(int(4000 * draw.random() ** 4)) for _ in range(6)) for _ in range(3000)]
    path = tmp_path_factory.mktemp("match") / "log.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_narrower_rows_match_in_less_memory(log: Path) -> None:
    trace = _native.CacheLog(str(log), None)
    options = MatchOptions(baseline="lru", baseline_share=0.3, policies=("group_frequency", "lru"))
    result = match_memory(trace, options)
    base, *rows = result["rows"]
    assert (base["memory_share"], base["code_bytes"]) == (0.3, 128)
    assert base["memory_bytes"] == 128 * base["capacity_rows"]
    found = {(row["policy"], row["codec"]): row for row in rows}
    for row in rows:
        assert row["perfect_hit_rate"] >= base["perfect_hit_rate"]
        assert row["metadata_bytes_per_row"] > 8
        held = _native.CacheLog.rows_within(
            row["policy"], row["code_bytes"], result["distinct_rows"], row["memory_bytes"]
        )
        # Memory comes in slabs of 4 KiB here.
        assert 0 <= held - row["capacity_rows"] < 4096 // row["code_bytes"]
    for policy in ("group_frequency", "lru"):
        f32, int8, int4 = (found[policy, codec] for codec in ("f32", "int8", "int4"))
        assert f32["memory_share"] > int8["memory_share"] > int4["memory_share"]
    # Of the rows needed no codec changes anything, and fewer are not enough.
    assert (
        len({found["group_frequency", codec]["capacity_rows"] for codec in ("f32", "int8", "int4")})
        == 1
    )
    # The hits of `group_frequency` do not grow with each single row, but those of LRU do.
    for policy, fewer in (("group_frequency", 0.9), ("lru", 0.985)):
        needed = found[policy, "int8"]["capacity_rows"]
        assert needed >= 0.985 * base["capacity_rows"] or policy == "group_frequency"
        _, perfect, *_ = trace.replay(policy, int(fewer * needed), 0, 0)
        assert perfect / 3000 < base["perfect_hit_rate"]
    assert found["lru", "f32"]["memory_share"] > 0.3


def test_all_rows_take_more_than_their_bytes(log: Path) -> None:
    trace = _native.CacheLog(str(log), None)
    options = MatchOptions(baseline="lru", baseline_share=1.0, codecs=("f32",))
    row = match_memory(trace, options)["rows"][1]
    # As many rows as the baseline, which has them all: more memory than theirs, for the metadata.
    assert row["memory_share"] > 1
    with pytest.raises(InvalidError, match="share"):
        MatchOptions(baseline_share=0.0)


@pytest.mark.parametrize("start", [2, 40, 900])
def test_the_search_ends_at_the_least_size_that_is_enough(start: int) -> None:
    for least in (1, 2, 37, 500, 899, 1000):
        for steepness in (0.05, 1.0, 8.0):
            search, rates = _Search(start, 1000), {}
            for _ in range(20):
                sizes = search.next_sizes()
                if not sizes:
                    break
                assert not set(sizes) & set(rates), "asks for a size once"
                rates |= {rows: (rows / least) ** steepness for rows in sizes}
                search.note(rates, 1.0)
            assert not search.next_sizes()
            assert search.enough is not None
            assert least <= search.enough <= max(least + 1, 1.011 * least)
    search = _Search(start, 1000)
    for _ in range(30):
        search.note(dict.fromkeys([*search.next_sizes(), 1], 0.0), 1.0)
        if not search.next_sizes():
            break
    assert (search.enough, search.too_few) == (None, 1000)


def test_generated_samples_are_a_log(tmp_path: Path) -> None:
    logs = [generated_log(500, 0.001, threads=threads) for threads in (1, 2)]
    assert {log.sizes()[:2] for log in logs} == {(500, 13_000)}
    found = [match_memory(log, MatchOptions(baseline_share=0.2, threads=2)) for log in logs]
    assert found[0]["rows"] == found[1]["rows"]
    told = tmp_path / "memory.json"
    command = ["sim", "memory", "--samples", "500", "--scale", "0.001", "--share", "0.2"]
    assert main([*command, "--codecs", "int8", "--json", str(told)]) == 0
    assert [row["codec"] for row in json.loads(told.read_text())["rows"]] == ["f32", "int8"]
