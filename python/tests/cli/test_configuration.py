"""`tierbed serve` and `tierbed-server` have the same options, defaults and words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from tierbed.cli import _register, app

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"
#: Of torch, which the server without Python has not.
ONLY_PYTHON = {"--threads", "--predict"}
#: What no file sets.
ONLY_SAID = {"--config", "--print-config", "--quiet"}


def of_the_page() -> dict[str, tuple[str, str]]:
    """Returns the default and the words of each option."""
    row = re.compile(r"\| `(--[a-z-]+)` \| `.*` \| (?:`(.*?)`)? ?\| (.*) \|")
    found = (row.fullmatch(line) for line in PAGE.read_text().splitlines())
    return {match[1]: (match[2] or "", match[3]) for match in found if match}


def written(value: Any) -> str:
    """Returns a default as the page writes it."""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def plain(words: str) -> str:
    return words.replace("`", "").rstrip(".")


def of_the_command() -> dict[str, tuple[str, str]]:
    _register()
    command: Any = typer.main.get_command(app)
    options = [p for p in command.commands["serve"].params if p.param_type_name == "option"]
    return {p.opts[0]: (written(p.default), p.help) for p in options if p.opts[0] != "--help"}


def test_the_page_has_every_option_of_the_command_and_no_other() -> None:
    assert of_the_command().keys() - ONLY_PYTHON - ONLY_SAID == of_the_page().keys()
    assert len(of_the_page()) > 40


def test_defaults_and_words_are_the_same() -> None:
    page, command = of_the_page(), of_the_command()
    for name, (default, words) in page.items():
        assert (default, plain(words)) == (command[name][0], plain(command[name][1])), name
