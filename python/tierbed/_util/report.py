"""Output of results: tables on the screen, JSON for machines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_table", "write_json", "write_text"]

Row = Mapping[str, Any]


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes ``value`` as JSON, replacing the file at once; ``"-"`` is standard output."""
    text = json.dumps(value, indent=2, sort_keys=False, default=_plain)
    if os.fspath(path) == "-":
        print(text)
        return
    write_text(path, text + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes ``text``, replacing the file at once."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(text)
    temporary.replace(target)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def print_table(title: str, rows: Sequence[Row], columns: Sequence[str] | None = None) -> None:
    """Prints ``rows`` as a table on standard output.

    Args:
        title: Above the table.
        rows: Flat objects.
        columns: Which fields, in which order; by default those of the first row.
    """
    names = list(columns or (rows[0].keys() if rows else ()))
    table = Table(title=title, title_justify="left")
    for name in names:
        is_number = any(isinstance(row.get(name), (int, float)) for row in rows)
        table.add_column(name.replace("_", " "), justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(name, ""), name, row) for name in names))
    # Names and paths may have brackets, which are no markup.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, width=200)
    console.print(table)


def _cell(value: Any, name: str, row: Row) -> str:
    # Seeds are there to be given again, so they have no commas.
    if "seed" in (name, row.get("what")) and isinstance(value, int):
        return str(value)
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if value != value:
            return "n/a"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
