"""Configuration of a command: a file below its command line, checked whole, and printed.

A file is one for all commands: each takes the keys of its own options, and checks all others, so
that a wrong key is told by whichever command comes first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from tierbed.cli.config_file import Entry, Fault, Parsed, read_file
from tierbed.cli.settings import Setting
from tierbed.errors import InvalidError

__all__ = [
    "ConfigFile",
    "PrintConfig",
    "commands_of",
    "effective",
    "optional_params",
    "settings_of",
]

#: Keys above all sections are those of a server: `tierbed-server` reads such files.
_FLAT = "serve"
#: More keys than these are not listed by an error.
_LISTED_MAX = 20
_LINES, _PRINTS = "tierbed.lines", "tierbed.prints"


@dataclass(frozen=True)
class _Known:
    """A setting, and the option that checks it."""

    setting: Setting
    option: Any


@dataclass(frozen=True)
class _Given:
    """A value of a file, as the command line would give it."""

    value: Any
    line: int


def settings_of(command: Any) -> list[Setting]:
    """Returns what files can set of a command, in its order; none where it reads no file."""
    found: list[Setting] = getattr(command.callback, "settings", [])
    return found


def commands_of(command: Any, name: str = "") -> dict[str, Any]:
    """Returns a command, or those of a group and of the groups within it, by their words.

    Args:
        command: The command or group.
        name: Its words.
    """
    inner = getattr(command, "commands", None)
    if inner is None:
        return {name: command}
    found: dict[str, Any] = {}
    for word, one in inner.items():
        found.update(commands_of(one, f"{name} {word}".strip()))
    return found


def _known(command: Any) -> dict[tuple[str, str], _Known]:
    """Returns the keys of all commands, or of the only one."""
    known: dict[tuple[str, str], _Known] = {}
    for one in commands_of(command).values():
        options = {option.name: option for option in one.params}
        for setting in settings_of(one):
            known.setdefault((setting.section, setting.key), _Known(setting, options[setting.name]))
    return known


def _load(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the values of the file the defaults of the command."""
    if path is None:
        return None
    known = _known(context.find_root().command)
    given = _checked(read_file(path), path, known, context)
    mine = {
        s.name: given[s.section, s.key]
        for s in settings_of(context.command)
        if (s.section, s.key) in given
    }
    context.default_map = {name: one.value for name, one in mine.items()}
    context.meta[_LINES] = {name: f"{path}:{one.line}" for name, one in mine.items()}
    return path


def _checked(
    parsed: Parsed, path: Path, known: dict[tuple[str, str], _Known], context: typer.Context
) -> dict[tuple[str, str], _Given]:
    """Returns the values of a file in which everything is right, else tells all that is wrong."""
    faults, given = list(parsed.faults), dict[tuple[str, str], _Given]()
    sections = list(dict.fromkeys(section for section, _ in known))
    for name, line in parsed.sections.items():
        if name not in sections:
            faults.append(Fault(line, f"[{name}]: no such section; {_near(name, sections)}"))
    for entry in parsed.entries:
        if entry.section is not None and entry.section not in sections:
            continue
        place = entry.section or _FLAT, entry.key
        if place not in known:
            faults.append(Fault(entry.line, _unknown(entry, known, sections)))
            continue
        if place in given:
            first = given[place].line
            faults.append(Fault(entry.line, f"{entry.key} stands in line {first}; leave one out"))
        try:
            given[place] = _Given(_value(known[place], entry.value, context), entry.line)
        except InvalidError as error:
            faults.append(Fault(entry.line, f"{'.'.join(place)}: {error}"))
    if faults:
        lines = [f"{path}:{one.line}: {one.text}" for one in sorted(set(faults))]
        head = [] if len(lines) == 1 else [f"{path}: {len(lines)} errors"]
        raise InvalidError("\n".join([*head, *lines]), {"path": str(path)})
    return given


def _value(known: _Known, value: Any, context: typer.Context) -> Any:
    """Returns a value as the command line gives it, after the checks that it has there."""
    spoken = known.setting.spoken(value)
    try:
        known.setting.read(known.option.process_value(context, spoken))
    except typer.BadParameter as error:
        raise InvalidError(known.setting.misfit(spoken) or error.message) from error
    except InvalidError as error:
        raise InvalidError(str(error).removeprefix(f"{known.setting.flag} ")) from error
    return spoken


def _unknown(entry: Entry, known: Iterable[tuple[str, str]], sections: list[str]) -> str:
    """Says what is wrong with a key that nobody has."""
    if entry.section is None and entry.key in sections:
        return f"{entry.key}: no key but a section; write [{entry.key}] and its keys below it"
    elsewhere = [section for section, key in known if key == entry.key]
    section = entry.section or _FLAT
    keys = [key for one, key in known if one == section]
    told = f"{entry.section}.{entry.key}" if entry.section else entry.key
    if elsewhere:
        below = " or ".join(f"[{section}]" for section in elsewhere)
        return f"{told}: no such key; write {entry.key} below {below}"
    return f"{told}: no such key; {_near(entry.key, keys, section)}"


def _near(name: str, names: list[str], section: str = "") -> str:
    near = get_close_matches(name, names, 1)
    if near:
        return f"did you mean {near[0]}?"
    if len(names) > _LISTED_MAX:
        return f"`tierbed {section} --print-config` lists those that there are"
    return f"there are {', '.join(names)}"


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=_load,
        help="Options from a file, in TOML or YAML; those of the command line go first.",
        rich_help_panel="Configuration",
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config",
        help="Print what is set, as such a file, and where it comes from; do nothing else.",
        rich_help_panel="Configuration",
    ),
]


def optional_params(context: Any, params: list[Any], arguments: list[str] | None = None) -> Any:
    """Returns options of which none must be given where they are only printed.

    Args:
        context: Of the call.
        params: The options.
        arguments: The words of the call, when it begins.
    """
    if arguments is not None and "--print-config" in arguments and _PRINTS not in context.meta:
        context.meta[_PRINTS] = [copy.copy(one) for one in params]
        for one in context.meta[_PRINTS]:
            one.required = False
    return context.meta.get(_PRINTS, params)


def effective(context: typer.Context, values: dict[str, Any]) -> str:
    """Returns everything that is set as a file, each value with where it comes from.

    Args:
        context: Of the call.
        values: What its options have, by name.
    """
    sections: dict[str, list[str]] = {}
    for setting in settings_of(context.command):
        source = getattr(context.get_parameter_source(setting.name), "name", "DEFAULT")
        origin = {
            "DEFAULT": "default",
            "DEFAULT_MAP": context.meta.get(_LINES, {}).get(setting.name),
        }.get(source, setting.flag)
        value = values[setting.name]
        lines = sections.setdefault(setting.section, [])
        if value is None:
            lines.append(f"# {setting.key} =  # not set")
        else:
            lines.append(f"{setting.key} = {setting.written(value)}  # {_one_line(origin)}")
    texts = ["\n".join([f"[{name}]", *lines]) for name, lines in sections.items()]
    path = context.command_path.partition(" ")[2] or context.command.name
    head = f"# Read by: tierbed {path} --config FILE"
    return "\n\n".join([head, *texts]) + "\n"


def _one_line(text: str | None) -> str:
    return (text or "").replace("\n", " ").replace("\r", " ")
