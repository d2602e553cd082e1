"""The model of exchanges between GPUs: its formulas, and that nothing of it looks measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierbed.cli import main
from tierbed_bench.sim.exchange import PAPER, Link, Load, hold_out, model_report, predict, volume

# 1 GB/s each way, so that seconds are bytes.
PLAIN = Link("plain", memory=1e9, pair=1e9, out=2e9, collective_s=0.0)
LAUNCH = 5e-6


def test_times_are_bytes_over_bandwidths() -> None:
    load = Load(tables=2, batch=10, pooling=3.0, dim=4, ranks=2)
    assert load.read_bytes == 10 * (3 * (4 * 4 + 8) + 8)
    assert load.written_bytes == 10 * 16
    assert load.sent_bytes == 80
    times = predict(load, PLAIN, slow=2.0)
    assert times["compute"] == pytest.approx(960e-9 + LAUNCH)
    assert times["fused"] == pytest.approx(960e-9 + LAUNCH)
    assert times["baseline"] == pytest.approx(960e-9 + 2 * (80e-9 + 320e-9) + LAUNCH)


def test_a_slow_link_bounds_the_fused_kernel_and_one_gpu_sends_nothing() -> None:
    link = Link("thin", memory=1e9, pair=1e6, out=1e6)
    times = predict(Load(tables=2, batch=10, pooling=1.0, dim=4, ranks=2), link)
    assert times["fused"] == pytest.approx(80e-6 + LAUNCH)
    alone = predict(Load(tables=2, batch=10, pooling=1.0, dim=4, ranks=1), link)
    assert alone["fused"] == alone["baseline"] == alone["compute"]


def test_links_add_up_to_what_a_gpu_can_send() -> None:
    assert [PLAIN.bandwidth(ranks) for ranks in (1, 2, 3, 4)] == [1e9, 1e9, 2e9, 2e9]


@pytest.mark.parametrize("scaling", PAPER)
def test_two_gpus_are_fitted_and_more_are_predicted(scaling: str) -> None:
    found = hold_out(scaling)
    by_ranks = {row["ranks"]: row for row in found["rows"]}
    assert by_ranks[2]["use"] == "fitted"
    assert by_ranks[2]["error"] == pytest.approx(0.0, abs=1e-9)
    assert found["slow"] > 1.0
    for ranks in (3, 4):
        assert by_ranks[ranks]["use"] == "predicted"
        # The paper's ratios fall with the number of GPUs, and so must the model's.
        assert by_ranks[ranks]["model"] < by_ranks[ranks - 1]["model"]
        assert abs(by_ranks[ranks]["error"]) < 0.15


def test_the_fused_kernel_sends_all_along_and_the_baseline_at_the_end() -> None:
    curve = volume(Load(256, 16384, 64.0, ranks=4), Link("v", 720e9, 50e9, 150e9))
    assert curve[4]["baseline"] == 0.0
    assert 0.4 < curve[4]["fused"] < 0.6
    assert curve[-1]["fused"] == curve[-1]["baseline"] == pytest.approx(1.0)


def test_the_report_says_that_it_is_a_model(tmp_path: Path) -> None:
    assert main(["sim", "exchange", "--json", str(tmp_path / "model.json")]) == 0
    report = json.loads((tmp_path / "model.json").read_text())
    assert report["measured"] == "model"
    assert report == json.loads(json.dumps(model_report()))
