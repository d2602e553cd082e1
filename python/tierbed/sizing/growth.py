"""Memory that grows with a table, its pages, its ids or a log: bytes of each, part by part.

These numbers stand here alone. ``docs/reference/memory.md`` shows them, ``tierbed plan`` computes
with them, and ``python/tests/unit/test_memory_growth.py`` measures each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tierbed.errors import InvalidError

__all__ = ["GROWTH", "Growth", "growth_of", "table_lines"]

#: Bytes of a page of a table.
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Growth:
    """Memory of one part, for each thing that it grows with.

    Args:
        part: Its name; inside a budget that of ``stats()["budget"]["parts"]``.
        where: What has it.
        per: What it grows with.
        least: Bytes of each, at least.
        most: Bytes of each, at most.
        ends: Where its growth ends.
    """

    part: str
    where: str
    per: str
    least: float
    most: float
    ends: str

    def bytes_of(self, count: float) -> float:
        """Returns the most bytes that ``count`` of them take."""
        return self.most * count


_NEVER = "never"

#: Inside ``dram_budget``, while training.
TRAINING = (
    Growth("page maps", "`file` store", "page of 4 KiB", 2, 2, _NEVER),
    Growth("row buffer", "window order", "row held, beside its record", 25.8, 31.6, "the budget"),
    Growth("range maps", "`cold` store", "range of 64 pages", 72, 72, _NEVER),
    Growth("filters", "`lsm` store", "row", 1.25, 1.26, _NEVER),
    Growth("block indexes", "`lsm` store", "block of 4 KiB", 8, 8, _NEVER),
    Growth("memory store", "`memory` store", "row, beside its record", 0.9, 1.3, _NEVER),
    Growth("plan windows", "forward order", "window, for one table", 36, 60, _NEVER),
    Growth("chunk lists", "forward order", "chunk of rows on disk", 16, 64, _NEVER),
    Growth("vocabulary directory", "open vocabulary", "id", 0.03, 0.13, _NEVER),
)
#: Inside ``dram_budget``, while serving.
SERVING = (
    Growth("forward_index", "snapshot", "row, by the bits of a page's number", 1, 4, _NEVER),
    Growth("forward_index", 'snapshot with `head_rows="5%"`', "row", 0.14, 0.4, _NEVER),
    Growth("placement_index", "snapshot with a placement", "row, likewise", 1, 4, _NEVER),
    Growth("placement_index", "snapshot with a placement", "replica, likewise", 1, 4, _NEVER),
    Growth("deltas", "delta upon a snapshot", "row of the delta", 12, 12, _NEVER),
)
#: Beside any budget.
OUTSIDE = (
    Growth("next uses", "plan that is made", "row of the tables", 8, 8, "the budget"),
    Growth("tokens", "`Vocabulary`", "token", 24, 24, "256 MiB"),
    Growth("query log", "`QueryLog`", "id of a query", 4, 4.4, _NEVER),
    Growth("query log", "`QueryLog`", "query", 8, 8.4, _NEVER),
    Growth("bisection", "`place`", "id of a query", 4, 8, _NEVER),
    Growth("bisection", "`place`", "row", 20, 32, _NEVER),
    Growth("growth of pages", "`place`", "id of a query in a block", 16, 32, "2^25 ids a thread"),
    Growth("placement", "`Placement`", "row", 16, 26, _NEVER),
)
GROWTH: tuple[tuple[str, tuple[Growth, ...]], ...] = (
    ("training", TRAINING),
    ("serving", SERVING),
    ("outside", OUTSIDE),
)


def growth_of(part: str, where: str = "", per: str = "") -> Growth:
    """Returns the growth of a part.

    Args:
        part: Its name.
        where: What has it, as far as that tells it from others.
        per: What it grows with, likewise.

    Raises:
        InvalidError: None, or several, are called so.
    """
    found = [
        one
        for _, group in GROWTH
        for one in group
        if one.part == part and where in one.where and per in one.per
    ]
    if len(found) != 1:
        raise InvalidError(
            f"{len(found)} parts of the table of memory are {part!r} {where!r} {per!r}; name one"
        )
    return found[0]


def table_lines(group: str) -> Iterator[str]:
    """Yields the lines of a group of parts as the documents show them.

    Args:
        group: ``training``, ``serving`` or ``outside``.
    """
    yield "| part | of | bytes | of each | ends at |"
    yield "|---|---|---|---|---|"
    for one in dict(GROWTH)[group]:
        yield f"| {one.part} | {one.where} | {_told(one)} | {one.per} | {one.ends} |"


def _told(one: Growth) -> str:
    if one.least == one.most:
        return f"{one.most:g}"
    return f"{one.least:g} to {one.most:g}" if one.least else f"at most {one.most:g}"
