"""Reference of the file that commands read: its sections and keys, from their options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from tierbed import cli
from tierbed.cli.configuration import commands_of, settings_of
from tierbed.cli.settings import Setting

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"

HEAD = """\
# Run file

Keys of the file that `tierbed train`, `plan`, `plan cluster`, `eval`, `publish` and `serve` read
with `--config FILE`; [how to write one](../how-to/configure-a-run.md). This page is made of the
options of these commands, by `cargo x config`.

A command takes the keys of its own options, and checks the others. A key is the option's name
without dashes before it, but for `store.path`, `data.paths` and `eval.paths`: `--store` and
`--data`. Paths are relative to where the command runs.

| in a table | is written |
|---|---|
| `true`, `false` | a flag; on the command line `--name` or `--no-name` |
| number | `3`, `0.5`, `1e-3` |
| `SIZE` | `"16MiB"`, `"4GB"`, or a number of bytes |
| time | `"2s"`, `"500ms"`, or a number of seconds |
| rows | a number of rows, or a share such as `"5%"` |
| list | `["a", "b"]`; a single text is a list of one |
"""
SERVE = """
## [serve]

Of `serve`. It has the keys of [a server](configuration.md), and those below. Keys above all
sections are of this section, too, so `tierbed serve` reads the files of `tierbed-server`.
"""
KINDS = {
    "flag": "`true`, `false`",
    "whole": "whole number",
    "number": "number",
    "text": "text",
    "size": "`SIZE`",
    "seconds": "time",
    "rows": "rows",
    "list": "list",
}


def page() -> str:
    """Returns the page docs/reference/run-file.md."""
    cli._register()
    group: Any = typer.main.get_command(cli.app)
    users: dict[str, list[str]] = {}
    rows: dict[str, dict[str, str]] = {}
    for words, command in commands_of(group).items():
        # `tierbed plan` alone is `tierbed plan run`.
        name = words.removesuffix(" run")
        options = {option.name: option for option in command.params}
        for setting in settings_of(command):
            commands = users.setdefault(setting.section, [])
            commands += [name] if name not in commands else []
            keys = rows.setdefault(setting.section, {})
            keys.setdefault(setting.key, _row(setting, options[setting.name]))
    parts = [HEAD]
    for section in sorted(rows, key=lambda section: section == "serve"):
        names = ", ".join(f"`{name}`" for name in users[section])
        parts.append(SERVE if section == "serve" else f"\n## [{section}]\n\nOf {names}.\n")
        parts.append("\n| key | takes | default | |\n|---|---|---|---|\n")
        known = _of_a_server() if section == "serve" else set[str]()
        parts += [row for key, row in rows[section].items() if key not in known]
    return "".join(parts)


def _of_a_server() -> set[str]:
    text = (REFERENCE / "configuration.md").read_text(encoding="utf-8")
    return {*re.findall(r"^\| `--([a-z-]+)`", text, re.MULTILINE), "snapshot"}


def _row(setting: Setting, option: Any) -> str:
    takes, least, most = KINDS[setting.kind], setting.least, setting.most
    if words := setting.choices:
        takes = ", ".join(f"`{word}`" for word in words)
    elif least is not None:
        takes += f", {least:g} to {most:g}" if most is not None else f", at least {least:g}"
    default = "" if option.default in (None, "") else setting.written(option.default)
    default = f"`{default}`" if default else "required" if option.required else ""
    return f"| `{setting.key}` | {takes} | {default} | {setting.text.rstrip('.')} |\n"
