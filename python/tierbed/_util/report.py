"""How are results shown: as a table, as JSON for machines, as a picture?"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "Figure",
    "machine",
    "percentile",
    "print_table",
    "save_figure",
    "write_json",
    "write_suite",
]

Row = Mapping[str, Any]
Figure = Callable[[Any], None]


def machine() -> dict[str, Any]:
    """Returns what one must know about this machine to read a measurement."""
    import torch

    from tierbed import _native

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "cpu_features": _native.cpu_features(),
        "memory_bytes": memory_bytes,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "tierbed": _native.version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


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


def write_suite(
    out: str | os.PathLike[str],
    suite: str,
    rows: Sequence[Row],
    ratios: Mapping[str, float | None],
    figure: Figure | None = None,
    told: Mapping[str, Any] | None = None,
) -> Path:
    """Writes ``<out>/<suite>.json``, and ``<out>/<suite>.png`` when a figure is given.

    Args:
        out: Folder.
        suite: Name of the benchmark.
        rows: One flat object per measurement: its parameters and metrics in snake_case.
        ratios: ``<system>_vs_<baseline>``: ratio; None where a side is missing.
        figure: Draws onto a matplotlib figure.
        told: What else one must know, such as sizes; beside ``machine`` and ``date``.

    Returns:
        The path of the JSON file.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{suite}.json"
    write_json(
        path,
        {
            "suite": suite,
            "machine": machine(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": _command(),
            **(told or {}),
            "rows": [dict(row) for row in rows],
            "ratios": dict(ratios),
        },
    )
    if figure is not None:
        save_figure(folder / f"{suite}.png", figure)
    return path


def _command() -> str:
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def save_figure(
    path: str | os.PathLike[str], draw: Figure, size: tuple[float, float] = (9, 4.5)
) -> None:
    """Writes a PNG that ``draw`` fills; needs no display."""
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
    from rich.console import Console
    from rich.table import Table

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
