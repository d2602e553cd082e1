"""Several epochs of a loader under one plan.

A shuffle gives every epoch another order, and rows that lie along one order have to move before
they lie along the next. One plan of several epochs knows in which batch of which epoch a row is
needed next, so no row moves between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from tierbed.data.loader_draws import as_drawn, begun, has_drawn_its_seed, pass_epoch
from tierbed.data.order import BatchOrder, fingerprint, known_order
from tierbed.errors import InvalidError
from tierbed.train.place import (
    Generators,
    Place,
    generators_now,
    is_begun,
    set_epochs,
    set_generators,
    set_own_generators,
)

__all__ = ["Epochs"]


class Epochs:
    """The epochs of a loader that one plan covers, and which of them comes next.

    Datasets and samplers with a ``set_epoch`` are told the number of each epoch, counted on from
    the number that they have when the plan begins.

    Args:
        loader: A loader with a length.
        key: Takes a batch, returns what is looked up of it.
        count: Epochs of a plan; at least 2.

    Raises:
        InvalidError: The loader has no length.
    """

    def __init__(self, loader: Iterable[Any], key: Callable[[Any], Any], count: int) -> None:
        self._loader, self._key, self._count = loader, key, count
        try:
            self._length = len(loader)  # type: ignore[arg-type]
        except TypeError as error:
            raise InvalidError(
                f"epochs={count} needs a loader that knows its number of batches, and a "
                f"{type(loader).__name__} does not; leave epochs out"
            ) from error
        self._number = 0
        # The generators where the plan begins; None until its first epoch is asked for.
        self._begin: Generators | None = None
        # Whether the loader had seeded workers then, which it keeps.
        self._had_drawn = False
        self._fingerprint: str | None = None
        self._is_repeating = False
        # What undo() puts back.
        self._before: tuple[int, Generators | None, Generators] | None = None

    @property
    def passed(self) -> int:
        """Batches of the plan that lie before the epoch."""
        return 0 if self._is_repeating else self._number * self._length

    def __iter__(self) -> Iterator[Any]:
        """Begins the epoch of the loader that :meth:`begin` moved on to."""
        return begun(self._loader, self._has_drawn(self._number))

    def _has_drawn(self, number: int) -> bool:
        return number > 0 or self._had_drawn

    def within(self, start: int) -> int:
        """Returns which batch of its epoch the batch ``start`` of a plan is."""
        return start % self._length if self._length else start

    def begin(self, start: int, left: Place | None, resumed: Mapping[str, Any] | None) -> int:
        """Moves on to the next epoch, where the loader then stands.

        Args:
            start: Batches that are done: of the plan, if no epoch was begun; else of the epoch.
            left: Where the epoch before was left early.
            resumed: From :meth:`state_dict`, if the epoch is one that was saved.

        Returns:
            Batches of the epoch that are done.

        Raises:
            InvalidError: The plan has no batch ``start``.
        """
        self._before = (self._number, self._begin, generators_now(self._loader))
        if resumed is not None:
            self._restore(resumed)
        elif self._begin is None:
            return self._pass(start)
        elif left is None:
            self._move_on()
        elif not is_begun(self._loader):
            # What it draws behind its last batch was not drawn.
            set_own_generators(self._loader, left.begin)
            pass_epoch(as_drawn(self._loader, self._has_drawn(self._number)))
            self._move_on()
        return start

    def undo(self) -> None:
        """Puts back what the last :meth:`begin` changed: the epoch cannot be begun."""
        assert self._before is not None, "no epoch was begun"
        self._number, self._begin, generators = self._before
        self._fingerprint = None
        set_generators(self._loader, generators)

    def state_dict(self, is_over: bool) -> dict[str, Any]:
        """Returns what :meth:`begin` resumes from.

        Args:
            is_over: Whether the epoch is done, or none was begun: the next one is saved.
        """
        if self._begin is None or (is_over and self._number + 1 == self._count):
            had_drawn = self._begin is not None
            return {"number": 0, "begin": None, "from": self._begin, "had_drawn": had_drawn}
        number = self._number + is_over
        return {
            "number": number,
            "begin": self._begin,
            "from": None,
            "had_drawn": self._had_drawn,
        }

    def _restore(self, saved: Mapping[str, Any]) -> None:
        self._fingerprint = None
        self._number, self._begin = int(saved["number"]), saved["begin"]
        self._had_drawn = saved["had_drawn"]
        if self._begin is not None:
            set_epochs(self._loader, self._begin, self._number)
            return
        if saved["from"] is not None:
            set_epochs(self._loader, saved["from"], self._count)
        self._begin = generators_now(self._loader)

    def _pass(self, start: int) -> int:
        number = start // max(1, self._length)
        if number >= self._count:
            raise InvalidError(
                f"the {self._count} epochs of a plan have {self._count * self._length} batches; "
                f"begin at one of them, not at {start}"
            )
        self._begin_plan()
        assert self._begin is not None, "the plan was begun"
        for self._number in range(1, number + 1):
            pass_epoch(as_drawn(self._loader, self._has_drawn(self._number - 1)))
            set_epochs(self._loader, self._begin, self._number)
        return self.within(start)

    def _move_on(self) -> None:
        assert self._begin is not None, "no epoch was begun"
        self._number += 1
        set_epochs(self._loader, self._begin, self._number)
        if self._number == self._count:
            self._begin_plan()

    def _begin_plan(self) -> None:
        self._number, self._fingerprint = 0, None
        self._begin = generators_now(self._loader)
        self._had_drawn = isinstance(self._loader, DataLoader) and has_drawn_its_seed(self._loader)

    # ------------------------------------------------------------ the order

    def known_order(self) -> BatchOrder | str:
        """Returns the order of the batches of all epochs, or why it is not known.

        Where all epochs have the same order, that of one: such a plan serves all.
        """
        assert self._begin is not None, "no epoch was begun"
        now = known_order(as_drawn(self._loader, self._has_drawn(self._number)), self._key)
        if isinstance(now, str):
            return now
        if self._fingerprint is None:
            reason = self._find()
            if reason is not None:
                return reason
        if self._is_repeating:
            return now
        assert self._fingerprint is not None, "the order of the first epoch is known"
        is_stepped = now.is_stepped
        return BatchOrder(
            self._fingerprint,
            self._batches,
            self.passed + now.start,
            self._count * self._length,
            None if is_stepped is None else lambda at: is_stepped(at % self._length),
        )

    def _find(self) -> str | None:
        """Finds the order of the plan; returns why it is not known."""
        found = []
        with self._from_begin() as loaders:
            for loader in loaders:
                order = known_order(loader, self._key)
                if isinstance(order, str):
                    return order
                found.append(order.fingerprint)
                if len(found) == 2:
                    break
        self._is_repeating = found[0] == found[1]
        self._fingerprint = fingerprint([found[0], "epochs", self._count])
        return None

    def _batches(self) -> Iterator[Any]:
        with self._from_begin() as loaders:
            for loader in loaders:
                order = known_order(loader, self._key)
                if isinstance(order, str):
                    raise InvalidError(f"the order of a later epoch is not known: {order}")
                yield from order.batches()

    @contextmanager
    def _from_begin(self) -> Iterator[Iterator[Any]]:
        """Gives the loader as it stands before each epoch of the plan; puts it back at the end."""
        assert self._begin is not None, "no epoch was begun"
        now = generators_now(self._loader)
        try:
            set_generators(self._loader, self._begin)
            yield self._loaders(self._begin)
        finally:
            set_generators(self._loader, now)

    def _loaders(self, begin: Generators) -> Iterator[Any]:
        loader = as_drawn(self._loader, self._had_drawn)
        for number in range(self._count):
            if number > 0:
                pass_epoch(loader)
                loader = as_drawn(self._loader, has_drawn=True)
                set_epochs(loader, begin, number)
            yield loader
