"""Does `tierbed bench training` run every system, or say why not, and compute what it says?"""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tierbed.errors import CorruptionError, InvalidError
from tierbed.train.lookahead import lookahead
from tierbed_bench.models import PARTS, ModelOptions, run_models
from tierbed_bench.trace import Trace
from tierbed_bench.training import LOOK_AHEAD_BATCHES, TrainingOptions, run_training
from tierbed_bench.training_report import Outcome, ratios_of, row_of
from tierbed_bench.workers import Worker, WorkerError

RATIOS = {
    "forward_vs_rocksdb",
    "forward_vs_memory",
    "forward_vs_torch",
    "forward_vs_fbgemm",
    "cold_vs_rocksdb",
    "recdb_vs_rocksdb",
}
MUST_RUN = {
    "forward",
    "forward_pipelined",
    "memory",
    "file",
    "hashdb",
    "recdb",
    "torch",
    "torch_2_threads",
    "parts_recdb",
}
MAY_BE_SKIPPED = {
    "rocksdb",
    "cold",
    "fbgemm",
    "fbgemm_2_threads",
    "forward_python",
    "forward_python_2_threads",
    "forward_2_5_percent",
    "forward_20_percent",
    "parts_forward",
    "parts_recdb_without_hot_rows",
    "parts_recdb_without_sorter",
    "parts_recdb_without_picker",
    "parts_recdb_without_scheduler",
    "parts_plain_lsm",
}


def a_slice(rows_per_s: float, steps_us: list[int], **growth: int) -> dict[str, Any]:
    return {
        "batches": len(steps_us),
        "row_updates": int(rows_per_s * sum(steps_us) / 1e6),
        "steps_us": steps_us,
        "tail_us": 0,
        "lookup_us": sum(steps_us) // 2,
        "cpu_ns": 1_000_000,
        "resident_peak_bytes": 1 << 20,
        "growth": growth,
        "counters": {"disk_bytes": 300, "live_bytes": 200},
    }


def an_outcome(name: str, kind: str, speeds: list[float], beside: list[float]) -> Outcome:
    outcome = Outcome(
        name=name,
        kind=kind,
        order="by key",
        threads=1,
        scale=1.0,
        batch_len=256,
        dram_share=0.05,
        look_ahead=64,
        table_bytes=1000,
    )
    counts = {"train_cpu_ns": 400_000, "device_read_bytes": 500, "device_write_bytes": 60}
    outcome.slices = [
        a_slice(speed, [1000] * 99 + [20_000], **counts, changed_bytes=40) for speed in speeds
    ]
    outcome.beside = [a_slice(speed, [100] * 100) for speed in beside]
    return outcome


def test_ratios_are_medians_over_pairs_of_slices() -> None:
    forward = an_outcome("forward", "forward", [10e6, 2e6, 10e6], [])
    # Load fell on the second pair: both sides are slow there, the ratio is not.
    rocks = an_outcome("rocksdb", "keyed", [1e6, 0.2e6, 1.1e6], [10e6, 2e6, 10e6])
    recdb = an_outcome("recdb", "keyed", [4e6, 4e6, 4e6], [20e6, 20e6, 20e6])
    for part in rocks.slices:  # half of the forward order's steps is pooling, none of these
        part["lookup_us"] = 0
    ratios, notes = ratios_of([forward, rocks, recdb])
    assert ratios["forward_vs_rocksdb"] == pytest.approx(20.0, rel=0.01)
    assert ratios["forward_vs_rocksdb_step"] == pytest.approx(10.0, rel=0.01)
    assert ratios["recdb_vs_rocksdb"] == pytest.approx(4.0, rel=0.01)
    assert ratios["recdb_vs_rocksdb_step"] == pytest.approx(2.0, rel=0.01)
    torch_ = an_outcome("torch", "python", [1e6], [4e6])
    for part in torch_.slices:  # a table of others is timed as a whole: so is the forward order
        del part["lookup_us"]
    native = ratios_of([forward, torch_])[0]
    assert native["forward_native_vs_torch"] == pytest.approx(4.0, rel=0.01)
    assert "forward_native_vs_torch_step" not in native
    assert ratios["forward_vs_torch"] is None
    assert "torch: not asked for" in notes["forward_vs_torch"]
    assert set(ratios) >= RATIOS


def test_a_row_says_what_a_system_took_per_row_update() -> None:
    row = row_of(an_outcome("rocksdb", "keyed", [1e6, 2e6, 3e6], [9e6] * 3))
    updates = [118_999, 237_999, 356_999]
    assert row["row_updates_per_s"] == pytest.approx(4e6, rel=0.01)
    assert row["step_row_updates_per_s"] == pytest.approx(2e6, rel=0.01)
    assert row["read_bytes_per_row_update"] == pytest.approx(1500 / sum(updates), rel=0.01)
    assert row["write_amplification"] == pytest.approx(1.5)
    assert row["space_amplification"] == pytest.approx(1.5)
    expected = median(600_000 / count for count in updates)
    assert row["storage_cpu_ns_per_row_update"] == pytest.approx(expected, rel=0.01)
    assert (row["step_ms_p50"], row["step_ms_max"]) == (1.0, 20.0)
    assert (row["stalls_over_10x_median"], row["steps"]) == (3, 300)
    skipped = an_outcome("hashdb", "keyed", [], [])
    skipped.skipped = "no such library"
    assert row_of(skipped)["skipped"] == "no such library"


