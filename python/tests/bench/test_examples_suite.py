"""The suite of examples: what it tells of programs that say this and that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierbed.errors import InvalidError
from tierbed_bench.examples import EXAMPLES, ExamplesOptions, run_examples

PROGRAM = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--check", action="store_true")
parser.add_argument("--json", type=pathlib.Path)
parser.add_argument("--data", nargs="+")
told, others = parser.parse_known_args()
assert told.check and others == {options!r}, others
round_file = pathlib.Path({folder!r}) / "round"
number = int(round_file.read_text()) if round_file.exists() else 0
round_file.write_text(str(number + 1))
disk, torch = [(2.0, 4.0), (6.0, 3.0), (4.0, 4.0)][number]
quality = [0.5, {last}]
def run(name, seconds, mib):
    return dict(name=name, quality=quality, seconds=seconds, rows_bytes=mib << 20, tokens=120)
runs = [run("memory on disk", disk, 5), run("memory in plain torch", torch, 100)]
told.json.write_text(json.dumps(dict(quality="perplexity", runs=runs)))
"""


def program(folder: Path, model: str, last: object) -> str:
    options = next(list(one.options) for one in EXAMPLES if one.name == model)
    return PROGRAM.format(folder=str(folder), last=last, options=options)


def test_times_are_medians_and_ratios_those_of_a_round(tmp_path: Path) -> None:
    (tmp_path / "ngram_memory_lm.py").write_text(program(tmp_path, "ngram_memory_lm", 0.75))
    options = ExamplesOptions(folder=tmp_path, models=("ngram_memory_lm",))
    told = json.loads(run_examples(tmp_path / "out", options).read_text())
    disk, torch = told["rows"]
    assert (disk["system"], torch["system"]) == ("on_disk", "memory_in_plain_torch")
    assert (disk["seconds"], torch["seconds"]) == (4.0, 4.0)
    assert (disk["tokens_per_s"], disk["reached"], disk["epochs"]) == (30.0, 0.75, 2)
    # Rounds: 2 / 4, 6 / 3, 4 / 4.
    assert told["ratios"]["ngram_memory_lm_seconds_vs_torch"] == 1.0
    assert told["ratios"]["ngram_memory_lm_memory_vs_torch"] == 0.05


def test_a_program_that_fails_or_wavers_ends_the_suite(tmp_path: Path) -> None:
    options = ExamplesOptions(folder=tmp_path, models=("din",))
    with pytest.raises(InvalidError, match=r"has no din\.py"):
        run_examples(tmp_path / "out", options)
    (tmp_path / "din.py").write_text("raise SystemExit('not plain torch')")
    with pytest.raises(InvalidError, match="not plain torch"):
        run_examples(tmp_path / "out", options)
    (tmp_path / "din.py").write_text(program(tmp_path, "din", "float(number)"))
    with pytest.raises(InvalidError, match="another quality each time"):
        run_examples(tmp_path / "out", options)


def test_models_and_data_are_known_by_name(tmp_path: Path) -> None:
    for wrong in ({"models": ("dim",)}, {"data": ("din",)}, {"data": ("dim=x",)}):
        with pytest.raises(InvalidError):
            run_examples(tmp_path, ExamplesOptions(**wrong))
