"""Look-ahead: the rows of coming batches, read before they are needed.

Two ways. When the order of the epoch is known (:mod:`tierbed.data.order`), :func:`lookahead` makes
a plan of it, once, and training follows the plan: the *forward order*. Otherwise it reads ahead in
the loader, announces the batches to the store in groups, and hands on the loader's own batches
one by one: the *window order*. A group is read in one sorted sweep, so the store reads each page
once per group. When the row buffer holds less than the window, the window shortens itself.

Source: RecDB §4.1 (look-ahead window over the coming batches).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import islice
from typing import Any, Generic, TypeVar

from torch import nn

from tierbed.errors import InvalidError
from tierbed.jagged import is_kjt
from tierbed.train.epochs import Epochs
from tierbed.train.following import follow
from tierbed.train.place import (
    Place,
    generators_now,
    set_generators,
    set_global_generators,
)
from tierbed.train.session import Announcing, StepSession
from tierbed.train.several import SeveralSessions

__all__ = ["Lookahead", "lookahead", "sparse_of"]

Batch = TypeVar("Batch")
_LOG = logging.getLogger("tierbed")


def sparse_of(batch: Any) -> Any:
    """Takes what a batch looks up from where our own batches have it, or those of TorchRec."""
    for name in ("sparse", "sparse_features"):
        found = getattr(batch, name, None)
        if found is not None:
            return found
    if is_kjt(batch):
        return batch
    kind = type(batch).__name__
    raise InvalidError(
        f"a batch of type {kind} has no .sparse; give lookahead a function that takes a batch and "
        'returns its KeyedJaggedTensor, such as key=lambda batch: batch["sparse"]',
        {"batch": kind},
    )


def _session_of(emb: Any) -> Any:
    """Returns the control of the look-ahead of a collection, a model with one, or several."""
    if isinstance(emb, (list, tuple)) and len(emb) > 1:
        return SeveralSessions([_session_of(one) for one in emb], [_bags_of(one) for one in emb])
    for owner in (emb, getattr(emb, "embeddings", None)):
        make = getattr(owner, "_step_session", None)
        if make is not None:
            return make()
    found = type(emb).__name__
    raise InvalidError(
        f"lookahead needs the collection that will look the batches up, or a model that has one as "
        f".embeddings, not {found}; give it an EmbeddingBagCollection or EmbeddingCollection",
        {"found": found},
    )


def _looked_up(emb: Any) -> Any:
    """Returns the collections of a model that does not say which one looks batches up."""
    if not isinstance(emb, nn.Module):
        return emb
    if any(hasattr(owner, "_step_session") for owner in (emb, getattr(emb, "embeddings", None))):
        return emb
    found = list({id(one): one for one in _collections_in(emb)}.values())
    return found[0] if len(found) == 1 else found or emb


def _collections_in(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if hasattr(child, "_step_session"):
            yield child
        else:
            yield from _collections_in(child)


def _same(value: Any) -> Any:
    return value


def _bags_of(emb: Any) -> Callable[[Any], Any]:
    """Returns what makes bags of what the key returned: a module of one table takes ids instead."""
    made: Callable[[Any], Any] = getattr(emb, "_bags_of", _same)
    return made


def _bags_key(emb: Any, key: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
    """Returns the key whose result is bags."""
    bags_of = _bags_of(emb)
    if bags_of is _same:
        return key
    if key is sparse_of:
        return bags_of
    return lambda batch: bags_of(key(batch))


def lookahead(
    loader: Iterable[Batch],
    emb: Any,
    window: int = 64,
    key: Callable[[Batch], Any] = sparse_of,
    *,
    start: int = 0,
    epochs: int = 1,
) -> Lookahead[Batch]:
    """Yields the batches of ``loader``, whose rows are then in memory.

    Args:
        loader: Any iterable of batches. When it tells its order (see :mod:`tierbed.data.order`) and
            the store may follow it, a plan is made first, with a progress bar, and kept in the
            store's folder for the next run.
        emb: The collection that will look the batches up, a model with ``embeddings``, or a module
            of one table, whose ``key`` returns the argument of its ``forward``, or a tuple of them.
            Or several of these, or any other model with collections in it: ``key`` then returns
            one KeyedJaggedTensor for all, or a list with a part for each, in the order of
            ``model.modules()``. Over one store they follow a plan together, where no two share a
            table; over several stores they train by window.
        window: Most batches read ahead; 0 reads none, and makes no plan.
        key: Takes a batch, returns its KeyedJaggedTensor; by default ``batch.sparse``,
            ``batch.sparse_features`` or the batch itself.
        start: Batches of the first epoch that are done: they are read and passed over. With
            ``epochs``, batches of the plan; whole epochs are not read.
        epochs: Epochs that one plan covers, where each has another order, as of a shuffle. No row
            moves between them then; the plan takes as many times the disk. Each ``iter`` is still
            one epoch of the loader, which must have a length. A dataset or sampler with a
            ``set_epoch`` gets the number of each epoch.

    Returns:
        An iterable, and an iterator over one epoch; see :class:`Lookahead`. It yields the
        loader's own batches, unchanged and in order. In forward order a batch that was not
        stepped when the next one is asked for is passed without a step; so is the rest of an
        epoch that ended early, when the next one begins.

    Raises:
        InvalidError: A negative number, or ``emb`` is no collection; and with the first batch of an
            epoch: the store was opened with ``order="forward"`` and the order is not known or not
            the one it follows, ``start`` is not the batch where the store stands, or a batch has
            no ``sparse`` and no ``key`` was given.

    Examples:
        >>> from typing import NamedTuple
        >>> class Batch(NamedTuple):
        ...     sparse: tb.KeyedJaggedTensor
        >>> ids, one = torch.tensor([3, 5]), torch.tensor([2])
        >>> loader = [Batch(tb.KeyedJaggedTensor(["item"], ids, lengths=one)) for _ in range(3)]
        >>> tables = [tb.EmbeddingBagConfig(name="item", num_embeddings=1000, embedding_dim=16)]
        >>> with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        ...     emb = tb.EmbeddingBagCollection(tables, store=store)
        ...     for batch in tb.lookahead(loader, emb, window=2):
        ...         emb(batch.sparse).values().sum().backward()
    """
    for name, value, least in (("window", window, 0), ("start", start, 0), ("epochs", epochs, 1)):
        if value < least:
            raise InvalidError(f"{name} must be at least {least}, not {value}", {name: str(value)})
    emb = _looked_up(emb)
    bags_key = _bags_key(emb, key)
    session = _session_of(emb)
    order_key = session.joined_key(bags_key) if isinstance(session, SeveralSessions) else bags_key
    together = Epochs(loader, order_key, epochs) if epochs > 1 else None
    return Lookahead(loader, session, window, bags_key, start, together)


class Lookahead(Generic[Batch]):
    """The batches of a loader, looked ahead. Made by :func:`lookahead`.

    Every ``iter`` is an epoch of its own, as of the loader: its plan is found or made, and the
    loader is iterated, when the first batch is asked for. ``len`` is the number of batches of the
    next epoch, where the loader tells its own. ``next`` begins an epoch, too, which an ``iter``
    behind it goes on with.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        session: Any,
        window: int,
        key: Callable[[Batch], Any],
        start: int,
        epochs: Epochs | None = None,
    ) -> None:
        self._loader = loader
        self._session = session
        self._window = window
        self._key = key
        self._start = start
        self._epochs = epochs
        self._is_read = False
        self._resumed: Place | None = None
        self._place = Place(0)
        self._begun: Generator[Batch, None, None] | None = None

    def __len__(self) -> int:
        # A framework that goes on in the middle of an epoch counts all of its batches.
        done = self._start if self._resumed is None else 0
        if self._epochs is not None:
            done = self._epochs.within(done)
        return max(0, len(self._loader) - done)  # type: ignore[arg-type]

    @property
    def is_last(self) -> bool:
        """Whether the batch that was handed on is the last one of its epoch, as far as known."""
        return self._place.batch == self._batches_of_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Returns where the epoch stands: batches handed on, and the state of generators.

        Of the global generators, and of those of a ``DataLoader``: a shuffle without a seed goes
        on, too. For :meth:`load_state_dict` of a look-ahead over an equal loader.
        """
        if self._resumed is not None:
            return self._resumed.as_dict()
        place = self._place
        is_over = place.batch == 0 or place.batch == self._batches_of_epoch()
        if is_over:
            place = Place(0, begin=generators_now(self._loader))
        place.now = generators_now(self._loader)
        place.epochs = None if self._epochs is None else self._epochs.state_dict(is_over)
        return place.as_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next epoch go on behind the last batch that was handed on.

        The batches before it are read and passed over. Generators are put back when the first
        batch is asked for.

        Args:
            state_dict: What :meth:`state_dict` returned.
        """
        self._resumed = Place.of(state_dict)
        self._begun = None

    def _batches_of_epoch(self) -> int | None:
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def __iter__(self) -> Iterator[Batch]:
        begun, self._begun = self._begun, None
        if begun is None or getgeneratorstate(begun) == GEN_CLOSED:
            return self._epoch()
        return begun

    def __next__(self) -> Batch:
        if self._begun is None:
            self._begun = self._epoch()
        return next(self._begun)

    def close(self) -> None:
        """Ends the epoch that ``next`` began; one of a ``for`` ends with its loop."""
        if self._begun is not None:
            self._begun.close()

    def _epoch(self) -> Generator[Batch, None, None]:
        if self._is_read and _is_read_once(self._loader):
            raise InvalidError(
                f"the {type(self._loader).__name__} that is looked ahead can be read once; for "
                "several epochs give an iterable that begins anew, such as a DataLoader"
            )
        loader, session, window, key = self._loader, self._session, self._window, self._key
        resumed, start = self._resumed, self._start
        if resumed is not None:
            start = resumed.batch
            set_generators(loader, resumed.begin)
        ordered = loader if self._epochs is None else self._epochs
        try:
            if self._epochs is not None:
                left = None if self._place.begin is None else self._place
                start = self._epochs.begin(start, left, None if resumed is None else resumed.epochs)
            follows = window > 0 and follow(ordered, session, window, key, start)
        except BaseException:
            if self._epochs is not None:
                self._epochs.undo()
            raise
        self._resumed = None
        self._place = Place(start, begin=generators_now(loader))
        batches = _from(ordered, start, self._batches_of_epoch(), resumed)
        self._start, self._is_read = 0, True
        run = _run_planned if follows else _run
        with closing(run(batches, session, window, key)) as stepped:
            for batch in stepped:
                self._place.batch += 1
                yield batch
        self._place = Place(0)


