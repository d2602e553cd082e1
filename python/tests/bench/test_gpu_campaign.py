"""The campaign of a GPU, without one: stages run, and what is cut off has told its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_campaign
import pytest

pytest.importorskip("triton", reason="triton is not installed")
GPU = Path(__file__).parents[3] / "tools" / "python" / "gpu"


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run(
        [sys.executable, str(GPU / "gpu_campaign.py"), "--out", str(out), "--dry-run", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )


def test_ceilings_and_training_take_every_path_and_tell_no_times(tmp_path: Path) -> None:
    # The stage between them has a test of its own.
    found = run(tmp_path, "--only", "probe", "--only", "end_to_end")
    logs = [file.read_text()[-2000:] for file in tmp_path.glob("*.log")]
    assert found.returncode == 0, (found.stderr, logs)
    result = json.loads((tmp_path / "campaign.json").read_text())
    assert result["is_dry"]
    assert [stage["stage"] for stage in result["stages"]] == ["probe", "end_to_end"]
    rows = [row for stage in result["stages"] for row in stage["rows"]]
    assert {row["part"] for row in rows} == {
        "machine", "copy", "gather", "link", "end_to_end", "end_to_end_ratios",
    }  # fmt: skip
    equal = [row for row in rows if "equal" in row]
    assert len(equal) == 8
    assert all(row["equal"] for row in equal)
    for row in rows:
        for name, value in row.items():
            if name.endswith(("ms", "per_s", "share", "share_of_copy")) or "_vs_" in name:
                assert value is None, (name, value)
    assert all(row["measured"] is None for row in result["predictions"])


def test_a_campaign_without_time_names_what_it_left_out(tmp_path: Path) -> None:
    found = run(tmp_path, "--seconds", "0")
    assert found.returncode == 1
    result = json.loads((tmp_path / "campaign.json").read_text())
    assert {stage["ended"] for stage in result["stages"]} == {"no time"}


def test_results_stand_beside_what_was_predicted(tmp_path: Path) -> None:
    lines = tmp_path / "exchange.jsonl"
    rows = [
        {"part": "kernel", "load": "weak", "share_of_copy": 0.8, "fused_ms": 5.5},
        {"part": "kernel", "load": "one-hot", "share_of_copy": 0.6},
    ]
    # The last line was cut off in the middle.
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"part": "ker')
    assert gpu_campaign.told(lines) == rows
    assert gpu_campaign.told(tmp_path / "missing.jsonl") == []
    found = {
        (one["part"], one.get("load"), one["field"]): one for one in gpu_campaign.compared(rows)
    }
    assert found["kernel", "weak", "share_of_copy"]["met"] is True
    assert found["kernel", "one-hot", "share_of_copy"]["met"] is False
    assert found["kernel", "weak", "fused_ms"]["met"] is None
    assert found["kernel", "strong", "fused_ms"]["measured"] is None


def test_a_stage_that_takes_too_long_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time\n"
        "open(sys.argv[2], 'w').write('{\"part\": \"told\"}\\n')\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(gpu_campaign, "HERE", tmp_path)
    found = gpu_campaign.run(gpu_campaign.Stage("slow", "slow.py", 2.0), tmp_path, is_dry=True)
    assert found["ended"] == "cut off after 2 s"
    assert found["rows"] == [{"part": "told"}]
