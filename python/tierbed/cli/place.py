"""``place``: which rows share a page, from a query log; and how a placement ages."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tierbed._util.progress import Progress
from tierbed._util.report import print_table, write_json
from tierbed.cli.fields import Fields, add
from tierbed.cli.options import JsonOut, LogFormat, finish, shows_tables
from tierbed.config import words
from tierbed.errors import InvalidError
from tierbed.placement.build import (
    LogOptions,
    PageReads,
    Placement,
    PlaceOptions,
    QueryLog,
    place_each,
    rows_per_page_of,
)
from tierbed.placement.drift import Drift, measure_drift
from tierbed.placement.log_columns import parse_columns
from tierbed.placement.log_files import read_columns, read_log
from tierbed.placement.ray_cluster import place_on_ray, ray_cluster
from tierbed.placement.ray_log import RayQueryLog
from tierbed.placement.shards import RowShards, ShardOptions, divide_rows

__all__ = ["PLACEMENT_FILE", "inspect_placement", "placement_file", "register"]

PLACEMENT_FILE = "placement.tbp"
#: What of a build is done, until the placement is written.
UNFINISHED = "unfinished"

Log = Annotated[
    str,
    typer.Option(
        "--log",
        metavar="FILE",
        help="The query log, plain or compressed; with --columns also a pattern, or s3://...",
    ),
]


def placement_file(path: Path) -> Path | None:
    """Returns the placement file at or in ``path``; None when there is none."""
    inside = path / PLACEMENT_FILE
    if inside.is_file():
        return inside
    return path if path.is_file() and path.suffix == ".tbp" else None


@dataclass(frozen=True, kw_only=True)
class Judging:
    """What the placement is built from and judged by.

    Args:
        ratio: Replicas per row of the table.
        cache_share: Rows cached in front, as a share of the rows.
        cache_policy: Eviction policy of that cache.
        split: Build from this earlier share, judge on the rest.
    """

    ratio: float = 0.1
    cache_share: float = 0.0
    cache_policy: str = "s3_fifo"
    split: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Ageing:
    """How a placement ages; nothing is placed.

    Args:
        drift: Place nothing: say how this placement ages on the log.
        slices: Slices of time of the log.
        tolerance: Further reads that are still fine.
    """

    drift: Path | None = None
    slices: int = 10
    tolerance: float = 0.05


def place_(
    log: Log,
    *,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the placement and its report.")
    ] = None,
    log_format: LogFormat = "auto",
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="A,B=ROWS",
            help="The log is columns: each record is a query, each column ids of a table.",
        ),
    ] = None,
    reading: Annotated[
        LogOptions,
        Fields(
            skip=("seed", "query_count_max"),
            names={"row_count": "rows", "query_rows_max": "query-rows"},
        ),
    ],
    rows_per_page: Annotated[
        int | None, typer.Option("--rows-per-page", min=1, help="Rows of a page; or give --dim.")
    ] = None,
    dim: Annotated[
        int | None, typer.Option("--dim", help="Elements of a row; or give --rows-per-page.")
    ] = None,
    codec: Annotated[
        words.PageCodec, typer.Option("--codec", help="With --dim: how the snapshot keeps rows.")
    ] = "f32",
    options: Annotated[PlaceOptions, Fields(skip=("rows_per_page", "iterations"))],
    judging: Annotated[Judging, Fields()],
    ray: Annotated[
        str | None,
        typer.Option("--ray", help="Build on a Ray cluster: its address, or local."),
    ] = None,
    mapping: Annotated[
        Path | None, typer.Option("--mapping", help="Write MaxEmbed's mapping here, too.")
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option("--shards", min=1, help="Also divide the rows into so many shards."),
    ] = None,
    shard_tolerance: Annotated[
        float,
        typer.Option(
            "--shard-tolerance",
            min=0.0,
            max=10.0,
            help="With --shards: rows and load that one may have beyond the mean, as a share.",
        ),
    ] = 0.05,
    ageing: Annotated[Ageing, Fields(title="Drift")],
    json_path: JsonOut = None,
) -> None:
    """Choose which rows share a page, and which deserve several, from a query log."""
    reading = replace(reading, seed=options.seed)
    source = _Source(log, log_format, None if columns is None else parse_columns(columns), reading)
    if ageing.drift is not None:
        aged = _drift(ageing.drift, source.read(), ageing, options)
        title = f"{ageing.drift} on a newer log, beside a fresh one by {options.method}"
        _show_drift(aged, title, json_path)
        return
    if out is None:
        raise InvalidError("say where the placement goes with --out")
    if (rows_per_page is None) == (dim is None):
        raise InvalidError("give either --rows-per-page or --dim")
    options = replace(options, rows_per_page=rows_per_page or rows_per_page_of(dim or 0, codec))
    divided = None
    if ray is not None and source.columns is not None:
        if shards is not None:
            raise InvalidError(
                "shards are divided where the whole log is; leave out --shards, or --ray"
            )
        placement, found = _build_of_blocks(source, options, judging, ray)
    else:
        # What was split is not held: a build has the earlier part and a copy of it, too.
        divided = source.read().split(judging.split)
        placement, found = _build(divided, options, judging, ray, out / UNFINISHED)
    result = {
        "method": options.method,
        "ratio": judging.ratio,
        "cache_share": judging.cache_share,
        "seed": options.seed,
        **found,
        **asdict(placement.info()),
    }
    out.mkdir(parents=True, exist_ok=True)
    placement.write(out / PLACEMENT_FILE)
    if shards is not None and divided is not None:
        division = ShardOptions(
            shards=shards,
            tolerance=shard_tolerance,
            iterations=options.iterations,
            seed=options.seed,
            threads=options.threads,
        )
        result.update(_divide(divided, division, out))
    if (out / UNFINISHED).is_dir():
        shutil.rmtree(out / UNFINISHED)
    if mapping is not None:
        placement.write_mapping(mapping)
    write_json(out / "placement.json", result)
    finish(result, json_path, f"placement in {out}")


@dataclass(frozen=True)
class _Source:
    """A log that is named on the command line."""

    log: str
    log_format: words.LogFormat
    columns: dict[str, int | None] | None
    reading: LogOptions

    def read(self) -> QueryLog:
        """Reads it into the memory of this process."""
        if self.columns is not None:
            return read_columns(self.log, self.columns, self.reading)
        return read_log(Path(self.log), self.log_format, self.reading)


_LATER, _SAME = "later queries", "the queries it was built from"


def _build(
    divided: tuple[QueryLog, QueryLog],
    options: PlaceOptions,
    judging: Judging,
    ray: str | None,
    kept: Path,
) -> tuple[Placement, dict[str, Any]]:
    """Builds from the earlier part of a log of this process, here or on a cluster, and judges."""
    ratio, cached = judging.ratio, judging.cache_share
    earlier, later = divided
    misses = None
    if cached > 0.0:
        misses = earlier.misses(earlier, cached, policy=judging.cache_policy).log
    started_s = time.perf_counter()
    if kept.is_dir() and ray is None:
        typer.echo(f"goes on with what is kept in {kept}", err=True)
    unit = "steps" if ray is None else "tasks"
    with Progress(f"place by {options.method}", None, unit) as bar:
        if ray is None:
            [placement] = place_each(
                earlier, [ratio], options, misses=misses, kept=kept, progress=bar.set
            )
        else:
            placement = place_on_ray(
                earlier, options, address=ray, misses=misses, ratio=ratio, progress=bar.set
            )
    build_s = time.perf_counter() - started_s
    placement = placement.ordered_by_use(earlier if misses is None else misses)
    judged = (later if len(later) else earlier).misses(earlier, cached, policy=judging.cache_policy)
    return placement, {
        "queries_built_from": len(earlier),
        "queries_judged": judged.query_count,
        "judged_on": _LATER if len(later) else _SAME,
        "hit_ratio": judged.hit_ratio,
        "build_s": build_s,
        **_judged(placement, judged.log, judged.query_count, options.threads),
    }


def _build_of_blocks(
    source: _Source, options: PlaceOptions, judging: Judging, address: str
) -> tuple[Placement, dict[str, Any]]:
    """Builds from columns that workers of a cluster read; this process never has the log."""
    if judging.cache_share > 0.0:
        raise InvalidError(
            "a cache is replayed where the whole log is; leave out --cache-share, or --ray"
        )
    with ray_cluster(address) as ray:
        log = RayQueryLog.read(ray, source.log, source.columns or {}, source.reading)
        earlier, later = log.split(judging.split)
        started_s = time.perf_counter()
        with Progress(f"place by {options.method}", None, "tasks") as bar:
            placement = place_on_ray(
                earlier, options, address=address, ratio=judging.ratio, progress=bar.set
            )
        build_s = time.perf_counter() - started_s
        placement = earlier.ordered_by_use(placement)
        judged = later if len(later) else earlier
        reads, home_pages = judged.reads(placement)
        return placement, {
            "queries_built_from": len(earlier),
            "queries_judged": len(judged),
            "judged_on": _LATER if len(later) else _SAME,
            "hit_ratio": 0.0,
            "build_s": build_s,
            **_of_reads(reads, home_pages, len(judged)),
        }


def _judged(placement: Placement, log: QueryLog, query_count: int, threads: int) -> dict[str, Any]:
    """Pages with and without replicas, and how full of use they are."""
    home_pages = placement.connectivity(log) * len(log) / max(1, query_count)
    return _of_reads(placement.reads(log, threads=threads), home_pages, query_count)


def _of_reads(reads: PageReads, home_pages: float, query_count: int) -> dict[str, Any]:
    return {
        "pages_per_query": reads.pages / max(1, query_count),
        "pages_per_query_without_replicas": home_pages,
        "useful_rows_per_page": reads.useful_rows_per_page,
        "absent_rows": reads.absent_rows,
        "reads_by_useful_rows": reads.reads_by_useful_rows,
    }


def _divide(
    divided: tuple[QueryLog, QueryLog], division: ShardOptions, out: Path
) -> dict[str, Any]:
    """Divides rows by the earlier queries beside the placement, and judges by the later ones."""
    earlier, later = divided
    rows = divide_rows(earlier, division)
    rows.write(out / PLACEMENT_FILE)
    return _divided(rows, later if len(later) else earlier)


def _divided(rows: RowShards, log: QueryLog) -> dict[str, Any]:
    """Shards that queries need, beside those of other divisions, and how even they are."""
    reads = rows.reads(log)
    hashed = RowShards.by_hash(rows.shard_count, rows.row_count).reads(log)
    ranges = RowShards.by_rows(rows.shard_count, rows.row_count).reads(log)
    return {
        "shards": rows.shard_count,
        "shards_per_query": reads.shards_per_query,
        "shards_per_query_by_hash": hashed.shards_per_query,
        "shards_per_query_by_rows": ranges.shards_per_query,
        "shard_rows_imbalance": reads.rows_imbalance,
        "shard_rows_imbalance_by_hash": hashed.rows_imbalance,
        "shard_row_counts": rows.row_counts(),
    }


def _drift(path: Path, newer: QueryLog, ageing: Ageing, fresh: PlaceOptions) -> Drift:
    found = placement_file(path)
    if found is None:
        raise InvalidError(f"{path} holds no placement", {"path": str(path)})
    with Progress("slices", ageing.slices, "slices") as bar:
        return measure_drift(
            Placement.read(found),
            newer,
            slices=ageing.slices,
            method=fresh.method,
            tolerance=ageing.tolerance,
            seed=fresh.seed,
            threads=fresh.threads,
            progress=bar.set,
        )


def _show_drift(drift: Drift, title: str, json_path: Path | None) -> None:
    if shows_tables(json_path):
        print_table(title, drift.slices)
        told = "the placement still serves: no two slices in a row read too much"
        if drift.rebuild_at is not None:
            told = f"rebuild: from slice {drift.rebuild_at} on it reads too much"
        print(told)
    if json_path is not None:
        write_json(json_path, {"slices": drift.slices, "rebuild_at": drift.rebuild_at})


def inspect_placement(
    path: Path, log: Path | None, log_format: words.LogFormat, json_path: Path | None
) -> None:
    """Shows what is in a placement file, and what a log reads through it."""
    placement = Placement.read(path)
    info = placement.info()
    result: dict[str, Any] = {"kind": "placement", "path": str(path), **asdict(info)}
    reads: PageReads | None = None
    if log is not None:
        queries = read_log(log, log_format)
        reads = placement.reads(queries)
        result["connectivity_before"] = placement.connectivity(queries)
        result["connectivity_after"] = reads.pages / len(queries)
        result["useful_rows_per_page"] = reads.useful_rows_per_page
        result["absent_rows"] = reads.absent_rows
        result["reads_by_useful_rows"] = reads.reads_by_useful_rows
    if shows_tables(json_path):
        print_table("pages by rows on them", _histogram(info.pages_by_rows, "rows", "pages"))
        print_table("rows by pages they are on", _histogram(info.rows_by_pages, "pages", "rows"))
        if reads is not None:
            useful = _histogram(reads.reads_by_useful_rows, "useful_rows", "page_reads")
            print_table("page reads by useful rows", useful)
    finish(result, json_path, str(path))


def _histogram(counts: list[int], key: str, value: str) -> list[dict[str, Any]]:
    total = max(1, sum(counts))
    return [
        {key: at, value: count, "share": count / total} for at, count in enumerate(counts) if count
    ]


def register(app: typer.Typer) -> None:
    """Adds the verb of this file."""
    add(app, "place", place_, "Choose which rows share a page.")
