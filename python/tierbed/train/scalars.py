"""Counters of a store as scalars, for loggers of experiments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["HasStats", "scalars"]


class HasStats(Protocol):
    """A :class:`tierbed.Store` or a :class:`tierbed.Snapshot`."""

    def stats(self) -> Mapping[str, Any]:
        """Returns nested counters."""


def scalars(source: HasStats, prefix: str = "tierbed/") -> dict[str, float]:
    """Returns the numbers of ``source.stats()`` by path, such as ``tierbed/buffer/hit_count``.

    What is no number is left out. For ``wandb.log``, ``mlflow.log_metrics`` and, one by one,
    ``SummaryWriter.add_scalar``.

    Args:
        source: A store or a snapshot.
        prefix: In front of every name.

    Examples:
        >>> with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        ...     tb.scalars(store)["tierbed/budget/limit_bytes"]
        16777216.0
    """
    found: dict[str, float] = {}
    _collect(source.stats(), prefix, found)
    return found


def _collect(tree: Mapping[str, Any], prefix: str, found: dict[str, float]) -> None:
    for name, value in tree.items():
        path = f"{prefix}{name}".replace(" ", "_")
        if isinstance(value, Mapping):
            _collect(value, f"{path}/", found)
        elif isinstance(value, (int, float)):
            found[path] = float(value)
