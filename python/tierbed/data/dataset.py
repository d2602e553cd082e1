"""Datasets: walks through samples that stop and resume.

All sources look alike: an iterable of batches over a range of samples in time order, with the
sizes of the tables the ids need, a state to checkpoint, and a split at a point in time.
"""

from __future__ import annotations

import copy
import glob
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierbed.data.batch import Batch
from tierbed.errors import InvalidError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Dataset", "Paths", "ProgressCallback", "expand_paths"]

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


class Dataset(ABC):
    """Batches of the samples ``first..stop`` of a source, in time order.

    Iterating yields batches of ``batch_size`` samples, the last one perhaps smaller.
    :meth:`state_dict` tells how far iteration came, :meth:`load_state_dict` makes the next
    iteration go on there. One iteration at a time.

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

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches(self.first + self._done, self.stop, self.batch_size):
            # Counted before it is handed out: a state taken now does not repeat this batch.
            self._done += len(batch)
            yield batch
        self._done = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns where iteration is: behind the batch handed out last (JSON values)."""
        return {"done": self._done, "range": [self.first, self.stop], **self.identity()}

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