def _from(
    loader: Iterable[Batch], start: int, count: int | None, resumed: Place | None
) -> Iterator[Batch]:
    """Yields the batches of ``loader`` behind the first ``start``; it has ``count``.

    Before the last one the loader is read to its end: samplers draw there once more, and what is
    saved behind the last batch is saved behind that, too.
    """
    batches = islice(loader, start, None)
    for at, batch in enumerate(batches, start + 1):
        if at == start + 1 and start > 0 and resumed is not None:
            set_global_generators(resumed.now)
        rest = list(islice(batches, 1)) if at == count else []
        yield batch
        yield from rest


def _is_read_once(loader: Iterable[Any]) -> bool:
    """Whether it is an iterator itself: there is no second epoch in it."""
    return isinstance(loader, Iterator) and iter(loader) is loader


# ---------------------------------------------------------------- forward order


def _run_planned(
    batches: Iterator[Batch],
    session: StepSession | SeveralSessions,
    window: int,
    key: Callable[[Batch], Any],
) -> Generator[Batch, None, None]:
    stands = session.find_position()
    for batch in batches:
        # Several collections look up parts of a batch, so the whole one is told before.
        if stands is not None and isinstance(session, SeveralSessions):
            stands = stands if session.expect(key(batch)) else None
        if stands is None:
            # The rows have left the plan; from here on they are looked ahead by window.
            _LOG.warning("left the forward order: %s", session.store.order()["reason"])
            yield batch
            yield from _run(batches, session, window, key)
            return
        yield batch
        if session.position == stands and not session.is_collecting():
            session.pass_planned(key(batch))
        stands = session.position


# ---------------------------------------------------------------- window order


def _run(
    batches: Iterator[Batch],
    session: Announcing,
    window: int,
    key: Callable[[Batch], Any],
) -> Generator[Batch, None, None]:
    announced: deque[Batch] = deque()  # their rows are in the buffer
    waiting: deque[Batch] = deque()  # read from the loader, not announced yet
    reach = window
    try:
        while True:
            if window and len(announced) <= reach // 2:
                _fill(waiting, batches, reach - len(announced))
                group = list(islice(waiting, reach - len(announced)))
                fit = session.prefetch([key(batch) for batch in group]) if group else 0
                announced.extend(waiting.popleft() for _ in range(fit))
                reach = min(window, 2 * reach) if fit == len(group) else max(1, len(announced))
            elif not announced:
                _fill(waiting, batches, 1)
            if not announced and not waiting:
                return
            if announced:
                session.note_used()
            yield (announced or waiting).popleft()
    finally:
        session.end_lookahead()


def _fill(waiting: deque[Batch], batches: Iterator[Batch], count: int) -> None:
    """Reads from the loader until ``count`` batches wait or it ends."""
    waiting.extend(islice(batches, max(0, count - len(waiting))))
