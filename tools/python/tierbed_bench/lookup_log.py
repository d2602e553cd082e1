"""What does a placement save when queries of a log are answered from pages on a device?

The earlier part of a log is placed; the later part is asked, in a closed loop, of a table that is
the log's rows again and again until it is as large as wanted (see ``tierbed_bench::lookup``).
Every query is checked. One snapshot is on disk at a time. Without a cache all methods are measured
at all ratios; behind caches those of the smallest and the largest ratio, ``grown`` as built for the
middle one of the caches. A cache begins as full as queries before would have left it. Beside the
snapshots stand, all of the same run: the same rows in memory; mapped, with as many bytes of pages
in memory as the row cache has in the row beside it; and the reads per second of the device itself,
with as many in flight.

With ``head_rows`` follow snapshots without a placement, most used rows first (``by_use``), and such
whose rows lie by id behind a head (``tail``): what their index takes, and what that costs in pages.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tierbed import _native
from tierbed._util.progress import Progress
from tierbed._util.report import print_table, write_json
from tierbed.errors import InvalidError
from tierbed.placement.build import rows_per_page_of
from tierbed_bench.suite import write_suite

__all__ = ["LogOptions", "run_lookup_log"]

Row = dict[str, Any]

#: Methods that make no replicas.
PLAIN = ("random", "shp")
#: Of MaxEmbed §8.4: ten pages of a row known.
INDEX_LIMIT = 10
#: Queries of a call that keep the device busy.
SATURATING_BATCH = 32
#: Calls of which choosing pages is timed.
SELECTED_CALLS = 20_000
#: Warming up takes this part of a measurement's time; a map begins empty and needs longer.
WARM_SHARE, MAP_WARM_SHARE = 0.3, 4.0
#: A snapshot is asked once the device reads at this share of its best, or has been waited for.
SETTLED_SHARE, SETTLE_SECONDS_MAX = 0.7, 180.0


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What ``tierbed bench lookup --log`` measures.

    Args:
        log: One query per line.
        table_bytes: The table is at least that large.
        dim: Elements of a row.
        ratios: Replicas per row, for the methods that make replicas.
        caches: Rows the cache holds, as shares of all.
        threads: Threads that ask.
        batch: Queries of a call.
        queue_depth: Reads a thread has in flight at most.
        calls: Measured calls of a thread, at most.
        seconds: Longest time of a measurement.
        skew: How unevenly the copies of the log's rows are asked for.
        scratch: Folder for what is deleted again; it needs room for a table and its replicas.
        seed: Of everything that is drawn.
        query_count_max: Queries of the log that are used.
        head_rows: Heads of tables whose other rows lie by id, as rows or shares; none for none.
    """

    log: Path
    table_bytes: int = 8 << 30
    dim: int = 64
    ratios: tuple[float, ...] = (0.0, 0.1, 0.2, 0.4, 0.8)
    caches: tuple[float, ...] = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4)
    threads: int = 4
    batch: int = 1
    queue_depth: int = 64
    calls: int = 100_000
    seconds: float = 1.5
    skew: float = 1.0
    scratch: Path | None = None
    seed: int = 1
    query_count_max: int | None = None
    head_rows: tuple[str, ...] = ()


def quick(options: LogOptions) -> LogOptions:
    """Returns the same on a small table with few queries: seconds, for tests."""
    return LogOptions(
        log=options.log,
        table_bytes=16 << 20,
        dim=options.dim,
        ratios=(0.0, 0.4),
        caches=(0.0, 0.1),
        threads=2,
        batch=options.batch,
        queue_depth=16,
        calls=400,
        seconds=options.seconds,
        skew=options.skew,
        scratch=options.scratch,
        seed=options.seed,
        query_count_max=20_000,
        head_rows=options.head_rows,
    )


def run_lookup_log(out: Path, options: LogOptions, json_path: Path | None = None) -> Path:
    """Runs the suite; writes ``lookup_log.json`` and ``.png`` to ``out``, and ``json_path``."""
    out.mkdir(parents=True, exist_ok=True)
    scratch = options.scratch or out
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        bench = _Bench(options, Path(folder))
        rows = bench.measure()
    ratios = _speeds(rows)
    checks = {**_checks(rows, ratios), **_tail_checks(rows)}
    told = {"placed": bench.placed, "clones": bench.clones, "checks": checks}
    path = write_suite(out, "lookup_log", rows, ratios, _bars(rows), told)
    if json_path is not None:
        write_json(json_path, {"rows": rows, "ratios": ratios, **told})
    columns = (
        "what method ratio cache_share batch index_limit pages_per_query useful_rows_per_page "
        "device_kib_per_query queries_per_s effective_mb_per_s latency_us_p50 latency_us_p99 "
        "selection_cpu_share device_share"
    )
    print_table("queries of a log, from pages", rows, columns.split())
    print_table("checks", [{"check": name, **found} for name, found in checks.items()])
    return path


