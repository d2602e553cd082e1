"""Does the command line behave as others do?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import tierbed as tb
from tierbed._util.report import print_table
from tierbed.cli import lab, main, run
from tierbed.config import words
from tierbed.nn import MODELS
from tierbed.recipes.run import OPTIMIZERS


def told(capsys: Any, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return str(capsys.readouterr().out)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_told(capsys: Any, option: str) -> None:
    assert told(capsys, option) == f"tierbed {tb.__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tierbed", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"tierbed {tb.__version__}\n")


@pytest.mark.parametrize("command", [(), ("train",), ("sim",), ("sim", "cache"), ("bench",)])
def test_short_help_is_help(capsys: Any, command: tuple[str, ...]) -> None:
    assert told(capsys, *command, "-h") == told(capsys, *command, "--help")


def test_help_uses_the_width_there_is(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = told(capsys, "--help").partition("Commands:")[2]
    assert "..." not in commands, "no text is cut"
    narrow = told(capsys, "train", "--help")
    monkeypatch.setenv("COLUMNS", "200")
    wide = told(capsys, "train", "--help")
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines())) <= 120


@pytest.mark.parametrize(
    ("command", "option", "known"),
    [
        ("train", "--model", MODELS),
        ("demo lifecycle", "--model", MODELS),
        ("train", "--optimizer", OPTIMIZERS),
        ("plan", "--optimizer", OPTIMIZERS),
        ("import", "--optimizer", OPTIMIZERS),
        ("train", "--order", get_args(words.Order)),
        ("train", "--on-mismatch", get_args(words.OnMismatch)),
        ("train", "--backend", get_args(words.Backend)),
        ("train", "--format", get_args(words.DataFormat)),
        ("eval", "--format", get_args(words.DataFormat)),
    ],
)
def test_choices_are_listed(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, command: str, option: str, known: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    listed = re.search(
        rf"{option} +[<\[]?([a-z_|]+)[>\]]?", told(capsys, *command.split(), "--help")
    )
    assert listed is not None
    assert sorted(listed[1].split("|")) == sorted(known)


def test_a_quiet_command_says_only_the_result(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("tierbed_bench")
    arguments = ["train", "--format", "synthetic", "--samples", "300", "--dram-budget", "32MiB"]
    for quiet in ([], ["-q"]):
        assert main([*arguments, "--store", str(tmp_path / str(len(quiet))), *quiet]) == 0
        out, err = capsys.readouterr()
        assert "samples per s" in out
        assert ("checkpoint at step" in err) == (quiet == [])


def test_a_seed_is_printed_as_it_is_given(capsys: Any) -> None:
    print_table("tables", [{"name": "t", "seed": 123456789, "rows": 123456789}])
    print_table("one", [{"what": "seed", "value": 987654321}])
    out = capsys.readouterr().out
    assert "123456789 " in out
    assert "123,456,789 " in out
    assert "987654321 " in out


def test_an_import_of_a_folder_says_what_to_do(tmp_path: Path, capsys: Any) -> None:
    arguments = ["import", "--store", str(tmp_path / "s"), "--table", "t", "--file", str(tmp_path)]
    assert main([*arguments, "--create", "--optimizer", "sgd"]) == 2
    assert (
        "holds no tables in a format that is known; name a file, or a folder"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["bench", "sim", "tco", "generate"])
def test_commands_of_a_missing_package_name_it(
    command: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "PACKAGE", "tierbed_bench_that_is_not_there")
    commands = typer.Typer()
    lab.register(commands)
    assert run(commands, "tierbed", [command, "cache", "--log", "x"]) == 2
    assert f"`tierbed {command}` is part of the package tierbed-bench" in capsys.readouterr().err
