"""Does `plan cluster` compute what its page says, tell where inputs come from, and refuse?"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tierbed.cli import main

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs" / "how-to" / "plan-a-cluster.md"
BLOCK = re.compile(r"(```console\n\$ tierbed (plan cluster [^\n]*)\n```\n\n)((?:[|<][^\n]*\n)+)")
SERVING = {
    "shards": "shards",
    "fits": "fits",
    "hosts": "hosts",
    "bound by": "binds",
    "cores": "cores",
    "reads/s": "iops",
    "memory of a host, GB": "dram_bytes",
    "money per month": "money_per_month",
}
TRAINING = {
    "hosts": "hosts",
    "bound by": "binds",
    "samples/s": "samples_per_s",
    "step, us": "step_s",
    "network of a host, Mbit/s": "network_bytes_per_s",
    "disk of a host, GB": "ssd_bytes",
    "money per month": "money_per_month",
}
SCALE = {"dram_bytes": 1e-9, "ssd_bytes": 1e-9, "network_bytes_per_s": 8e-6, "step_s": 1e6}
LOAD = ("--table", "10TB", "--requests-per-s", "1e6")


def plan(out: Path, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "cluster", *arguments, "--json", str(out), "-q"]) == 0
    return dict(json.loads(out.read_text()))


def cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return f"{value * SCALE.get(name, 1):,.0f}"


def table(found: dict[str, Any]) -> str:
    columns, rows = SERVING, found.get("serving", {}).get("plans")
    if rows is None:
        columns, rows = TRAINING, [found["training"]]
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[cell(name, row[name]) for name in columns.values()] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---")


def test_the_page_has_what_its_commands_compute(tmp_path: Path) -> None:
    text = PAGE.read_text()

    def computed(block: re.Match[str]) -> str:
        return block[1] + table(plan(tmp_path / "out.json", *block[2].split()[2:]))

    written, count = BLOCK.subn(computed, text)
    if "TIERBED_WRITE_REFERENCE" in os.environ:
        PAGE.write_text(written)
    assert count >= 6
    assert "<!--" not in written
    assert PAGE.read_text() == written, "write it by TIERBED_WRITE_REFERENCE=1 and this test"


def test_inputs_tell_where_they_come_from(tmp_path: Path, capsys: Any) -> None:
    file, measured = tmp_path / "run.toml", tmp_path / "measured.json"
    file.write_text('[cluster]\ndim = 32\nhost-dram = "1TB"\n')
    inputs = {"request_us": 25.5, "dim": 128, "poll_s": 1}
    measured.write_text(json.dumps({"inputs": inputs, "command": "bench mine"}))
    options = ("--config", str(file), "--measured", str(measured), "--poll-s", "2")
    found = plan(tmp_path / "out.json", *LOAD, *options)
    told = {one["name"]: (one["value"], one["origin"]) for one in found["inputs"]}
    assert told["table"] == (10e12, "given: --table")
    assert told["dim"] == (32, f"given: {file}:2")
    assert told["host_dram"] == (1e12, f"given: {file}:3")
    assert told["poll_s"] == (2, "given: --poll-s")
    assert told["request_us"] == (25.5, f"measured: {measured}, bench mine")
    assert told["sample_us"][1].startswith("measured: docs/results/data/serving.json")
    assert "rpc_us" not in told, "a full copy asks nobody"
    assert told["ids"] == (26, "assumed: as Criteo")
    assert main(["plan", "cluster", *LOAD]) == 0
    shown = capsys.readouterr().out
    assert "docs/results/data/serving.json" in shown
    assert "news are served" in shown


def test_costs_come_from_two_runs_of_the_benchmark(tmp_path: Path, capsys: Any) -> None:
    files = []
    for samples, cost in ((1, 40.0), (101, 1040.0)):
        rows = [{"part": "cost", "system": "tierbed_infer", "cpu_us": cost}]
        told = {"suite": "serve", "shape": {"sample_count": samples}, "rows": rows}
        files.append(tmp_path / f"{samples}.json")
        files[-1].write_text(json.dumps(told))
    both = [word for file in files for word in ("--measured", str(file))]
    found = plan(tmp_path / "out.json", *LOAD, *both)
    told = {one["name"]: one["value"] for one in found["inputs"]}
    assert (told["request_us"], told["sample_us"]) == (30.0, 10.0)
    assert main(["plan", "cluster", *LOAD, "--measured", str(files[0])]) == 2
    assert "give a second file" in capsys.readouterr().err


def test_a_rehearsal_is_what_training_reads(tmp_path: Path) -> None:
    rehearsed = tmp_path / "plan.json"
    per_batch = {
        "later_epoch_read_bytes_per_batch": 3000.0,
        "later_epoch_write_bytes_per_batch": 1000.0,
    }
    rehearsed.write_text(json.dumps({**per_batch, "samples": 640, "batch_count": 10}))
    asked = ("--table", "1TB", "--hosts", "2", "--measured", str(rehearsed))
    found = plan(tmp_path / "out.json", *asked)
    told = {one["name"]: one["value"] for one in found["inputs"]}
    assert told["disk_bytes"] == 4000 / 64
    assert "disk_id_bytes" not in told
    assert found["training"]["parts_s"]["disk"] == pytest.approx(8 * 1024 * 62.5 / 12e9)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"rows": []}, "has no input"),
        ({"inputs": {"request_ms": 1}}, "there is no input 'request_ms'"),
        ({"inputs": {"utilization": 0}}, "must be more than 0"),
        ({"inputs": {"request_us": -1}}, "must be a number from 0"),
        ({"inputs": {"dram_share": 1.5}}, "at most 1"),
        ({"inputs": {"dim": 1.5}}, "whole number"),
    ],
)
def test_files_of_wrong_inputs_are_refused(
    content: dict[str, Any], told: str, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(content))
    assert main(["plan", "cluster", *LOAD, "--measured", str(file)]) == 2
    assert told in capsys.readouterr().err


def test_a_plan_without_a_word_is_the_rehearsal(capsys: Any) -> None:
    assert main(["plan", "--help"]) == 0
    assert "--scratch" in capsys.readouterr().out
    assert main(["plan", "cluster", "--help"]) == 0
    assert "--requests-per-s" in capsys.readouterr().out
