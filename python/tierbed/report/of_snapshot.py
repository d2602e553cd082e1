"""Report of a published snapshot."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tierbed.report import sections
from tierbed.report.budgets import of_queries
from tierbed.report.counts import INITIAL, STORAGE, counts_of
from tierbed.report.page import Report
from tierbed.report.parts import Figure, Note, Part, bytes_text, count_text, share_text

if TYPE_CHECKING:
    from tierbed.report.observer import Observer
    from tierbed.serve.snapshot import Snapshot

__all__ = ["report_of_snapshot"]


def report_of_snapshot(
    snapshot: Snapshot, observer: Observer, queries: str | os.PathLike[str] | None
) -> Report:
    """Makes a report of an open snapshot.

    Args:
        snapshot: The snapshot.
        observer: What saw its lookups.
        queries: Folder of recorded queries, for what other budgets would bring.

    Raises:
        InvalidError: The folder holds no logs of the snapshot's tables.
    """
    stats = snapshot.stats()
    counts, budget = counts_of(stats, 0), stats["budget"]
    estimates = None if queries is None else of_queries(stats, snapshot.tables(), queries)
    contents = stats["contents"]
    total = sum(counts.tiers.values())
    # Initial values are computed: they are read from nowhere.
    in_memory = total - counts.tiers[STORAGE] - counts.tiers.get(INITIAL, 0)
    parts: list[Part] = [
        sections.memory_figure(budget),
        Figure(
            name="Rows found in memory",
            value=share_text(in_memory / total) if total else "n/a",
            note=f"of {count_text(total)} rows looked up",
        ),
        Figure(
            name="Read",
            value=bytes_text(counts.read_bytes),
            note=f"in {count_text(counts.read_count)} reads",
        ),
        Figure(
            name="On disk",
            value=bytes_text(stats["disk_bytes"]),
            note=f"{count_text(contents['row_count'])} rows on "
            f"{count_text(contents['page_count'])} pages",
        ),
        sections.memory_part(budget),
        sections.tiers_part(counts.tiers, "Of the different rows of each lookup."),
        *sections.over_time(observer.history.columns, "lookups"),
    ]
    parts += sections.another_budget(estimates) if estimates else [_no_estimate(stats, queries)]
    parts.append(sections.tables_part(_tables(contents["tables"], snapshot.tables())))
    generation = stats["snapshot"]["generation"]
    return Report(
        title=f"Tierbed snapshot {snapshot.path}",
        about=(
            f"Identity {snapshot.identity}, {generation['delta_count']} deltas upon it. Counted "
            f"since it was opened here: {counts.steps:,} lookups."
        ),
        parts=parts,
        numbers={
            "memory": budget,
            "counts": asdict(counts),
            "points": observer.history.columns,
            "another_budget": None if estimates is None else estimates.to_dict(),
            "tables": contents["tables"],
            "disk_bytes": stats["disk_bytes"],
        },
    )


def _no_estimate(stats: Mapping[str, Any], queries: str | os.PathLike[str] | None) -> Note:
    if queries is not None:
        is_empty = not sum(tier["row_count_max"] for tier in stats["snapshot"]["tiers"])
        text = (
            "It has no cache, so that no budget finds more rows."
            if is_empty
            else (
                "No query was written yet. Files appear whole, and the last ones when the "
                "snapshot is closed: look up more, or record with a smaller file_bytes."
            )
        )
        return Note(title="Another budget", text=text, width="full")
    return Note(
        title="Another budget",
        text=(
            "Queries are not recorded yet. Record them, look up for a while, and make the report "
            "from what was written; tierbed serve has --record for the same:"
        ),
        code="snapshot.record('queries'); ...; snapshot.report(queries='queries')",
        width="full",
    )


def _tables(
    contents: Sequence[Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    known = {table["name"] for table in tables}
    return [
        {
            "name": table["name"],
            "codec": table["codec"],
            "rows": f"{table['row_count']:,}",
            "stored": f"{table['stored_rows']:,}",
            "dim": str(table["dim"]),
            "bytes": bytes_text(4096 * table["page_count"]),
        }
        for table in contents
        if table["name"] in known
    ]
