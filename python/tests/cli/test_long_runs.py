"""Real data, benchmarks and the demo, end to end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tierbed.cli import main

pytestmark = pytest.mark.slow


def tierbed(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize(("model", "auc_min"), [("dlrm", 0.77), ("deepfm", 0.765), ("pnn", 0.765)])
def test_a_real_log_is_learned(real_log: Path, tmp_path: Path, model: str, auc_min: float) -> None:
    out = tmp_path / "out.json"
    code = tierbed(
        *("train", "--format", "criteo", "--data", real_log, "--eval-last", 0.2),
        *("--model", model, "--store", tmp_path / "run", "--dram-budget", "16MiB"),
        *("--seed", 1, "--json", out),
    )
    assert code == 0
    result = json.loads(out.read_text())
    assert result["auc"] >= auc_min
    assert result["dram_peak_bytes"] <= 16 << 20
    assert result["eval_samples"] == 12_000


@pytest.mark.parametrize("suite", ["lookup", "training"])
def test_a_quick_benchmark_writes_table_json_and_picture(
    suite: str, tmp_path: Path, capsys: Any
) -> None:
    assert tierbed("bench", suite, "--quick", "--out", tmp_path) == 0
    result = json.loads((tmp_path / f"{suite}.json").read_text())
    assert set(result) >= {"suite", "machine", "date", "command", "rows", "ratios"}
    assert result["suite"] == suite
    assert len(result["rows"]) >= 3
    for row in result["rows"]:
        # None is a figure that a system does not have.
        assert all(value is None or isinstance(value, (str, int, float)) for value in row.values())
        assert all(name == name.lower() for name in row)
    assert all("_vs_" in name for name in result["ratios"])
    for name, ratio in result["ratios"].items():
        assert ratio is None or ratio > 0
        assert ratio is not None or result["notes"][name], "a ratio is missing without a reason"
    assert (tmp_path / f"{suite}.png").read_bytes().startswith(b"\x89PNG")
    assert all(path.suffix in (".json", ".png") for path in tmp_path.iterdir())


@pytest.mark.timeout(600)
def test_the_demo_shows_the_whole_river(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "demo"
    assert tierbed("demo", "--out", out, "--samples", 20_000) == 0
    facts = json.loads((out / "report.json").read_text())
    assert facts["tables_over_budget"] >= 10
    assert facts["rows_that_differ"] == 0
    assert facts["dense_weights_equal"] is True
    assert 0 < facts["resumed_from_step"] < facts["steps"]
    assert facts["dram_peak_bytes"] <= facts["dram_budget_bytes"]
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "what was shown" in capsys.readouterr().out
    shutil.rmtree(out)
