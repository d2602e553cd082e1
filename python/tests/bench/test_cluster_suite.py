"""The suite of clusters: it plans what it measures, and its file is one of inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierbed.cli import main
from tierbed.errors import InvalidError
from tierbed_bench import ClusterOptions, run_cluster
from tierbed_bench.hosts import why_no_hosts


@pytest.mark.slow
def test_calculator_is_held_against_what_was_measured(tmp_path: Path) -> None:
    if (why := why_no_hosts()) is not None:
        pytest.skip(why)
    options = ClusterOptions(quick=True, rates=(100,), shares=(1.0, 0.05))
    told = json.loads(run_cluster(tmp_path, options).read_text())
    assert [(row["rate_mbit"], row["dram_share"]) for row in told["rows"]] == [
        (100, 1),
        (100, 0.05),
    ]
    for row in told["rows"]:
        assert row["error"] == pytest.approx(
            row["planned_samples_per_s"] / row["samples_per_s"] - 1.0
        )
        # Vectors and gradients of the half that is away, and ids: bytes do not depend on times.
        assert row["wire_bytes"] > 2 * 2 * 16 * 4
        assert row["wire_bytes"] == pytest.approx(told["inputs"]["wire_bytes"], rel=0.1)
    planned = tmp_path / "planned.json"
    asked = ["plan", "cluster", "--table", "1GB", "--hosts", "2", "--json", str(planned)]
    assert main([*asked, "--measured", str(tmp_path / "cluster.json")]) == 0
    inputs = {one["name"]: one for one in json.loads(planned.read_text())["inputs"]}
    assert inputs["step_us"]["value"] == told["inputs"]["step_us"]
    assert "cluster.json" in inputs["step_us"]["origin"]


@pytest.mark.parametrize("wrong", [{"rates": ()}, {"rates": (0,)}, {"shares": (0.0,)}])
def test_options_of_no_cluster_are_refused(wrong: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(InvalidError, match="give"):
        ClusterOptions(**wrong)  # type: ignore[arg-type]
