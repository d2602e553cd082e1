"""The suite of the storage thread: each system takes turns beside each dense part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierbed.errors import InvalidError
from tierbed_bench.overlap import SYSTEMS, OverlapOptions, run_overlap


def test_every_system_is_measured_beside_every_dense_part(tmp_path: Path) -> None:
    options = OverlapOptions(widths=(0, 8), rows=3000, batches=2, memory_share=2.0, rounds=2)
    found = json.loads(run_overlap(tmp_path, options).read_text())
    of = {(row["width"], row["system"]): row for row in found["rows"]}
    assert set(of) == {(width, system) for width in (0, 8) for system in SYSTEMS}
    for row in of.values():
        assert row["samples_per_s"] > 0.0
        assert row["step_ms_p50"] <= row["step_ms_p99"]
    speeds = [of[8, system]["samples_per_s"] for system in ("thread", "no_thread")]
    assert found["ratios"]["thread_vs_no_thread_width_8"] == pytest.approx(speeds[0] / speeds[1])
    assert (tmp_path / "overlap.png").is_file()


def test_sizes_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="at least 1"):
        run_overlap(tmp_path, OverlapOptions(rounds=0))
