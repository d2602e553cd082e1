"""Columns of Parquet files as samples.

Any columns: one label, numbers for the dense side, strings or integers for the categorical
side. A list column is a bag: as many ids per sample as the list has items, none for an empty or
null list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierbed._util.arrow import arrow_modules
from tierbed.data.batch import Batch
from tierbed.data.dataset import Dataset, Paths, ProgressCallback, expand_paths
from tierbed.data.vocabulary import (
    BUILD_BUDGET_BYTES,
    Vocabulary,
    VocabularyReport,
    finish_builder,
    new_builder,
    open_vocabulary,
)
from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor

__all__ = ["ParquetColumns", "ParquetData", "build_parquet_vocabulary"]

_CHUNK_SAMPLES = 1 << 14


@dataclass(frozen=True, kw_only=True)
class ParquetColumns:
    """Which columns are what.

    Args:
        label: Column of the label, 0 or 1.
        dense: Columns of the dense features.
        categorical: Columns of ids or tokens, single or lists.
        is_log_dense: Transform dense values by ``log1p(max(x, 0))``; missing ones are 0.
    """

    label: str
    dense: Sequence[str] = ()
    categorical: Sequence[str] = ()
    is_log_dense: bool = True

    def __post_init__(self) -> None:
        if not self.categorical:
            raise InvalidError("name at least one categorical column")

    def names(self) -> list[str]:
        """Returns all columns."""
        return [self.label, *self.dense, *self.categorical]


class _Files:
    """Opened files, and how many samples lie before each row group."""

    def __init__(self, paths: Sequence[Path], columns: Sequence[str]) -> None:
        arrow, _, parquet = arrow_modules()
        self.paths = paths
        self.groups: list[tuple[Path, int, int]] = []
        for path in paths:
            try:
                file = parquet.ParquetFile(path)
            except arrow.ArrowInvalid as error:
                raise InvalidError(f"{path} is not a Parquet file: {error}") from error
            with file:
                missing = [name for name in columns if name not in file.schema_arrow.names]
                if missing:
                    raise InvalidError(
                        f"{path} has no column {', '.join(missing)}; "
                        f"it has {', '.join(file.schema_arrow.names)}",
                        {"path": str(path)},
                    )
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    self.groups.append((path, group, rows))
        self.sample_count = sum(rows for _, _, rows in self.groups)

    def tables(self, columns: Sequence[str], first: int, step: int) -> Iterator[Any]:
        """Yields tables of at most ``step`` samples from sample ``first`` on.

        Row groups before it are not read.
        """
        arrow, _, parquet = arrow_modules()
        for path, group, rows in self.groups:
            if first >= rows:
                first -= rows
                continue
            with parquet.ParquetFile(path) as file:
                names = list(dict.fromkeys(columns))
                for batch in file.iter_batches(step, row_groups=[group], columns=names):
                    if first >= batch.num_rows:
                        first -= batch.num_rows
                        continue
                    yield arrow.Table.from_batches([batch.slice(first)])
                    first = 0


def _flat(column: Any) -> tuple[Any, Tensor | None]:
    """Splits a column into its items and, if it holds lists, the length of each ``[B]``."""
    arrow, compute, _ = arrow_modules()
    array = column.combine_chunks() if isinstance(column, arrow.ChunkedArray) else column
    kind = array.type
    if not (arrow.types.is_list(kind) or arrow.types.is_large_list(kind)):
        return array, None
    lengths = compute.fill_null(compute.list_value_length(array), 0)
    return array.flatten(), torch.from_numpy(np.array(lengths, dtype=np.int64))


def _tokens(items: Any) -> list[bytes]:
    """Returns items as bytes; null is the empty token."""
    arrow, _, _ = arrow_modules()
    kind = items.type
    if arrow.types.is_dictionary(kind):
        items = items.dictionary_decode()
        kind = items.type
    if not (arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind)):
        items = items.cast(arrow.string()).cast(arrow.binary())
    return [token or b"" for token in items.to_pylist()]


class ParquetData(Dataset):
    """Samples of Parquet files, row groups read one after the other.

    Args:
        paths: The files, oldest first.
        columns: Which columns are what.
        vocabulary: Rows of the tokens, built by :func:`build_parquet_vocabulary`; or rows
            of each table by column name, when the columns hold row ids already.
        batch_size: Samples of a batch, ``B``.
        first: First sample of the range.
        stop: Sample after the last; None is the end of the files.
        progress: Called with samples done and samples in all, after every batch.

    Raises:
        InvalidError: A vocabulary that does not fit the columns.
    """

    def __init__(
        self,
        paths: Paths,
        columns: ParquetColumns,
        vocabulary: Vocabulary | str | Path | Mapping[str, int],
        batch_size: int,
        *,
        first: int = 0,
        stop: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.columns = columns
        self.progress = progress
        self._files = _Files(expand_paths(paths), columns.names())
        end = self._files.sample_count
        super().__init__(batch_size, min(first, end), end if stop is None else min(stop, end))
        self._names = list(columns.categorical)
        self.vocabulary: Vocabulary | None = None
        if isinstance(vocabulary, Mapping):
            absent = [name for name in self._names if name not in vocabulary]
            if absent:
                raise InvalidError(f"no number of rows given for column {', '.join(absent)}")
            self._rows = [vocabulary[name] for name in self._names]
        else:
            opened = open_vocabulary(vocabulary)
            if opened.feature_names != self._names:
                raise InvalidError(
                    f"vocabulary is of the columns {', '.join(opened.feature_names)}, "
                    f"not of {', '.join(self._names)}; name the columns in the same order"
                )
            self.vocabulary = opened
            self._rows = opened.row_counts

    @property
    def feature_names(self) -> list[str]:
        """Names of the ``F`` categorical features."""
        return list(self._names)

    @property
    def dense_count(self) -> int:
        """Number of dense features, ``N``."""
        return len(self.columns.dense)

    def table_sizes(self) -> list[tuple[str, int]]:
        """Returns name and ``num_embeddings`` of the table each feature needs."""
        return list(zip(self._names, self._rows, strict=True))

    def identity(self) -> dict[str, Any]:
        """Returns what a state must agree with to be resumed."""
        files = [[path.name, path.stat().st_size] for path in self._files.paths]
        return {"files": files, "columns": self.columns.names(), "row_counts": list(self._rows)}

    def batches(self, first: int, stop: int | None, batch_size: int) -> Iterator[Batch]:
        """Yields batches of the samples ``first..stop`` of the source.

        Args:
            first: First sample.
            stop: Sample after the last; None reads to the end.
            batch_size: Samples of a batch.
        """
        arrow, _, _ = arrow_modules()
        end = self._files.sample_count if stop is None else min(stop, self._files.sample_count)
        held: list[Any] = []
        held_rows = 0
        done = first
        for table in self._files.tables(self.columns.names(), first, batch_size):
            held.append(table)
            held_rows += table.num_rows
            while done < end and held_rows >= min(batch_size, end - done):
                count = min(batch_size, end - done)
                joined = arrow.concat_tables(held)
                batch = self._batch(joined.slice(0, count), done)
                held, held_rows = [joined.slice(count)], held_rows - count
                done += count
                if self.progress is not None:
                    self.progress(done - first, end - first)
                yield batch
            if done >= end:
                return

    def _batch(self, table: Any, first: int) -> Batch:
        label = self._numbers(table, self.columns.label, first)
        if bool(((label != 0) & (label != 1)).any()):
            raise InvalidError(f"column {self.columns.label} holds labels other than 0 and 1")
        dense = torch.zeros(table.num_rows, self.dense_count)
        for at, name in enumerate(self.columns.dense):
            values = self._numbers(table, name, first)
            dense[:, at] = torch.log1p(values.clamp(min=0)) if self.columns.is_log_dense else values
        values_of: list[Tensor] = []
        lengths_of: list[Tensor] = []
        for at, name in enumerate(self._names):
            items, lengths = _flat(table.column(name))
            values_of.append(self._ids(at, name, items))
            one_each = torch.ones(table.num_rows, dtype=torch.int64)
            lengths_of.append(one_each if lengths is None else lengths)
        sparse = KeyedJaggedTensor(
            list(self._names), torch.cat(values_of), lengths=torch.cat(lengths_of)
        )
        return Batch(dense, sparse, label)

    def _numbers(self, table: Any, name: str, first: int) -> Tensor:
        arrow, compute, _ = arrow_modules()
        try:
            column = table.column(name).cast(arrow.float64())
        except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError) as error:
            raise InvalidError(
                f"column {name} is not numeric near sample {first}: {error}"
            ) from error
        values = np.array(compute.fill_null(column, 0.0), dtype=np.float32)
        return torch.from_numpy(np.nan_to_num(values, nan=0.0))

    def _ids(self, at: int, name: str, items: Any) -> Tensor:
        arrow, compute, _ = arrow_modules()
        if self.vocabulary is not None:
            return self.vocabulary.look_up(name, _tokens(items))
        if not arrow.types.is_integer(items.type):
            raise InvalidError(
                f"column {name} holds {items.type}, not row ids; build a vocabulary for it"
            )
        filled = compute.fill_null(items.cast(arrow.int64()), 0)
        ids = torch.from_numpy(np.array(filled, dtype=np.int64))
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self._rows[at]:
            raise InvalidError(
                f"column {name} holds row ids from {int(ids.min())} to {int(ids.max())}, "
                f"its table has rows 0 to {self._rows[at] - 1}"
            )
        return ids


def build_parquet_vocabulary(
    paths: Paths,
    path: str | Path,
    categorical: Sequence[str],
    *,
    min_count: int = 1,
    memory_budget_bytes: int = BUILD_BUDGET_BYTES,
    samples: int | None = None,
    progress: ProgressCallback | None = None,
) -> VocabularyReport:
    """Builds the vocabulary file ``path`` of categorical columns, in one pass.

    Args:
        paths: The Parquet files, oldest first.
        path: The file to write, atomically; scratch files lie beside it meanwhile.
        categorical: Columns of tokens, single or lists.
        min_count: Tokens seen less often share row 0 with the missing ones.
        memory_budget_bytes: Memory the builder may hold; the result does not depend on it.
        samples: Read only so many; None reads all.
        progress: Called with samples read and samples in all.
    """
    path = Path(path)
    files = _Files(expand_paths(paths), categorical)
    builder = new_builder(list(categorical), path, memory_budget_bytes, min_count)
    total = files.sample_count if samples is None else min(samples, files.sample_count)
    done = 0
    for whole in files.tables(categorical, 0, _CHUNK_SAMPLES):
        table = whole.slice(0, total - done)
        for at, name in enumerate(categorical):
            items, _ = _flat(table.column(name))
            builder.add_column(at, _tokens(items))
        builder.note_samples(table.num_rows)
        done += table.num_rows
        if progress is not None:
            progress(done, total)
        if done >= total:
            break
    return finish_builder(builder, path, done, 0)
