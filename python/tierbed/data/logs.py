"""Text logs as batches, from any sample on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tierbed import _native
from tierbed.data.batch import Batch, batch_of
from tierbed.data.dataset import Dataset, Paths, ProgressCallback, expand_paths
from tierbed.data.vocabulary import Vocabulary, open_vocabulary

if TYPE_CHECKING:
    from tierbed._native_options import LogPosition, ReaderOptions

__all__ = ["AvazuData", "CriteoData", "Layout", "LogData"]

Layout = Literal["criteo", "avazu"]

_NO_BOUND = (1 << 63) - 1
_SKIP_SAMPLES = 1 << 16
# A remembered place every so many samples: reading on near one skips at most this many lines.
_MARK_SAMPLES = 1 << 18


class LogData(Dataset):
    """Samples of text logs, files read one after the other as a stream.

    Going to a sample passes over the lines before it without parsing them, from the nearest
    place already visited; plain files are entered there directly.

    Args:
        paths: The logs, oldest first; plain, gzip or zstd, told by content.
        vocabulary: Rows of the tokens.
        batch_size: Samples of a batch, ``B``.
        first: First sample of the range.
        stop: Sample after the last; None reads to the end.
        bad_lines: Stop at a malformed line, or leave it out (see ``skipped_line_count``).
        progress: Called with bytes read and bytes of all files, after every batch.
    """

    layout: ClassVar[Layout]

    def __init__(
        self,
        paths: Paths,
        vocabulary: Vocabulary | str | Path,
        batch_size: int,
        *,
        first: int = 0,
        stop: int | None = None,
        bad_lines: Literal["fail", "skip"] = "fail",
        progress: ProgressCallback | None = None,
    ) -> None:
        super().__init__(batch_size, first, stop)
        self.paths = expand_paths(paths)
        self.progress = progress
        self.skipped_line_count = 0
        self.vocabulary = open_vocabulary(vocabulary)
        self._options: ReaderOptions = {"format": self.layout, "bad_lines": bad_lines}
        reader = self._open()
        self._feature_names = reader.feature_names()
        self._dense_count = reader.dense_count
        # Places already visited, by sample; shared with parts of this dataset.
        self._marks: dict[int, LogPosition] = {}
        self._total: list[int] = []

    def _open(self) -> _native.CriteoReader:
        return _native.CriteoReader([str(path) for path in self.paths], self._options)

    @property
    def feature_names(self) -> list[str]:
        """Names of the ``F`` categorical features."""
        return list(self._feature_names)

    @property
    def dense_count(self) -> int:
        """Number of dense features, ``N``."""
        return self._dense_count

    def table_sizes(self) -> list[tuple[str, int]]:
        """Returns name and ``num_embeddings`` of the table each feature needs."""
        return self.vocabulary.table_sizes()

    @property
    def sample_count(self) -> int | None:
        """Samples of the range; None until the logs were read to their end once."""
        if self.stop is not None:
            return self.stop - self.first
        return max(0, self._total[0] - self.first) if self._total else None

    def count(self) -> int:
        """Returns the number of samples of the range.

        Passes through the logs once if the end is not known. Lines are counted, not parsed,
        unless bad ones are left out.
        """
        if self.sample_count is None:
            reader = self._open()
            total = 0
            while step := reader.skip(_SKIP_SAMPLES):
                total += step
                self._mark(reader, total)
                if self.progress is not None:
                    self.progress(*reader.progress())
            self._total[:] = [total]
        return super().count()

    def identity(self) -> dict[str, Any]:
        """Returns what a state must agree with to be resumed."""
        files = [[path.name, path.stat().st_size] for path in self.paths]
        # As text, which is what states have that were saved so far.
        options = json.dumps(self._options)
        return {"files": files, "options": options, **self.vocabulary.identity()}

    def _mark(self, reader: _native.CriteoReader, sample: int, *, always: bool = False) -> None:
        if always or not self._marks or sample - max(self._marks) >= _MARK_SAMPLES:
            self._marks[sample] = reader.position()

    def _open_at(self, first: int) -> _native.CriteoReader:
        reader = self._open()
        nearest = max((mark for mark in self._marks if mark <= first), default=None)
        if nearest is not None:
            reader.seek(self._marks[nearest])
        left = first - (nearest or 0)
        while left > 0:
            step = reader.skip(min(left, _SKIP_SAMPLES))
            if step == 0:
                break
            left -= step
        if first > 0 and left == 0:
            # Where a range begins (resumed, or kept for evaluation) it may begin again.
            self._mark(reader, first, always=True)
        return reader

    def batches(self, first: int, stop: int | None, batch_size: int) -> Iterator[Batch]:
        """Yields batches of the samples ``first..stop`` of the source.

        Args:
            first: First sample.
            stop: Sample after the last; None reads to the end.
            batch_size: Samples of a batch.
        """
        reader = self._open_at(first)
        left = _NO_BOUND if stop is None else stop - first
        sample = first
        while left > 0:
            parts = reader.next_batch(self.vocabulary.native, min(left, batch_size))
            if parts is None:
                break
            batch = batch_of(self._feature_names, parts)
            left -= len(batch)
            sample += len(batch)
            self._mark(reader, sample)
            self.skipped_line_count = reader.position()["skipped_line_count"]
            if self.progress is not None:
                self.progress(*reader.progress())
            yield batch
        if stop is None:
            self._total[:] = [sample]


class CriteoData(LogData):
    """Samples of logs in the Criteo layout; see :class:`LogData`.

    One line a sample: label, 13 integers (empty or negative allowed), 26 hexadecimal tokens (empty
    allowed), tab-separated. Integers become ``log1p(max(x, 0))``, missing ones 0. Any log in this
    layout will do. Batches have ``dense`` ``[B, 13]`` and one id per sample of each of the 26
    features ``C1`` to ``C26``.
    """

    layout = "criteo"


class AvazuData(LogData):
    """Samples of logs in the Avazu layout; see :class:`LogData`.

    Comma-separated with the header ``id,click,hour,C1,banner_pos,...``: ``click`` is the label,
    ``id`` is dropped, ``hour`` (YYMMDDHH) becomes the hour of the day, the others are tokens.
    Batches have ``dense`` ``[B, 0]`` and one id per sample of ``hour_of_day`` and each other
    column of the header.
    """

    layout = "avazu"
