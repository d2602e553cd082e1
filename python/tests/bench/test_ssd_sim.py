"""Logs on a simulated SSD: what must be faster than what, and the command line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tierbed.cli import main
from tierbed.errors import InvalidError
from tierbed_bench.sim.ssd import SsdSimOptions, simulate_ssd


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(5)
    lines = [" ".join(str(int(20_000 ** draw.random())) for _ in range(10)) for _ in range(4096)]
    path = tmp_path_factory.mktemp("ssd") / "log.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def _pick(result: dict[str, Any], sweep: str, system: str, field: str) -> list[float]:
    return [
        row[field] for row in result["rows"] if (row["sweep"], row["system"]) == (sweep, system)
    ]


def test_sweeps_follow_the_paper(log: Path) -> None:
    result = simulate_ssd(log)
    assert result == simulate_ssd(log)
    assert result["is_simulated"]
    [blocks] = _pick(result, "default", "blocks", "lookup_ratio")
    [vectors] = _pick(result, "default", "vectors", "lookup_ratio")
    [cached] = _pick(result, "default", "vectors_cache", "lookup_ratio")
    [memory] = _pick(result, "default", "memory", "lookup_ratio")
    assert blocks > vectors > cached >= 1 > memory
    # A slower flash makes lookups slower, and least so where rows are cached and pipelined.
    slow = _pick(result, "read_us", "vectors", "lookup_us")
    assert slow == sorted(slow)
    best = _pick(result, "read_us", "vectors_cache_pipeline", "lookup_us")
    assert best[2] - best[0] < slow[2] - slow[0]
    # A larger batch keeps more dies busy.
    per_query = _pick(result, "batch", "vectors", "lookup_us_per_query")
    assert per_query == sorted(per_query, reverse=True)
    hit_rates = _pick(result, "cache_share", "vectors_cache", "hit_rate")
    assert hit_rates == sorted(hit_rates)


def test_the_command_writes_a_table_json_and_a_picture(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "ssd.json"
    call = ["sim", "ssd", "--log", str(log), "--queries", "300", "--read-us", "4"]
    assert main([*call, "--json", str(out)]) == 0
    assert "simulated times" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["options"]["read_us"] == 4
    # Batches of 512 are more than 300 queries.
    batches = {row["value"] for row in result["rows"] if row["sweep"] == "batch"}
    assert batches == {64, 128, 256}
    assert out.with_suffix(".png").stat().st_size > 1000


def test_wrong_calls_say_what_is_wrong(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "ssd", "--log", str(log), "--cache", "1.5"]) == 2
    assert "shares" in capsys.readouterr().err
    assert main(["sim", "ssd", "--log", str(log), "--queries", "5"]) == 2
    with pytest.raises(InvalidError):
        SsdSimOptions(admit_from=4)
    with pytest.raises(InvalidError):
        SsdSimOptions(batch=0)
