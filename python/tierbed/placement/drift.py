"""Drift: how a placement ages, and when another is worth building.

A newer log is cut into slices of time. In each, the placement at hand is compared with one built
afresh from the slices before it, by the same method and space: what a rebuild would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tierbed.config.words import PlaceMethod
from tierbed.errors import InvalidError
from tierbed.placement.build import Placement, QueryLog, place

__all__ = ["Drift", "measure_drift"]


@dataclass(frozen=True)
class Drift:
    """What a newer log did to a placement.

    Args:
        slices: Per slice of time: ``slice``, ``queries``, ``pages_per_query``,
            ``useful_rows_per_page``, ``absent_rows`` (rows the placement does not have),
            ``fresh_pages_per_query`` and ``aged`` (pages by those of a fresh placement); the last
            two are None in the first slice, which has nothing before it.
        rebuild_at: First of two slices in a row from which the placement reads more than it may;
            None when it still serves.
    """

    slices: Sequence[dict[str, Any]]
    rebuild_at: int | None


def measure_drift(
    placement: Placement,
    newer: QueryLog,
    *,
    slices: int = 10,
    method: PlaceMethod = "grown",
    tolerance: float = 0.05,
    seed: int = 1,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Drift:
    """Compares a placement with fresh ones, slice by slice of a newer log.

    Args:
        placement: What serves today.
        newer: Queries since it was built, earliest first.
        slices: Parts of the log, equal in queries.
        method: How a rebuild would place rows; it gets the space that ``placement`` takes.
        tolerance: Reads above a fresh placement's that are still fine, as a share.
        seed: Of the fresh placements.
        threads: They change the time, never the counts.
        progress: Called with slices done and slices in all.

    Raises:
        InvalidError: Fewer than two slices, or more slices than queries.
    """
    if not 2 <= slices <= len(newer):
        raise InvalidError(f"slices must be from 2 to {len(newer)}, the queries; found {slices}")
    info = placement.info()
    rows: list[dict[str, Any]] = []
    before, rest = newer.split(0.0)
    for at in range(slices):
        here, rest = rest.split(1.0 / (slices - at))
        reads = placement.reads(here, threads=threads)
        row = {
            "slice": at,
            "queries": len(here),
            "pages_per_query": reads.pages / len(here),
            "useful_rows_per_page": reads.useful_rows_per_page,
            "absent_rows": reads.absent_rows,
            "fresh_pages_per_query": None,
            "aged": None,
        }
        if at > 0:
            fresh = place(
                before,
                rows_per_page=info.rows_per_page,
                method=method,
                ratio=info.replica_count / info.row_count,
                seed=seed,
                threads=threads,
            ).reads(here, threads=threads)
            row["fresh_pages_per_query"] = fresh.pages / len(here)
            row["aged"] = reads.pages / max(1, fresh.pages)
        rows.append(row)
        before, _ = newer.split((at + 1) / slices)
        if progress is not None:
            progress(at + 1, slices)
    return Drift(rows, _rebuild_at([row["aged"] for row in rows], 1.0 + tolerance))


def _rebuild_at(aged: Sequence[float | None], limit: float) -> int | None:
    """Finds the first of two slices in a row above ``limit``: one may be chance."""
    is_above = [value is not None and value > limit for value in aged]
    for at, pair in enumerate(pairwise(is_above)):
        if all(pair):
            return at
    return None
