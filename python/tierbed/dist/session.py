"""Control of the look-ahead over ranks: which batches they will look up together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tierbed.dist.exchange import OneSided, RankBatch
from tierbed.train.store import Store

__all__ = ["RankSession"]


class RankSession:
    """The look-ahead of one rank; all ranks look ahead together, over equally many batches.

    Args:
        store: This rank's rows.
        exchange: This rank's part in lookups of all.
        prepare: Takes a batch, returns what of it is looked up.
    """

    may_follow = False

    def __init__(
        self, store: Store, exchange: OneSided, prepare: Callable[[Any], RankBatch]
    ) -> None:
        self._store = store
        self._exchange = exchange
        self._prepare = prepare

    def prefetch(self, batches: Sequence[Any]) -> int:
        """Brings the rows of coming batches of all ranks; returns how many batches fit."""
        return self._exchange.prefetch([self._prepare(batch) for batch in batches])

    def note_used(self) -> None:
        """Does nothing: the exchange sees the lookups themselves."""

    def end_lookahead(self) -> None:
        """Forgets what was announced by :meth:`prefetch`."""
        self._exchange.end_lookahead()

    def tell_why_not(self) -> None:
        """Says why no plan is followed, where the caller may have expected one."""
        reason = self._store.plan_obstacle
        if reason is None and self._store.asks_for_plan:
            reason = "the rows of a rank are looked up for all ranks, and a plan is of one"
        if reason is not None:
            self._store.note_unknown_order(reason)