class _Bench:
    """One run: places the log, then writes and asks one snapshot after the other."""

    def __init__(self, options: LogOptions, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.placed: Row = {}
        self.clones = 1
        self.reads_per_s_best = 0.0

    def measure(self) -> list[Row]:
        """Returns a row for each placement, cache and way of reading."""
        wanted = self._wanted()
        with Progress("placing", 1, "logs") as bar:
            self.placed = self._place(wanted)
            bar.advance()
        row_bytes = 4 * self.options.dim * int(self.placed["row_count"])
        self.clones = max(1, math.ceil(self.options.table_bytes / row_bytes))
        rows: list[Row] = []
        with Progress("asking", len(wanted), "snapshots") as bar:
            for one in wanted:
                rows += self._snapshot(one)
                bar.advance(note=f"{one['method']} {one['ratio']}")
        heads = [None, *self.options.head_rows] if self.options.head_rows else []
        return rows + [row for head_rows in heads for row in self._by_use(head_rows)]

    def _place(self, wanted: list[Row]) -> Row:
        return self._command(
            "place",
            log=str(self.options.log),
            split=0.8,
            query_count_max=self.options.query_count_max,
            rows_per_page=rows_per_page_of(self.options.dim),
            methods=wanted,
            later=str(self.folder / "later"),
            earlier=str(self.folder / "earlier") if self.options.head_rows else None,
            seed=self.options.seed,
            threads=self.options.threads,
        )

    def _wanted(self) -> list[Row]:
        ratios = self.options.ratios
        methods = [(method, 0.0, 0.0) for method in PLAIN]
        methods += [("maxembed", ratio, 0.0) for ratio in ratios if ratio > 0]
        methods += [("grown", ratio, 0.0) for ratio in ratios]
        methods += [("grown", ratio, cache) for cache in self._middle() for ratio in self._ends()]
        return [
            {
                "method": method,
                "ratio": ratio,
                "cache_share": cache,
                "out": str(self.folder / f"{method}.{ratio}.{cache}"),
            }
            for method, ratio, cache in methods
        ]

    def _ends(self) -> list[float]:
        """The smallest and the largest ratio."""
        return sorted({min(self.options.ratios), max(self.options.ratios)})

    def _middle(self) -> list[float]:
        """The middle one of the caches, if there are any."""
        caches = sorted(share for share in self.options.caches if share > 0)
        return caches[(len(caches) - 1) // 2 :][:1]

    def _caches(self, one: Row) -> list[float]:
        """The caches that a placement is measured behind; what is built for one has no other."""
        caches = [share for share in self.options.caches if share > 0]
        if one["cache_share"] > 0:
            return caches
        is_end = one["ratio"] in self._ends()
        return [0.0, *(caches if is_end and one["method"] in ("shp", "maxembed") else [])]

    def _snapshot(self, one: Row) -> list[Row]:
        path = self.folder / "snapshot"
        written = self._command(
            "write",
            placement=one["out"],
            out=str(path),
            dim=self.options.dim,
            clones=self.clones,
        )
        named = {key: one[key] for key in ("method", "ratio")}
        named |= {"built_for_cache": one["cache_share"], "pages_bytes": written["pages_bytes"]}
        named |= {"write_s": written["write_s"], "settle_s": self._settle(path)}
        rows = []
        for share in self._caches(one):
            row = self._ask(path, cache_share=share)
            if share == 0:
                row["selection_cpu_share"] = self._selection_share(one, row)
                rows += self._saturated(path)
            rows.append({"what": "direct", **row})
        if one["method"] == "maxembed" and one["ratio"] == max(self.options.ratios):
            rows += self._ablations(one, path)
        if one["method"] == "shp":
            rows += self._in_memory(path)
        rows = [{**row, **named} for row in rows]
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
        return rows

    def _by_use(self, head_rows: str | None) -> list[Row]:
        """Most used rows first, without a placement; with a head, the others by id."""
        path = self.folder / "snapshot"
        written = self._command(
            "write_by_use",
            log=str(self.folder / "earlier"),
            out=str(path),
            dim=self.options.dim,
            clones=self.clones,
            skew=self.options.skew,
            head_rows=head_rows,
        )
        named: Row = {"what": "tail" if head_rows else "by_use", "method": head_rows or "all rows"}
        named |= {"ratio": 0.0, **{key: written[key] for key in ("index_bytes", "pages_bytes")}}
        named |= {"write_s": written["write_s"], "settle_s": self._settle(path)}
        rows = [{**self._ask(path, share), **named} for share in self.options.caches]
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
        return rows

    def _settle(self, path: Path) -> float:
        """Waits until the device reads about as fast as it did; returns how long, in seconds.

        A device may go on discarding the snapshot deleted before for a minute and more.
        """
        began = time.monotonic()
        while True:
            reads_per_s = float(self._raw(path)["reads_per_s"])
            self.reads_per_s_best = max(self.reads_per_s_best, reads_per_s)
            waited = time.monotonic() - began
            is_settled = reads_per_s >= SETTLED_SHARE * self.reads_per_s_best
            if is_settled or waited > SETTLE_SECONDS_MAX:
                return waited
            time.sleep(1.0)

    def _saturated(self, path: Path) -> list[Row]:
        """Calls of many queries, and the device alone before and after."""
        before = self._raw(path)
        row = self._ask(path, 0.0, batch=SATURATING_BATCH)
        after = self._raw(path)
        reads_per_s = (before["reads_per_s"] + after["reads_per_s"]) / 2
        row["device_share"] = row["pages_per_s"] / reads_per_s
        return [
            {"what": "saturated", **row},
            {"what": "device", "cache_share": 0.0, "pages_per_s": reads_per_s},
        ]

    def _in_memory(self, path: Path) -> list[Row]:
        """Through a map, with as much memory as the caches have and with all; and from a copy."""
        shares = [share for share in self.options.caches if share > 0]
        rows = [{"what": "mmap", **self._ask(path, share, backend="mmap")} for share in shares]
        rows.append({"what": "memory", **self._ask(path, 0.0, backend="memory")})
        for file in path.iterdir():
            with file.open("rb", buffering=0) as pages:
                while pages.read(1 << 22):
                    pass
        return [*rows, {"what": "mmap", **self._ask(path, 1.0, backend="mmap")}]

    def _ablations(self, one: Row, path: Path) -> list[Row]:
        """Figures 15 and 16: without the pipeline, with other index limits, and greedy."""
        rows = []
        row = self._ask(path, 0.0, is_pipelined=False, index_limit=None)
        rows.append({"what": "not pipelined", **row})
        limits: Sequence[int | None] = (1, 3, 5, INDEX_LIMIT, None)
        for limit in limits:
            row = self._ask(path, 0.0, index_limit=limit)
            row["selection_cpu_share"] = self._selection_share(one, row, index_limit=limit)
            rows.append({"what": "index limit", **row})
        row = self._ask(path, 0.0, is_greedy=True, index_limit=None)
        share = self._selection_share(one, row, is_greedy=True, index_limit=None)
        return [*rows, {"what": "greedy", **row, "selection_cpu_share": share}]

    def _ask(
        self,
        path: Path,
        cache_share: float,
        *,
        backend: str = "direct",
        batch: int | None = None,
        **choice: Any,
    ) -> Row:
        options = self.options
        batch = batch or options.batch
        is_mapped = backend == "mmap" and cache_share < 1.0
        # As many queries, however many a call has.
        calls = max(10, options.calls * options.batch // batch)
        answer = self._command(
            "run",
            snapshot=str(path),
            asked=self._asked(),
            choice=_choice(choice),
            backend=backend,
            threads=options.threads,
            queue_depth=options.queue_depth,
            batch=batch,
            warm_calls=calls,
            calls=calls,
            warm_seconds_max=options.seconds * (MAP_WARM_SHARE if is_mapped else WARM_SHARE),
            seconds_max=options.seconds,
            cache_share=cache_share,
        )
        return {"cache_share": cache_share, "batch": batch, **_choice(choice), **answer}

    def _selection_share(self, one: Row, row: Row, **choice: Any) -> float:
        answer = self._command(
            "select",
            placement=one["out"],
            asked=self._asked(),
            choice=_choice(choice),
            batch=self.options.batch,
            calls=min(self.options.calls, SELECTED_CALLS),
        )
        return float(answer["cpu_us_per_query"]) / float(row["cpu_us_per_query"])

    def _raw(self, path: Path) -> Row:
        return self._command(
            "raw",
            snapshot=str(path),
            threads=self.options.threads,
            queue_depth=self.options.queue_depth,
            reads=10 * self.options.calls,
            seconds_max=self.options.seconds / 2,
            seed=self.options.seed,
        )

    def _asked(self) -> Row:
        return {
            "log": str(self.folder / "later"),
            "clones": self.clones,
            "skew": self.options.skew,
            "seed": self.options.seed,
        }

    @staticmethod
    def _command(do: str, **fields: Any) -> Row:
        answer: Row = json.loads(_native.bench_lookup(json.dumps({"do": do, **fields})))
        return answer


def _choice(changed: Row) -> Row:
    return {"is_greedy": False, "index_limit": INDEX_LIMIT, "is_pipelined": True, **changed}


def _speeds(rows: Sequence[Row]) -> dict[str, float]:
    """Pages per query and queries per second next to SHP, at the same cache and batch.

    ``..._pages_per_s_vs_shp`` of saturated rows says whether fewer pages are as many more queries:
    1 where they are.
    """
    shp = {(row["what"], row.get("cache_share")): row for row in rows if row["method"] == "shp"}
    ratios = {}
    for row in rows:
        base = shp.get((row["what"], row.get("cache_share")))
        if row["what"] not in ("direct", "saturated") or base is None or row is base:
            continue
        name = f"{row['method']}_r{row['ratio']}_cache{row['cache_share']}"
        fields = ["pages_per_query", "queries_per_s"]
        if row["what"] == "saturated":
            name = f"saturated_{row['method']}_r{row['ratio']}"
            fields.append("pages_per_s")
        for field in fields:
            if base[field]:
                ratios[f"{name}_{field}_vs_shp"] = row[field] / base[field]
    return ratios


def _checks(rows: Sequence[Row], ratios: dict[str, float]) -> dict[str, Row]:
    """Whether fewer pages are more queries, choosing pages is cheap, and the device is busy."""
    per_s = {n: v for n, v in ratios.items() if n.endswith("_pages_per_s_vs_shp")}
    worst = max(per_s.values(), key=lambda value: abs(value - 1), default=math.nan)
    chosen = [row["selection_cpu_share"] for row in rows if "selection_cpu_share" in row]
    busy = [row["device_share"] for row in rows if "device_share" in row]
    return {
        "pages_per_s_vs_shp, farthest from 1": {"value": worst, "aim": "0.9 to 1.1"},
        "selection_cpu_share, largest": {"value": max(chosen), "aim": "below 0.25"},
        "device_share, smallest": {"value": min(busy), "aim": "at least 0.9"},
        "device_share, median": {"value": median(busy), "aim": "at least 0.9"},
    }


def _tail_checks(rows: Sequence[Row]) -> dict[str, Row]:
    """What a head saves of the index, and what it costs in pages."""
    every = {row["cache_share"]: row for row in rows if row["what"] == "by_use"}
    checks: dict[str, Row] = {}
    for row in rows:
        if row["what"] != "tail":
            continue
        base, name = every[row["cache_share"]], f"head of {row['method']}"
        share = row["index_bytes"] / base["index_bytes"]
        checks[f"index_bytes, {name} vs all rows"] = {"value": share, "aim": "at most 0.15"}
        if base["pages_per_query"]:
            ratio = row["pages_per_query"] / base["pages_per_query"]
            name = f"pages_per_query, {name} vs all rows, cache {row['cache_share']}"
            checks[name] = {"value": ratio, "aim": "at most 1.03"}
    return checks


def _bars(rows: Sequence[Row]) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        shown = [row for row in rows if row["what"] == "direct" and row["cache_share"] == 0]
        names = [f"{row['method']} r={row['ratio']}" for row in shown]
        left.barh(names, [row["pages_per_query"] for row in shown], color="#3b6ea5")
        left.set_xlabel("pages per query, no cache")
        left.invert_yaxis()
        right.barh(names, [row["queries_per_s"] for row in shown], color="#b5651d")
        right.set_xlabel("queries per second, no cache")
        right.invert_yaxis()

    return draw


def check(options: LogOptions) -> None:
    """Refuses what cannot be measured.

    Raises:
        InvalidError: No log, or SHP and a run without cache are missing from the comparison.
    """
    if not options.log.is_file():
        raise InvalidError(f"no log at {options.log}", {"path": str(options.log)})
    if 0.0 not in options.caches:
        raise InvalidError("--cache must have 0: the share of selection is measured there")
