"""Report of a training store, and of a folder by what its training told last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tierbed import _native
from tierbed.errors import UnsupportedError
from tierbed.report import sections
from tierbed.report.budgets import Estimates, of_sample
from tierbed.report.counts import MEMORY, Counts, counts_of
from tierbed.report.page import Report
from tierbed.report.parts import Figure, Note, Part, bytes_text, count_text, share_text

if TYPE_CHECKING:
    from tierbed.report.observer import Observer
    from tierbed.train.store_reports import StoreReports

__all__ = ["report_of_store"]

_RECORD = "store.record()"


def report_of_store(
    store: StoreReports, observer: Observer | None, told: Mapping[str, Any] | None = None
) -> Report:
    """Makes a report of a store that trains here, or of one that was opened to be looked at.

    Args:
        store: The store.
        observer: What saw its lookups, where it trains here.
        told: The progress of its last training, where it does not.

    Raises:
        UnsupportedError: Several shards, before their first batch.
    """
    stats, path = store.stats(), store.path
    if "budget" not in stats:
        raise UnsupportedError(
            "a store of several shards divides its memory when it knows its tables; look up a "
            "batch first"
        )
    if observer is not None:
        budget, points = stats["budget"], observer.history.columns
        counts = counts_of(stats, observer.ids)
        estimates = of_sample(stats, observer)
        where = "this process"
    else:
        budget = stats["budget"] if told is None else told["budget"]
        points = {} if told is None else told["points"]
        counts = counts_of(stats, 0) if told is None else _counts_told(told["counts"])
        recorded = None if told is None else told["another_budget"]
        estimates = None if recorded is None else Estimates.from_dict(recorded)
        where = "its last training" if told is not None else "this look at it"
    tables: Sequence[Any] = store.tables()
    parts: list[Part] = [
        sections.memory_figure(budget),
        _memory_hits(counts),
        Figure(
            name="Read",
            value=bytes_text(counts.read_bytes),
            note=f"in {count_text(counts.read_count)} reads",
        ),
        Figure(name="On disk", value=bytes_text(stats["disk_bytes"]), note=_rows_note(tables)),
        sections.memory_part(budget),
        sections.tiers_part(
            counts.tiers,
            "Of the ids looked up. What was read ahead counts where it was before; initial values "
            "are those of rows that were never trained.",
        ),
        *sections.over_time(points, "steps"),
    ]
    parts += sections.another_budget(estimates) if estimates else [_no_estimate(stats, where)]
    parts.append(
        sections.tables_part(
            [_table(table) for table in tables], "Bytes are of all rows, with optimizer state."
        )
    )
    return Report(
        title=f"Tierbed store {path or 'in memory'}",
        about=f"Counted in {where}: {counts.steps:,} steps. {_order_text(stats)}",
        parts=parts,
        numbers={
            "memory": budget,
            "counts": asdict(counts),
            "points": points,
            "another_budget": None if estimates is None else estimates.to_dict(),
            "tables": [{**table, "bytes": _native.table_bytes(table)} for table in tables],
            "order": stats["order"],
            "disk_bytes": stats["disk_bytes"],
        },
    )


def _memory_hits(counts: Counts) -> Figure:
    total = sum(counts.tiers.values())
    note = f"of {count_text(total)} ids looked up"
    value = share_text(counts.tiers[MEMORY] / total) if total else "n/a"
    return Figure(name="Rows found in memory", value=value, note=note)


def _counts_told(columns: Mapping[str, Any]) -> Counts:
    tiers = {
        name.removeprefix("tier:"): int(count)
        for name, count in columns.items()
        if name.startswith("tier:")
    }
    plain = {name: int(count) for name, count in columns.items() if not name.startswith("tier:")}
    return Counts(**plain, tiers=tiers)


def _order_text(stats: Mapping[str, Any]) -> str:
    order = stats["order"]
    if order["kind"] == "forward":
        return "Training follows the forward order."
    reason = order.get("reason")
    return "Training goes by window" + (f": {reason}." if reason else ".")


def _no_estimate(stats: Mapping[str, Any], where: str) -> Note:
    if stats["order"]["kind"] == "forward":
        return Note(
            title="Another budget",
            text=(
                "In forward order every row is in memory when it is used, whatever the budget: a "
                "larger one makes windows of the plan longer, so that fewer rows are read again. "
                "Rehearse the run with another budget:"
            ),
            code="tierbed plan --dram-budget 2GiB ...",
            width="full",
        )
    if where != "this process":
        return Note(
            title="Another budget",
            text=(
                "Lookups were not recorded for this. In the program that trains, call this before "
                "training, and make the report there:"
            ),
            code=f"{_RECORD}; ...; store.report().save('report.html')",
            width="full",
        )
    return Note(
        title="Another budget",
        text=(
            "Lookups are not recorded yet. Record a sample of them from now on, train for some "
            "hundred steps, and make the report again:"
        ),
        code=_RECORD,
        width="full",
    )


def _rows_note(tables: Sequence[Any]) -> str:
    rows = sum(int(table["row_count"]) for table in tables)
    size = sum(_native.table_bytes(table) for table in tables)
    return f"{count_text(rows)} rows of {bytes_text(size)} in {len(tables)} tables"


def _table(table: Any) -> dict[str, str]:
    size = _native.table_bytes(table)
    return {
        "name": table["name"],
        "optimizer": table["optimizer"].replace("_", " "),
        "rows": f"{table['row_count']:,}",
        "dim": str(table["dim"]),
        "bytes": bytes_text(size),
    }
