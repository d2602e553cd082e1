"""The demo, before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

import tierbed as tb
from tierbed_bench.demo import BUDGET_MIN_BYTES, DemoOptions, _Demo
from tierbed_bench.generator import write_criteo_tsv


def test_the_demo_needs_a_file_with_many_values(tmp_path: Path) -> None:
    def prepared(samples: int) -> int:
        log = tmp_path / f"{samples}.tsv"
        write_criteo_tsv(log, samples, scale=0.1, seed=1)
        return _Demo(DemoOptions(out=tmp_path / "out", data=log)).prepare().dram_budget_bytes

    with pytest.raises(tb.InvalidError, match="give a longer file"):
        prepared(3)
    assert prepared(30_000) >= BUDGET_MIN_BYTES
