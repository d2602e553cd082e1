"""What do replicas cost, and does their speed pay for it?

A month of a server plus the drives that hold the table, once without and once with replicas.
Source: MaxEmbed §7.3, Table 2, which counts the whole price of a drive in one month; give
``months`` to spread it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierbed.errors import InvalidError

__all__ = ["PAPER_DRIVES", "Prices", "Space", "total_cost"]

PAPER_DRIVES: Mapping[str, float] = {"P5800X": 1.25, "PM1735": 0.3125}


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What is paid.

    Args:
        server_per_month: Price of the server, without drives for the table.
        drives_per_gb: Price of a gigabyte of each kind of drive, by its name.
        months: Over how many months a drive is paid off.
    """

    server_per_month: float = 1588.0
    drives_per_gb: Mapping[str, float] = field(default_factory=lambda: dict(PAPER_DRIVES))
    months: float = 1.0

    def __post_init__(self) -> None:
        if not self.drives_per_gb:
            raise InvalidError("name at least one kind of drive with its price per gigabyte")
        for name, price in [("server", self.server_per_month), *self.drives_per_gb.items()]:
            _check(f"price of {name}", price, least=0.0)
        _check("months", self.months, least=1e-9)


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is stored.

    Args:
        table_gb: Size of the table without replicas.
        ratio: Replicas per row of the table.
        replicated_gb: Size with replicas, where it is known better than by the ratio.
    """

    table_gb: float
    ratio: float
    replicated_gb: float | None = None

    def __post_init__(self) -> None:
        _check("table size", self.table_gb, least=1e-12)
        _check("ratio", self.ratio, least=0.0)
        if self.replicated_gb is not None:
            _check("replicated size", self.replicated_gb, least=self.table_gb)

    @property
    def with_replicas_gb(self) -> float:
        """Size of table and replicas."""
        computed = self.table_gb * (1.0 + self.ratio)
        return computed if self.replicated_gb is None else self.replicated_gb


def total_cost(space: Space, prices: Prices, speedup: float) -> Sequence[dict[str, Any]]:
    """Compares a month without and with replicas, one row for each kind of drive.

    Args:
        space: What is stored.
        prices: What is paid.
        speedup: Queries per second with replicas over those without.

    Returns:
        Rows of ``drive``, ``cost_plain``, ``cost_replicated``, ``performance``,
        ``performance_per_cost`` (above 1 the replicas pay) and ``break_even_speedup``.
    """
    _check("speedup", speedup, least=1e-12)
    rows = []
    for drive, per_gb in prices.drives_per_gb.items():
        plain = prices.server_per_month + space.table_gb * per_gb / prices.months
        replicated = prices.server_per_month + space.with_replicas_gb * per_gb / prices.months
        if plain <= 0.0:
            raise InvalidError(f"server and {drive} are both free; give a price")
        rows.append(
            {
                "drive": drive,
                "cost_plain": plain,
                "cost_replicated": replicated,
                "performance": speedup,
                "performance_per_cost": speedup * plain / replicated,
                "break_even_speedup": replicated / plain,
            }
        )
    return rows


def _check(what: str, value: float, *, least: float) -> None:
    if not math.isfinite(value) or value < least:
        raise InvalidError(f"{what} must be a number of at least {least:g}, found {value}")
