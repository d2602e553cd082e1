"""Batches of columns: their order and position, and how they are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tierbed.config import EmbeddingBagConfig
from tierbed.data.arrow_parts import Parts
from tierbed.data.arrow_values import Bags, Missing, bags_of, ids_of, numbers_of
from tierbed.data.batch import Batch
from tierbed.data.dataset import Dataset, WorkerPart, check_rank
from tierbed.data.ids import IdKind, OpenIds, Tokens
from tierbed.data.sample_order import Shuffle, cut, in_order, segments_of
from tierbed.data.vocabulary import Vocabulary
from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ColumnData", "ColumnLayout"]


@dataclass(frozen=True, kw_only=True)
class ColumnLayout:
    """Which columns are what; see :func:`columns`.

    Args:
        label: Columns of labels; ``is_single`` for one without a dimension of its own.
        dense: Columns of dense features.
        ids: Kinds of ids by feature.
        weights: Column of the weights by feature.
        missing: What a missing value is.
        log_dense: Whether dense values become ``log1p(max(x, 0))``.
        is_single: Whether ``label`` was given as one name.
    """

    label: tuple[str, ...]
    dense: tuple[str, ...]
    ids: dict[str, IdKind]
    weights: dict[str, str]
    missing: Missing
    log_dense: bool
    is_single: bool

    def names(self) -> list[str]:
        """Returns all columns, each once."""
        of_ids = [str(kind.column) for kind in self.ids.values()]
        return list(dict.fromkeys([*self.label, *self.dense, *of_ids, *self.weights.values()]))

    def tables(self) -> dict[str, list[str]]:
        """Returns the features of each table."""
        found: dict[str, list[str]] = {}
        for feature, kind in self.ids.items():
            found.setdefault(str(kind.table), []).append(feature)
        return found


class ColumnData(Dataset):
    """Samples from columns of one source. Made by :func:`columns`.

    ``missing_counts`` has the missing values met so far by column, where they are filled.

    Args:
        parts: The source.
        layout: Which columns are what.
        batch_size: Samples of a batch, ``B``.
        vocabulary: Rows of tokens.
        shuffle: Samples of a window, and the seed; None for the order of the source.

    Raises:
        InvalidError: A column that there is not, or a vocabulary without a table.
    """

    def __init__(
        self,
        parts: Parts,
        layout: ColumnLayout,
        batch_size: int,
        vocabulary: Vocabulary | None = None,
        shuffle: tuple[int, int] | None = None,
    ) -> None:
        known = None if parts.part_rows is None else sum(parts.part_rows)
        super().__init__(batch_size, 0, known)
        parts.check(layout.names())
        tokens = [kind.table for kind in layout.ids.values() if isinstance(kind, Tokens)]
        if tokens and vocabulary is None:
            raise InvalidError(
                f"ids of table {tokens[0]} are tokens without a vocabulary; give vocabulary= a path"
            )
        absent = [name for name in tokens if vocabulary and name not in vocabulary.feature_names]
        if absent and vocabulary:
            raise InvalidError(
                f"vocabulary is of {', '.join(vocabulary.feature_names)}, not of {absent[0]}; give "
                "the path of another file, which is built"
            )
        self.layout = layout
        self.vocabulary = vocabulary
        self.missing_counts: Counter[str] = Counter()
        self._parts = parts
        self._shuffle = shuffle
        self._share = (0, 1, False)
        self._stream_rows: list[int] = []
        # Seen by workers that live on, too.
        self._epoch = _shared(0)

    @property
    def feature_names(self) -> list[str]:
        """Names of the ``F`` features."""
        return list(self.layout.ids)

    @property
    def dense_count(self) -> int:
        """Number of dense features, ``N``; a column of lists of ``K`` numbers is ``K``."""
        kinds = [self._parts.schema.field(name).type for name in self.layout.dense]
        return sum(getattr(kind, "list_size", 1) for kind in kinds)

    def _rows_of(self, kind: IdKind) -> int | None:
        if isinstance(kind, Tokens):
            assert self.vocabulary is not None
            return dict(self.vocabulary.table_sizes())[str(kind.table)]
        return None if isinstance(kind, OpenIds) else kind.rows

    def table_sizes(self) -> list[tuple[str, int]]:
        """Returns name and ``num_embeddings`` of each table.

        Raises:
            InvalidError: A table has an open vocabulary, and no size.
        """
        sizes = []
        for name, features in self.layout.tables().items():
            rows = self._rows_of(self.layout.ids[features[0]])
            if rows is None:
                raise InvalidError(
                    f"table {name} has an open vocabulary and no size; call tables()"
                )
            sizes.append((name, rows))
        return sizes

    def tables(self, embedding_dim: int) -> list[EmbeddingBagConfig]:
        """Returns the tables of a collection for these batches.

        Args:
            embedding_dim: Elements of a row, ``D``.
        """
        return [
            EmbeddingBagConfig(
                num_embeddings=self._rows_of(self.layout.ids[features[0]]),
                embedding_dim=embedding_dim,
                name=name,
                feature_names=features,
            )
            for name, features in self.layout.tables().items()
        ]

    # ---------------------------------------------------------------- order and position

    @property
    def epoch(self) -> int:
        """Number of the epoch, which the shuffle depends on."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Gives the coming epochs another shuffle; without it every epoch has the same order.

        Reaches the workers of a ``DataLoader``, those that live on included.

        Args:
            epoch: Number of the epoch.
        """
        self._epoch.fill_(epoch)

    def _shuffled(self) -> Shuffle | None:
        if self._shuffle is None:
            return None
        return Shuffle(*self._shuffle, epoch=self.epoch)

    def identity(self) -> dict[str, Any]:
        """Returns what a state must agree with to be resumed."""
        vocabulary = {} if self.vocabulary is None else self.vocabulary.identity()
        return {
            **self._parts.identity(),
            "layout": repr(self.layout),
            "shuffle": None if self._shuffle is None else list(self._shuffle),
            "share": list(self._share),
            **vocabulary,
        }

    def order_identity(self) -> dict[str, Any] | str:
        """Returns what the order of the batches depends on, or why it is not known."""
        own, of_parts = super().order_identity(), self._parts.order_identity()
        if isinstance(of_parts, str) or isinstance(own, str):
            return of_parts
        # Without a shuffle, epochs have one order.
        epoch = 0 if self._shuffle is None else self.epoch
        return {**own, "source": of_parts, "epoch": epoch}

    def state_dict(self) -> dict[str, Any]:
        """Returns where iteration is, with the epoch (JSON values)."""
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position taken by :meth:`state_dict` of the same data.

        Args:
            state: What :meth:`state_dict` returned.
        """
        super().load_state_dict(state)
        self.set_epoch(state["epoch"])

    def _span(self) -> tuple[int, int | None]:
        """Returns the places of this rank in an epoch; all of a stream."""
        if self._parts.part_rows is None:
            return 0, None
        assert self.stop is not None
        count, (rank, world_size, even) = self.stop - self.first, self._share
        if even:
            count -= count % world_size
        return count * rank // world_size, count * (rank + 1) // world_size

    @property
    def sample_count(self) -> int | None:
        """Samples of the range that are this rank's; None for a stream."""
        first, stop = self._span()
        if stop is not None:
            return stop - first
        return super().sample_count if self._share[1] == 1 else None

    def count(self) -> int:
        """Returns the number of samples, by a pass through a stream.

        Raises:
            InvalidError: The source can be read once.
        """
        if self.sample_count is not None:
            return self.sample_count
        if self._share[1] == 1 and not self._stream_rows:
            found = self._parts.count()
            self._stream_rows += [] if found is None else [found]
        if self._share[1] > 1 or not self._stream_rows:
            return super().count()
        return max(0, self._stream_rows[0] - self.first)

    def part(self, first: int, stop: int | None) -> Self:
        """Returns the same source with another range of samples.

        Args:
            first: First sample.
            stop: Sample after the last.
        """
        if self._parts.part_rows is not None:
            end = sum(self._parts.part_rows)
            first, stop = min(first, end), end if stop is None else min(stop, end)
        part = super().part(first, stop)
        part._epoch = _shared(self.epoch)
        part.missing_counts = Counter()
        return part

    def shard(self, rank: int, world_size: int, *, even: bool = False) -> Self:
        """Returns the share of a rank; those of all ranks are all samples, each once.

        Of a source whose rows are counted, the order of an epoch is divided into ranges that differ
        by at most one sample; ``even`` leaves out the last samples, fewer than ranks. Of a stream
        the ranks take batches in turn; ``even`` leaves out the last ones, unless all ranks have a
        full one.

        Args:
            rank: This rank, from 0.
            world_size: Number of ranks.
            even: Give every rank as many batches, as training in step needs.

        Raises:
            InvalidError: No such rank, or the share of a share.
        """
        check_rank(rank, world_size)
        if self._share[1] > 1:
            raise InvalidError("the data are one rank's share; divide those of all ranks")
        share = self.part(self.first, self.stop)
        share._share = (rank, world_size, even)
        return share

    # ---------------------------------------------------------------- batches

    def batches(self, first: int, stop: int | None, batch_size: int) -> Iterator[Batch]:
        """Yields batches of the samples ``first..stop`` of the source, in its order.

        Args:
            first: First sample.
            stop: Sample after the last; None reads to the end.
            batch_size: Samples of a batch.
        """
        segments = segments_of(self._parts.part_rows, first, stop, None)
        rows = in_order(self._parts, self.layout.names(), segments, (0, None), None)
        for table in cut(rows, batch_size):
            yield self._batch(table)

    def walk(self, done: int, worker: WorkerPart) -> Iterator[tuple[int, Batch]]:
        """Yields a worker's batches of an epoch, each with the samples done behind it.

        Args:
            done: Samples of the epoch that are passed over.
            worker: Which batches; the others are read and not made.
        """
        for number, table in enumerate(self._own_tables(done)):
            done += table.num_rows
            if worker.has(number):
                yield done, self._batch(table)

    def _own_tables(self, done: int) -> Iterator[Any]:
        """Yields the rows of this rank's batches behind the first ``done`` samples of its epoch."""
        first, stop = self._span()
        shuffle = self._shuffled()
        rank, world_size, even = self._share
        is_stream = self._parts.part_rows is None
        passed = done
        if is_stream:
            passed = -(-done // self.batch_size) * world_size * self.batch_size
        segments = segments_of(self._parts.part_rows, self.first, self.stop, shuffle)
        span = (first + passed, stop)
        rows = in_order(self._parts, self.layout.names(), segments, span, shuffle)
        tables = cut(rows, self.batch_size)
        if not is_stream or world_size == 1:
            yield from tables
            return
        round_: list[Any] = []
        for table in tables:
            round_.append(table)
            if len(round_) == world_size:
                if not even or table.num_rows == self.batch_size:
                    yield round_[rank]
                round_ = []
        if not even and rank < len(round_):
            yield round_[rank]

    def _numbers(self, table: Any, name: str, missing: Missing) -> Any:
        numbers, absent = numbers_of(table.column(name), name, missing)
        self._note(name, absent)
        return numbers

    def _note(self, column: str, absent: int) -> None:
        if absent:
            self.missing_counts[column] += absent

    def _batch(self, table: Any) -> Batch:
        layout, count = self.layout, table.num_rows
        labels = [self._numbers(table, name, "fail") for name in layout.label]
        label = np.concatenate(labels, axis=1) if labels else np.empty((count, 0), np.float32)
        parts = [self._numbers(table, name, layout.missing) for name in layout.dense]
        dense = np.concatenate(parts, axis=1) if parts else np.empty((count, 0), np.float32)
        if layout.log_dense:
            dense = np.log1p(np.maximum(dense, 0.0))
        found: dict[str, Bags] = {}
        for feature, kind in layout.ids.items():
            column = table.column(str(kind.column))
            found[feature] = ids_of(column, feature, kind, self.vocabulary, layout.missing)
            self._note(str(kind.column), found[feature].missing_count)
        weights = [self._weights(table, feature, bags) for feature, bags in found.items()]
        sparse = KeyedJaggedTensor(
            list(found),
            torch.from_numpy(np.concatenate([bags.items for bags in found.values()])),
            torch.from_numpy(np.concatenate(weights)) if layout.weights else None,
            lengths=torch.from_numpy(np.concatenate([bags.lengths for bags in found.values()])),
        )
        flat = label[:, 0].copy() if layout.is_single else label
        return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(flat))

    def _weights(self, table: Any, feature: str, bags: Bags) -> Any:
        """Returns the weights ``[E]`` of a feature's ids; 1 for a feature without."""
        name = self.layout.weights.get(feature)
        if name is None:
            return np.ones(len(bags.items), np.float32)
        weighed = bags_of(table.column(name), keeps_null=True)
        if not np.array_equal(weighed.lengths, bags.lengths):
            raise InvalidError(
                f"column {name} has other numbers of items than the ids of feature {feature}; give "
                "each id a weight"
            )
        return numbers_of(weighed.items, name, "fail")[0][:, 0]


def _shared(epoch: int) -> Tensor:
    """Returns a number that workers see, too."""
    made = torch.full((), epoch, dtype=torch.int64, device="cpu")
    return made.share_memory_()  # type: ignore[no-untyped-call, no-any-return]
