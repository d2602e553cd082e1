"""`tierbed bench plans` writes what was computed and what was measured, size by size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierbed.cli import main
from tierbed_bench.plans import COMPUTED


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_each_size_has_a_row_for_each_value(tmp_path: Path, capsys: Any) -> None:
    sizes = ("--sizes", "0.05", "--orders", "forward", "--share", "0.5")
    assert main(["bench", "plans", *sizes, "--out", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "plans.json").read_text())
    assert [row["value"] for row in told["rows"]] == list(COMPUTED)
    for row in told["rows"]:
        assert row["computed"] == pytest.approx(row["measured"], rel=0.2), row
    assert set(told["ratios"]) == set(COMPUTED)
    assert "plans.json" in capsys.readouterr().out
    assert main(["bench", "plans", "--share", "2"]) == 2
