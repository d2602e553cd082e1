"""Open vocabularies over ranks: one rank keeps the index of a table, and tells the others rows.

Rows are given as in one process: in the order in which ids first come in the batch of all ranks,
feature by feature, samples of rank 0 first. From then on ranks exchange rows of a table that grows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tierbed._native import NativeStore
from tierbed.dist.nodes import Nodes
from tierbed.dist.open_index import IndexMessages, OpenTable, RankBatch, range_of
from tierbed.dist.wire import Wire
from tierbed.errors import InvalidError

__all__ = ["OpenTables"]


class OpenTables:
    """The open tables of a collection: from the ids of a batch to rows.

    All ranks make the same calls in the same order.

    Args:
        native: The store of this rank.
        tables: The tables.
        ranks: All ranks, each as a node of its own.
        wire: To the other ranks.
        fail: Lets the others know that this rank cannot go on, and why.
    """

    def __init__(
        self,
        native: NativeStore,
        tables: Sequence[OpenTable],
        ranks: Nodes,
        wire: Wire,
        fail: Callable[[str], None],
    ) -> None:
        self._tables = list(tables)
        self._messages = IndexMessages(native, tables, ranks, wire)
        self._wire = wire
        self._fail = fail
        # Announced batches, nearest first, as they were before their ids became rows.
        self._announced: deque[RankBatch] = deque()

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent to the others."""
        return self._messages.sent_bytes

    # ------------------------------------------------------------ look-ahead

    def is_announced(
        self, at: int, indices: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> bool:
        """Returns whether a batch is announced batch number ``at``."""
        is_there = at < len(self._announced)
        return is_there and _is_same(self._announced[at], (indices, offsets, weights))

    def note_announced(self, batch: RankBatch) -> None:
        """Notes that ``batch`` is announced next."""
        self._announced.append(batch)

    def forget_announced(self, kept: int) -> None:
        """Forgets batches that were announced, behind the first ``kept``."""
        while len(self._announced) > kept:
            self._announced.pop()

    def pass_announced(self, number: int) -> None:
        """Forgets announced batches up to ``number``, counted from 1."""
        for _ in range(number):
            self._announced.popleft()

    def number_of(self, batch: RankBatch) -> int:
        """Returns which announced batch ``batch`` is, counted from 1; 0: none."""
        same = (at for at, one in enumerate(self._announced, 1) if _is_same(one, batch))
        return next(same, 0)

    # ------------------------------------------------------------ rows

    def without_ids(self, batch: RankBatch, feature_count: int) -> RankBatch:
        """Returns the batch with the shared row instead of ids: what of it can be checked."""
        ids, offsets, weights = batch
        ids = ids.clone()
        for table in self._tables:
            start, end = range_of(table, offsets, feature_count)
            ids[start:end] = 0
        return ids, offsets, weights

    def translate(
        self, batch: RankBatch, feature_count: int, *, trains: bool, number: int = 0
    ) -> tuple[RankBatch, int]:
        """Finds the rows of a batch's ids, together with all ranks.

        Args:
            batch: Ids, offsets and weights of this rank's samples.
            feature_count: Features of the batch.
            trains: Whether it is trained on: new ids get rows.
            number: Which announced batch it is, counted from 1; 0: none.

        Returns:
            The batch with rows instead of ids, and the number if all ranks gave the same, else 0.

        Raises:
            InvalidError: Some ranks train, and some only look up.
            TierbedError: Another rank failed; the message names it.
        """
        asked = self._messages.ask(batch, feature_count)
        with self._telling():
            told = self._messages.swap_numbers(asked, (int(trains), number))
        if len(set(told[:, 0].tolist())) > 1:
            # All ranks see this, and none sends more: the batch may be looked up again.
            raise InvalidError(
                "some ranks train and some only look up; call train() or eval() on all of them"
            )
        with self._telling():
            ids = self._messages.swap_ids(asked, told)
            answers = self._messages.answers(told, ids, trains=trains)
            rows = self._messages.swap_rows(asked, told, answers)
        translated = batch[0].clone()
        for (start, end), of_table, numbers in zip(asked.ranges, rows, asked.numbers, strict=True):
            translated[start:end] = of_table[numbers]
        is_agreed = bool((told[:, 1] == number).all())
        return (translated, *batch[1:]), number if is_agreed else 0

    def evict(self, now: int) -> dict[str, tuple[int, int]]:
        """Takes the rows of ids that the policy of their table judges, together with all ranks.

        Args:
            now: The time, in minutes.

        Returns:
            By table, ids that lost their row, and ids forgotten before they had one.
        """
        taken: dict[str, tuple[int, int]] = {}
        with self._telling():
            for table in self._tables:
                taken[table.config.name] = self._messages.evict(table, now)
        return taken

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Lets all other ranks know at once when this one cannot go on."""
        try:
            yield
        except BaseException as error:
            self._fail(str(error))
            self._wire.abort()
            raise

    def close(self) -> None:
        """Leaves, when nothing more is sent."""
        self._wire.close()


def _is_same(one: RankBatch, other: RankBatch) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
