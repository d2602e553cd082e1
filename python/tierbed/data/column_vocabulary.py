"""Vocabularies of columns, counted in one bounded pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierbed.data.arrow_parts import Parts
from tierbed.data.arrow_values import bags_of, tokens_of
from tierbed.data.dataset import ProgressCallback
from tierbed.data.ids import IdKind, Tokens, id_kinds
from tierbed.data.library_parts import parts_of
from tierbed.data.sample_order import cut, in_order, segments_of
from tierbed.data.vocabulary import (
    BUILD_BUDGET_BYTES,
    VocabularyReport,
    finish_builder,
    new_builder,
)
from tierbed.errors import InvalidError

__all__ = ["build_column_vocabulary", "count_tokens"]

_CHUNK_SAMPLES = 1 << 14


def build_column_vocabulary(
    source: Any,
    path: str | Path,
    ids: Mapping[str, IdKind | int],
    *,
    min_count: int = 1,
    memory_budget_bytes: int = BUILD_BUDGET_BYTES,
    samples: int | None = None,
    filesystem: Any = None,
    file_format: str | None = None,
    progress: ProgressCallback | None = None,
) -> VocabularyReport:
    """Builds the vocabulary file ``path`` of the columns of tokens, in one pass.

    Args:
        source: As of :func:`columns`.
        path: The file to write, atomically; scratch files lie beside it meanwhile.
        ids: As of :func:`columns`; what is not :class:`Tokens` is passed over.
        min_count: Tokens seen less often share row 0 with the missing ones.
        memory_budget_bytes: Memory the builder may hold; the result does not depend on it.
        samples: Read only the first ones, those that are trained on; None reads all.
        filesystem: As of :func:`columns`.
        file_format: As of :func:`columns`.
        progress: Called with samples read and samples in all, of a stream with 0 for these.

    Raises:
        InvalidError: No column of tokens, or one that there is not.

    Examples:
        >>> import pyarrow, tempfile
        >>> clicks = pyarrow.table({"site": ["a", "b", "a"]})
        >>> ids = {"site": tb.data.Tokens()}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = tb.data.build_column_vocabulary(clicks, folder + "/vocabulary", ids)
        >>> report.features[0].token_count
        2
    """
    parts = parts_of(source, filesystem, file_format)
    kinds = id_kinds(ids)
    parts.check([str(kind.column) for kind in kinds.values()])
    return count_tokens(
        parts,
        Path(path),
        kinds,
        min_count=min_count,
        memory_budget_bytes=memory_budget_bytes,
        samples=samples,
        progress=progress,
    )


def count_tokens(
    parts: Parts,
    path: Path,
    kinds: Mapping[str, IdKind],
    *,
    min_count: int = 1,
    memory_budget_bytes: int = BUILD_BUDGET_BYTES,
    samples: int | None = None,
    progress: ProgressCallback | None = None,
) -> VocabularyReport:
    """Counts the tokens of opened parts; see :func:`build_column_vocabulary`.

    Raises:
        InvalidError: No column of tokens, or the source can be read once.
    """
    kept = {name: kind for name, kind in kinds.items() if isinstance(kind, Tokens)}
    if not kept:
        raise InvalidError("no feature has tokens; a vocabulary is for ids of the kind Tokens")
    if parts.is_read_once:
        raise InvalidError(
            "a source that is read once cannot be counted before; give the path of a vocabulary "
            "that is built, or a source that begins again"
        )
    tables = list(dict.fromkeys(str(kind.table) for kind in kept.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    builder = new_builder(tables, path, memory_budget_bytes, min_count)
    known = None if parts.part_rows is None else sum(parts.part_rows)
    total = samples if known is None else min(known, known if samples is None else samples)
    columns = list(dict.fromkeys(str(kind.column) for kind in kept.values()))
    segments = segments_of(parts.part_rows, 0, total, None)
    done = 0
    for table in cut(in_order(parts, columns, segments, (0, None), None), _CHUNK_SAMPLES):
        for name, kind in kept.items():
            items = bags_of(table.column(str(kind.column)), keeps_null=True).items
            builder.add_column(tables.index(str(kind.table)), tokens_of(items, name, kind))
        builder.note_samples(table.num_rows)
        done += table.num_rows
        if progress is not None:
            progress(done, total or 0)
    return finish_builder(builder, path, done, 0)
