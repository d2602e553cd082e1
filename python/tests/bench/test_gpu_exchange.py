"""The benchmark of the GPU kernel, without a GPU: every path runs, and nothing looks measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")
SCRIPT = Path(__file__).parents[3] / "tools" / "python" / "gpu" / "gpu_exchange.py"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )


def test_a_dry_run_takes_every_path_and_tells_no_times(tmp_path: Path) -> None:
    lines = tmp_path / "gpu.jsonl"
    found = run("--dry-run", "--json", str(tmp_path / "gpu.json"), "--lines", str(lines))
    assert found.returncode == 0, found.stderr[-4000:]
    result = json.loads((tmp_path / "gpu.json").read_text())
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    assert told[0]["part"] == "machine"
    assert told[1:] == result["rows"], "each result is told when it is there"
    assert result["is_dry"]
    assert result["skipped"] == []
    rows: list[dict[str, Any]] = result["rows"]
    parts = [row["part"] for row in rows]
    of_forward = {"correctness", "signals", "copy", "kernel", "tile", "pcie"}
    of_backward = {"step-correctness", "put", "step", "hot-row"}
    assert set(parts) == of_forward | of_backward | {"type", "case"}
    assert all(row["equal"] for row in rows if "equal" in row)
    assert parts.count("correctness") == 12
    assert [row["case"] for row in rows if row.get("equal") and row["part"] == "case"] == ["heaps"]
    for row in rows:
        assert row.get("measured", "dry-run") == "dry-run"
        for name, value in row.items():
            if name.endswith(("ms", "per_s", "share_of_copy")) or "_vs_" in name:
                assert value is None, (name, value)


def test_without_time_left_loads_are_named_as_skipped(tmp_path: Path) -> None:
    found = run("--dry-run", "--seconds", "0", "--json", str(tmp_path / "gpu.json"))
    assert found.returncode == 0, found.stderr[-4000:]
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert result["skipped"] == ["weak", "one-hot"]
    assert not [row for row in result["rows"] if row["part"] in ("kernel", "put", "step")]
    (case,) = [row for row in result["rows"] if row["part"] == "case"]
    assert case["left_out"] == "no time"


def test_without_a_gpu_it_says_so() -> None:
    found = run(CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 2
    assert "--dry-run" in found.stderr
