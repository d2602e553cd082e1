"""How many pages do later queries read, by method, space, cache and page selection?

Placements are built from the earlier part of a log and judged on the later part, through the
index and page selection that serving uses, behind a warm row cache. Everything that is counted
repeats exactly; only ``build_s`` is a time: of the run that made the placements of all ratios at
once, replay of the cache included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierbed._native import placement_methods
from tierbed._util.progress import Progress
from tierbed.config.words import LogFormat, PageSelection, PlaceMethod, Positive
from tierbed.errors import InvalidError
from tierbed.placement.build import (
    LogOptions,
    MissStream,
    Placement,
    PlaceOptions,
    QueryLog,
    place_each,
)
from tierbed.placement.log_files import read_log
from tierbed_bench.placement_report import report

__all__ = ["PlacementOptions", "run_placement"]

QUICK_METHODS: tuple[PlaceMethod, ...] = (
    *("random", "by_frequency", "shp_published", "shp"),
    *("maxembed_published", "maxembed", "grown"),
)
#: Methods that add replicas to the homes of another.
HOMES_OF = {"maxembed_published": "shp_published", "maxembed": "shp"}
CACHES = (0.0, 0.01, 0.05, 0.1)
QUICK_CACHES = (0.0, 0.1)
BATCHES = (1, 32)
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """What to measure.

    Args:
        logs: Query logs, each measured for itself.
        log_format: maxembed is binary; auto goes by the name.
        split: Share of the queries that placements are built from: the earlier ones.
        shuffle: Draw the earlier part by this seed, for logs not in order of time.
        rows_per_page: Rows a page holds.
        ratios: Replicas per row; 0 is always measured too.
        caches: Rows of the cache in front, as shares of the table; by default 0, 1, 5 and 10 %.
        policy: Who leaves the cache.
        quick: Few methods, ratios 0, 0.1 and 0.8, one selection; by default caches 0 and 10 %.
        queries_max: Read this many queries at most.
        seed: Of all placements.
        threads: They change times, never counts.
    """

    logs: Sequence[Path] = ()
    log_format: LogFormat = "auto"
    split: float = 0.8
    shuffle: int | None = None
    rows_per_page: Positive = 16
    ratios: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    caches: Sequence[float] | None = None
    policy: str = "s3_fifo"
    quick: bool = False
    queries_max: int | None = None
    seed: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        caches = self.all_caches
        for name, shares, most in (("ratios", self.ratios, math.inf), ("cache", caches, 1.0)):
            if not shares or not all(0.0 <= share <= most for share in shares):
                raise InvalidError(f"--{name} must be numbers from 0 to {most:g}, found {shares}")

    @property
    def methods(self) -> dict[PlaceMethod, bool]:
        """Names of the methods measured, and whether each makes replicas."""
        known = dict(placement_methods())
        return {name: known[name] for name in known if not self.quick or name in QUICK_METHODS}

    @property
    def all_ratios(self) -> list[float]:
        """0 and the ratios asked for."""
        return sorted({0.0, *((0.1, 0.8) if self.quick else self.ratios)})

    @property
    def all_caches(self) -> list[float]:
        """The shares of the cache."""
        usual = QUICK_CACHES if self.quick else CACHES
        return sorted(set(usual if self.caches is None else self.caches))

    @property
    def selections(self) -> list[tuple[PageSelection, int | None]]:
        """Page selections and index limits."""
        limits = (10,) if self.quick else (1, 3, 5, 10, None)
        found: list[tuple[PageSelection, int | None]] = [("one_pass", limit) for limit in limits]
        return found if self.quick else [*found, ("greedy", None)]


@dataclass
class _Built:
    """A placement, and where it counts."""

    method: PlaceMethod
    ratio: float
    placement: Placement
    build_s: float
    caches: Sequence[float] = field(default_factory=list)


def run_placement(out: Path, options: PlacementOptions, json_path: Path | None = None) -> Path:
    """Runs the suite and writes ``placement.json`` and ``placement.png`` to ``out``."""
    if not options.logs:
        raise InvalidError("name a query log with --log")
    rows: list[Row] = []
    logs: list[dict[str, Any]] = []
    for path in options.logs:
        given = LogOptions(query_count_max=options.queries_max, seed=options.seed)
        log = read_log(path, options.log_format, given)
        if options.shuffle is not None:
            log = log.shuffled(options.shuffle)
        sizes = {"rows": log.row_count, "queries": len(log), "pins": log.pin_count}
        stage = _Stage(log, options)
        rows += [{"log": _name(path), **row} for row in _measure(stage, options)]
        logs.append({"log": _name(path), **sizes, "hit_ratios": stage.hit_ratios()})
    told = {"logs": logs, "split": options.split, "shuffle": options.shuffle}
    return report(out, rows, told, json_path)


def _name(path: Path) -> str:
    return path.name.split(".")[0]


class _Stage:
    """The two parts of a log, and what each cache leaves of them."""

    def __init__(self, log: QueryLog, options: PlacementOptions) -> None:
        self.earlier, self.later = log.split(options.split)
        if not len(self.earlier) or not len(self.later):
            raise InvalidError(f"--split {options.split} leaves a part of the log empty")
        self._policy = options.policy
        self._build: dict[float, tuple[QueryLog, float]] = {}
        self._judge: dict[tuple[float, int], MissStream] = {}

    def build_log(self, cache: float) -> tuple[QueryLog, float]:
        """What a placement behind ``cache`` is built from, and the seconds that took."""
        if cache == 0.0:
            return self.earlier, 0.0
        if cache not in self._build:
            started_s = time.perf_counter()
            stream = self.earlier.misses(self.earlier, cache, policy=self._policy)
            self._build[cache] = (stream.log, time.perf_counter() - started_s)
        return self._build[cache]

    def later_misses(self, cache: float, batch: int) -> MissStream:
        """What later queries read from pages behind ``cache``."""
        key = (cache, batch)
        if key not in self._judge:
            self._judge[key] = self.later.misses(
                self.earlier, cache, policy=self._policy, batch=batch
            )
        return self._judge[key]

    def hit_ratios(self) -> list[dict[str, float]]:
        """Which share of the rows asked for later each cache served, by batch."""
        return [
            {"cache_share": cache, "batch": batch, "hit_ratio": stream.hit_ratio}
            for (cache, batch), stream in self._judge.items()
        ]


def _measure(stage: _Stage, options: PlacementOptions) -> Iterator[Row]:
    methods, ratios, caches = options.methods, options.all_ratios, options.all_caches
    total = sum(
        (len(ratios) if replicates else 1) * (len(caches) if name == "grown" else 1)
        for name, replicates in methods.items()
    )
    with Progress("placements", total, "placements") as bar:
        for built in _build(stage, options, methods, ratios):
            for cache in built.caches:
                for batch in BATCHES:
                    yield from _judge(
                        stage.later_misses(cache, batch), built, cache, batch, options
                    )
            bar.advance(1, f"{built.method} {built.ratio:g}")


def _build(
    stage: _Stage,
    options: PlacementOptions,
    methods: Mapping[PlaceMethod, bool],
    ratios: Sequence[float],
) -> Iterator[_Built]:
    """Builds every placement, those of all ratios at once; MaxEmbed takes SHP's homes."""
    homes: dict[str, _Built] = {}
    for method, replicates in methods.items():
        # `grown` is built for the cache in front, the others know of none.
        groups = [[c] for c in options.all_caches] if method == "grown" else [options.all_caches]
        for caches in groups:
            log, replay_s = stage.build_log(caches[0] if method == "grown" else 0.0)
            shared = homes.get(HOMES_OF.get(method, ""))
            wanted = ratios if replicates else [0.0]
            started_s = time.perf_counter()
            placements = place_each(
                stage.earlier,
                wanted,
                PlaceOptions(
                    method=method,
                    rows_per_page=options.rows_per_page,
                    seed=options.seed,
                    threads=options.threads,
                ),
                misses=log if method == "grown" else None,
                homes=None if shared is None else shared.placement,
            )
            if method == "grown":
                placements = [placement.ordered_by_use(log) for placement in placements]
            build_s = time.perf_counter() - started_s + replay_s
            build_s += 0.0 if shared is None else shared.build_s
            for ratio, placement in zip(wanted, placements, strict=True):
                built = _Built(method, ratio, placement, build_s, caches)
                if method in HOMES_OF.values():
                    homes[method] = built
                yield built


def _judge(
    stream: MissStream, built: _Built, cache: float, batch: int, options: PlacementOptions
) -> Iterator[Row]:
    """Counts the reads of every selection; without replicas all of them read the same."""
    has_choice = built.placement.info().replica_count > 0
    reads = None
    for select, limit in options.selections:
        if reads is None or has_choice:
            reads = built.placement.reads(
                stream.log, select=select, index_limit=limit, threads=options.threads
            )
        yield {
            "method": built.method,
            "ratio": built.ratio,
            "cache_share": cache,
            "batch": batch,
            "select": select,
            "k": "all" if limit is None else limit,
            "pages_per_query": reads.pages / stream.query_count,
            "useful_rows_per_page": reads.useful_rows_per_page,
            "build_s": built.build_s,
        }
