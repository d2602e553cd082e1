"""Look-ahead of several collections together.

The engine knows one layout of coming batches at a time. So the features of all collections over a
store are announced side by side, as one. No lookup is of that layout, so what was used is not
counted: each announcement begins anew, with the batches that still wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tierbed.errors import InvalidError
from tierbed.train.session import StepSession
from tierbed.train.store import Store

__all__ = ["SeveralSessions"]

_Bags = tuple[Tensor, Tensor]


class SeveralSessions:
    """The look-ahead of several collections, which train by window.

    Args:
        sessions: Of each collection; those that only read have none.
        bags_of: Of each collection, what makes its bags of what the key returned.
    """

    may_follow = False

    def __init__(self, sessions: Sequence[Any], bags_of: Sequence[Callable[[Any], Any]]) -> None:
        self._sessions = list(sessions)
        self._bags_of = list(bags_of)
        self._waiting: deque[Any] = deque()
        by_store: dict[Store, list[int]] = {}
        for at, session in enumerate(self._sessions):
            if isinstance(session, StepSession):
                by_store.setdefault(session.store, []).append(at)
        self._joined = [_Joined(store, at, self._sessions) for store, at in by_store.items()]

    def prefetch(self, batches: Sequence[Any]) -> int:
        """Brings the rows of coming batches into memory; returns how many batches fit."""
        whole = [*self._waiting, *(self._divided(batch) for batch in batches)]
        fit = len(whole)
        for joined in self._joined:
            fit = min(fit, joined.announce(whole))
        fit = max(fit, len(self._waiting))
        new = fit - len(self._waiting)
        self._waiting.extend(whole[len(self._waiting) : fit])
        return new

    def note_used(self) -> None:
        """Notes that the nearest batch was handed on."""
        if self._waiting:
            self._waiting.popleft()

    def end_lookahead(self) -> None:
        """Forgets what was announced by :meth:`prefetch`."""
        self._waiting.clear()
        for joined in self._joined:
            joined.store.native.end_lookahead()

    def tell_why_not(self) -> None:
        """Says why no plan is followed, where the caller may have expected one."""
        for session in self._sessions:
            session.tell_why_not()

    def _divided(self, batch: Any) -> list[Any]:
        """Returns what each collection looks up of what the key returned."""
        count = len(self._bags_of)
        parts = list(batch) if isinstance(batch, (list, tuple)) else [batch] * count
        if len(parts) != count:
            raise InvalidError(
                f"the key returned {len(parts)} parts for {count} modules; return one part for "
                "each, or one KeyedJaggedTensor for all"
            )
        return [bags_of(part) for bags_of, part in zip(self._bags_of, parts, strict=True)]


class _Joined:
    """The features of all collections over one store, side by side."""

    def __init__(self, store: Store, at: Sequence[int], sessions: Sequence[Any]) -> None:
        self.store = store
        self._parts = [(one, sessions[one]) for one in at]
        tables = [table for _, session in self._parts for table in session.tables]
        # Only rows are named: how they are pooled does not matter.
        self._plan = store.native.plan(tables, ["sum"] * len(tables))

    def announce(self, batches: Sequence[Sequence[Any]]) -> int:
        self.store.native.end_lookahead()
        return self.store.native.prefetch(self._plan, [self._bags(batch) for batch in batches])

    def _bags(self, batch: Sequence[Any]) -> _Bags:
        ids, lengths = [], []
        for at, session in self._parts:
            of_part, offsets = session.rows_of(batch[at])
            ids.append(of_part)
            lengths.append(torch.diff(offsets).view(len(session.tables), -1).sum(dim=1))
        # A bag per feature: modules need not agree in samples.
        counts = torch.cat(lengths)
        return torch.cat(ids), torch.nn.functional.pad(counts.cumsum(0), (1, 0))
