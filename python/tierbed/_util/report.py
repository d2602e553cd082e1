"""Output of results: tables on the screen, JSON for machines, pictures."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tierbed.errors import UnsupportedError

__all__ = [
    "Figure",
    "can_draw",
    "percentile",
    "print_table",
    "save_figure",
    "write_json",
]

Row = Mapping[str, Any]
Figure = Callable[[Any], None]


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes ``value`` as JSON, replacing the file at once; ``"-"`` is standard output."""
    text = json.dumps(value, indent=2, sort_keys=False, default=_plain)
    if os.fspath(path) == "-":
        print(text)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(text + "\n")
    temporary.replace(target)


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def can_draw() -> bool:
    """Whether pictures can be drawn: matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save_figure(
    path: str | os.PathLike[str], draw: Figure, size: tuple[float, float] = (9, 4.5)
) -> None:
    """Writes a PNG that ``draw`` fills; needs no display.

    Args:
        path: The file.
        draw: Draws onto a matplotlib figure.
        size: Width and height in inches.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    if not can_draw():
        raise UnsupportedError("matplotlib is not installed; pip install 'tierbed[figures]'")
    # Matplotlib is optional.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as MatplotlibFigure

    figure = MatplotlibFigure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(os.fspath(path), dpi=120)


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
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
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


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which ``share`` of ``values`` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
