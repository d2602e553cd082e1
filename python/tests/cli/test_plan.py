"""Does a rehearsal foretell memory, disk and I/O of a run?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierbed.cli import main
from tierbed.recipes.full_size import TableUse, rows_at
from tierbed.recipes.rehearsal import disk_bytes

DATA = ("--format", "synthetic", "--samples", 6400, "--scale", 0.01, "--seed", 1)
# Tables of several budgets: rows leave memory all the time.
RUN = (*DATA, "--eval-last", 0, "--dim", 16, "--batch-size", 64, "--dram-budget", "2MiB")


def tierbed(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def result_of(verb: str, out: Path, *arguments: Any) -> dict[str, Any]:
    assert tierbed(verb, *arguments, "--json", out) == 0
    return dict(json.loads(out.read_text()))


@pytest.mark.parametrize("order", ["forward", "window"])
def test_a_plan_is_within_a_fifth_of_the_run(order: str, tmp_path: Path) -> None:
    run = (*RUN, "--order", order)
    plan = result_of("plan", tmp_path / "plan.json", *run, "--scratch", tmp_path)
    train = ("--store", tmp_path / "run", "--epochs", 3, *run)
    real = result_of("train", tmp_path / "out.json", *train)
    stats = real["stats"]

    assert plan["fits"]
    assert plan["order"] == stats["order"]["kind"] == order
    assert plan["samples"] == 6400
    assert 3 * plan["batch_count"] == real["steps"]
    assert plan["table_bytes"] == real["table_bytes"]
    assert plan["dram_budget_bytes"] == real["dram_budget_bytes"] == 2 << 20
    assert plan["dram_peak_bytes"] == pytest.approx(real["dram_peak_bytes"], rel=0.2)
    parts = {name: part["peak_bytes"] for name, part in stats["budget"]["parts"].items()}
    assert plan["dram_part_bytes"] == pytest.approx(parts, rel=0.2, abs=4096)
    on_disk = disk_bytes(tmp_path / "run" / "tables")
    assert plan["disk_bytes"] == pytest.approx(on_disk, rel=0.2)

    def foretold(count: str) -> float:
        epochs = plan[f"first_epoch_{count}_per_batch"] + 2 * plan[f"later_epoch_{count}_per_batch"]
        checkpoint = plan.get(f"checkpoint_{count}", 0) / real["steps"]
        return float(epochs / 3 + checkpoint)

    io, steps = stats["store"]["io"], real["steps"]
    written = io["write_bytes"] + stats["store"].get("dump_bytes", 0)
    assert plan["later_epoch_read_bytes_per_batch"] > 4096, "the budget is tight"
    assert foretold("write_bytes") == pytest.approx(written / steps, rel=0.2)
    assert foretold("read_bytes") == pytest.approx(io["read_bytes"] / steps, rel=0.2)
    assert foretold("reads") == pytest.approx(io["read_count"] / steps, rel=0.2)


def test_a_budget_too_small_is_answered_with_the_least(tmp_path: Path, capsys: Any) -> None:
    short = (*RUN, "--samples", 640, "--order", "forward", "--scratch", tmp_path, "--dram-budget")
    plan = result_of("plan", tmp_path / "plan.json", *short, "64KiB")
    assert not plan["fits"]
    least = plan["dram_budget_bytes"]
    assert f"at least {least:,} bytes" in capsys.readouterr().err
    # Another budget may cut other windows: the least one is asked about as it is.
    assert result_of("plan", tmp_path / "plan.json", *short, least)["fits"]
    assert not result_of("plan", tmp_path / "plan.json", *short, least * 4 // 5)["fits"]
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"], "scratch folders are gone"


def test_a_plan_tells_why_it_is_by_window(tmp_path: Path) -> None:
    short = (*RUN, "--samples", 640, "--scratch", tmp_path, "--dram-budget", "512KiB")
    plan = result_of("plan", tmp_path / "plan.json", *short)
    assert plan["order"] == "window"
    assert "budget" in plan["order_reason"]


def test_a_scratch_folder_is_made_first_or_left_out(tmp_path: Path, capsys: Any) -> None:
    short = ("plan", *RUN, "--samples", 640)
    scratch = ("--scratch", tmp_path / "scratch")
    assert tierbed(*short, *scratch) == 2
    assert "make it first, or leave it out" in capsys.readouterr().err
    (tmp_path / "scratch").mkdir()
    assert tierbed(*short, *scratch) == 0
    assert tierbed(*short) == 0


COMPUTED = (
    *("disk_bytes", "dram_peak_bytes", "process_peak_bytes", "first_epoch_read_bytes_per_batch"),
    *("first_epoch_write_bytes_per_batch", "later_epoch_read_bytes_per_batch"),
    "later_epoch_write_bytes_per_batch",
)


def full_and_real(order: str, budget: str, samples: int, times: int, folder: Path) -> None:
    """Compares what is computed for more samples with a rehearsal of these."""
    data = ("--format", "synthetic", "--scale", samples * 3.125e-6, "--seed", 1, "--eval-last", 0)
    run = (*data, "--dim", 16, "--batch-size", 128, "--dram-budget", budget, "--order", order)
    full = samples * times
    computing = ("--samples", samples, "--full-samples", full)
    plan = result_of("plan", folder / "few.json", *run, *computing, "--scratch", folder)
    real = result_of("plan", folder / "all.json", *run, "--samples", full, "--scratch", folder)
    assert plan["fits"]
    assert real["fits"]
    assert (plan["full_samples"], plan["full_batch_count"]) == (full, real["batch_count"])
    assert plan["full_table_bytes"] == pytest.approx(real["table_bytes"], rel=1e-6)
    found = {name: plan[f"full_{name}"] for name in COMPUTED}
    assert found == pytest.approx({name: real[name] for name in COMPUTED}, rel=0.2)
    assert plan["later_epoch_read_bytes_per_batch"] > 4096, "the budget is tight"


def test_more_samples_are_computed_within_a_fifth(tmp_path: Path) -> None:
    full_and_real("forward", "1536KiB", 6400, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("order", ["forward", "window"])
def test_four_times_the_samples_are_computed_within_a_fifth(order: str, tmp_path: Path) -> None:
    full_and_real(order, "2MiB", 12_800, 4, tmp_path)


def test_what_fits_the_memory_is_not_continued(tmp_path: Path, capsys: Any) -> None:
    short = (*RUN, "--samples", 640, "--scratch", tmp_path, "--full-samples")
    plan = result_of("plan", tmp_path / "plan.json", *short, 6400, "--dram-budget", "16MiB")
    assert plan["full_later_epoch_read_bytes_per_batch"] is None
    assert plan["full_disk_bytes"] > plan["disk_bytes"]
    assert "rehearse more with --samples" in capsys.readouterr().err
    assert tierbed("plan", *short, 600) == 2
    assert "set --samples" in capsys.readouterr().err
    assert tierbed("plan", *short, 600, "--samples", 300) == 0


def test_rows_grow_as_they_grew_and_within_their_table() -> None:
    # As a power of the samples; bending; all used; and a vocabulary, which has no end.
    assert rows_at(TableUse(10_000, (100, 200, 400)), 4.0) == pytest.approx(1600)
    assert rows_at(TableUse(1000, (100, 200, 400)), 4.0) == 1000
    assert rows_at(TableUse(1000, (100, 200, 400), is_open=True), 4.0) == pytest.approx(1600)
    assert rows_at(TableUse(50, (50, 50, 50)), 16.0) == 50
    bending = TableUse(10_000, (100, 200, 300))
    assert 300 < rows_at(bending, 2.0) < 450
    assert rows_at(bending, 2.0) < rows_at(bending, 4.0) == rows_at(bending, 64.0)
    assert rows_at(TableUse(10, (0, 0, 0)), 8.0) == 1
