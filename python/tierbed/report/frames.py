"""Frames of ``tierbed top``: a training run, or a server, on a terminal of any width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tierbed.report.parts import bytes_text, count_text, share_text

__all__ = ["Meter", "server_frame", "training_frame"]

# Rates are of so many seconds, as far as there are points.
RECENT_S = 5.0
# A run that said nothing for so long is not stepping.
QUIET_S = 5.0
_PAGE_BYTES = 4096
_FIGURE_WIDTH = 19
# Of a server that has not looked twice at its counters.
_NOTHING_YET: Mapping[str, Any] = {
    "seconds": None,
    "latency": None,
    **dict.fromkeys(
        ("requests_per_s", "rows_per_s", "refused_per_s", "failed_per_s", "pages_read_per_s"),
        math.nan,
    ),
}

Figures = Sequence[tuple[str, str]]


class Meter:
    """A bar that is as wide as its column.

    Args:
        ratio: From 0 to 1.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = min(1.0, max(0.0, ratio))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 30)
        done = round(width * self.ratio)
        full, rest = ("━", "·") if console.encoding.startswith("utf") else ("#", ".")
        yield Segment(full * done, Style(color="cyan"))
        yield Segment(rest * (width - done), Style(color="bright_black"))


def training_frame(
    told: Mapping[str, Any], name: str, now_s: float, is_alive: bool | None, width: int
) -> RenderableType:
    """Returns a frame of a training run.

    Args:
        told: What its file of progress says.
        name: What the run is called.
        now_s: Seconds since 1970.
        is_alive: Whether its process runs; None where that cannot be told.
        width: Columns of the terminal.
    """
    counts, points = told["counts"], told["points"]
    state, style, is_over = _state_of(told, now_s, is_alive)
    before, seconds = _base(points, told["written_s"], is_over)

    def per_s(column: str) -> float:
        return (counts[column] - before.get(column, 0)) / seconds if seconds else math.nan

    figures = [
        ("steps/s", _rate(per_s("steps"))),
        ("rows/s", _rate(per_s("ids"))),
        ("read/s", _byte_rate(per_s("read_bytes"))),
        ("written/s", _byte_rate(per_s("write_bytes"))),
        ("steps", f"{counts['steps']:,}"),
        ("rows looked up", count_text(counts["ids"])),
        ("on disk", bytes_text(told["disk_bytes"])),
        ("order", told["order"]["kind"]),
    ]
    tiers = [
        (column.removeprefix("tier:"), count - before.get(column, 0), count)
        for column, count in counts.items()
        if column.startswith("tier:")
    ]
    span = "rates are means of the run" if is_over else f"rates are of the last {seconds:.0f} s"
    ran_s = told["written_s"] - told["start_s"]
    return Group(
        _head(name, state, style, f"training for {_span(ran_s)}, process {told['pid']}, {span}"),
        _figures(figures, width),
        _tiers(tiers, width),
        _memory(_parts(told["budget"]), told["budget"]["limit_bytes"], width),
    )


def server_frame(stats: Mapping[str, Any], url: str, width: int) -> RenderableType:
    """Returns a frame of a server.

    Args:
        stats: What its ``/stats`` answers.
        url: Where it was asked.
        width: Columns of the terminal.
    """
    recent = stats["recent"] or _NOTHING_YET
    latency = recent["latency"] or {"p50_us": None, "p99_us": None, "p999_us": None}
    queue, open_ = stats["queue"], stats["connections"]
    figures = [
        ("requests/s", _rate(recent["requests_per_s"])),
        ("rows/s", _rate(recent["rows_per_s"])),
        ("refused/s", _rate(recent["refused_per_s"])),
        ("failed/s", _rate(recent["failed_per_s"])),
        ("latency p50", _time(latency["p50_us"])),
        ("latency p99", _time(latency["p99_us"])),
        ("latency p99.9", _time(latency["p999_us"])),
        ("read/s", _byte_rate(recent["pages_read_per_s"] * _PAGE_BYTES)),
        ("in the queue", f"{queue['requests']:,}"),
        ("predicted wait", _time(queue["wait_us"])),
        ("in flight", f"{queue['in_flight']:,} of {queue['in_flight_max']:,}"),
        ("connections", f"{open_['open']:,} of {open_['open_max']:,}"),
    ]
    seconds = recent["seconds"]
    row_count = recent["rows_per_s"] * seconds if seconds else 0.0
    tiers = [
        (tier["name"], (tier["recent_ratio"] or 0.0) * row_count, tier["rows"])
        for tier in stats["tiers"]
    ]
    state = stats["state"]
    style = "green" if state == "ready" else "yellow"
    span = "" if seconds is None else f", rates are of the last {seconds:.0f} s"
    about = f"{stats['model']} at {url}, up {_span(stats['uptime_s'])}{span}"
    memory = stats["memory"]
    parts = sorted(memory["parts_bytes"].items(), key=lambda part: -part[1])
    faults = [
        Text(f"{one['kind']}: {one['count']:,} times, {one['message']}", style="red")
        for one in stats["faults"]
    ]
    return Group(
        _head(stats["snapshot"], state, style, about),
        _figures(figures, width),
        _tiers(tiers, width),
        _memory(parts, memory["budget_bytes"], width),
        *faults,
    )


