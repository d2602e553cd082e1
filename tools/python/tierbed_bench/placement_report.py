"""What do the rows of ``tierbed bench placement`` say? Means, ratios, tables, a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tierbed._util.report import print_table, write_json
from tierbed_bench.suite import write_suite

__all__ = ["by_log", "geometric_mean", "ratios_of", "report"]

Row = Mapping[str, Any]
PAGES = "pages_per_query"
#: What `grown` is compared with, at equal space and cache.
REPLICATED = ("maxembed", "maxembed_published")
_Point = tuple[float, float, str]
"""Cache share, ratio and method."""


def report(out: Path, rows: Sequence[Row], told: Mapping[str, Any], json_path: Path | None) -> Path:
    """Prints the tables and writes JSON, Markdown and PNG; returns the path of the JSON file."""
    ratios, tables = ratios_of(rows), by_log(rows)
    is_quiet = json_path is not None and str(json_path) == "-"
    if not is_quiet:
        for log in dict.fromkeys(row["log"] for row in rows):
            print_table(f"{log}: pages per query, one-pass, k = 10", _by_cache(rows, log))
        print_table("pages per query of one method by another's, over logs", _compared(ratios))
        for title, lines in tables.items():
            print_table(title, lines)
    # Of one log every row is: the head of the file names it.
    is_one_log = len({row["log"] for row in rows}) == 1
    written = [{k: v for k, v in row.items() if k != "log"} for row in rows] if is_one_log else rows
    path = write_suite(out, "placement", written, ratios, _figure(rows), told)
    path.with_suffix(".md").write_text("\n".join(map(_markdown, tables.items())))
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _compared(ratios: Mapping[str, float | None]) -> list[dict[str, Any]]:
    names = [name for name in ratios if not name.startswith("worst_")]
    return [
        {"ratio": name, "geometric_mean": ratios[name], "worst": ratios[f"worst_{name}"]}
        for name in names
    ]


def geometric_mean(values: Iterable[float]) -> float | None:
    """Returns the geometric mean; None without values or where one is not positive."""
    found = list(values)
    if not found or min(found) <= 0.0:
        return None
    return math.exp(sum(map(math.log, found)) / len(found))


def ratios_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """Pages per query of one method by another's, at equal space, cache and batch.

    Keys say batch, cache and ratio; ``worst_`` is the largest over the logs.
    """
    found: dict[str, float | None] = {}
    usual = [row for row in rows if row["select"] == "one_pass" and row["k"] == 10]
    at: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in usual:
        place = (row["batch"], row["cache_share"], row["ratio"], row["method"])
        at.setdefault(place, {})[row["log"]] = row[PAGES]

    def compare(name: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
        shared = at.get(one, {}).keys() & at.get(other, {}).keys()
        pairs = [(at[one][log], at[other][log]) for log in sorted(shared)]
        values = [mine / theirs for mine, theirs in pairs if theirs > 0.0]
        if values:
            found[name] = geometric_mean(values)
            found[f"worst_{name}"] = max(values)

    points = sorted({(row["batch"], row["cache_share"]) for row in usual})
    space = sorted({row["ratio"] for row in usual})
    for batch, cache in points:
        where = f"cache_{cache:g}_batch_{batch}"
        plain = (batch, cache, 0.0)
        compare(f"shp_vs_by_frequency_{where}", (*plain, "shp"), (*plain, "by_frequency"))
        for ratio in space:
            here = (batch, cache, ratio)
            named = f"{where}_ratio_{ratio:g}"
            for method in REPLICATED:
                compare(f"grown_vs_{method}_{named}", (*here, "grown"), (*here, method))
            if ratio > 0.0:
                compare(f"maxembed_vs_shp_{named}", (*here, "maxembed"), (*plain, "shp"))
        most = (batch, cache, space[-1], "maxembed")
        compare(f"grown_without_replicas_vs_maxembed_{where}", (*plain, "grown"), most)
        compare(f"grown_vs_by_frequency_{where}", (*plain, "grown"), (*plain, "by_frequency"))
    return found


def by_log(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Pages per query, one method's by another's: tables with a line per log, by title.

    Single queries, one pass with ten pages known per row. Two lines follow the logs: geometric
    mean and largest.
    """
    at: dict[_Point, dict[str, float]] = {}
    for row in rows:
        if (row["batch"], row["select"], row["k"]) == (1, "one_pass", 10):
            point = (row["cache_share"], row["ratio"], row["method"])
            at.setdefault(point, {})[row["log"]] = row[PAGES]
    caches = sorted({cache for cache, _, _ in at})
    space = sorted({ratio for _, ratio, method in at if method == "grown"})
    beside: dict[str, dict[str, tuple[_Point, _Point]]] = {method: {} for method in REPLICATED}
    frequency: dict[str, tuple[_Point, _Point]] = {}
    for cache in caches:
        here, plain = f"cache {100 * cache:g} %", (cache, 0.0, "by_frequency")
        for method, columns in beside.items():
            for ratio in space:
                points = ((cache, ratio, "grown"), (cache, ratio, method))
                columns[f"{here}, r {ratio:g}"] = points
        for method in ("shp_published", "shp", "grown"):
            frequency[f"{here}, {method}"] = ((cache, 0.0, method), plain)
    for cache in caches if space else []:
        most = (cache, space[-1], "maxembed")
        beside["maxembed"][f"cache {100 * cache:g} %, grown r 0 by maxembed r {space[-1]:g}"] = (
            (cache, 0.0, "grown"),
            most,
        )
    return {
        **{f"grown by {method}": _lines(at, columns) for method, columns in beside.items()},
        "each method without replicas by by_frequency": _lines(at, frequency),
    }


