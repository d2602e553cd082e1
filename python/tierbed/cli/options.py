"""Options that several verbs share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tierbed._util.report import print_table, write_json
from tierbed.cli.settings import Key
from tierbed.config import words as closed
from tierbed.errors import InvalidError

DramBudget = Annotated[
    closed.SizeText,
    Key("store"),
    typer.Option(
        "--dram-budget",
        metavar="SIZE",
        help="Memory for everything the store keeps: 16MiB, 4GiB.",
    ),
]
JsonOut = Annotated[
    Path | None,
    Key(None),
    typer.Option("--json", help="Write the result as JSON here; - is the screen."),
]
Threads = Annotated[
    int,
    typer.Option(
        "--threads",
        min=1,
        metavar="N",
        help="Threads of torch; results repeat for equal numbers.",
    ),
]
Data = Annotated[
    list[Path] | None,
    Key("data", "paths"),
    typer.Option(
        "--data", metavar="FILE", help="File of samples, plain or compressed; repeat for several."
    ),
]
Codec = Annotated[
    closed.PageCodec | None,
    typer.Option("--codec", help="How rows are kept on pages; f32 if not said."),
]
HeadRows = Annotated[
    str | None,
    closed.Unit("rows"),
    typer.Option(
        "--head-rows",
        metavar="ROWS",
        help="Rows of each table with entries in the index, as 1000 or 5%; the others lie by id.",
    ),
]
RowOptimizer = typer.Option("--optimizer", help="Of the rows.")
LogFormat = Annotated[
    closed.LogFormat,
    typer.Option("--log-format", help="maxembed is binary; auto goes by the name."),
]


def shows_tables(json_path: Path | None) -> bool:
    """Whether the screen is for tables: not when it is where JSON goes."""
    return json_path is None or str(json_path) != "-"


def pairs(option: str, given: list[str]) -> dict[str, str]:
    """Returns what ``NAME=VALUE`` says by name."""
    pairs: dict[str, str] = {}
    for one in given:
        name, sign, value = one.partition("=")
        if not (sign and name and value):
            raise InvalidError(f"{option} is NAME=VALUE, not {one!r}: {option} item=item.npy")
        if name in pairs:
            raise InvalidError(f"{option} names {name!r} twice; give every table once")
        pairs[name] = value
    return pairs


def finish(result: dict[str, Any], json_path: Path | None, title: str) -> None:
    """Prints a result, and writes it as JSON when asked; JSON on the screen replaces the table."""
    if shows_tables(json_path):
        rows = [
            {"what": name.replace("_", " "), "value": value}
            for name, value in result.items()
            if not isinstance(value, (dict, list))
        ]
        print_table(title, rows)
    if json_path is not None:
        write_json(json_path, result)
