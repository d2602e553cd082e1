"""The suite of cores: equal work and equal results on every number of cores."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from tierbed.errors import InvalidError
from tierbed_bench.cores import PARTS, CoresOptions, run_cores
from tierbed_bench.cores_counts import CoreCounts, Event, scaling_of

TINY = {"rows": 500, "batches": 2, "samples": 500, "rounds": 1}


def test_every_part_is_measured_on_every_number_of_cores(tmp_path: Path) -> None:
    there = len(os.sched_getaffinity(0))
    found = json.loads(run_cores(tmp_path, CoresOptions(cores=(1, 2, 4096), **TINY)).read_text())
    wanted = [count for count in (1, 2) if count <= there]
    for part in PARTS:
        rows = [row for row in found["rows"] if row["part"] == part]
        assert [row["cores"] for row in rows] == wanted
        assert all(row["per_s"] > 0.0 for row in rows)
        if wanted == [1, 2]:
            speeds = [row["per_s"] for row in rows]
            assert found["ratios"][f"{part}_2_vs_1"] == pytest.approx(speeds[1] / speeds[0])
    assert len(found["models"]) == (len(PARTS) if len(wanted) > 1 else 0)
    assert all(row["model_4096"] > 0.0 for row in found["models"])
    assert (tmp_path / "cores.png").is_file()


def test_wrong_parts_and_missing_cores_are_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="unknown parts"):
        run_cores(tmp_path, CoresOptions(parts=("sorting",)))
    with pytest.raises(InvalidError, match="fewer cores"):
        run_cores(tmp_path, CoresOptions(cores=(4096,), **TINY))


def test_counts_are_those_of_all_threads() -> None:
    counts = CoreCounts({"task_clock_ns": Event(kind=1, number=1)})
    counts.begin()
    done = threading.Thread(target=_work)
    done.start()
    done.join()
    row = counts.row(cores=1, units=10)
    assert row["cpu_ns"] > 0.0
    assert row["per_s"] > 0.0
    assert -0.05 < row["idle_share"] < 1.0
    # The kernel counts the same time for threads that were made since.
    assert row["task_clock_ns_per_unit"] == pytest.approx(row["cpu_ns"], rel=0.3)


def test_events_that_are_not_counted_are_left_out() -> None:
    row = CoreCounts({"no_such_event": Event(kind=1, number=1 << 20)}).row(1, 1)
    assert not any("no_such_event" in name for name in row)


def test_models_of_amdahl_are_found_and_checked() -> None:
    # 90 % of the work divides; a unit takes a tenth more work on two cores.
    found = scaling_of([_measured(cores, 1.0 / (0.1 + 0.9 / cores)) for cores in (1, 2, 4)])
    assert found is not None
    assert found.serial_share == pytest.approx(0.1)
    assert found.at(16) == pytest.approx(6.4)
    assert found.half_cores == pytest.approx(9.0)
    assert found.model_error == pytest.approx(0.0)
    assert found.speedup == pytest.approx(4 * found.busy_factor * found.work_factor)
    linear = scaling_of([_measured(1, 1.0), _measured(2, 2.1)])
    assert linear is not None
    assert linear.serial_share == 0.0
    assert linear.half_cores is None
    assert scaling_of([_measured(2, 1.0), _measured(4, 1.5)]) is None


def _measured(cores: int, per_s: float) -> dict[str, float]:
    cpu_ns = 1e9 / 2 if cores == 1 else 1.1e9 / 2
    return {
        "cores": cores,
        "per_s": per_s,
        "cpu_ns": cpu_ns,
        "idle_share": 1.0 - per_s * cpu_ns / 1e9 / cores,
    }


def _work() -> None:
    begun_s = time.thread_time()
    while time.thread_time() - begun_s < 0.1:
        pass
