"""Load on servers: every answer is right, what is not here is said, and all parts tell the same."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tierbed as tb
from tierbed.cli import main
from tierbed.errors import InvalidError
from tierbed.serve import Limits, ServeOptions, Server
from tierbed_bench import (
    ServingOptions,
    run_serving,
    serving_memory,
    serving_systems,
    serving_triton,
)
from tierbed_bench.serving_activation import activation, activations, reload
from tierbed_bench.serving_bench import PROTOCOLS, Bench
from tierbed_bench.serving_memory import least_memory
from tierbed_bench.serving_report import ratios
from tierbed_bench.serving_systems import AbsentError, Rows, System, started

SHAPE = {"row_count": 5_000, "dim": 8, "id_count": 6, "skew": 1.05}


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    rows = Rows(folder=tmp_path, shape=SHAPE)
    rows.write()
    return rows


def _all_told(phase: dict[str, Any]) -> None:
    """Every request was answered, by its rows or for want of room: other load may take that."""
    assert phase["checked"] == phase["good"] > 0, phase
    assert phase["good"] + phase["refused"] == phase["offered"], phase


def test_answers_of_all_protocols_are_the_rows_and_overload_is_told(rows: Rows) -> None:
    bench = Bench(ServingOptions(seconds=0.3, check_every=1, connections_max=64), rows)
    with started("tierbed", rows, dram_bytes=4 << 20, protocols=PROTOCOLS) as systems:
        assert [system.name for system in systems] == [f"tierbed_{one}" for one in PROTOCOLS]
        for system in systems:
            [phase] = bench.load(system, [150.0], 0.4)
            _all_told(phase)
            assert phase["good_us"]["p50"] <= phase["good_us"]["p99"] <= phase["good_us"]["max"]
            # The kernel counts in ticks of 10 ms: so many requests take several of them.
            [phase] = bench.load(system, [2_000.0], 0.5)
            assert phase["server_cpu_us"] > 0
            bench.overload(system, 100.0)
    for row, system in zip(bench.told, systems, strict=True):
        assert (row["part"], row["system"], row["rate"]) == ("overload", system.name, 200.0)
        assert 0.0 < row["goodput_share"] < 4.0
        assert row["good"] + row["refused"] + row["late"] == row["offered"]


def test_refusals_and_failures_of_all_protocols_are_told_apart(rows: Rows) -> None:
    bench = Bench(ServingOptions(connections=64, connections_max=64), rows)
    narrow = ServeOptions(
        grpc_address="127.0.0.1:0", limits=Limits(requests_max=1), log_level="off"
    )
    with (
        tb.Snapshot.open(rows.snapshot) as snapshot,
        Server(snapshot, "127.0.0.1:0", options=narrow) as server,
    ):
        for protocol in PROTOCOLS:
            address = server.grpc_address if protocol == "grpc" else server.address
            target = {"protocol": protocol, "address": address, "model": "tierbed.rows"}
            system = System(name=protocol, target=target, pids=(os.getpid(),))
            [phase] = bench.load(system, [4_000.0], 0.3)
            assert phase["good"] > 0, protocol
            assert phase["refused"] > 0, protocol
            assert phase["good"] + phase["refused"] == phase["offered"], protocol
            if protocol != "lookup":
                unknown = replace(system, target={**target, "model": "other"})
                [phase] = bench.load(unknown, [100.0], 0.2)
                assert phase["failed"] == phase["offered"] > 0, protocol


def test_peers_answer_the_same_rows_or_are_left_out(rows: Rows) -> None:
    for name in serving_systems.PEERS:
        bench = Bench(ServingOptions(check_every=1), rows)
        with contextlib.suppress(AbsentError), started(name, rows, dram_bytes=64 << 20) as [system]:
            [phase] = bench.load(system, [100.0], 0.3)
            assert phase["checked"] == phase["offered"] > 5


def test_requests_of_several_samples_are_answered_whole(rows: Rows) -> None:
    shape = {**SHAPE, "sample_count": 400}
    bench = Bench(ServingOptions(samples=400, check_every=1), replace(rows, shape=shape))
    with started("tierbed", rows, dram_bytes=4 << 20, protocols=PROTOCOLS) as systems:
        for system in systems:
            [phase] = bench.load(system, [20.0], 0.5)
            _all_told(phase)


def test_ratios_above_one_are_better_than_the_baseline() -> None:
    cost = {"redis": 30.0, "engine": 10.0, "triton": 300.0, "tierbed_infer": 20.0}
    rows = [{"part": "cost", "system": name, "cpu_us": us} for name, us in cost.items()]
    of_one = {"part": "predict", "samples": 1, "connections": 8}
    rows += [{**of_one, "system": "tierbed_predict", "cpu_us": 10.0}]
    rows += [{**of_one, "system": "tierbed_aoti", "cpu_us": 5.0}]
    rows += [{**of_one, "system": "triton_predict", "cpu_us": 50.0}]
    rows += [{"part": "half_load", "system": "engine", "p99_us": 100}]
    rows += [{"part": "half_load", "system": "tierbed_infer", "p99_us": 400}]
    assert ratios(rows) == {
        "per_core_tierbed_infer_vs_redis": 1.5,
        "per_core_tierbed_infer_vs_triton": 15.0,
        "per_core_tierbed_infer_vs_engine": 0.5,
        "per_core_predict_1x8_vs_triton": 5.0,
        "per_core_aoti_1x8_vs_triton": 10.0,
        "half_load_p99_tierbed_infer_vs_engine": 0.25,
    }


def test_a_peer_that_is_not_here_says_what_brings_it(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(serving_systems, "UNPACKED", tmp_path)
    monkeypatch.setattr(serving_triton, "ENVIRONMENT", tmp_path)
    for name in serving_systems.PEERS:
        with (
            pytest.raises(AbsentError, match=r"run scripts/(bench|client)-deps"),
            started(name, rows, dram_bytes=1 << 20),
        ):
            pass


def test_the_suite_runs_small_from_the_command_line(tmp_path: Path, capsys: Any) -> None:
    out, path = tmp_path / "out", tmp_path / "serve.json"
    small = ["--rows", "5000", "--dim", "8", "--ids", "6", "--seconds", "0.2", "--rounds", "1"]
    small += ["--first-rate", "50", "--protocols", "infer", "--p99-ms-max", "10000"]
    assert main(["bench", "serve", "--quick", *small, "--out", str(out), "--json", str(path)]) == 0
    assert (out / "serve.png").stat().st_size > 0
    result = json.loads(path.read_text())
    assert result["suite"] == "serve"
    parts = {row["part"] for row in result["rows"]}
    assert {"cost", "sweep", "limited", "half_load", "activations", "predict"} <= parts
    systems = {row["system"] for row in result["rows"]}
    assert systems >= {"tierbed_infer", "tierbed_predict", "engine"}
    for system in ("tierbed_predict", "tierbed_aoti"):
        if system in result["left_out"]:
            continue
        predicted = [row for row in result["rows"] if row["system"] == system]
        assert [row["samples"] for row in predicted] == [1, 1, 16, 16, 128, 128]
        assert all(row["rate"] > 0 for row in predicted)
    assert sum(row.get("checked", 0) for row in result["rows"]) > 0
    assert sum(row.get("wrong", 0) for row in result["rows"]) == 0
    said = capsys.readouterr().out
    assert "half_load" in said
    for name in result["left_out"]:
        assert f"{name} is left out" in said


def test_answers_are_of_one_version_while_deltas_come(rows: Rows) -> None:
    rows = replace(rows, shape={**SHAPE, "changed_share": 0.2})
    options = ServingOptions(
        seconds=0.4, rounds=2, rates=(200.0,), check_every=1, p99_ms_max=10_000.0
    )
    bench = Bench(options, rows)
    activation(bench, 4 << 20)
    activations(bench, 4 << 20, 3)
    told = [row for row in bench.told if row["part"] == "activation"]
    if told:  # Other load may take what the only rate needs; it is left out then, and said.
        assert [row["checked"] for row in told] == [row["good"] for row in told]
        assert all(0.0 <= row["hit_share"] <= 1.0 for row in told)
    else:
        assert "activation" in str(bench.absent)
    [last] = [row for row in bench.told if row["part"] == "activations"]
    assert last["deltas"] == 3
    assert last["memory_bytes"] > 0


def test_triton_answers_of_one_version_while_it_loads_its_rows_again(rows: Rows) -> None:
    rows = replace(rows, shape={**SHAPE, "changed_share": 0.2})
    options = ServingOptions(
        seconds=0.4, rounds=2, rates=(100.0,), check_every=1, p99_ms_max=10_000.0
    )
    bench = Bench(options, rows)
    try:
        reload(bench)
    except AbsentError as reason:
        pytest.skip(str(reason))
    told = [row for row in bench.told if row["part"] == "activation"]
    assert told or "activation" in str(bench.absent)
    assert [row["checked"] for row in told] == [row["good"] for row in told]
    assert len(told) in (0, 2)


def test_the_least_memory_grows_until_requests_are_answered_in_time(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ServingOptions(
        seconds=0.3, check_every=1, memory_rate=50.0, memory_p99_ms_max=10_000.0, peers=("redis",)
    )
    bench = Bench(options, rows)
    # Any server with the options of tierbed-server does: that one may not be built here.
    monkeypatch.setattr(serving_memory, "server_command", serve_command)
    least_memory(bench)
    told = {row["system"]: row for row in bench.told}
    assert told["tierbed_server"]["is_kept"]
    assert told["tierbed_server"]["memory_bytes"] > told["tierbed_server"]["budget_bytes"] > 0
    if "redis" in told:
        assert told["redis"]["memory_bytes"] > rows.byte_count
    # A bound that nothing keeps: every budget is tried, and said to be too small.
    bench = Bench(replace(options, memory_p99_ms_max=0.0, peers=()), rows)
    least_memory(bench)
    assert {row["is_kept"] for row in bench.told} == {False}
    assert len(bench.told) > 1
    assert "kept up with no budget" in bench.absent["tierbed_server memory"]


def serve_command() -> list[str]:
    """``tierbed serve``, which takes what is given to ``tierbed-server``."""
    return [sys.executable, "-m", "tierbed.cli", "serve"]


def test_words_that_are_none_are_refused(tmp_path: Path) -> None:
    for wrong in (
        ServingOptions(parts=("speed",)),
        ServingOptions(peers=("mysql",)),
        ServingOptions(protocols=()),
    ):
        with pytest.raises(InvalidError, match="--p"):
            run_serving(tmp_path, wrong)
