"""Remedies of what plans a cluster: each is followed, and then a plan comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierbed.cli import main
from tierbed.errors import InvalidError
from tierbed.sizing import Inputs, plan_serving, read_measured

ROWS = ("--table", "1TB")
LOAD = (*ROWS, "--requests-per-s", "1e6")


@pytest.mark.parametrize(
    ("wrong", "remedy", "right"),
    [
        (ROWS, "give --requests-per-s for serving", LOAD),
        (ROWS, "or --samples-per-s or --hosts for training", (*ROWS, "--hosts", "2")),
        (LOAD[2:], "give --table", LOAD),
        ((*LOAD, "--shards", "0"), "give other --shards", (*LOAD, "--shards", "2")),
        ((*LOAD, "--dram-share", "0.001"), "give --pages", (*LOAD, "--pages", "9")),
        ((*ROWS, "--hosts", "20000"), "give other --hosts", (*ROWS, "--hosts", "20")),
        (
            (*LOAD, "--host-dram", "1MB"),
            "give larger --host-dram or --host-ssd",
            (*LOAD, "--host-dram", "1GB"),
        ),
        (
            (*ROWS, "--samples-per-s", "1e9", "--ranks", "1"),
            "give other --ranks, --batch, --host-gbit or --host-ssd",
            (*ROWS, "--samples-per-s", "1e9", "--ranks", "32"),
        ),
    ],
)
def test_a_plan_says_what_it_needs(
    wrong: tuple[str, ...], remedy: str, right: tuple[str, ...], capsys: Any
) -> None:
    assert main(["plan", "cluster", *wrong]) == 2
    assert remedy in capsys.readouterr().err
    assert main(["plan", "cluster", *right]) == 0


def test_measured_files_are_those_of_benchmarks_and_plans(tmp_path: Path) -> None:
    def written(name: str, value: Any) -> Path:
        (tmp_path / name).write_text(json.dumps(value))
        return tmp_path / name

    def of_serve(samples: int, cost: float) -> Path:
        row = {"part": "cost", "system": "tierbed_infer", "cpu_us": cost}
        told = {"suite": "serve", "shape": {"sample_count": samples}, "rows": [row]}
        return written(f"{samples}.json", told)

    with pytest.raises(InvalidError, match="name a JSON file of results"):
        read_measured([tmp_path / "absent.json"])
    with pytest.raises(InvalidError, match="or write inputs as an object `inputs`"):
        read_measured([written("other.json", {"suite": "lookup"})])
    [own] = read_measured([written("own.json", {"inputs": {"request_us": 12}})])
    assert own.values == {"request_us": 12}
    one = of_serve(1, 50.0)
    with pytest.raises(InvalidError, match=r"give a second file of `tierbed bench serve"):
        read_measured([one])
    [both] = read_measured([one, of_serve(11, 150.0)])
    assert both.values == {"sample_us": 10.0, "request_us": 40.0}


def test_pages_are_given_where_none_were_measured() -> None:
    load = {"table": 1e12, "requests_per_s": 1e3, "dram_share": 0.001}
    with pytest.raises(InvalidError, match="give --pages"):
        plan_serving(Inputs(load))
    assert plan_serving(Inputs({**load, "pages": 10})).iops == 2e4
