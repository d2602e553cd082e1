"""Charts of measurements, drawn as SVG from the tables of `results.py`.

Use: `python scripts/site/charts.py` draws the chart of the README again.
"""

from __future__ import annotations

import hashlib
import io
import json
import textwrap
from dataclasses import asdict
from pathlib import Path

import results

REPOSITORY = Path(__file__).resolve().parents[2]
README_CHART = REPOSITORY / "docs" / "results" / "speed.svg"
COLOURS = ("#3f51b5", "#009688", "#ff9800", "#e91e63", "#795548", "#607d8b", "#9c27b0", "#4caf50")


def draw(table: results.Table) -> str:
    """Returns the chart of a table as SVG; equal tables give equal pictures.

    Raises:
        ValueError: The table has no chart, or one of an unknown kind.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    chart = table.chart
    if chart is None or chart.kind not in ("bar", "line"):
        raise ValueError(f"{table.title}: no chart, or neither bar nor line")
    with rc_context({"svg.hashsalt": "tierbed", "svg.fonttype": "none", "font.size": 9}):
        height = 1.2 + 0.24 * len(table.rows) * max(1, len(chart.columns) * 0.6)
        size = (7.5, min(9.0, height)) if chart.kind == "bar" else (7.5, 3.6)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        (_bars if chart.kind == "bar" else _lines)(axes, table, chart)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False) if len(chart.columns) > 1 or chart.kind == "line" else None
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Description": digest(table)})
    return text.getvalue()


def _bars(axes, table: results.Table, chart: results.Chart) -> None:  # type: ignore[no-untyped-def]
    names = [str(row[0]).replace("`", "") for row in table.rows]
    width = 0.8 / len(chart.columns)
    for at, column in enumerate(chart.columns):
        values = [_number(row[table.columns.index(column)]) for row in table.rows]
        places = [
            place + (at - (len(chart.columns) - 1) / 2) * width for place in range(len(names))
        ]
        axes.barh(places, values, height=width, label=column, color=COLOURS[at % len(COLOURS)])
        for place, value in zip(places, values, strict=True):
            if value == value:  # what was not measured has no label
                axes.annotate(f" {value:g}", (value, place), va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("\n".join(textwrap.wrap(chart.unit or chart.columns[0], 72)))
    axes.set_xscale("log" if chart.log else "linear")
    axes.margins(x=0.12)


def _lines(axes, table: results.Table, chart: results.Chart) -> None:  # type: ignore[no-untyped-def]
    for at, row in enumerate(table.rows):
        values = [_number(row[table.columns.index(column)]) for column in chart.columns]
        name = str(row[0]).replace("`", "")
        axes.plot(chart.columns, values, marker="o", label=name, color=COLOURS[at % len(COLOURS)])
    axes.set_ylabel(chart.unit)
    axes.set_yscale("log" if chart.log else "linear")


def _number(cell: results.Cell) -> float:
    return float(cell) if isinstance(cell, (int, float)) else float("nan")


def digest(table: results.Table) -> str:
    """Returns what tells whether a picture is of this table."""
    return hashlib.sha256(json.dumps(asdict(table), sort_keys=True).encode()).hexdigest()[:16]


def readme_table() -> results.Table:
    """Returns the measurements that the README shows."""
    return results.read(REPOSITORY / "docs/results/data/training.json").runs[0].tables[0]


if __name__ == "__main__":
    README_CHART.write_text(draw(readme_table()), encoding="utf-8")
    print(f"wrote {README_CHART.relative_to(REPOSITORY)}")
