"""Look-ahead of several collections together.

The engine knows one layout of coming batches at a time. So the features of all collections over a
store are announced side by side, as one. By window no lookup is of that layout, so what was used is
not counted: each announcement begins anew, with the batches that still wait. Along a plan the batch
is one, too; each collection looks up and steps its part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tierbed.data.order import BatchOrder, known_order
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.train.session import Reading, StepSession
from tierbed.train.store import Store

__all__ = ["SeveralSessions"]


class SeveralSessions:
    """The look-ahead of several collections.

    Those over one store follow a plan together. Collections over several stores train by window.

    Args:
        sessions: Of each collection; those that only read have none.
        bags_of: Of each collection, what makes its bags of what the key returned.
    """

    def __init__(self, sessions: Sequence[Any], bags_of: Sequence[Callable[[Any], Any]]) -> None:
        self._sessions = list(sessions)
        self._bags_of = list(bags_of)
        self._waiting: deque[Any] = deque()
        by_store: dict[Store, list[int]] = {}
        for at, session in enumerate(self._sessions):
            if isinstance(session, StepSession):
                by_store.setdefault(session.store, []).append(at)
        self._joined = [_Joined(store, at, self._sessions) for store, at in by_store.items()]

    # ------------------------------------------------------------ window order

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

    # ------------------------------------------------------------ forward order

    @property
    def _trains(self) -> bool:
        return any(session.trains for joined in self._joined for session in joined.sessions)

    @property
    def may_follow(self) -> bool:
        """Whether a plan of the batches may be made and followed."""
        return (
            self._trains
            and all(joined.store.asks_for_plan for joined in self._joined)
            and self._obstacle() is None
        )

    def tell_why_not(self) -> None:
        """Says why no plan is followed, where the caller may have expected one."""
        if not self._trains:
            for session in self._sessions:
                session.tell_why_not()
            return
        reason = self._obstacle()
        for joined in self._joined:
            if reason is not None and joined.store.asks_for_plan:
                joined.store.note_unknown_order(reason)

    def _obstacle(self) -> str | None:
        """Returns why the collections cannot follow a plan together; None when they can."""
        if not all(isinstance(session, (StepSession, Reading)) for session in self._sessions):
            return "collections are divided over ranks, and are looked ahead with others"
        if len(self._joined) != 1:
            return (
                "the collections have stores of their own; give them one store, whose memory and "
                "checkpoints are for all"
            )
        return self._joined[0].obstacle()

    @property
    def store(self) -> Store:
        """The store of all collections that train along a plan."""
        return self._joined[0].store

    def find_order(self, loader: Iterable[Any], key: Callable[[Any], Any]) -> BatchOrder | str:
        """Returns the order of a loader's batches, or why it is not known."""
        return known_order(loader, self.joined_key(key))

    def joined_key(self, key: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns the key whose result is the bags of all collections over the first store."""
        return (lambda batch: _JoinedBags(*self._bags(key(batch)))) if self._joined else key

    def stands_in_plan(self) -> bool:
        """Whether a plan is followed, whose batches are checked one by one."""
        return self.position is not None

    def is_collecting(self) -> bool:
        """Whether gradients wait for the step of an optimizer, which leaves the plan then.

        Raises:
            InvalidError: The store insists on its plan.
        """
        return any(session.is_collecting() for session in self._joined[0].sessions)

    @property
    def position(self) -> tuple[int, int] | None:
        """Epochs and batches of the epoch done; None without a plan."""
        return self.store.native.position()

    def find_position(self) -> tuple[int, int] | None:
        """Returns the :attr:`position`, where an epoch begins."""
        return self.position

    def feature_names(self) -> list[str]:
        """Returns the input features of all collections, in the order of the plan."""
        return [name for one in self._joined[0].sessions for name in one.feature_names()]

    def follow(self, source: str, window: int) -> dict[str, Any]:
        """Follows the plan of ``source`` if there is one; returns the engine's answer."""
        return self.store.native.follow(self._joined[0].plan, source, window)

    def start_plan(self, source: str, window: int) -> None:
        """Starts making the plan of ``source``."""
        self.store.native.start_plan(self._joined[0].plan, source, window)

    def push_planned(self, batch: Any, *, is_stepped: bool) -> None:
        """Adds the next batch to the plan."""
        self.store.native.push_planned(self._joined[0].plan, *self._bags(batch), is_stepped)

    def finish_plan(self) -> None:
        """Finishes the plan, which is durable then."""
        self.store.native.finish_plan()

    def expect(self, batch: Any) -> bool:
        """Makes sure that this is the next batch of the plan, before collections look it up.

        Args:
            batch: What the key returned.

        Returns:
            Whether the plan is followed still.

        Raises:
            InvalidError: It is another batch, and the store insists on its plan.
        """
        return self.store.native.expect_joined(self._joined[0].plan, *self._bags(batch))

    def pass_planned(self, batch: Any) -> None:
        """Ends the next batch of the plan, of which some collections were stepped, or none."""
        if not self.store.native.end_joined():
            self.store.native.pass_planned(self._joined[0].plan, *self._bags(batch))

    def pass_planned_to(self, batch: int) -> None:
        """Passes the batches of the plan up to ``batch``, of this epoch or of the next one."""
        self.store.native.pass_planned_to(batch)

    def _bags(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self._joined[0].bags(self._divided(batch))


class _JoinedBags(NamedTuple):
    """A bag for each feature of all collections."""

    ids: Tensor
    bounds: Tensor

    def values(self) -> Tensor:
        return self.ids

    def offsets(self) -> Tensor:
        return self.bounds


class _Joined:
    """The features of all collections over one store, side by side."""

    def __init__(self, store: Store, at: Sequence[int], sessions: Sequence[Any]) -> None:
        self.store = store
        self._parts: list[tuple[int, StepSession]] = [(one, sessions[one]) for one in at]
        tables = [table for session in self.sessions for table in session.tables]
        # Only rows are named: how they are pooled does not matter.
        self.plan = store.native.plan(tables, ["sum"] * len(tables))

    @property
    def sessions(self) -> list[StepSession]:
        return [session for _, session in self._parts]

    def obstacle(self) -> str | None:
        """Returns why these collections cannot follow a plan; None when they can."""
        others = len(self.store.collections()) - len(self._parts)
        if others > 0:
            return (
                f"{others} more collections train on the store; give lookahead all of them, or "
                "drop the others"
            )
        for session in self.sessions:
            if not session.trains:
                return "some of the collections train, and some only read"
            reason = session.obstacle()
            if reason is not None:
                return reason
            if session.is_open:
                return "a table has an open vocabulary, and several collections train on the store"
        owned = [table for session in self.sessions for table in set(session.tables)]
        if len(owned) != len(set(owned)):
            return "two collections share a table, and a plan steps each table once for a batch"
        if self.store.device is not None:
            return "rows train on a device, and several collections train on the store"
        try:
            # Nothing is expected now: this only asks an engine of several shards.
            self.store.native.end_joined()
        except UnsupportedError as error:
            return str(error)
        return None

    def announce(self, batches: Sequence[Sequence[Any]]) -> int:
        self.store.native.end_lookahead()
        return self.store.native.prefetch(self.plan, [self.bags(batch) for batch in batches])

    def bags(self, batch: Sequence[Any]) -> tuple[Tensor, Tensor]:
        ids, lengths = [], []
        for at, session in self._parts:
            of_part, offsets = session.rows_of(batch[at])
            ids.append(of_part)
            lengths.append(torch.diff(offsets).view(len(session.tables), -1).sum(dim=1))
        # A bag per feature: modules need not agree in samples.
        counts = torch.cat(lengths)
        return torch.cat(ids), torch.nn.functional.pad(counts.cumsum(0), (1, 0))
