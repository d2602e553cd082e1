"""Files of options, in TOML or YAML, with the line of every key.

TOML is read by the standard library, whose parser tells no lines; :mod:`tierbed.cli.toml_lines`
finds them. YAML is read by PyYAML where that is installed, in words of YAML 1.2: ``off`` is a
text, and only ``true`` and ``false`` are none.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierbed.cli.toml_lines import key_lines
from tierbed.errors import InvalidError, UnsupportedError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Entry", "Fault", "Parsed", "read_file"]

_BYTES_MAX = 1 << 20
_WHOLE = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True)
class Entry:
    """A key of a file.

    Args:
        section: The section that it stands in; None above all.
        key: Its name.
        value: What it is set to.
        line: Its line, from 1.
    """

    section: str | None
    key: str
    value: Any
    line: int


@dataclass(frozen=True, order=True)
class Fault:
    """Something that is wrong in a file.

    Args:
        line: Its line, from 1.
        text: What is wrong, and what would be right.
    """

    line: int
    text: str


@dataclass
class Parsed:
    """What a file has.

    Args:
        entries: Its keys.
        sections: The line of each section.
        faults: What is wrong with it as a file.
    """

    entries: list[Entry] = field(default_factory=list)
    sections: dict[str, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def add(self, section: str | None, key: str, value: Any, line: int) -> None:
        """Adds a key, or says that it was there."""
        earlier = (one for one in self.entries if (one.section, one.key) == (section, key))
        if (first := next(earlier, None)) is not None:
            self.faults.append(Fault(line, f"{key} stands in line {first.line}; leave one out"))
        self.entries.append(Entry(section, key, value, line))


def read_file(path: Path) -> Parsed:
    """Reads a file of options; YAML where it is called so, else TOML.

    Raises:
        InvalidError: No file that can be read.
        UnsupportedError: YAML without PyYAML.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidError(
            f"--config: cannot read {path}: {error.strerror}; name a file of options"
        ) from error
    if len(raw) > _BYTES_MAX:
        raise InvalidError(f"--config: {path} has more than 1 MiB; name a file of options")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return Parsed(faults=[Fault(line, "no text in UTF-8; write the file in UTF-8")])
    return _of_yaml(path, text) if path.suffix in (".yaml", ".yml") else _of_toml(text)


def _of_toml(text: str) -> Parsed:
    found = Parsed()
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"\(at line (\d+), ", str(error))
        line = int(at[1]) if at else text.count("\n") + 1
        told = str(error).partition(" (at ")[0]
        found.faults.append(Fault(line, f"no TOML: {told[:1].lower()}{told[1:]}"))
        return found
    lines = key_lines(text)
    for name, value in tables.items():
        line = lines[name,]
        if not isinstance(value, dict):
            found.add(None, name, value, line)
            continue
        found.sections[name] = line
        for key, one in value.items():
            # Within a table in one line only that has a line.
            found.add(name, key, one, lines.get((name, key), line))
    return found


def _of_yaml(path: Path, text: str) -> Parsed:
    try:
        import yaml
    except ImportError as error:
        raise UnsupportedError(
            f"--config: {path} is YAML, which needs the package pyyaml; pip install pyyaml, or"
            " write the file in TOML"
        ) from error
    found = Parsed()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = 1 if mark is None else mark.line + 1
        found.faults.append(Fault(line, f"no YAML: {error.problem}"))
        return found
    except yaml.YAMLError as error:
        found.faults.append(Fault(1, f"no YAML: {' '.join(str(error).split())}"))
        return found
    if root is None:
        return found
    if not isinstance(root, yaml.MappingNode):
        found.faults.append(Fault(1, "no keys; write sections, and keys below them"))
        return found
    for name, node in root.value:
        line = name.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            if name.value in found.sections:
                first = found.sections[name.value]
                found.faults.append(
                    Fault(line, f"{name.value} stands in line {first}; leave one out")
                )
            found.sections.setdefault(name.value, line)
            for key, one in node.value:
                found.add(name.value, str(key.value), _plain(one), key.start_mark.line + 1)
        else:
            found.add(None, str(name.value), _plain(node), line)
    # A key without a value is not set.
    found.entries = [one for one in found.entries if one.value is not None]
    return found


def _plain(node: Any) -> Any:
    """Returns the value of a node as YAML 1.2 has it."""
    if isinstance(node.value, list):
        if node.id == "mapping":
            return {}
        return [_plain(one) for one in node.value]
    text = node.value
    if node.style is not None:
        return text
    if text in ("", "~", "null"):
        return None
    if text in ("true", "false"):
        return text == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
