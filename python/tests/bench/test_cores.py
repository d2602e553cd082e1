"""The suite of cores: equal work and equal results on every number of cores."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tierbed.errors import InvalidError
from tierbed_bench.cores import CoresOptions, run_cores

TINY = {"rows": 500, "batches": 2, "samples": 500, "rounds": 1}


def test_every_part_is_measured_on_every_number_of_cores(tmp_path: Path) -> None:
    there = len(os.sched_getaffinity(0))
    found = json.loads(run_cores(tmp_path, CoresOptions(cores=(1, 2, 4096), **TINY)).read_text())
    wanted = [count for count in (1, 2) if count <= there]
    for part in ("training", "lookups", "placement"):
        rows = [row for row in found["rows"] if row["part"] == part]
        assert [row["cores"] for row in rows] == wanted
        assert all(row["per_s"] > 0.0 for row in rows)
        if wanted == [1, 2]:
            speeds = [row["per_s"] for row in rows]
            assert found["ratios"][f"{part}_2_vs_1"] == pytest.approx(speeds[1] / speeds[0])
    assert (tmp_path / "cores.png").is_file()


def test_wrong_parts_and_missing_cores_are_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="unknown parts"):
        run_cores(tmp_path, CoresOptions(parts=("sorting",)))
    with pytest.raises(InvalidError, match="fewer cores"):
        run_cores(tmp_path, CoresOptions(cores=(4096,), **TINY))
