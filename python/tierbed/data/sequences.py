"""Logs of events as sequences, one per user or session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tierbed._util.arrow import arrow_modules
from tierbed.data.library_parts import parts_of
from tierbed.errors import InvalidError

__all__ = ["sequences"]


def sequences(
    source: Any,
    *,
    by: str,
    order: str,
    items: Sequence[str],
    least: int = 1,
    most: int | None = None,
    last: str | None = None,
    filesystem: Any = None,
) -> Any:
    """Returns a log's items as sequences, one per user or session.

    The rows of the result are sorted by their last time, so that the last of them are the newest.
    The log lies in memory meanwhile, those of its columns that are named.

    Args:
        source: A log with a row per event; as of :func:`columns`.
        by: Column of the user or session.
        order: Column of the time; equal times keep the order of the log.
        items: Columns that become lists.
        least: Sequences with fewer events are left out.
        most: Of longer sequences only the last events are kept.
        last: Makes columns of the last event of each sequence, which its lists then lack: of a
            column ``item`` it is called ``item`` and this word.
        filesystem: As of :func:`columns`.

    Returns:
        A ``pyarrow.Table`` with ``by``, ``order`` (of the last event) and a list per column.

    Raises:
        InvalidError: A column that there is not, or numbers that leave no sequence.

    Examples:
        >>> import pyarrow
        >>> log = {"session": ["b", "a", "b"], "item": [5, 6, 7], "time": [30, 10, 20]}
        >>> table = tb.data.sequences(
        ...     pyarrow.table(log), by="session", order="time", items=["item"]
        ... )
        >>> table["item"].to_pylist()
        [[6], [7, 5]]
    """
    arrow, compute, _ = arrow_modules()
    if least < 1 or (most is not None and most < 1):
        raise InvalidError(f"least and most must be at least 1, not {least} and {most}")
    parts = parts_of(source, filesystem)
    names = list(dict.fromkeys([by, order, *items]))
    parts.check(names)
    every = range(1 if parts.part_rows is None else len(parts.part_rows))
    read = list(parts.read(every, names, 1 << 16))
    fields = [parts.schema.field(name) for name in names]
    log = arrow.Table.from_batches(read, arrow.schema(fields) if not read else None)
    log = log.take(compute.sort_indices(log, sort_keys=[(by, "ascending"), (order, "ascending")]))
    log = log.combine_chunks()
    codes = np.array(log[by].combine_chunks().dictionary_encode().indices)
    begins = np.flatnonzero(np.diff(codes, prepend=-1))
    ends = np.append(begins[1:], len(codes)) if len(begins) else begins
    kept = ends - begins >= least
    begins, ends = begins[kept], ends[kept]
    begins = begins if most is None else np.maximum(begins, ends - most)
    newest = compute.sort_indices(log[order].take(arrow.array(ends - 1)))
    begins, ends = begins[np.array(newest)], ends[np.array(newest)]
    found = {name: log[name].take(arrow.array(ends - 1)) for name in (by, order)}
    if last is not None:
        found |= {name + last: log[name].take(arrow.array(ends - 1)) for name in items}
        ends = ends - 1
    lengths = ends - begins
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    # Where each event of each sequence lies in the sorted log.
    at = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], lengths)
    for name in items:
        values = log[name].take(arrow.array(at)).combine_chunks()
        found[name] = arrow.LargeListArray.from_arrays(arrow.array(offsets), values)
    return arrow.table(found)
