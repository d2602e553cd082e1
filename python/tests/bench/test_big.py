"""The suite of tables larger than memory: all phases at two sizes, equal bits, and what grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tierbed.errors import InvalidError, TierbedError
from tierbed_bench.big import room, sizes
from tierbed_bench.big.data import Batches, Sample, Shape, shape_for
from tierbed_bench.big.process import Kill, Outcome, disk_bytes, run_phase
from tierbed_bench.big.report import RSS_MORE_BYTES, checks_of, growth_of, ratios_of
from tierbed_bench.big.suite import BigOptions, run_big
from tierbed_bench.big.training import Curve

TINY = Shape(rows=1000, tables=2, dim=8, batch=64)


def test_an_epoch_has_every_row_and_repeats() -> None:
    first, second = (list(Batches(TINY)) for _ in range(2))
    assert len(first) == TINY.batch_count == -(-1000 // 48)
    for at, name in enumerate(TINY.names):
        ids = torch.cat([batch.values().view(2, -1)[at] for batch in first])
        assert torch.equal(ids.unique(), torch.arange(1000)), f"all rows of {name}"
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.values(), other.values())
    rest = list(Batches(TINY, start=5))
    assert torch.equal(rest[0].values(), first[5].values())
    assert Batches(TINY, 5).known_order().start == 5


def test_the_digest_of_a_sample_does_not_depend_on_the_order_of_a_scan() -> None:
    rows, records = torch.arange(1000), torch.rand(1000, 10)
    uses = torch.arange(1000)

    def digest(order: torch.Tensor, changed: float = 0.0) -> tuple[str, int]:
        sample = Sample(TINY, row_count=100)
        weights = records[:, :8].clone()
        weights[20] += changed  # every 20th row is of the sample
        for part in order.chunk(3):
            for name in TINY.names:
                sample.visit(name, rows[part], weights[part], records[part, 8:], uses[part])
        return sample.digest()

    assert digest(torch.arange(1000)) == digest(torch.randperm(1000))
    assert digest(torch.arange(1000))[1] == 100
    assert digest(torch.arange(1000), changed=1e-3) != digest(torch.arange(1000))


def test_sizes_of_which_nothing_can_be_measured_are_refused() -> None:
    assert shape_for(1 << 20, tables=2, dim=8, batch=64, seed=1).table_bytes <= 1 << 20
    for size in (100, 1 << 62):
        with pytest.raises(InvalidError, match="rows in each of 2 tables"):
            shape_for(size, tables=2, dim=8, batch=64, seed=1)


def test_wrong_options_are_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="unknown parts"):
        run_big(tmp_path, BigOptions(parts=("reading",)))
    with pytest.raises(InvalidError, match="between 0 and 1"):
        run_big(tmp_path, BigOptions(smaller=2.0))


def test_the_default_size_is_bounded_by_memory_and_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ram = room.os.sysconf("SC_PAGE_SIZE") * room.os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(room, "free_bytes", lambda _: 100 * ram)
    like = shape_for(1 << 40, tables=4, dim=64, batch=2048, seed=1)
    wanted = int(2.5 * ram), "2.5 times the RAM"
    assert room.default_size(tmp_path, like, serves=True) == wanted
    disk = 8 << 30
    monkeypatch.setattr(room, "free_bytes", lambda _: disk)
    size, chosen_by = room.default_size(tmp_path, like, serves=True)
    assert disk // 4 < size < disk
    assert "disk" in chosen_by
    assert size < room.default_size(tmp_path, like, serves=False)[0]
    shape = shape_for(size, tables=4, dim=64, batch=2048, seed=1)
    assert room.forward_bytes(shape) <= disk, "what is measured fits"
    left = disk - room.filled_bytes(shape, "file")
    monkeypatch.setattr(room, "free_bytes", lambda _: left)
    # The most exact codec whose snapshot fits is taken, none where none does.
    assert room.codec_that_fits(shape, tmp_path, is_forward=False) == "int8"
    assert room.codec_that_fits(shape, tmp_path, is_forward=True) is not None
    little = room.publish_bytes(shape, room.CODECS[-1], is_forward=True) - 1
    monkeypatch.setattr(room, "free_bytes", lambda _: little)
    assert room.codec_that_fits(shape, tmp_path, is_forward=True) is None
    monkeypatch.setattr(room, "free_bytes", lambda _: 10 * disk)
    assert room.codec_that_fits(shape, tmp_path, is_forward=True) == "f32"


def a_row(size: str, phase: str, variant: str, **measures: Any) -> dict[str, Any]:
    return {"size": size, "phase": phase, "variant": variant, **measures}


def test_growth_and_checks_are_those_of_the_rows() -> None:
    rows = [
        a_row("smaller", "epoch", "epoch 2", row_updates_per_s=100.0, checkpoint_s=2.0),
        a_row("full", "epoch", "epoch 2", row_updates_per_s=80.0, checkpoint_s=3.0),
        a_row("full", "bits", "runs", is_equal=False),
        a_row("full", "publish", "forward", skipped="no room"),
        a_row("full", "serve", "x", failed="no file"),
        a_row("full", "scan", "x", rss_over_budget_and_torch_bytes=RSS_MORE_BYTES + 1),
    ]
    growth = {(row["phase"], row["measure"]): row for row in growth_of(rows)}
    assert growth["epoch", "row_updates_per_s"]["full_by_smaller"] == pytest.approx(0.8)
    assert growth["epoch", "checkpoint_s"]["full_by_smaller"] == pytest.approx(1.5)
    assert growth["bits", "is_equal"]["full"] == "no"
    assert ("publish", "skipped at full size: no room") in growth
    assert ("serve", "failed at full size: no file") in growth
    assert ratios_of(rows)["epoch_2_full_vs_smaller"] == pytest.approx(0.8)
    assert ratios_of(rows)["serve_full_vs_smaller"] is None
    broken = {(check["check"], check["is_met"]) for check in checks_of(rows)}
    assert broken == {(name, False) for name in ("rate", "equal bits", "memory", "no failure")}


def test_a_phase_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    given = {"budget_bytes": 32 << 20}
    with pytest.raises(TierbedError, match=r"did not come to its end: (.|\n)*no position"):
        run_phase("epoch", TINY, tmp_path, {**given, "kill_at": "no position"})
    with pytest.raises(TierbedError, match="did not come to its end"):
        run_phase("plan", TINY, tmp_path, given, kill=Kill("never"))


def test_a_part_that_fails_is_a_row_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(phase: str, *_: Any, **more: Any) -> Outcome:
        ran.append(phase)
        if phase in ("plan", "verify"):
            raise TierbedError(f"no {phase}")
        rows = {"peak_rss_bytes": 1, "rows": 1, "digest": "x", "checkpoint_s": 1.0}
        return Outcome(row=rows, is_killed=more["kill"] is not None)

    monkeypatch.setattr(sizes, "run_phase", run)
    options = BigOptions(size="4MiB", tables=4, quick=True)
    with pytest.raises(TierbedError, match="phases failed: smaller training, smaller verify"):
        run_big(tmp_path, options)
    found = json.loads((tmp_path / "big.json").read_text())
    failed = [(row["phase"], row["failed"]) for row in found["phases"] if "failed" in row]
    assert failed == [("training", "no plan"), ("verify", "no verify")] * 2
    assert "serve" in ran


def test_every_phase_runs_at_both_sizes(tmp_path: Path) -> None:
    options = BigOptions(
        size="4MiB", budget="24MiB", tables=4, smaller=0.5, quick=True, seconds=0.2
    )
    found = json.loads(run_big(tmp_path, options).read_text())
    phases = found["phases"]
    kept = [json.loads(line) for line in (tmp_path / "big.jsonl").read_text().splitlines()]
    assert kept == phases, "every row is kept as it comes"
    by_size = {
        size: {(row["phase"], row["variant"]) for row in phases if row["size"] == size}
        for size in ("smaller", "full")
    }
    assert by_size["smaller"] == by_size["full"]
    assert not [row for row in phases if "skipped" in row]
    assert [row["is_equal"] for row in phases if row["phase"] == "bits"] == [True] * 6
    assert [row["sample_rows_equal"] for row in phases if "identity" in row] == [None, True] * 2
    assert sum("is_killed" in row for row in phases) == 8
    resumed = [row for row in phases if row["variant"] == "resumed"]
    assert all(row["first_batch"] > 0 for row in resumed), "it went on behind a checkpoint"
    assert found["size_bytes"] <= 4 << 20
    assert found["size_chosen_by"] == "asked for"
    assert found["ratios"]["epoch_2_full_vs_smaller"] > 0.0
    assert (tmp_path / "big.png").is_file()
    assert disk_bytes(tmp_path) < 1 << 20, "stores are deleted"


def test_rates_of_an_epoch_leave_checkpoints_out() -> None:
    shape = shape_for(64 << 20, tables=2, dim=16, batch=64, seed=1)
    curve = Curve(shape, 0, 100.0)
    now_s = 100.0
    for done in range(1, shape.batch_count + 1):
        now_s += 0.5
        curve.note(done, now_s)
        if done % 7 == 0:
            now_s += 3.0
            curve.leave_out(3.0)
    assert len(curve.points) > 20
    assert all(rate == pytest.approx(2 * shape.batch_ids) for _, _, rate in curve.points)
