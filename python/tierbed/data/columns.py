"""Samples from columns: files, stores of objects, tables and datasets of other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierbed.config.words import check_word
from tierbed.data.arrow_values import Missing
from tierbed.data.column_data import ColumnData, ColumnLayout
from tierbed.data.column_vocabulary import count_tokens
from tierbed.data.ids import IdKind, Tokens, id_kinds
from tierbed.data.library_parts import parts_of
from tierbed.data.vocabulary import Vocabulary, open_vocabulary
from tierbed.errors import InvalidError

__all__ = ["columns"]


def columns(
    source: Any,
    *,
    ids: Mapping[str, IdKind | int],
    label: str | Sequence[str] = (),
    dense: Sequence[str] = (),
    weights: Mapping[str, str] | None = None,
    batch_size: int,
    vocabulary: Vocabulary | str | Path | None = None,
    missing: Missing = "fail",
    log_dense: bool = False,
    shuffle: int = 0,
    seed: int = 0,
    filesystem: Any = None,
    file_format: str | None = None,
) -> ColumnData:
    """Returns samples from the columns of a source: which are ids, numbers and labels.

    A column of lists is a bag: as many ids per sample as the list has, in their order. Rows are
    read as they are needed: a few row groups of files, and a window of a shuffle.

    Args:
        source: Files, told by path, pattern or address (``s3://bucket/day=*/part-*.parquet``), or a
            list of them, oldest first: Parquet, Arrow IPC or Feather, CSV, JSON lines, ORC; or a
            ``Table``, ``Dataset`` or ``RecordBatchReader`` of pyarrow, a ``DataFrame`` or
            ``LazyFrame`` of Polars, a ``Dataset`` or ``IterableDataset`` of Hugging Face, or what
            else hands out Arrow tables, such as a ``DataFrame`` of pandas.
        ids: What the ids of each feature are: :class:`Rows`, or just their number,
            :class:`Hashed`, :class:`Tokens` or :class:`OpenIds`. Features are in this order.
        label: Column of the label, ``[B]``; or several, ``[B, L]``; none by default, ``[B, 0]``.
        dense: Columns of dense features, of numbers or of lists of equally many numbers.
        weights: Column of the weights of a feature's ids, by feature; ids of others weigh 1.
        batch_size: Samples of a batch, ``B``.
        vocabulary: Rows of tokens; a path without a file is built, from all samples. To build one
            from the samples that are trained on, call :func:`build_column_vocabulary` before.
        missing: ``fail`` refuses a null, or a number that is nan; ``fill`` takes a number as 0 and
            leaves an id out, counted in ``missing_counts``. A missing token has row 0, a list that
            is null is refused or empty, and a missing label is always refused.
        log_dense: Transform dense values to ``log1p(max(x, 0))``.
        shuffle: Samples of a window that are shuffled together; 0 keeps the order of the source.
            The row groups of Parquet, and other parts, are shuffled, too; those of streams are not.
        seed: Seed of the shuffle.
        filesystem: Where paths lie, of ``pyarrow.fs`` or fsspec; by default told by the address.
        file_format: ``parquet``, ``ipc``, ``csv``, ``json`` or ``orc``; by default told by the
            names of files.

    Raises:
        InvalidError: A column that there is not, or an argument that fits no source.
        UnsupportedError: pyarrow is not installed.

    Examples:
        >>> import pyarrow
        >>> clicks = pyarrow.table({
        ...     "click": [1, 0, 0],
        ...     "user": [7, 8, 7],
        ...     "seen": [["a", "b"], [], ["b"]],
        ... })
        >>> data = tb.data.columns(
        ...     clicks,
        ...     label="click",
        ...     ids={"user": 1000, "seen": tb.data.Hashed(rows=50)},
        ...     batch_size=2,
        ... )
        >>> batch = next(iter(data))
        >>> batch.sparse["user"].values(), batch.sparse["seen"].lengths()
        (tensor([7, 8]), tensor([2, 0]))
        >>> [table.name for table in data.tables(embedding_dim=16)]
        ['user', 'seen']
    """
    check_word("missing", missing, Missing)
    if shuffle < 0:
        raise InvalidError(f"shuffle must be at least 0, not {shuffle}")
    kinds = id_kinds(ids)
    unknown = [feature for feature in weights or {} if feature not in kinds]
    if unknown:
        raise InvalidError(f"weights are given for {', '.join(unknown)}, whose ids are not")
    layout = ColumnLayout(
        label=(label,) if isinstance(label, str) else tuple(label),
        dense=tuple(dense),
        ids=kinds,
        weights=dict(weights or {}),
        missing=missing,
        log_dense=log_dense,
        is_single=isinstance(label, str),
    )
    parts = parts_of(source, filesystem, file_format)
    tokens = any(isinstance(kind, Tokens) for kind in kinds.values())
    if tokens and isinstance(vocabulary, str | Path):
        if not Path(vocabulary).exists():
            parts.check(layout.names())
            count_tokens(parts, Path(vocabulary), kinds)
        vocabulary = open_vocabulary(vocabulary)
    return ColumnData(
        parts,
        layout,
        batch_size,
        vocabulary if isinstance(vocabulary, Vocabulary) else None,
        (shuffle, seed) if shuffle else None,
    )
