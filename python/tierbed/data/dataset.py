"""Datasets: walks through samples that stop and resume.

All sources look alike: an iterable of batches over a range of samples in time order, with the
sizes of the tables the ids need, a state to checkpoint, and a split at a point in time. A
``DataLoader`` with workers yields the batches of the dataset itself, in the same order.
"""

from __future__ import annotations

import copy
import glob
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from tierbed.config import EmbeddingBagConfig
from tierbed.data.batch import Batch
from tierbed.errors import InvalidError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Dataset", "Paths", "ProgressCallback", "WorkerPart", "check_rank", "expand_paths"]

Paths = str | Path | Sequence[str | Path]
"""A file, a pattern (``day_*.gz``), or a list of both; read in the order given."""

ProgressCallback = Callable[[int, int], None]
"""Called with bytes (or samples) done and in all."""


def expand_paths(paths: Paths) -> list[Path]:
    """Returns the files that ``paths`` names; a pattern gives its files sorted by name."""
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found: list[Path] = []
    for path in given:
        if Path(path).exists() or not glob.has_magic(str(path)):
            found.append(Path(path))
            continue
        matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise InvalidError(f"no file matches the pattern {path}", {"path": str(path)})
        found.extend(Path(match) for match in matches)
    if not found:
        raise InvalidError("no data file given; name at least one file or pattern")
    return found


def check_rank(rank: int, world_size: int) -> None:
    """Refuses a rank that is none of ``world_size``.

    Raises:
        InvalidError: No such rank.
    """
    if not 0 <= rank < world_size:
        raise InvalidError(f"rank must be 0 to world_size - 1, got {rank} of {world_size}")


class WorkerPart(NamedTuple):
    """Which batches of an iteration are a loader worker's: every ``of``-th from ``at`` on."""

    at: int
    of: int

    @classmethod
    def here(cls) -> WorkerPart:
        """Returns that of this process; all batches outside of workers."""
        info = get_worker_info()
        return cls(0, 1) if info is None else cls(info.id, info.num_workers)

    def has(self, number: int) -> bool:
        """Tells whether the batch ``number``, counted from where iteration began, is its own."""
        return number % self.of == self.at


