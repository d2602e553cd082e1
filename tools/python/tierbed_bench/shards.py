"""How many shards do later queries need, by hash, by ranges of ids and by placement?

Shards are made from the earlier part of a log and judged on the later part. All that is counted
repeats exactly; only ``build_s`` is a time. *Imbalance* is the busiest shard's share of the mean:
of rows asked for, of queries that need it, and of rows that it holds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tierbed._util.progress import Progress
from tierbed._util.report import print_table, write_json
from tierbed.config.words import LogFormat, Positive, Share
from tierbed.errors import InvalidError
from tierbed.placement.build import LogOptions, QueryLog
from tierbed.placement.log_files import read_log
from tierbed.placement.shards import RowShards, ShardOptions, divide_rows
from tierbed_bench.generator import GeneratedData, scale_for_rows
from tierbed_bench.placement_report import geometric_mean
from tierbed_bench.suite import write_suite

__all__ = ["ShardsOptions", "run_shards"]

Row = dict[str, Any]
GENERATED = "generated"
#: What of a folder is a log.
_LOGS = ("*.txt", "*.txt.gz", "*.txt.zst")


@dataclass(frozen=True, kw_only=True)
class ShardsOptions:
    """What to measure.

    Args:
        logs: Query logs, each measured for itself; of a folder all texts in it.
        log_format: maxembed is binary; auto goes by the name.
        split: Share of the queries that shards are made from: the earlier ones.
        shards: Numbers of shards.
        tolerance: Rows and load that a shard may have beyond the mean, as a share.
        samples: Samples of the generated log; 0 leaves it out.
        rows: Rows of the generated log at most.
        queries_max: Read this many queries at most.
        seed: Of all that is drawn.
        threads: They change times, never counts.
    """

    logs: Sequence[Path] = ()
    log_format: LogFormat = "auto"
    split: Share = 0.8
    shards: tuple[int, ...] = (8, 64)
    tolerance: float = 0.05
    samples: int = 200_000
    rows: Positive = 400_000
    queries_max: int | None = None
    seed: int = 1
    threads: Positive = 1


def run_shards(out: Path, options: ShardsOptions, json_path: Path | None = None) -> Path:
    """Runs the suite and writes ``shards.json`` and ``shards.png`` to ``out``."""
    files = list(dict.fromkeys(file for path in options.logs for file in _files(path)))
    named: list[tuple[str, Callable[[], QueryLog]]] = [
        (_name(file), partial(_read, file, options)) for file in files
    ]
    if options.samples > 0:
        named.append((GENERATED, partial(_generated, options)))
    if not named:
        raise InvalidError("name a query log with --log, or samples of the generated one")
    orders = {_name(file): _order(file) for file in files}
    rows: list[Row] = []
    logs: list[Row] = []
    with Progress("logs", len(named), "logs") as bar:
        for name, read in named:
            log, order = read(), orders.get(name, "time")
            if order == "drawn":
                log = log.shuffled(options.seed)
            sizes = {"rows": log.row_count, "queries": len(log), "pins": log.pin_count}
            logs.append({"log": name, "order": order, **sizes})
            rows += [{"log": name, **row} for row in _measure(log, options)]
            bar.advance(1, name)
    told = {"logs": logs, "split": options.split, "tolerance": options.tolerance}
    ratios = _ratios(rows)
    path = write_suite(out, "shards", rows, ratios, _figure(rows), told)
    if json_path is None or str(json_path) != "-":
        for shards in options.shards:
            print_table(f"shards per later query, {shards} shards", _lines(rows, shards))
    if json_path is not None:
        write_json(json_path, json.loads(path.read_text()))
    return path


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for ending in _LOGS for file in path.rglob(ending))


def _name(path: Path) -> str:
    return path.name.split(".")[0]


def _order(path: Path) -> str:
    """Whether a log is in order of time, as ``NAME.meta.json`` beside it says; else it is drawn."""
    about = path.with_name(f"{_name(path)}.meta.json")
    if not about.is_file():
        return "time"
    split = json.loads(about.read_text()).get("split", {})
    return "time" if split.get("time_ordered", True) else "drawn"


def _read(path: Path, options: ShardsOptions) -> QueryLog:
    given = LogOptions(query_count_max=options.queries_max, seed=options.seed)
    return read_log(path, options.log_format, given)


def _generated(options: ShardsOptions) -> QueryLog:
    data = GeneratedData(scale_for_rows(options.rows), options.samples, 1 << 12, options.seed)
    batches = data.batches(0, options.samples, 1 << 12)
    return QueryLog.from_samples(dict(data.table_sizes()), (batch.sparse for batch in batches))


def _measure(log: QueryLog, options: ShardsOptions) -> Iterator[Row]:
    earlier, later = log.split(options.split)
    if not len(earlier) or not len(later):
        raise InvalidError(f"--split {options.split} leaves a part of the log empty")
    for count in options.shards:
        given = ShardOptions(
            shards=count,
            tolerance=options.tolerance,
            seed=options.seed,
            threads=options.threads,
        )
        started_s = time.perf_counter()
        placed = divide_rows(earlier, given)
        build_s = time.perf_counter() - started_s
        ways = {
            "hash": (RowShards.by_hash(count, log.row_count), 0.0),
            "rows": (RowShards.by_rows(count, log.row_count), 0.0),
            "placement": (placed, build_s),
        }
        for by, (shards, seconds) in ways.items():
            reads, held = shards.reads(later), shards.row_counts()
            yield {
                "shards": count,
                "by": by,
                "shards_per_query": reads.shards_per_query,
                "shards_per_query_earlier": shards.reads(earlier).shards_per_query,
                "load_imbalance": reads.rows_imbalance,
                "query_imbalance": reads.queries_imbalance,
                "rows_imbalance": max(held) * count / sum(held),
                "build_s": seconds,
            }


def _ratios(rows: Sequence[Row]) -> dict[str, float | None]:
    """Shards per query of one division by another's: means over logs, and the largest."""
    found: dict[str, float | None] = {}
    at = {(row["log"], row["shards"], row["by"]): row["shards_per_query"] for row in rows}
    logs = list(dict.fromkeys(row["log"] for row in rows))
    for shards in sorted({row["shards"] for row in rows}):
        for other in ("hash", "rows"):
            values = {
                log: at[log, shards, "placement"] / at[log, shards, other]
                for log in logs
                if at[log, shards, other] > 0.0
            }
            name = f"placement_vs_{other}_{shards}"
            found[name] = geometric_mean(values.values())
            found[f"worst_{name}"] = max(values.values(), default=None)
            if other == "hash":
                found.update({f"{name}_{log}": value for log, value in values.items()})
    return found


def _lines(rows: Sequence[Row], shards: int) -> list[Row]:
    lines: dict[str, Row] = {}
    for row in rows:
        if row["shards"] == shards:
            line = lines.setdefault(row["log"], {"log": row["log"]})
            line[row["by"]] = row["shards_per_query"]
            if row["by"] != "rows":
                line[f"load imbalance, {row['by']}"] = row["load_imbalance"]
    for line in lines.values():
        line["placement by hash"] = line["placement"] / line["hash"] if line["hash"] else None
    return list(lines.values())


def _figure(rows: Sequence[Row]) -> Callable[[Any], None]:
    """Shards per query by placement, as a share of those by hash; a bar per log."""
    counts = sorted({row["shards"] for row in rows})

    def draw(figure: Any) -> None:
        plots = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
        for plot, shards in zip(plots, counts, strict=True):
            lines = _lines(rows, shards)
            plot.barh(
                [line["log"] for line in lines],
                [line["placement by hash"] or 0.0 for line in lines],
            )
            plot.set_title(f"{shards} shards")
            plot.set_xlabel("shards per query, by hash = 1")

    return draw
