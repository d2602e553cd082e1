"""What another memory budget would bring, computed from lookups that were recorded.

A training store has a sample of the rows that were looked up (:meth:`tierbed.Store.record`); a
snapshot has query logs (:meth:`tierbed.Snapshot.record`), which are replayed through the
engine's own cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tierbed.errors import InvalidError
from tierbed.placement.build import LogOptions, QueryLog
from tierbed.report.counts import MEMORY

if TYPE_CHECKING:
    from tierbed.report.observer import Observer

__all__ = ["SCALES", "BudgetEstimate", "Estimates", "of_queries", "of_sample", "read_queries"]

SCALES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Budgets that are asked about, as multiples of the one in force."""

# The earlier queries fill the cache, the later ones are counted.
_WARM_SHARE = 0.5
# Parts of a training store that take a share of its budget.
_GROWING = ("batch scratch", "io buffers")
# Enough to tell ratios of caches apart, and read in seconds.
QUERY_COUNT_MAX = 100_000


@dataclass(frozen=True, kw_only=True)
class BudgetEstimate:
    """A budget, and what it would bring.

    Attributes:
        scale: As a multiple of the budget in force.
        budget_bytes: The budget.
        row_capacity: Rows that memory would hold; 0 where the budget is too small for any.
        hit_ratio: Share of the rows that would be found in memory.
    """

    scale: float
    budget_bytes: int
    row_capacity: int
    hit_ratio: float


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """What other budgets would bring.

    Attributes:
        budgets: By budget, that in force among them.
        use_count: Uses of rows that were recorded.
        measured_ratio: What the engine counted while they were, with the budget in force.
        first_use_ratio: Share of uses that were the first of their row, which no memory has.
        how: How it was computed.
    """

    budgets: tuple[BudgetEstimate, ...]
    use_count: int
    measured_ratio: float | None
    first_use_ratio: float | None
    how: str

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Estimates:
        """Takes what :meth:`to_dict` returned."""
        budgets = tuple(BudgetEstimate(**one) for one in told["budgets"])
        return cls(**{**told, "budgets": budgets})

    def at(self, scale: float) -> BudgetEstimate:
        """Returns the estimate of a multiple of the budget, one of :data:`SCALES`."""
        return next(one for one in self.budgets if one.scale == scale)


def of_sample(stats: Mapping[str, Any], observer: Observer) -> Estimates | None:
    """Computes what other budgets would bring to training by window.

    Args:
        stats: Of the store.
        observer: Has the sample.

    Returns:
        None where nothing was recorded, or training is not by window.
    """
    sample, start = observer.sample, observer.sample_start
    now, buffer = observer.counts(), observer.row_buffer
    is_by_window = stats["order"]["kind"] == "window"
    if sample is None or start is None or not sample.use_count or not is_by_window:
        return None
    if buffer is None:
        return None
    held_bytes, row_capacity = buffer
    ratios = [
        (scale, size, rows, sample.hit_ratio(rows) or 0.0)
        for scale, size, rows in _capacities(stats, held_bytes, row_capacity)
    ]
    looked_up = now.ids - start.ids
    return Estimates(
        budgets=_estimates(ratios),
        use_count=sample.use_count,
        measured_ratio=(now.tiers[MEMORY] - start.tiers[MEMORY]) / looked_up if looked_up else None,
        first_use_ratio=sample.first_use_ratio(),
        how=(
            f"computed from a sample of {sample.row_count:,} of the rows in {sample.use_count:,} "
            "lookups of ids, as if the least recently used row left memory first"
        ),
    )


