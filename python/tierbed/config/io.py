"""Options of how files are read and written."""

from __future__ import annotations

from dataclasses import dataclass

from tierbed.config.words import IoEngine

__all__ = ["IoOptions"]


@dataclass(frozen=True, kw_only=True)
class IoOptions:
    """How files are read and written.

    Args:
        engine: ``"auto"`` takes io_uring and falls back to ``"pread"`` where the system refuses
            it; ``stats()`` says which and why.
        queue_depth: Reads in flight at a time; 0 chooses by the budget.

    Examples:
        >>> _ = tb.placement.import_tables({"item": torch.zeros(1000, 8)}, "snapshot")
        >>> tb.Snapshot.open("snapshot", io=tb.IoOptions(engine="pread")).close()
    """

    engine: IoEngine = "auto"
    queue_depth: int = 0
