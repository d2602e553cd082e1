"""Control of the look-ahead: which batches a collection will look up, and along which plan.

A :class:`StepSession` stands between :func:`tierbed.lookahead` and a store, for one collection. The
collection's own lookups and steps go past it; where they stand along a plan, each step returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from tierbed._util.tensors import as_int64
from tierbed.data.order import BatchOrder, known_order
from tierbed.errors import InvalidError
from tierbed.ops.binding import Binding
from tierbed.train.store import Store

__all__ = ["Announcing", "Reading", "StepSession"]


class Announcing(Protocol):
    """What every look-ahead needs."""

    @property
    def may_follow(self) -> bool:
        """Whether a plan of the batches may be made and followed."""

    def prefetch(self, batches: Sequence[Any]) -> int:
        """Brings the rows of coming batches into memory; returns how many batches fit."""

    def note_used(self) -> None:
        """Notes that the nearest batch of :meth:`prefetch` was handed on."""

    def end_lookahead(self) -> None:
        """Forgets what was announced by :meth:`prefetch`."""

    def tell_why_not(self) -> None:
        """Says why no plan is followed, where the caller may have expected one."""


class Reading:
    """The look-ahead over rows that do not train: there is nothing to bring."""

    may_follow = False

    def prefetch(self, batches: Sequence[Any]) -> int:
        """Returns that all batches fit."""
        return len(batches)

    def note_used(self) -> None:
        """Does nothing."""

    def end_lookahead(self) -> None:
        """Does nothing."""

    def tell_why_not(self) -> None:
        """Does nothing: nobody expects a plan."""


class StepSession:
    """The look-ahead of one collection on its training store.

    Args:
        store: Where the rows live.
        collection: The collection, which picks its features out of a batch.
        binding: The collection's lookups and steps.
    """

    def __init__(self, store: Store, collection: Any, binding: Binding) -> None:
        self.store = store
        self._collection = collection
        self._binding = binding

    # ------------------------------------------------------------ window order

    def prefetch(self, batches: Sequence[Any]) -> int:
        """Brings the rows of coming batches into memory; returns how many batches fit."""
        pairs: list[tuple[Any, Any]] = [self.rows_of(batch) for batch in batches]
        return self.store.native.prefetch(self._binding.plan, pairs)

    def note_used(self) -> None:
        """Does nothing: the engine sees the lookups themselves."""

    @property
    def tables(self) -> list[int]:
        """Table id of each feature."""
        return self._binding.tables

    def rows_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the rows ``[E]`` and offsets ``[F*B+1]`` that a lookup of ``batch`` reads."""
        ids, offsets = self._ids(batch)
        if self._binding.is_open:
            ids = self._binding.translate(ids, offsets, is_training=False)
        return ids, offsets

    def end_lookahead(self) -> None:
        """Forgets what was announced by :meth:`prefetch`."""
        self.store.native.end_lookahead()

    # ------------------------------------------------------------ forward order

    @property
    def trains(self) -> bool:
        """Whether lookups are stepped now."""
        return bool(self._collection.training and self._binding.hook.requires_grad)

    @property
    def may_follow(self) -> bool:
        """Whether a plan of the batches may be made and followed."""
        return self.trains and not self._binding.frozen and self.store.may_follow_plan

    def tell_why_not(self) -> None:
        """Says why no plan is followed, where the caller may have expected one."""
        if not self.trains:
            if not self._collection.training:
                self.store.note_scans(is_coming=True)
            return
        reason = self.store.plan_obstacle
        if reason is None and self.store.asks_for_plan:
            reason = self.obstacle()
        if reason is not None:
            self.store.note_unknown_order(reason)

    def obstacle(self) -> str | None:
        """Returns why this collection can follow no plan; None when it can."""
        if not self._binding.frozen:
            return None
        names = [self._binding.guard.tables[at] for at in sorted(self._binding.frozen)]
        return f"the tables {names} are frozen, and a step along a plan is one of all tables"

    @property
    def is_open(self) -> bool:
        """Whether a table has an open vocabulary."""
        return self._binding.is_open

    def find_order(self, loader: Iterable[Any], key: Callable[[Any], Any]) -> BatchOrder | str:
        """Returns the order of a loader's batches, or why it is not known."""
        return known_order(loader, key)

    def stands_in_plan(self) -> bool:
        """Whether a plan is followed, whose batches are checked one by one."""
        return self.find_position() is not None

    def is_collecting(self) -> bool:
        """Whether gradients wait for the step of an optimizer, which leaves the plan then.

        Raises:
            InvalidError: The store insists on its plan.
        """
        collector = self._binding.guard.collector
        if collector is None or not collector.is_pending:
            return False
        if not self.store.may_leave_plan:
            raise InvalidError(
                "the gradients of a batch were not stepped before the next batch, and in forward "
                "order every batch is a step of its own; step after each batch, or open the store "
                'with order="window"'
            )
        return True

    @property
    def position(self) -> tuple[int, int] | None:
        """Epochs and batches of the epoch done behind the last step; None without a plan."""
        return self._binding.position

    def find_position(self) -> tuple[int, int] | None:
        """Asks the engine for the :attr:`position`, where an epoch begins."""
        self._binding.position = self.store.native.position()
        return self._binding.position

    def feature_names(self) -> list[str]:
        """Returns the input features of the collection, in the order of its output."""
        names: list[str] = self._collection.feature_names()
        return names

    def follow(self, source: str, window: int) -> dict[str, Any]:
        """Follows the plan of ``source`` if there is one; returns the engine's answer."""
        return self.store.native.follow(self._binding.plan, source, window)

    def start_plan(self, source: str, window: int) -> None:
        """Starts making the plan of ``source``."""
        self.store.native.start_plan(self._binding.plan, source, window)

    def push_planned(self, batch: Any, *, is_stepped: bool) -> None:
        """Adds the next batch to the plan; one that is not stepped gives no rows to new ids."""
        self.store.native.push_planned(self._binding.plan, *self._ids(batch), is_stepped)

    def finish_plan(self) -> None:
        """Finishes the plan, which is durable then."""
        self.store.native.finish_plan()

    def pass_planned(self, batch: Any) -> None:
        """Passes the next batch of the plan without a step."""
        self._binding.position = self.store.native.pass_planned(
            self._binding.plan, *self._ids(batch)
        )

    def pass_planned_to(self, batch: int) -> None:
        """Passes the batches of the plan up to ``batch``, of this epoch or of the next one.

        Nothing is stepped and the batches are not needed; their rows move as in any epoch.
        """
        self.store.native.pass_planned_to(batch)

    def _ids(self, batch: Any) -> tuple[Tensor, Tensor]:
        bags = self._collection.bags(batch)
        return as_int64(bags.values()).detach().cpu(), as_int64(bags.offsets()).detach().cpu()
