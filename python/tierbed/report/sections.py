"""Sections that reports of stores, snapshots and folders share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tierbed.report.budgets import Estimates
from tierbed.report.parts import (
    Bar,
    Column,
    Figure,
    Lines,
    Note,
    Part,
    Table,
    bytes_text,
    count_text,
    share_text,
)

__all__ = [
    "another_budget",
    "memory_figure",
    "memory_part",
    "over_time",
    "tables_part",
    "tiers_part",
]

_SCALE_NAMES = {0.125: "1/8", 0.25: "1/4", 0.5: "half", 1.0: "now", 2.0: "double", 4.0: "4 x"}
_SCALE_NAMES[8.0] = "8 x"
_ASKED = (0.5, 1.0, 2.0)


def memory_figure(budget: Mapping[str, Any]) -> Figure:
    """Returns how much of the budget is in use."""
    used, limit = budget["used_bytes"], budget["limit_bytes"]
    return Figure(
        name="Memory in use",
        value=bytes_text(used),
        note=f"{share_text(used / limit)} of the budget of {bytes_text(limit)}",
    )


def memory_part(budget: Mapping[str, Any]) -> Table:
    """Returns memory by part against the budget, the largest part first."""
    limit = budget["limit_bytes"]
    parts = sorted(budget["parts"].items(), key=lambda part: -part[1]["peak_bytes"])
    named = [("all parts", budget), *((name.replace("_", " "), part) for name, part in parts)]
    rows = [
        (
            name,
            Bar(ratio=part["used_bytes"] / limit, text=share_text(part["used_bytes"] / limit)),
            bytes_text(part["used_bytes"]),
            bytes_text(part["peak_bytes"]),
        )
        for name, part in named
        if part["peak_bytes"]
    ]
    return Table(
        title=f"Memory, of a budget of {bytes_text(limit)}",
        columns=[
            Column(name="part"),
            Column(name="share of the budget"),
            Column(name="in use", is_number=True),
            Column(name="most", is_number=True, is_wide=True),
        ],
        rows=rows,
        current=0,
    )


def tiers_part(tiers: Mapping[str, int], note: str) -> Part:
    """Returns where rows came from, as shares of all."""
    total = sum(tiers.values())
    if not total:
        return Note(title="Where rows came from", text="No row was looked up yet.")
    rows = [
        (name, Bar(ratio=count / total, text=share_text(count / total)), count_text(count))
        for name, count in tiers.items()
    ]
    return Table(
        title="Where rows came from",
        columns=[
            Column(name="tier"),
            Column(name="share of the rows"),
            Column(name="rows", is_number=True),
        ],
        rows=rows,
        note=note,
    )


def rates(points: Mapping[str, Sequence[float]], name: str) -> list[tuple[float, float]]:
    """Returns what was counted per second between points, at seconds since the first."""
    moments, counts = points["at_s"], points[name]
    return [
        (moments[at] - moments[0], (counts[at] - counts[at - 1]) / (moments[at] - moments[at - 1]))
        for at in range(1, len(moments))
        if moments[at] > moments[at - 1]
    ]


def over_time(points: Mapping[str, Sequence[float]], step: str) -> list[Part]:
    """Returns lines of rates: steps, rows, bytes read and written.

    Args:
        points: Columns of a history.
        step: What a step is called.
    """
    shown = [
        (f"{step.capitalize()} per second", "steps", count_text),
        ("Rows per second", "ids", count_text),
        ("Read per second", "read_bytes", bytes_text),
        ("Written per second", "write_bytes", bytes_text),
    ]
    if len(points.get("at_s", ())) < 3:
        text = "Less than a second of lookups was seen: there is no line to draw yet."
        return [Note(title="Over time", text=text, width="full")]
    parts: list[Lines] = []
    for title, name, text_of in shown:
        line = rates(points, name)
        if name == "write_bytes" and not any(y for _, y in line):
            continue
        most = max((y for _, y in line), default=0.0)
        parts.append(
            Lines(
                title=title,
                points=line,
                highest=f"at most {text_of(most)}",
                scale=[f"{line[0][0]:.1f} s", f"{line[-1][0]:.1f} s"],
            )
        )
    width = "third" if len(parts) == 3 else "half"
    return [replace(part, width=width) for part in parts]


def another_budget(estimates: Estimates) -> list[Part]:
    """Returns what half and double the budget would bring, and the curve around them."""
    rows = []
    for one in (estimates.at(scale) for scale in _ASKED):
        is_any = one.row_capacity > 0
        rows.append(
            (
                _SCALE_NAMES[one.scale],
                bytes_text(one.budget_bytes),
                count_text(one.row_capacity) if is_any else "too small",
                Bar(ratio=one.hit_ratio, text=share_text(one.hit_ratio)) if is_any else "",
            )
        )
    note = estimates.how[0].upper() + estimates.how[1:] + "."
    if estimates.measured_ratio is not None:
        note += f" Counted by the engine, now: {share_text(estimates.measured_ratio)}."
    if estimates.first_use_ratio is not None:
        note += (
            f" {share_text(estimates.first_use_ratio)} were the first use of a row, which no "
            "budget finds in memory."
        )
    large = [one for one in estimates.budgets if one.row_capacity]
    curve = [(float(at), one.hit_ratio) for at, one in enumerate(large)]
    now = next(at for at, one in enumerate(large) if one.scale == 1.0)
    return [
        Table(
            title="Another budget",
            columns=[
                Column(name="budget"),
                Column(name="bytes", is_number=True, is_wide=True),
                Column(name="rows held", is_number=True, is_wide=True),
                Column(name="rows found in memory"),
            ],
            rows=rows,
            note=note,
            current=_ASKED.index(1.0),
        ),
        Lines(
            title="Rows found in memory, by budget",
            points=curve,
            highest=f"up to {share_text(max(y for _, y in curve))}",
            scale=[_SCALE_NAMES[one.scale] for one in large],
            width="half",
            top=1.0,
            now=float(now),
        ),
    ]


def tables_part(tables: Sequence[Mapping[str, str]], note: str = "") -> Table:
    """Returns the tables, whose fields are columns; the first field is their name."""
    names = list(tables[0]) if tables else ["name"]
    words = ("name", "optimizer", "codec")
    wide = ("optimizer", "codec", "stored")
    columns = [
        Column(name=name, is_number=name not in words, is_wide=name in wide) for name in names
    ]
    rows = [[table[name] for name in names] for table in tables]
    return Table(title="Tables", columns=columns, rows=rows, width="full", note=note)