def _lines(
    at: Mapping[_Point, Mapping[str, float]], columns: Mapping[str, tuple[_Point, _Point]]
) -> list[dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for name, (one, other) in columns.items():
        mine, theirs = at.get(one, {}), at.get(other, {})
        for log in mine.keys() & theirs.keys():
            if theirs[log] > 0.0:
                lines.setdefault(log, {"log": log})[name] = mine[log] / theirs[log]
    every = [lines[log] for log in sorted(lines)]
    names = [name for name in columns if any(name in line for line in every)]
    of = {name: [line[name] for line in every if name in line] for name in names}
    mean = {name: geometric_mean(values) for name, values in of.items()}
    ordered = [{"log": line["log"], **{n: line[n] for n in names if n in line}} for line in every]
    if not every:
        return []
    return [
        *ordered,
        {"log": f"geometric mean of {len(every)}", **mean},
        {"log": "largest", **{name: max(values) for name, values in of.items()}},
    ]


def _markdown(table: tuple[str, Sequence[Row]]) -> str:
    title, lines = table
    names = list(lines[0]) if lines else []
    told = [[_told(line.get(name)) for name in names] for line in lines]
    rows = [names, ["---"] * len(names), *told]
    return "\n".join([f"{title}:", "", *(f"| {' | '.join(row)} |" for row in rows), ""])


def _told(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value or "")


def _by_cache(rows: Sequence[Row], log: str) -> list[dict[str, Any]]:
    """One line per method and ratio, one column per cache and batch."""
    lines: dict[tuple[str, float], dict[str, Any]] = {}
    for row in rows:
        if row["log"] != log or row["select"] != "one_pass" or row["k"] != 10:
            continue
        line = lines.setdefault(
            (row["method"], row["ratio"]), {"method": row["method"], "ratio": row["ratio"]}
        )
        line[f"cache {row['cache_share']:g}, batch {row['batch']}"] = row[PAGES]
        if row["cache_share"] == 0.0 and row["batch"] == 1:
            line["useful_rows_per_page"] = row["useful_rows_per_page"]
            line["build_s"] = row["build_s"]
    return list(lines.values())


def _figure(rows: Sequence[Row]) -> Callable[[Any], None]:
    """Pages per query by space, as a share of SHP's; one plot per cache, means over logs."""
    caches = sorted({row["cache_share"] for row in rows})

    def draw(figure: Any) -> None:
        plots = figure.subplots(1, len(caches), sharey=True, squeeze=False)[0]
        for plot, cache in zip(plots, caches, strict=True):
            lines = _shares_of_shp(rows, cache)
            for method, points in lines.items():
                ratios, shares = zip(*sorted(points.items()), strict=True)
                plot.plot(ratios, shares, marker="o", label=method)
            plot.set_title(f"cache {100 * cache:g} %")
            plot.set_xlabel("replicas per row")
        plots[0].set_ylabel("pages per query, share of SHP's")
        plots[0].legend()

    return draw


def _shares_of_shp(rows: Sequence[Row], cache: float) -> dict[str, dict[float, float]]:
    wanted = [
        row
        for row in rows
        if (row["cache_share"], row["batch"], row["select"], row["k"]) == (cache, 1, "one_pass", 10)
    ]
    base = {row["log"]: row[PAGES] for row in wanted if row["method"] == "shp"}
    shares: dict[str, dict[float, list[float]]] = {}
    for row in wanted:
        if base.get(row["log"], 0.0) > 0.0:
            by_ratio = shares.setdefault(row["method"], {})
            by_ratio.setdefault(row["ratio"], []).append(row[PAGES] / base[row["log"]])
    return {
        method: {ratio: geometric_mean(values) or 0.0 for ratio, values in by_ratio.items()}
        for method, by_ratio in shares.items()
    }
