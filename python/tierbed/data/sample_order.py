"""The order of an epoch's samples: in time, or shuffled by parts and windows; from any place on.

Shuffled, the parts of the source are permuted, and the samples of each window of the sequence that
they make. Both permutations follow from seed and epoch alone, so that an order begins again
anywhere by reading one window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tierbed._util.arrow import arrow_modules
from tierbed.data.arrow_parts import Parts
from tierbed.data.hashing import hash_integers
from tierbed.errors import InvalidError, IoError

__all__ = ["Shuffle", "in_order", "permutation"]

_READ_ROWS = 1 << 13


@dataclass(frozen=True)
class Shuffle:
    """A seeded shuffle of an epoch.

    Args:
        window: Samples that are permuted together, and lie in memory.
        seed: Seed.
        epoch: Epoch; each has an order of its own.
    """

    window: int
    seed: int
    epoch: int


@dataclass(frozen=True)
class Segment:
    """A range of a part's rows.

    Args:
        part: Number of the part.
        start: Its first row.
        rows: Number of rows; None reads to the end of a stream.
    """

    part: int
    start: int
    rows: int | None


def permutation(count: int, *seeds: int) -> Any:
    """Returns a permutation ``[count]`` i64 that depends on the seeds alone.

    Args:
        count: Number of places.
        seeds: Other seeds, another permutation.
    """
    mixed = 0
    for seed in seeds:
        words = np.array([(mixed + seed) % (1 << 64)], dtype=np.uint64)
        mixed = int(hash_integers(words)[0])
    return np.argsort(hash_integers(np.arange(count, dtype=np.int64), mixed), kind="stable")


def segments_of(
    part_rows: Sequence[int] | None, first: int, stop: int | None, shuffle: Shuffle | None
) -> list[Segment]:
    """Returns the samples ``first..stop`` as ranges of parts, in the order of an epoch.

    Args:
        part_rows: Rows of each part; None for a stream, whose one part is never permuted.
        first: First sample.
        stop: Sample after the last; None for the end.
        shuffle: How parts are permuted.
    """
    if part_rows is None:
        return [Segment(0, first, None if stop is None else stop - first)]
    found, begin = [], 0
    for part, rows in enumerate(part_rows):
        start = max(first - begin, 0)
        end = rows if stop is None else min(stop - begin, rows)
        if start < end:
            found.append(Segment(part, start, end - start))
        begin += rows
    if shuffle is None:
        return found
    return [found[at] for at in permutation(len(found), shuffle.seed, shuffle.epoch, 0)]


def _behind(segments: Sequence[Segment], passed: int, most: int | None) -> list[Segment]:
    """Returns what is left of ``segments`` behind the first ``passed`` samples, ``most`` of it."""
    left = []
    for segment in segments:
        if segment.rows is not None and passed >= segment.rows:
            passed -= segment.rows
            continue
        rows = None if segment.rows is None else segment.rows - passed
        if most is not None:
            rows = most if rows is None else min(rows, most)
            most -= rows
        if rows is None or rows > 0:
            left.append(replace(segment, start=segment.start + passed, rows=rows))
        passed = 0
    return left


def _rows(parts: Parts, segments: Sequence[Segment], columns: list[str]) -> Iterator[Any]:
    """Yields the rows of segments as tables."""
    arrow, _, _ = arrow_modules()
    batches = parts.read([segment.part for segment in segments], columns, _READ_ROWS)
    for segment in segments:
        known = None if parts.part_rows is None else parts.part_rows[segment.part]
        passed, wanted = segment.start, segment.rows
        while known is None or known > 0:
            if wanted == 0 and known is None:
                break
            batch = _next(batches)
            if batch is None and known is None:
                return
            if batch is None or (known is not None and batch.num_rows > known):
                raise InvalidError(
                    "a source holds other rows than when it was opened; open it again"
                )
            known = None if known is None else known - batch.num_rows
            piece = batch.slice(passed) if wanted is None else batch.slice(passed, wanted)
            passed = max(0, passed - batch.num_rows)
            if piece.num_rows:
                wanted = None if wanted is None else wanted - piece.num_rows
                yield arrow.Table.from_batches([piece])


def _next(batches: Iterator[Any]) -> Any:
    arrow, _, _ = arrow_modules()
    try:
        return next(batches, None)
    except arrow.ArrowInvalid as error:
        raise InvalidError(
            f"a source does not go on as it began: {error}; give a dataset of pyarrow with the "
            "schema of all"
        ) from error
    except OSError as error:
        raise IoError(f"a source cannot be read: {error}", errno=error.errno) from error


def cut(tables: Iterator[Any], rows: int) -> Iterator[Any]:
    """Yields the rows of ``tables`` as tables of ``rows`` rows, the last one perhaps smaller."""
    arrow, _, _ = arrow_modules()
    held: list[Any] = []
    count = 0
    for table in tables:
        held.append(table)
        count += table.num_rows
        if count < rows:
            continue
        joined, at = arrow.concat_tables(held), 0
        while count - at >= rows:
            yield joined.slice(at, rows)
            at += rows
        held, count = [joined.slice(at)], count - at
    if count:
        yield arrow.concat_tables(held)


def in_order(
    parts: Parts,
    columns: list[str],
    segments: Sequence[Segment],
    span: tuple[int, int | None],
    shuffle: Shuffle | None,
) -> Iterator[Any]:
    """Yields samples of an epoch as tables, in its order.

    Args:
        parts: The source.
        columns: The columns that are read.
        segments: All samples of the epoch; see :func:`segments_of`.
        span: Places in the epoch of the first sample and of that after the last. Windows begin at
            multiples of their size.
        shuffle: How windows are permuted.
    """
    arrow, _, _ = arrow_modules()
    place, stop = span
    if shuffle is None:
        left = _behind(segments, place, None if stop is None else stop - place)
        yield from _rows(parts, left, columns)
        return
    window = place // shuffle.window
    begin = window * shuffle.window
    # All of the last window, whose permutation depends on its size.
    end = None if stop is None else -(-stop // shuffle.window) * shuffle.window
    left = _behind(segments, begin, None if end is None else end - begin)
    tables = _rows(parts, left, columns)
    for number, table in enumerate(cut(tables, shuffle.window), window):
        order = permutation(table.num_rows, shuffle.seed, shuffle.epoch, number + 1)
        first = number * shuffle.window
        last = table.num_rows if stop is None else min(table.num_rows, stop - first)
        picked = order[max(0, place - first) : last]
        if len(picked):
            yield table.combine_chunks().take(arrow.array(picked))