def test_a_trace_reads_the_same_from_python(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with Worker() as worker:
        told = worker.ask("trace", path=path, scale=1e-4, seed=5)
    trace = Trace(path, 64)
    with pytest.raises(InvalidError, match="no whole batch"):
        Trace(path, 1 << 20)
    assert list(trace.features.values()) == [column["row_count"] for column in told["columns"]]
    assert trace.batch_count == told["samples"] // 64
    everything = torch.cat(
        [trace.ids(number).view(26, 64) for number in range(trace.batch_count)], dim=1
    )
    for rows, column in zip(trace.features.values(), everything, strict=True):
        assert int(column.max()) < rows
        # Dense by first appearance: a new id is the next one.
        seen = torch.cummax(column, 0).values
        assert int((seen[1:] - seen[:-1]).max()) <= 1
    torch.testing.assert_close(trace.ids(trace.batch_count + 2), trace.ids(2))
    path.write_bytes(b"something else")
    with pytest.raises(CorruptionError):
        Trace(path, 64)


def test_a_worker_that_fails_or_dies_says_so() -> None:
    with Worker() as worker:
        with pytest.raises(WorkerError, match="unknown variant"):
            worker.ask("fly")
        with pytest.raises(WorkerError, match="no system is open"):
            worker.ask("run", first=0, count=1, mode="train")
    with Worker(seconds_max=0.2, module="tests_that_do_not_exist") as worker:
        with pytest.raises(WorkerError, match="no answer") as caught:
            worker.ask("open", job={})
        assert caught.value.kind == "gone"


def run_tiny(out: Path, *systems: str) -> dict[str, Any]:
    # So little data needs a large share of it as memory: a batch must fit.
    options = TrainingOptions(
        quick=True, scale=0.0004, repeats=1, dram_share=0.9, seed=2, systems=systems
    )
    path = run_training(out / "out", options, out / "copy.json")
    result: dict[str, Any] = json.loads(path.read_text())
    assert json.loads((out / "copy.json").read_text()) == result
    assert (out / "out" / "training.png").stat().st_size > 1000
    assert {"suite", "machine", "date", "command", "scale", "seed", "rows", "ratios"} <= set(result)
    assert list((out / "out").glob("bench-*")) == [], "scratch is deleted"
    return result


def check_rows(result: dict[str, Any], must_run: set[str], may_be_skipped: set[str]) -> None:
    rows = {row["system"]: row for row in result["rows"]}
    assert set(rows) == must_run | may_be_skipped
    for row in rows.values():
        assert {"order", "dram_share", "window"} <= set(row)
        assert row.get("skipped") or row["row_updates_per_s"] > 0, row
    for name in must_run:
        assert "skipped" not in rows[name], rows[name]
    assert set(result["ratios"]) >= RATIOS
    for name, value in result["ratios"].items():
        assert (value is None) == (name in result["notes"]), name


def test_systems_are_measured_beside_the_forward_order(tmp_path: Path, capsys: Any) -> None:
    result = run_tiny(tmp_path, "memory", "file", "rocksdb")
    check_rows(result, {"forward", "memory", "file"}, {"rocksdb"})
    by_name = {row["system"]: row for row in result["rows"]}
    forward, memory = by_name["forward"], by_name["memory"]
    assert forward["row_updates"] == by_name["file"]["row_updates"] + memory["row_updates"] + (
        by_name["rocksdb"].get("row_updates", 0)
    )
    assert forward["storage_cpu_ns_per_row_update"] > 0
    assert forward["plan_bytes_per_sample"] > 0
    assert result["ratios"]["forward_vs_memory"] > 0
    assert "recdb: not asked for" in result["notes"]["recdb_vs_rocksdb"]
    assert "row updates by system" in capsys.readouterr().out


@pytest.mark.slow
def test_every_system_is_measured_or_skipped_with_a_reason(tmp_path: Path) -> None:
    check_rows(run_tiny(tmp_path), MUST_RUN, MAY_BE_SKIPPED)


def test_stores_are_looked_ahead_as_users_look_ahead() -> None:
    assert signature(lookahead).parameters["window"].default == LOOK_AHEAD_BATCHES


def test_unknown_systems_and_scales_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="abacus"):
        run_training(tmp_path, TrainingOptions(quick=True, scale=1e-4, systems=("abacus",)))
    with pytest.raises(InvalidError, match="scale"):
        run_training(tmp_path, TrainingOptions(scale=2.0))


def test_models_score_the_same_over_every_store(tmp_path: Path) -> None:
    options = ModelOptions(
        models=("dlrm",),
        batch_lens=(128,),
        stores=("memory", "file", "lsm"),
        rows=3_000,
        samples=1_024,
    )
    result = json.loads(run_models(tmp_path, options).read_text())
    for model in ("dlrm",):
        rows = [row for row in result["rows"] if row["model"] == model]
        assert [row["store"] for row in rows] == ["memory", "file", "lsm"]
        assert not any("skipped" in row for row in rows), rows
        assert len({row["auc"] for row in rows}) == 1
        for row in rows:
            parts = sum(row[f"{part}_ms"] for part in PARTS)
            assert row["step_ms"] == pytest.approx(row["load_ms"] + parts)
            assert row["storage_share"] < 1
        assert rows[0]["storage_share"] == 0
    with pytest.raises(InvalidError, match="first"):
        run_models(tmp_path, ModelOptions(models=("pnn",), batch_lens=(8,), stores=("file",)))
    with pytest.raises(InvalidError, match="abacus"):
        run_models(tmp_path, ModelOptions(models=("abacus",), batch_lens=(8,)))