def of_queries(
    stats: Mapping[str, Any], tables: Sequence[Mapping[str, Any]], folder: str | os.PathLike[str]
) -> Estimates | None:
    """Replays recorded queries through the snapshot's cache, at other sizes.

    Args:
        stats: Of the snapshot.
        tables: Its tables.
        folder: What :meth:`tierbed.Snapshot.record` wrote.

    Returns:
        None where no query was written yet, or the snapshot has no cache.

    Raises:
        InvalidError: The folder holds no logs of these tables.
    """
    of = stats["snapshot"]
    held_bytes = sum(tier["capacity_bytes"] for tier in of["tiers"])
    capacity = sum(tier["row_count_max"] for tier in of["tiers"])
    log = read_queries(tables, folder)
    if log is None or not capacity:
        return None
    policy = of["tiers"][0]["policy"]
    earlier, later = log.split(_WARM_SHARE)
    ratios = [
        (
            scale,
            size,
            rows,
            _replayed(earlier, later, rows, policy),
        )
        for scale, size, rows in _capacities(stats, held_bytes, capacity)
    ]
    asked = of["cache_hits"] + of["cache_misses"]
    return Estimates(
        budgets=_estimates(ratios),
        use_count=later.pin_count,
        measured_ratio=of["cache_hits"] / asked if asked else None,
        first_use_ratio=None,
        how=(
            f"{len(log):,} recorded queries replayed through the cache ({policy}): the first half "
            "filled it, the second half was counted"
        ),
    )


def read_queries(
    tables: Sequence[Mapping[str, Any]], folder: str | os.PathLike[str]
) -> QueryLog | None:
    """Reads recorded query logs as one, whose rows are numbered through all tables.

    The n-th query of every log was part of the same request, where all were recorded.

    Args:
        tables: Of the snapshot.
        folder: What :meth:`tierbed.Snapshot.record` wrote.

    Returns:
        None where no query was written yet.

    Raises:
        InvalidError: The folder holds no logs of these tables.
    """
    sizes = {str(table["name"]): int(table["row_count"]) for table in tables}
    starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    groups = [path for path in sorted(Path(folder).glob("*")) if path.is_dir()]
    if not groups or any(name not in sizes for path in groups for name in path.name.split("+")):
        raise InvalidError(
            f"{folder} holds no query logs of {list(sizes)}; name the folder that was given to "
            "record()",
            {"path": str(folder)},
        )
    options = LogOptions(query_count_max=QUERY_COUNT_MAX)
    logs = [
        (QueryLog.read(path, options=options), _numbers(path.name.split("+"), sizes, starts))
        for path in groups
        if any(path.iterdir())
    ]
    if not logs:
        return None

    def queries() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for at in range(max(len(log) for log, _ in logs)):
            rows = torch.cat([numbers[log[at]] for log, numbers in logs if at < len(log)])
            yield rows, torch.tensor([0, len(rows)])

    return QueryLog.from_batches(sum(sizes.values()), queries())


def _numbers(
    group: Sequence[str], sizes: Mapping[str, int], starts: Mapping[str, int]
) -> torch.Tensor:
    """Returns the numbers, through all tables, of the rows of tables recorded together."""
    return torch.cat([torch.arange(starts[name], starts[name] + sizes[name]) for name in group])


def _replayed(earlier: QueryLog, later: QueryLog, row_capacity: int, policy: str) -> float:
    if not row_capacity:
        return 0.0
    share = min(1.0, row_capacity / later.row_count)
    return later.misses(earlier, share, policy=policy).hit_ratio


def _capacities(
    stats: Mapping[str, Any], held_bytes: int, row_capacity: int
) -> Iterator[tuple[float, int, int]]:
    """Yields scale, budget and rows; parts that no larger batch needs stay as they are."""
    limit_bytes = int(stats["budget"]["limit_bytes"])
    parts = stats["budget"]["parts"]
    growing = sum(parts[name]["used_bytes"] for name in _GROWING if name in parts)
    for scale in SCALES:
        size = int(scale * limit_bytes)
        bytes_left = int(held_bytes + (scale - 1) * (limit_bytes - growing))
        rows = row_capacity if scale == 1.0 else row_capacity * bytes_left // max(1, held_bytes)
        yield scale, size, max(0, int(rows))


def _estimates(ratios: Sequence[tuple[float, int, int, float]]) -> tuple[BudgetEstimate, ...]:
    return tuple(
        BudgetEstimate(scale=scale, budget_bytes=size, row_capacity=rows, hit_ratio=ratio)
        for scale, size, rows, ratio in ratios
    )
