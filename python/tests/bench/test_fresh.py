"""Freshness: the suite runs small, its deltas hold what changed, and its words are checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierbed.cli import main
from tierbed.errors import InvalidError
from tierbed_bench import FreshOptions, run_fresh


def test_the_suite_runs_small_and_tells_all_parts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--rows", "3000", "--rounds", "1", "--poll", "50ms", "--dram-budget", str(16 << 20)]
    assert main(["bench", "fresh", *options, "--out", str(out)]) == 0
    told = json.loads((out / "fresh.json").read_text())
    rows = {(row["part"], row["system"]): row for row in told["rows"]}
    assert list(rows) == [
        *(("publish", name) for name in ("checkpoint", "full", "tracked", "compared")),
        *(("tracking", name) for name in ("tracked", "untracked")),
        *(
            ("pauses", f"{what} {how}")
            for what in ("whole", "delta")
            for how in ("foreground", "beside")
        ),
        ("freshness", "folder"),
    ]
    assert rows["pauses", "delta beside"]["pause_s"] > 0.0
    assert rows["pauses", "delta beside"]["pause_s"] < rows["pauses", "delta beside"]["seconds"]
    assert rows["publish", "tracked"]["changed"] == 30
    assert rows["publish", "tracked"]["mib"] == rows["publish", "compared"]["mib"]
    assert rows["publish", "tracked"]["mib"] < rows["publish", "full"]["mib"]
    assert 0.0 < rows["freshness", "folder"]["seconds"] < rows["freshness", "folder"]["age_s"]
    assert told["ratios"]["publish_tracked_seconds_vs_full"] > 0.0
    assert told["ratios"]["step_tracked_vs_untracked"] > 0.0
    # Stores and versions are gone.
    assert sorted(path.name for path in out.iterdir()) == ["fresh.json", "fresh.png"]


def test_words_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="--parts"):
        run_fresh(tmp_path, FreshOptions(parts=("speed",)))
