"""What grows with the size of the tables: rows, checks and figure of ``bench big``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierbed_bench.common import ratio

__all__ = ["RSS_MORE_BYTES", "checks_of", "draw", "growth_of", "ratios_of"]

Row = dict[str, Any]
#: Memory that a phase may take beyond its budget and torch.
RSS_MORE_BYTES = 64 << 20
#: Row updates a second at full size, by those of the smaller size.
KEPT_RATE = 0.85

#: What is compared between sizes, by phase; a rate is better when larger.
_RATES = (
    "row_updates_per_s",
    "step_row_updates_per_s",
    "samples_per_s",
    "rows_per_s",
    "ids_per_s",
    "bytes_per_s",
)
_COSTS = (
    "seconds",
    "move_s",
    "restart_s",
    "open_s",
    "checkpoint_s",
    "checkpoint_s_max",
    "checkpoint_bytes",
    "step_ms_p50",
    "step_ms_p99",
    "bytes_per_id",
    "read_bytes_per_update",
    "written_bytes_per_update",
    "pages_read_per_update",
    "pages_written_per_update",
    "wait_count",
    "read_1_ms_p50",
    "read_10_ms_p50",
    "read_100_ms_p50",
    "read_many_ms_p50",
    "request_us_p50",
    "request_us_p99",
    "batch_ms_p99",
    "pages_read_per_row",
    "share",
    "index_bytes_per_row",
    "memory_bytes_per_row",
    "peak_rss_bytes",
    "rss_over_budget_and_torch_bytes",
    "disk_peak_by_rows",
)
#: Phases whose rates are those of the suite.
_HEADLINES = {
    ("epoch", "epoch 1"): "row_updates_per_s",
    ("epoch", "epoch 2"): "row_updates_per_s",
    ("model", "forward"): "samples_per_s",
    ("window", "file"): "row_updates_per_s",
    ("window", "cold"): "row_updates_per_s",
    ("publish", "file"): "rows_per_s",
    ("serve", "1 % of the tables"): "rows_per_s",
}


def _by_phase(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["phase"], row["variant"]), {})[row["size"]] = row
    return found


def growth_of(rows: Sequence[Row]) -> list[Row]:
    """Returns a row per phase and measure: its value at both sizes, and how it grows.

    Args:
        rows: Of all phases at all sizes.
    """
    table: list[Row] = []
    for (phase, variant), sizes in _by_phase(rows).items():
        one = {"phase": phase, "variant": variant}
        smaller, full = (sizes.get(label, {}) for label in ("smaller", "full"))
        for label, row in sizes.items():
            for name in ("skipped", "failed"):
                if name in row:
                    table.append({**one, "measure": f"{name} at {label} size: {row[name]}"})
        for name in ("is_equal", "is_killed", "sample_rows_equal"):
            values = [smaller.get(name), full.get(name)]
            if any(value is not None for value in values):
                table.append(
                    {**one, "measure": name, "smaller": _word(values[0]), "full": _word(values[1])}
                )
        for name in (*_RATES, *_COSTS):
            before, after = smaller.get(name), full.get(name)
            if before is None and after is None:
                continue
            grown = None if before is None or after is None else _growth(after, before)
            table.append(
                {**one, "measure": name, "smaller": before, "full": after, "full_by_smaller": grown}
            )
    return table


def _word(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _growth(after: float, before: float) -> float | None:
    return ratio(after, before) if before > 0 and after > 0 else None


def ratios_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """Returns rates at full size by those at the smaller one."""
    found: dict[str, float | None] = {}
    phases = _by_phase(rows)
    for (phase, variant), measure in _HEADLINES.items():
        sizes = phases.get((phase, variant), {})
        full, smaller = (sizes.get(label, {}).get(measure) for label in ("full", "smaller"))
        name = phase if variant.startswith("1 %") else f"{phase}_{variant}".replace(" ", "_")
        name = f"{name.removeprefix('epoch_')}_full_vs_smaller"
        found[name] = None if full is None or smaller is None else ratio(full, smaller)
    return found


def checks_of(rows: Sequence[Row]) -> list[Row]:
    """Returns what must hold, by size: equal bits, memory, disk, and the kept rate."""
    checks: list[Row] = []
    for row in rows:
        one = {"size": row["size"], "phase": row["phase"], "variant": row["variant"]}
        over = row.get("rss_over_budget_and_torch_bytes")
        if over is not None:
            checks.append(
                {
                    **one,
                    "check": "memory",
                    "found": over,
                    "bound": RSS_MORE_BYTES,
                    "is_met": over <= RSS_MORE_BYTES,
                }
            )
        if "failed" in row:
            checks.append({**one, "check": "no failure", "is_met": False})
        for name in ("is_equal", "sample_rows_equal"):
            if row.get(name) is not None:
                checks.append({**one, "check": "equal bits", "is_met": bool(row[name])})
    for name, value in ratios_of(rows).items():
        if name.startswith("epoch_") and value is not None:
            checks.append(
                {
                    "size": "full",
                    "phase": "epoch",
                    "variant": name,
                    "check": "rate",
                    "found": value,
                    "bound": KEPT_RATE,
                    "is_met": value >= KEPT_RATE,
                }
            )
    return checks


def draw(rows: Sequence[Row], curves: Mapping[str, list[list[float]]]) -> Callable[[Any], None]:
    """Returns what draws the rates within epochs, and how measures grow.

    Args:
        rows: Of all phases at all sizes.
        curves: By epoch: share done, seconds, and ids a second.
    """

    def onto(figure: Any) -> None:
        rates, growth = figure.subplots(1, 2)
        for name, points in curves.items():
            label = name.replace(" epoch epoch ", ", epoch ")
            if "epoch epoch" in name and "times" not in name and points:
                rates.plot(
                    [point[0] for point in points],
                    [point[2] / 1e6 for point in points],
                    label=label,
                    linestyle="-" if name.startswith("full") else "--",
                )
        rates.set_xlabel("share of the epoch")
        rates.set_ylabel("million ids a second, checkpoints left out")
        rates.set_ylim(bottom=0)
        if rates.lines:
            rates.legend(fontsize=7)
        bytes_of = {row["size"]: row["table_bytes"] for row in rows}
        proportional = bytes_of["full"] / bytes_of["smaller"]
        _draw_growth(growth, growth_of(rows), proportional)

    return onto


#: Measures whose growth is drawn.
_DRAWN = (
    ("epoch", "epoch 2", "row_updates_per_s"),
    ("model", "forward", "samples_per_s"),
    ("window", "file", "row_updates_per_s"),
    ("window", "cold", "row_updates_per_s"),
    ("plan", "forward", "seconds"),
    ("epoch", "epoch 2", "checkpoint_s"),
    ("epoch", "epoch 2", "checkpoint_bytes"),
    ("epoch", "resumed", "restart_s"),
    ("epoch", "epoch 2", "peak_rss_bytes"),
    ("publish", "file", "seconds"),
    ("serve", "1 % of the tables", "open_s"),
    ("serve", "1 % of the tables", "request_us_p99"),
)


def _draw_growth(axes: Any, table: Sequence[Row], proportional: float) -> None:
    found = {(row["phase"], row["variant"], row["measure"]): row for row in table}
    names, values = [], []
    for phase, variant, measure in _DRAWN:
        grown = found.get((phase, variant, measure), {}).get("full_by_smaller")
        if grown is not None:
            names.append(f"{variant if phase == 'epoch' else f'{phase} {variant}'}, {measure}")
            values.append(grown)
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.axvline(proportional, color="gray", linewidth=0.8, linestyle="--")
    axes.plot(values, names, "o")
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.grid(axis="y", linewidth=0.3)
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("at full size by at the smaller size (dashed: as the table)", fontsize=8)
