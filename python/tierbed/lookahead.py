"""How do the rows of coming batches get into memory before they are needed?

:func:`lookahead` reads ahead in the loader, announces the batches to the store in groups, and
hands on the loader's own batches one by one. A group is read in one sorted sweep, so the store
reads each page once per group. When the row buffer holds less than the window, the window
shortens itself.

Source: RecDB §4.1 (look-ahead window over the coming batches).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, TypeVar

from tierbed.errors import InvalidError

__all__ = ["lookahead"]

Batch = TypeVar("Batch")


class Prefetching(Protocol):
    """A collection, or a model that has one (``model.embeddings``)."""

    def prefetch(self, batches: list[Any]) -> int:
        """Announces batches; returns how many fit."""

    def end_lookahead(self) -> None:
        """Forgets what was announced."""


def _sparse(batch: Any) -> Any:
    return batch.sparse


def lookahead(
    loader: Iterable[Batch],
    emb: Any,
    window: int = 64,
    key: Callable[[Batch], Any] = _sparse,
) -> Iterator[Batch]:
    """Yields the batches of ``loader``, whose rows are then in memory.

    Args:
        loader: Any iterable of batches.
        emb: The collection that will look the batches up, or a model with ``embeddings``.
        window: Most batches read ahead; 0 reads none.
        key: Takes a batch, returns its KeyedJaggedTensor; by default ``batch.sparse``.

    Yields:
        The loader's own batches, unchanged and in order.
    """
    if window < 0:
        raise InvalidError(f"window must be at least 0, not {window}", {"window": str(window)})
    collection: Prefetching = emb if hasattr(emb, "prefetch") else emb.embeddings
    return _run(iter(loader), collection, window, key)


def _run(
    batches: Iterator[Batch],
    collection: Prefetching,
    window: int,
    key: Callable[[Batch], Any],
) -> Iterator[Batch]:
    announced: deque[Batch] = deque()  # their rows are in the buffer
    waiting: deque[Batch] = deque()  # read from the loader, not announced yet
    reach = window
    try:
        while True:
            if window and len(announced) <= reach // 2:
                _fill(waiting, batches, reach - len(announced))
                group = list(islice(waiting, reach - len(announced)))
                fit = collection.prefetch([key(batch) for batch in group]) if group else 0
                announced.extend(waiting.popleft() for _ in range(fit))
                reach = min(window, 2 * reach) if fit == len(group) else max(1, len(announced))
            elif not announced:
                _fill(waiting, batches, 1)
            if not announced and not waiting:
                return
            yield (announced or waiting).popleft()
    finally:
        collection.end_lookahead()


def _fill(waiting: deque[Batch], batches: Iterator[Batch], count: int) -> None:
    """Reads from the loader until ``count`` batches wait or it ends."""
    waiting.extend(islice(batches, max(0, count - len(waiting))))
