"""Measurements of `docs/results/data`: their form, their checks, and the pages made of them.

A file holds one suite. What a benchmark writes (`tierbed bench ... --out`) is read as it is;
a file that joins several runs has the form of :class:`Suite`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

Cell = str | int | float | None
T = TypeVar("T")

OUTCOMES = ("better", "equal", "worse", "loss")


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Bars or lines of some columns of a table; the first column names the groups."""

    columns: list[str]
    kind: str = "bar"
    unit: str = ""
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """Measurements side by side; the first column says of what."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    chart: Chart | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One measurement beside what it is compared with.

    Args:
        claim: What was compared, in words.
        measurement: The number.
        unit: Its unit; `x` for a ratio.
        baseline: What the number is compared with, or the number a paper states.
        outcome: `better`, `equal` or `worse` than the baseline; `loss` where it is a cost.
    """

    claim: str
    measurement: float | str
    unit: str
    baseline: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One command on one machine.

    Args:
        title: What was run.
        command: As typed.
        machine: Processor, and what else ran.
        date: Year, month and day.
        commit: Version that was measured.
        notes: What a reader must know; one sentence each.
        claims: The comparisons that hold for this run.
        tables: The measurements.
    """

    title: str
    command: str
    machine: str
    date: str
    commit: str
    notes: list[str] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """All runs of one suite."""

    suite: str
    title: str
    summary: str
    runs: list[Run]


def load(folder: Path) -> list[Suite]:
    """Reads every suite of a folder, sorted by name.

    Raises:
        ValueError: A file that has not the form of a suite; names file and field.
    """
    return [read(path) for path in sorted(folder.glob("*.json"))]


def read(path: Path) -> Suite:
    """Reads one file; see :func:`load`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        suite = _suite(value) if "runs" in value else _of_bench(value)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    if suite.suite != path.stem:
        raise ValueError(f"{path.name}: the suite is called {suite.suite}")
    return suite


def _suite(value: Mapping[str, Any]) -> Suite:
    return _made(Suite, {**value, "runs": [_run(run) for run in value["runs"]]})


def _run(value: Mapping[str, Any]) -> Run:
    claims = [_made(Claim, claim) for claim in value.get("claims", [])]
    for claim in claims:
        if claim.outcome not in OUTCOMES:
            raise ValueError(f"outcome of {claim.claim!r} is none of {', '.join(OUTCOMES)}")
    tables = [_table(table) for table in value.get("tables", [])]
    return _made(Run, {**value, "claims": claims, "tables": tables})


def _table(value: Mapping[str, Any]) -> Table:
    chart = _made(Chart, value["chart"]) if value.get("chart") else None
    table = _made(Table, {**value, "chart": chart})
    for row in table.rows:
        if len(row) != len(table.columns):
            raise ValueError(f"{table.title}: a row of {len(row)} cells: {row}")
    unknown = set(chart.columns) - set(table.columns) if chart else set()
    if unknown:
        raise ValueError(f"{table.title}: no column {sorted(unknown)} to draw")
    return table


def _made(kind: type[T], value: Mapping[str, Any]) -> T:
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    unknown = set(value) - known
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {sorted(unknown)}")
    return kind(**value)


def _of_bench(value: Mapping[str, Any]) -> Suite:
    """Reads what the benchmarks write: `rows` become a table, `ratios` become claims."""
    rows = value["rows"]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(
        title="Measurements",
        columns=[name.replace("_", " ") for name in columns],
        rows=[[_cell(row.get(name)) for name in columns] for row in rows],
    )
    claims = [
        Claim(
            claim=name.replace("_", " "),
            measurement=round(ratio, 2),
            unit="x",
            baseline=name.partition("_vs_")[2].replace("_", " ") or "baseline",
            outcome="equal" if abs(ratio - 1) < 0.01 else "better" if ratio > 1 else "worse",
        )
        for name, ratio in value.get("ratios", {}).items()
        if ratio is not None
    ]
    machine = value["machine"]
    run = Run(
        title="One run",
        command=value["command"],
        machine=f"{machine['cpu']}, {machine['cpu_count']} cores, torch {machine['torch']}",
        date=value["date"][:10],
        commit=str(value.get("commit") or machine["tierbed"]),
        claims=claims,
        tables=[table],
    )
    name = value["suite"]
    return Suite(suite=name, title=f"Benchmark {name}", summary="", runs=[run])


def _cell(value: Any) -> Cell:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value if value is None or isinstance(value, (str, int)) else json.dumps(value)


def chart_name(suite: Suite, run: int, table: int) -> str:
    """Returns the file name of a table's chart."""
    return f"{suite.suite}-{run + 1}-{table + 1}.svg"


def page(suite: Suite) -> str:
    """Renders the page of a suite."""
    parts = [f"# {suite.title}\n", f"{suite.summary}\n"]
    for run_at, run in enumerate(suite.runs):
        parts.append(f"## {run.title}\n")
        if run.claims:
            head = ["claim", "measured", "compared with", ""]
            parts.append(_markdown(head, [_claim(claim) for claim in run.claims]))
        for table_at, table in enumerate(run.tables):
            parts.append(f"**{table.title}**\n")
            if table.chart:
                name = chart_name(suite, run_at, table_at)
                parts.append(f"![{table.title}](charts/{name})\n")
            parts.append(_markdown(table.columns, table.rows))
        parts.extend(f"{note}\n" for note in run.notes)
        parts.append(f"Measured {run.date} at `{run.commit}`. {_begin(run.machine)}.\n")
        parts.append(f"```console\n$ {run.command}\n```\n")
    return "\n".join(parts)


def index(suites: list[Suite]) -> str:
    """Renders the claims of all suites, run after run, with machine, date and command."""
    parts = []
    for suite in suites:
        parts.append(f"## [{suite.title}]({suite.suite}.md)\n")
        for run in suite.runs:
            if run.claims:
                head = ["claim", "measured", "compared with", ""]
                parts.append(_markdown(head, [_claim(claim) for claim in run.claims]))
                parts.append(f"{run.title}, {run.date}. {_begin(run.machine)}. `{run.command}`\n")
    return "\n".join(parts)


def _begin(text: str) -> str:
    """Returns a text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def _claim(claim: Claim) -> list[Cell]:
    unit = "x" if claim.unit == "x" else f" {claim.unit}".rstrip()
    return [claim.claim, f"{_shown(claim.measurement)}{unit}", claim.baseline, claim.outcome]


def _markdown(columns: list[str], rows: list[list[Cell]]) -> str:
    is_number = [
        any(isinstance(row[at], (int, float)) for row in rows) for at in range(len(columns))
    ]
    rule = "|".join("---:" if number else "---" for number in is_number)
    lines = ["| " + " | ".join(columns) + " |", f"|{rule}|"]
    lines += ["| " + " | ".join(_shown(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    if isinstance(cell, float) and "e" in str(cell):
        return f"{cell:.9f}".rstrip("0")
    return str(cell)
