"""Medians over rounds, Tierbed next to the best of the others, and the picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from tierbed_bench.common import ratio
from tierbed_bench.peers.systems import OURS

__all__ = ["COLUMNS", "compared", "figure", "medians", "ratios"]

Row = dict[str, Any]
# What makes a cell, and what is measured in it.
CELL = ("rows", "clients", "memory_share")
MEASURES = (
    *("rows_per_s", "p50_ms", "p99_ms", "disk_bytes_per_query", "peak_bytes", "used_bytes"),
    *("open_s", "warm_queries", "queries", "stolen_share"),
)
COLUMNS = (
    *("memory_share", "rows", "clients", "system", "rows_per_s", "p50_ms", "p99_ms"),
    *("disk_bytes_per_query", "peak_bytes", "used_bytes", "note"),
)


def medians(measured: Sequence[Row]) -> list[Row]:
    """Returns a row for each cell and system, by cells; what was killed has a ``note``.

    ``rows_per_s_min`` and ``rows_per_s_max`` are of the rounds.
    """
    found = []
    for cell in _cells(measured):
        of_cell = [row for row in measured if _cell(row) == cell]
        for system in dict.fromkeys(row["system"] for row in of_cell):
            rounds = [row for row in of_cell if row["system"] == system]
            told = dict(zip(CELL, cell, strict=True))
            told |= {"system": system, "memory_bytes": rounds[0]["memory_bytes"]}
            noted = [row for row in rounds if "note" in row]
            if noted:
                found.append({**told, "note": noted[0]["note"], "rounds": len(rounds)})
                continue
            for name in MEASURES:
                values = [row[name] for row in rounds if row[name] is not None]
                told[name] = median(values) if values else None
            speeds = [row["rows_per_s"] for row in rounds]
            told |= {"rows_per_s_min": min(speeds), "rows_per_s_max": max(speeds)}
            found.append({**told, "rounds": len(rounds)})
    return found


def compared(rows: Sequence[Row]) -> list[Row]:
    """Tierbed over the best of the others, cell by cell; above 1 Tierbed is ahead.

    The best of each column may be another system. Systems that have no row there count as behind.

    Args:
        rows: As of :func:`medians`.
    """
    found = []
    for cell in _cells(rows):
        of_cell = [row for row in rows if _cell(row) == cell and "rows_per_s" in row]
        ours = next((row for row in of_cell if row["system"] == OURS), None)
        others = [row for row in of_cell if row["system"] != OURS]
        if cell[-1] is None or not others:
            continue
        told: Row = dict(zip(CELL, cell, strict=True))
        fastest = max(others, key=lambda row: float(row["rows_per_s"]))
        told["best"] = fastest["system"]
        told["rows_per_s_vs_best"] = _speed(ours, fastest)
        for name in ("p50_ms", "p99_ms"):
            best = min(others, key=lambda row, name=name: float(row[name]))  # type: ignore[misc]
            told[f"best_{name}"] = best["system"]
            told[f"{name}_vs_best"] = None if ours is None else ratio(best[name], ours[name])
        found.append(told)
    return found


def ratios(measured: Sequence[Row]) -> dict[str, float | None]:
    """Tierbed next to each other system: the median of the rounds' ratios, of speed and of p99.

    ``..._p99_vs_...`` is the other's time over Tierbed's: above 1 Tierbed is ahead in both. A
    system without a limit of memory stands beside Tierbed with every limit.
    """
    told = [row for row in measured if "rows_per_s" in row]
    found: dict[str, list[float]] = {}
    for ours in told:
        for other in told:
            is_free = other["memory_share"] is None
            same = [name for name in (*CELL, "round") if not is_free or name != "memory_share"]
            if (
                ours["system"] != OURS
                or other["system"] == OURS
                or any(ours[name] != other[name] for name in same)
            ):
                continue
            cell = f"{ours['rows']}x{ours['clients']}_memory{ours['memory_share']}"
            name = f"{other['system']}_without_limit" if is_free else other["system"]
            speed = ratio(ours["rows_per_s"], other["rows_per_s"])
            found.setdefault(f"{cell}_rows_per_s_vs_{name}", []).append(speed)
            wait = ratio(other["p99_ms"], ours["p99_ms"])
            found.setdefault(f"{cell}_p99_vs_{name}", []).append(wait)
    return {name: median(values) for name, values in found.items()}


def figure(rows: Sequence[Row]) -> Callable[[Any], None]:
    """A plot of speeds for each cell, one bar a system, on one scale."""
    cells = [cell for cell in _cells(rows) if cell[-1] is not None]

    def draw(drawn: Any) -> None:
        across = max(1, (len(cells) + 1) // 2)
        plots = drawn.subplots(2, across, sharex=True, sharey=True, squeeze=False)
        names = list(dict.fromkeys(row["system"] for row in rows))
        for plot, cell in zip(plots.ravel(), cells, strict=False):
            speeds = {row["system"]: row.get("rows_per_s") for row in rows if _cell(row) == cell}
            values = [speeds.get(name) or 0.0 for name in names]
            colors = ["#b5651d" if name == OURS else "#3b6ea5" for name in names]
            plot.barh([name.replace("_", " ") for name in names], values, color=colors)
            plot.set_title(f"{cell[0]} rows, {cell[1]} clients, {cell[2]:.0%}", fontsize=8)
            plot.tick_params(labelsize=7)
        plots[0][0].invert_yaxis()
        for plot in plots[-1]:
            plot.set_xlabel("rows per second", fontsize=8)

    return draw


def _cells(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(_cell(row) for row in rows))


def _cell(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in CELL)


def _speed(ours: Row | None, other: Row) -> float | None:
    return None if ours is None else ratio(ours["rows_per_s"], other["rows_per_s"])
