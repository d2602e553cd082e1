"""A placement built on two nodes of a Ray cluster is that of one machine, lost node or not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tierbed as tb
from tierbed.cli import main

HAS_RAY = importlib.util.find_spec("ray") is not None
with_ray = pytest.mark.skipif(not HAS_RAY, reason="ray is not installed (extra `ray`)")


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    """What the cases found on one cluster; to start it takes longer than to run them."""
    script = Path(__file__).with_name("ray_cases.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray's own processes write there, too.
    [told] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(told)
    return found


@with_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_build_what_one_machine_builds(cases: dict[str, Any]) -> None:
    told = cases["same"]
    assert told["nodes"] == 2
    assert told["equal"] == {"shp": True, "maxembed": True, "grown": True, "by_frequency": True}


@with_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_placement_on_ray_reads_blocks_not_the_driver(cases: dict[str, Any]) -> None:
    told = cases["blocks"]
    assert told["blocks"] > 1
    assert told["queries"] == told["queries_here"]
    assert all(told["equal"].values()), told["equal"]
    assert told["carried_bytes"] < 0.2 * told["log_bytes"], told


@with_ray
@pytest.mark.slow
def test_a_worker_and_a_node_lost_in_the_middle_do_not_lose_the_job(cases: dict[str, Any]) -> None:
    told = cases["killed"]
    done, total = told["done_before"]
    assert 0 < done < total, "the node was lost before or after the job"
    assert told["worker"].startswith("ray::_")
    assert told["nodes"] == 1
    assert told["equal"]


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_the_call_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.txt"
    log.write_text("1 2\n2 3\n")
    given = ["--log", str(log), "--rows-per-page", "4", "--out", str(tmp_path / "out")]
    assert main(["place", *given, "--method", "shp", "--ratio", "0", "--ray", "local"]) == 2
    assert "tierbed[ray]" in capsys.readouterr().err


def test_what_cannot_be_built_is_refused_before_a_cluster_is_sought() -> None:
    import torch

    from tierbed.placement import PlaceOptions, place_on_ray

    log = tb.QueryLog.from_batches(3, [(torch.tensor([0, 1]), torch.tensor([0, 2]))])
    with pytest.raises(tb.InvalidError, match="use one of"):
        place_on_ray(log, PlaceOptions(method="metis"))
    with pytest.raises(tb.InvalidError, match="no replicas"):
        place_on_ray(log, PlaceOptions(method="shp"), ratio=0.1)
