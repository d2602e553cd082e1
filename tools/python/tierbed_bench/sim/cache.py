"""Which cache policy suits this log? Replays of a query log at several capacities.

The policies are those of the row tiers, the same Rust code, over row numbers instead of rows.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from tierbed import _native
from tierbed._util.progress import Progress
from tierbed.config.words import Positive
from tierbed.errors import InvalidError

__all__ = ["SimOptions", "draw_curves", "simulate"]

# Rows of the result that are bounds, not policies.
_BOUNDS = ("belady", "greedy-hindsight", "upper-bound")


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """What to replay.

    Attributes:
        policies: Names of policies; all is every one.
        capacity_shares: Capacities as shares of the log's distinct rows, above 0 to 1.
        warm_share: Share of the queries replayed before counting begins.
        query_count_max: Replay only the first so many queries.
        admission_threshold: Uses from which on a row may enter, 1 to 3, counted in two bits per
            row (FlashEmbedding's bitmap); 0: always.
        has_bounds: Add what is possible when the future is known, which counts from the first
            query on: without a warm share.
    """

    policies: tuple[str, ...] = ("lru", "s3_fifo", "ev_car", "ev_lfu", "group_frequency", "auto")
    capacity_shares: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
    warm_share: float = 0.0
    query_count_max: Positive | None = None
    admission_threshold: int = 0
    has_bounds: bool = True

    def __post_init__(self) -> None:
        if not self.policies:
            raise InvalidError("no cache policy to replay; name one or more")
        if not self.capacity_shares or not all(0 < share <= 1 for share in self.capacity_shares):
            raise InvalidError(
                f"capacities are shares above 0 and at most 1, not {self.capacity_shares}"
            )
        if self.admission_threshold not in range(4):
            raise InvalidError(
                f"admission threshold must be 0 (always) to 3, not {self.admission_threshold}"
            )
        if not 0 <= self.warm_share < 1:
            raise InvalidError(f"warm share must be in [0, 1), not {self.warm_share}")

    def names(self) -> tuple[str, ...]:
        """The policies by name."""
        return tuple(_native.cache_policies()) if self.policies == ("all",) else self.policies


def simulate(log: str | os.PathLike[str], options: SimOptions | None = None) -> dict[str, Any]:
    """Replays ``log`` through every policy at every capacity, from an empty cache.

    Args:
        log: One query per line, or samples in Criteo's layout; plain, gzip or zstd.
        options: What to replay.

    Returns:
        ``rows``: one flat object per policy and capacity with ``policy``, ``capacity_share``,
        ``capacity_rows``, ``hit_rate``, ``perfect_hit_rate``, ``misses_per_request`` and, for
        policies, ``policy_bytes_per_row`` and ``rows_per_s`` of this run. Beside it the sizes of
        the log. Equal logs and options give equal counts.

    Raises:
        InvalidError: A policy is unknown, or the log has a line that is no query.
    """
    options = options or SimOptions()
    names = options.names()
    for name in names:
        _native.CacheLog.policy_bytes(name)  # refuses unknown names before the work
    trace = _native.CacheLog(os.fspath(log), options.query_count_max)
    query_count, asked_rows, distinct_rows = trace.sizes()
    first = int(query_count * options.warm_share)
    rows: list[dict[str, Any]] = []
    has_bounds = options.has_bounds and first == 0
    runs = len(options.capacity_shares) * (len(names) + (2 if has_bounds else 0))
    with Progress("replays", runs, unit="replays") as progress:
        for share in options.capacity_shares:
            capacity_rows = max(1, int(distinct_rows * share))
            size = {"capacity_share": share, "capacity_rows": capacity_rows}
            for name in names:
                started_s = time.perf_counter()
                counts = trace.replay(name, capacity_rows, first, options.admission_threshold)
                seconds = time.perf_counter() - started_s
                rows.append(
                    {
                        "policy": name,
                        **size,
                        **_rates(counts),
                        "policy_bytes_per_row": _native.CacheLog.policy_bytes(name),
                        "rows_per_s": asked_rows / max(seconds, 1e-9),
                    }
                )
                progress.advance(note=f"{name} {share:g}")
            if has_bounds:
                rows += _bound_rows(trace, capacity_rows, size, progress)
    return {
        "log": os.fspath(log),
        "queries": query_count,
        "counted_queries": query_count - first,
        "asked_rows": asked_rows,
        "distinct_rows": distinct_rows,
        "rows": rows,
    }


def _rates(counts: tuple[int, int, int, int]) -> dict[str, float]:
    queries, perfect_hits, asked, hits = counts
    return {
        "hit_rate": hits / max(asked, 1),
        "perfect_hit_rate": perfect_hits / max(queries, 1),
        "misses_per_request": (asked - hits) / max(queries, 1),
    }


def _bound_rows(
    trace: _native.CacheLog, capacity_rows: int, size: dict[str, Any], progress: Progress
) -> list[dict[str, Any]]:
    query_count = max(trace.sizes()[0], 1)
    farthest = {"policy": "belady", **size, **_rates(trace.replay_farthest(capacity_rows))}
    progress.advance(note="belady")
    greedy, upper, _ = trace.perfect_bounds(capacity_rows)
    progress.advance(note="bounds of perfect hits")
    empty = {"hit_rate": None, "misses_per_request": None}
    return [
        farthest,
        {
            "policy": "greedy-hindsight",
            **size,
            **empty,
            "perfect_hit_rate": greedy / query_count,
        },
        {"policy": "upper-bound", **size, **empty, "perfect_hit_rate": upper / query_count},
    ]


def draw_curves(figure: Any, result: dict[str, Any]) -> None:
    """Draws hit rates and perfect-hit rates over capacity onto a matplotlib figure."""
    left, right = figure.subplots(1, 2)
    for axes, rate, title in (
        (left, "hit_rate", "rows that were hits"),
        (right, "perfect_hit_rate", "queries that were perfect hits"),
    ):
        for name in dict.fromkeys(row["policy"] for row in result["rows"]):
            points = [
                (row["capacity_share"], row[rate])
                for row in result["rows"]
                if row["policy"] == name and row[rate] is not None
            ]
            if points:
                style = "--" if name in _BOUNDS else "-"
                axes.plot(*zip(*sorted(points), strict=True), style, marker="o", ms=3, label=name)
        axes.set_xscale("log")
        axes.set_xlabel("capacity, share of distinct rows")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    right.legend(fontsize="small")