class Dataset(IterableDataset[Batch], ABC):
    """Batches of the samples ``first..stop`` of a source, in time order.

    Iterating yields batches of ``batch_size`` samples, the last one perhaps smaller.
    :meth:`state_dict` tells how far iteration came, :meth:`load_state_dict` makes the next
    iteration go on there. One iteration at a time.

    Workers of ``DataLoader(data, batch_size=None)`` take turns: the loader yields the batches of
    the dataset, in its order. Each worker reads what the others read, and makes its own batches
    only. A state that was taken in a worker is of that worker, as torchdata's
    ``StatefulDataLoader`` keeps them.

    Args:
        batch_size: Samples of a batch, ``B``.
        first: First sample of the range.
        stop: Sample after the last; None reads to the end of the source.

    Raises:
        InvalidError: A batch of no samples, or a range that is none.
    """

    def __init__(self, batch_size: int, first: int = 0, stop: int | None = None) -> None:
        if batch_size < 1:
            raise InvalidError(f"batch_size must be at least 1, got {batch_size}")
        if first < 0 or (stop is not None and stop < first):
            raise InvalidError(f"the range of samples {first}..{stop} is not a range")
        self.batch_size = batch_size
        self.first = first
        self.stop = stop
        self._done = 0
        # The worker that this position was saved in, and where the iteration began.
        self._worker: WorkerPart | None = None
        self._begun_at = 0
        # The process whose iteration goes on.
        self._walking_pid = 0

    @property
    @abstractmethod
    def feature_names(self) -> list[str]:
        """Names of the ``F`` categorical features, in the order of the batches."""

    @property
    @abstractmethod
    def dense_count(self) -> int:
        """Number of dense features, ``N``."""

    @abstractmethod
    def table_sizes(self) -> list[tuple[str, int]]:
        """Returns name and ``num_embeddings`` of the table each feature needs."""

    @abstractmethod
    def batches(self, first: int, stop: int | None, batch_size: int) -> Iterator[Batch]:
        """Yields batches of the source's samples ``first..stop``.

        The range of this dataset does not matter. Stops early where the source ends.

        Args:
            first: First sample.
            stop: Sample after the last; None reads to the end.
            batch_size: Samples of a batch.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Returns what a state must agree with to be resumed (JSON values)."""

    def tables(self, embedding_dim: int) -> list[EmbeddingBagConfig]:
        """Returns the tables of a collection for these batches, one per feature.

        Args:
            embedding_dim: Elements of a row, ``D``.
        """
        return [
            EmbeddingBagConfig(num_embeddings=rows, embedding_dim=embedding_dim, name=name)
            for name, rows in self.table_sizes()
        ]

    def order_identity(self) -> dict[str, Any] | str:
        """Returns what the order of the batches depends on (JSON values), or why it is not known.

        Equal for equal batches in equal order, and only then.
        """
        return {
            "kind": type(self).__qualname__,
            "identity": self.identity(),
            "range": [self.first, self.stop],
            "batch_size": self.batch_size,
        }

    @property
    def sample_count(self) -> int | None:
        """Samples of the range; None where the end of the source is not known yet."""
        return None if self.stop is None else self.stop - self.first

    def count(self) -> int:
        """Returns the number of samples of the range, reading the source through if need be.

        Raises:
            InvalidError: The source does not know.
        """
        known = self.sample_count
        if known is None:
            raise InvalidError("the number of samples of this source is not known")
        return known

    def __len__(self) -> int:
        known = self.sample_count
        if known is None:
            raise TypeError("the number of samples is not known; call count() first")
        return (known + self.batch_size - 1) // self.batch_size

    def walk(self, done: int, worker: WorkerPart) -> Iterator[tuple[int, Batch]]:
        """Yields a worker's batches of an epoch, each with the samples done behind it.

        The position of this dataset does not matter.

        Args:
            done: Samples of the epoch that are passed over.
            worker: Which batches.
        """
        batches = self.batches(self.first + done, self.stop, self.batch_size)
        for number, batch in enumerate(batches):
            done += len(batch)
            if worker.has(number):
                yield done, batch

    def __iter__(self) -> Iterator[Batch]:
        worker = WorkerPart.here()
        if self._walking_pid == os.getpid() and get_worker_info() is not None:
            # An epoch that the loader left early; its worker had gone ahead.
            self._done, self._worker = 0, None
        self._walking_pid, begins = os.getpid(), self._done
        if self._worker is not None:
            if worker != self._worker:
                raise InvalidError(
                    f"data position was saved in worker {self._worker.at} of "
                    f"{self._worker.of}, this is worker {worker.at} of {worker.of}; resume "
                    "with as many workers, by the loader that saved it"
                )
            begins = self._begun_at
        self._begun_at = begins
        skipped = -(-(self._done - begins) // self.batch_size)
        # Workers take turns from where the iteration began, wherever they go on.
        turned = worker._replace(at=(worker.at - skipped) % worker.of)
        for done, batch in self.walk(self._done, turned):
            # Counted before it is handed out: a state taken now does not repeat this batch.
            self._done = done
            yield batch
        self._done = self._begun_at = 0
        self._worker, self._walking_pid = None, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns where iteration is: behind the batch handed out last (JSON values)."""
        state = {"done": self._done, "range": [self.first, self.stop], **self.identity()}
        worker = WorkerPart.here()
        if get_worker_info() is not None:
            state["worker"] = [*worker, self._begun_at]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position taken by :meth:`state_dict` of the same data.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            InvalidError: The state was taken from other data or another range.
        """
        expected = {"range": [self.first, self.stop], **self.identity()}
        for name, value in expected.items():
            if state.get(name) != value:
                raise InvalidError(
                    f"data position belongs to other data: {name} was {state.get(name)!r}, "
                    f"is {value!r}; resume with the same files and options",
                    {"expected": repr(state.get(name)), "found": repr(value)},
                )
        done = state.get("done")
        if not isinstance(done, int) or done < 0:
            raise InvalidError(f"data position is not a position: done is {done!r}")
        self._done = done
        worker = state.get("worker")
        self._worker = None if worker is None else WorkerPart(*worker[:2])
        self._begun_at = done if worker is None else worker[2]
        self._walking_pid = 0

    def split_last(self, fraction: float) -> tuple[Self, Self]:
        """Splits in time order: the last ``fraction`` is for evaluation, never shuffled in.

        Args:
            fraction: Share of the samples, from 0 to 1.

        Returns:
            The samples before, and the last ``fraction`` of them (rounded to samples).

        Raises:
            InvalidError: Another fraction.
        """
        if not 0.0 <= fraction <= 1.0:
            raise InvalidError(f"fraction must be 0 to 1, got {fraction}")
        count = self.count()
        at = self.first + count - round(count * fraction)
        return self.part(self.first, at), self.part(at, self.first + count)

    def shard(self, rank: int, world_size: int, *, even: bool = False) -> Self:
        """Returns the share of a rank: a range of samples; those of all ranks are all samples.

        Each sample is in one share. Shares differ by at most one sample, so that a rank may have
        one batch more than another; ``even`` leaves out the last samples, fewer than ranks.

        Args:
            rank: This rank, from 0.
            world_size: Number of ranks.
            even: Give every rank as many samples and batches, as training in step needs.

        Raises:
            InvalidError: No such rank.
        """
        check_rank(rank, world_size)
        count = self.count()
        if even:
            count -= count % world_size
        first, stop = count * rank // world_size, count * (rank + 1) // world_size
        return self.part(self.first + first, self.first + stop)

    def part(self, first: int, stop: int | None) -> Self:
        """Returns the same source with another range of samples.

        Args:
            first: First sample.
            stop: Sample after the last.

        Raises:
            InvalidError: Not a range.
        """
        part = copy.copy(self)
        Dataset.__init__(part, self.batch_size, first, stop)
        return part
