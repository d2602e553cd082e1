"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tierbed._util.report import write_json
from tierbed.cli.options import shows_tables
from tierbed_bench.figures import save_figure

ReplayedLog = Annotated[
    Path, typer.Option("--log", help="One query per line, or Criteo's layout; plain, gzip or zstd.")
]
ReplayedQueries = Annotated[
    int | None, typer.Option("--queries", min=1, help="Replay the first so many queries.")
]
Png = Annotated[Path | None, typer.Option("--png", help="Curves; by default beside the JSON file.")]
Scratch = Annotated[
    Path | None, typer.Option("--scratch", help="Folder for what is deleted again.")
]


def write_curves(
    result: dict[str, Any],
    json_path: Path | None,
    png: Path | None,
    draw: Callable[[Any, dict[str, Any]], None],
) -> None:
    """Writes a simulation's JSON and its curves, which lie beside the JSON unless ``png`` says."""
    if json_path is not None:
        write_json(json_path, result)
        if png is None and shows_tables(json_path):
            png = json_path.with_suffix(".png")
    if png is not None:
        save_figure(png, lambda figure: draw(figure, result))
