"""How little memory has another cache's hits: by hand, and in the order that codecs promise."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tierbed import _native
from tierbed.cache_match import MatchOptions, generated_log, match_memory
from tierbed.cli import main
from tierbed.errors import InvalidError


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
    options = MatchOptions(baseline="lru", baseline_share=0.3, policies=("ours", "lru"))
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
        assert held == row["capacity_rows"]
    for policy in ("ours", "lru"):
        f32, int8, int4 = (found[policy, codec] for codec in ("f32", "int8", "int4"))
        assert f32["memory_share"] > int8["memory_share"] > int4["memory_share"]
    # The same policy needs as many rows, and metadata besides.
    assert found["lru", "f32"]["capacity_rows"] >= 0.97 * base["capacity_rows"]
    assert found["lru", "f32"]["memory_share"] > 0.3


def test_what_cannot_be_matched_is_none(log: Path) -> None:
    trace = _native.CacheLog(str(log), None)
    options = MatchOptions(baseline="lru", baseline_share=1.0, codecs=("f32",))
    row = match_memory(trace, options)["rows"][1]
    assert row["memory_share"] is None
    with pytest.raises(InvalidError, match="share"):
        MatchOptions(baseline_share=0.0)


def test_generated_samples_are_a_log(tmp_path: Path) -> None:
    assert generated_log(500, 0.001).sizes()[:2] == (500, 13_000)
    told = tmp_path / "memory.json"
    command = ["sim", "memory", "--samples", "500", "--scale", "0.001", "--share", "0.2"]
    assert main([*command, "--codecs", "int8", "--json", str(told)]) == 0
    assert [row["codec"] for row in json.loads(told.read_text())["rows"]] == ["f32", "int8"]
