"""Completion in shells: what each asks and is answered, and bash itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from tierbed.cli import main
from tierbed.config.words import Backend, Order


def asked(shell: str, line: str) -> dict[str, str]:
    """Returns the variables that the script of a shell sets to ask about a line."""
    if shell == "bash":
        words = line.split(" ")
        return {
            "_TIERBED_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        }
    variables = {"_TIERBED_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line}
    return variables | ({"_TYPER_COMPLETE_FISH_ACTION": "get-args"} if shell == "fish" else {})


def completed(
    shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> dict[str, str]:
    """Returns what a shell is offered, with what each means where the shell shows that."""
    for name, value in asked(shell, line).items():
        monkeypatch.setenv(name, value)
    assert main([]) == 0
    out = str(capsys.readouterr().out).strip()
    if shell == "zsh":
        out = out.removeprefix("_arguments '*: :((").removesuffix("))'")
        out = "\n".join(part.replace('":"', "\t").strip('"') for part in out.splitlines())
    lines = (part.partition("\t") for part in out.splitlines() if part)
    return {word: meaning for word, _, meaning in lines}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tierbed ver", ["verify"]),
        ("tierbed models pu", ["push", "pull"]),
        ("tierbed doctor --no", ["--no-speed"]),
        ("tierbed train --dram", ["--dram-budget"]),
        ("tierbed publish --config x --no-", ["--no-delta", "--no-compiled"]),
        ("tierbed train --order ", list(get_args(Order))),
        ("tierbed train --dim 8 --backend ", list(get_args(Backend))),
        ("tierbed serve --log-level w", ["warn"]),
    ],
)
def test_commands_options_and_words_are_completed(
    shell: str, line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert list(completed(shell, line, monkeypatch, capsys)) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_shells_show_what_an_option_means(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    [meaning] = completed(shell, "tierbed train --check", monkeypatch, capsys).values()
    assert meaning.startswith("Steps between checkpoints")


@pytest.mark.parametrize("line", ["tierbed train --store ", "tierbed serve "])
def test_where_a_file_stands_the_shell_completes_files(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert completed("bash", line, monkeypatch, capsys) == {}
    assert list(completed("zsh", line, monkeypatch, capsys)) == ["_files"]


def test_a_wrong_file_of_options_does_not_disturb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train\n")
    line = f"tierbed train --config {path} --order f"
    assert list(completed("bash", line, monkeypatch, capsys)) == ["forward"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_by_the_script_that_is_printed(tmp_path: Path) -> None:
    program = tmp_path / "tierbed"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tierbed "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = """
        source <(_TIERBED_COMPLETE=source_bash tierbed) || exit 1
        complete -p tierbed
        COMP_WORDS=(tierbed train --order f) COMP_CWORD=3
        _tierbed_completion tierbed f --order
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "complete -o default -F _tierbed_completion tierbed",
        "forward",
    ]