def _state_of(
    told: Mapping[str, Any], now_s: float, is_alive: bool | None
) -> tuple[str, str, bool]:
    """Returns the state, its style, and whether the run is over."""
    if told["state"] == "closed":
        return "closed", "bright_black", True
    if is_alive is False:
        return "its process has ended", "red", True
    quiet_s = now_s - told["written_s"]
    if quiet_s > QUIET_S:
        return f"no step for {_span(quiet_s)}", "yellow", False
    return "training", "green", False


def _base(
    points: Mapping[str, Sequence[float]], until_s: float, is_over: bool
) -> tuple[Mapping[str, float], float]:
    """Returns counts that rates are measured from, and the seconds since."""
    moments = points["at_s"]
    old = [at for at, moment in enumerate(moments) if moment <= until_s - RECENT_S]
    at = old[-1] if old and not is_over else 0
    if not moments or moments[at] >= until_s:
        return {}, 0.0
    return {name: column[at] for name, column in points.items()}, until_s - moments[at]


def _parts(budget: Mapping[str, Any]) -> list[tuple[str, int]]:
    used = [(name, part["used_bytes"]) for name, part in budget["parts"].items()]
    return sorted((part for part in used if part[1]), key=lambda part: -part[1])


def _head(name: str, state: str, style: str, about: str) -> RenderableType:
    return Group(
        Text.assemble(("tierbed ", "bold"), (name, "bold"), "  ", (state, f"bold {style}")),
        Text(about, style="bright_black"),
        Text(),
    )


def _figures(figures: Figures, width: int) -> RenderableType:
    across = max(1, min(4, width // _FIGURE_WIDTH))
    grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
    for _ in range(across):
        grid.add_column(ratio=1)
    # A narrow terminal has no lines to spare.
    below = "\n" if across > 2 else ""
    cells = [
        Text.assemble((value, "bold"), "\n", (name, "bright_black"), below)
        for name, value in figures
    ]
    for at in range(0, len(cells), across):
        grid.add_row(*cells[at : at + across])
    return grid if across > 2 else Group(grid, Text())


def _tiers(tiers: Sequence[tuple[str, float, int]], width: int) -> RenderableType:
    """Shows name, rows of late and rows since the start of each tier."""
    late = sum(rows for _, rows, _ in tiers)
    names = [name for name, _, _ in tiers]
    table = _table("rows came from", ("recent", "since the start"), names, width)
    for name, recent, rows in tiers:
        ratio = recent / late if late else 0.0
        table.add_row(
            *_row(name, ratio, (share_text(ratio) if late else "n/a", count_text(rows)), width)
        )
    return Group(table, Text())


def _memory(parts: Sequence[tuple[str, int]], limit: int, width: int) -> RenderableType:
    named = [("all parts", sum(size for _, size in parts))]
    named += [(name.replace("_", " "), size) for name, size in parts]
    title, names = f"memory of {bytes_text(limit)}", [name for name, _ in named]
    table = _table(title, ("of the budget", "bytes"), names, width)
    for name, size in named:
        texts = (share_text(size / limit), bytes_text(size))
        table.add_row(*_row(name, size / limit, texts, width))
    return table


def _table(title: str, columns: tuple[str, str], names: Sequence[str], width: int) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="bright_black")
    longest = min(max(map(len, [title, *names])), width // 2)
    if width >= 50:
        table.add_column(title, width=longest, no_wrap=True, overflow="ellipsis")
        table.add_column("", ratio=1)
    else:
        table.add_column(title, ratio=1, no_wrap=True, overflow="ellipsis")
    for name in columns if width >= 40 else columns[:1]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _row(name: str, ratio: float, texts: tuple[str, str], width: int) -> list[RenderableType]:
    meter: list[RenderableType] = [Meter(ratio)] if width >= 50 else []
    return [Text(name), *meter, *(texts if width >= 40 else texts[:1])]


def _rate(per_s: float) -> str:
    return "n/a" if math.isnan(per_s) else count_text(round(per_s, 1))


def _byte_rate(per_s: float) -> str:
    return "n/a" if math.isnan(per_s) else bytes_text(per_s)


def _time(us: float | None) -> str:
    if us is None:
        return "n/a"
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.0f} µs"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
