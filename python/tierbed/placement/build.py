"""Placements: which rows share a page, and which are on several.

A :class:`QueryLog` says what was asked together; :func:`place` makes a :class:`Placement` of it;
:meth:`Placement.reads` counts the pages that other queries would read. No page is read or written
here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tierbed._native import NativePlacement, NativeQueryLog, NativeQueryLogBuilder
from tierbed.codec import Codec
from tierbed.config.words import (
    LogFormat,
    PageCodec,
    PageSelection,
    PlaceMethod,
    Positive,
    check_word,
)
from tierbed.errors import InvalidError
from tierbed.jagged import KeyedJaggedTensor

__all__ = [
    "LogOptions",
    "MissStream",
    "PageReads",
    "PlaceOptions",
    "Placement",
    "PlacementInfo",
    "QueryLog",
    "place",
    "place_each",
    "rows_per_page_of",
]

_PAGE_BYTES = 4096
_HEADER_BYTES = 24
_ID_BYTES = 4

Path = str | os.PathLike[str]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What is read of a query log.

    Args:
        row_count: Rows of the table; by default one more than the largest id.
        sample: Share of the queries to keep.
        seed: Equal seeds keep equal queries.
        query_count_max: Keep the first queries only.
        query_rows_max: Keep at most this many rows of a query, the first.
    """

    row_count: int | None = None
    sample: float = 1.0
    seed: int = 0
    query_count_max: int | None = None
    query_rows_max: int | None = None


class QueryLog:
    """Queries of one table, earliest first, each a set of row ids.

    Args:
        native: The log of the native module; use :meth:`read` or :meth:`from_batches`.

    Examples:
        >>> queries = (torch.tensor([1, 2, 1, 2, 3]), torch.tensor([0, 2, 5]))
        >>> log = tb.QueryLog.from_batches(10, [queries])
        >>> len(log)
        2
    """

    def __init__(self, native: NativeQueryLog) -> None:
        self.native = native

    @classmethod
    def read(
        cls,
        path: Path,
        log_format: LogFormat = "text",
        options: LogOptions | None = None,
        *,
        progress: Progress | None = None,
    ) -> QueryLog:
        """Reads a log in bounded memory: 4 bytes per row id and 8 per query that are kept.

        Args:
            path: The file, plain, gzip or zstd.
            log_format: ``text`` (a query per line), ``maxembed-text`` or ``maxembed`` (binary).
            options: What is read of it; by default all.
            progress: Called with bytes read and bytes in all.

        Raises:
            InvalidError: A line is no query; the error names file and line.
            CorruptionError: A packed or binary file is damaged.
        """
        given = options or LogOptions()
        return cls(NativeQueryLog.read(os.fspath(path), log_format, given, progress))

    @classmethod
    def from_batches(cls, row_count: int, batches: Iterable[tuple[Tensor, Tensor]]) -> QueryLog:
        """Collects queries from tensors.

        Args:
            row_count: Rows of the table.
            batches: Pairs of row ids ``[E]`` and offsets ``[queries + 1]``.

        Raises:
            InvalidError: An id is not below ``row_count``.
        """
        builder = NativeQueryLogBuilder(row_count)
        for values, offsets in batches:
            wanted = [part.to(torch.int64).contiguous() for part in (values, offsets)]
            builder.push(*wanted)
        return cls(builder.finish())

    @classmethod
    def from_samples(
        cls, table_sizes: Mapping[str, int], samples: Iterable[KeyedJaggedTensor]
    ) -> QueryLog:
        """Collects the samples of a data set, each as one query over all its features.

        Rows are numbered through: those of the first feature's table, then those of the next. A
        placement of such a log is one of several tables that share pages. A field without a token
        is row 0 of its feature, as in training: the model asks for that row, too.

        Args:
            table_sizes: Rows of each feature's table; features that are not named are left out.
            samples: Batches of ids, feature-major, as data sets yield them.

        Raises:
            InvalidError: An id is beyond its table, or samples lack a feature.
        """
        names, sizes = list(table_sizes), torch.tensor(list(table_sizes.values()))
        starts = torch.cumsum(sizes, 0) - sizes

        def by_sample() -> Iterator[tuple[Tensor, Tensor]]:
            for every in samples:
                batch = every.select(names)
                ids, lengths = batch.values(), batch.lengths().view(len(sizes), batch.stride())
                per_feature = lengths.sum(1)
                limits = sizes.repeat_interleave(per_feature)
                if bool(((ids < 0) | (ids >= limits)).any()):
                    raise InvalidError("a sample has an id beyond its table")
                sample = torch.arange(batch.stride()).repeat(len(sizes))
                order = torch.argsort(sample.repeat_interleave(lengths.flatten()), stable=True)
                rows = (ids + starts.repeat_interleave(per_feature))[order]
                bounds = torch.zeros(batch.stride() + 1, dtype=torch.int64)
                torch.cumsum(lengths.sum(0), 0, out=bounds[1:])
                yield rows, bounds

        return cls.from_batches(int(sizes.sum()), by_sample())

    @property
    def row_count(self) -> int:
        """Rows of the table, asked for or not."""
        return self.native.row_count

    @property
    def pin_count(self) -> int:
        """Rows over all queries."""
        return self.native.pin_count

    def __len__(self) -> int:
        return self.native.query_count

    def __getitem__(self, at: int) -> list[int]:
        rows = self.native.query(at) if at >= 0 else None
        if rows is None:
            raise IndexError(f"there are {len(self)} queries, not {at}")
        return rows

    def split(self, share: float) -> tuple[QueryLog, QueryLog]:
        """Splits by time: the earlier ``share`` of the queries, and the later rest.

        Args:
            share: Of the queries, from 0 to 1.
        """
        if share == 1.0:
            return self, QueryLog.from_batches(self.row_count, [])
        earlier, later = self.native.split(share)
        return QueryLog(earlier), QueryLog(later)

    def shuffled(self, seed: int) -> QueryLog:
        """The queries in another order, for logs whose order is not that of time.

        Args:
            seed: Equal seeds give equal orders.
        """
        return QueryLog(self.native.shuffled(seed))

    def sample(self, queries: int, seed: int = 0) -> QueryLog:
        """Draws ``queries`` of the queries, still in order of time.

        Args:
            queries: How many.
            seed: Equal seeds draw equal queries.
        """
        return QueryLog(self.native.sample(queries, seed))

    def write(self, path: Path) -> None:
        """Writes MaxEmbed's binary log.

        Args:
            path: The file.
        """
        self.native.write(os.fspath(path))

    def misses(
        self, earlier: QueryLog, share: float, *, policy: str = "s3_fifo", batch: int = 1
    ) -> MissStream:
        """Takes away what a row cache serves.

        Args:
            earlier: Queries that warm the cache; the log itself, to build from.
            share: Rows the cache holds, as a share of the table's rows.
            policy: Eviction policy of the cache.
            batch: Queries whose rows are asked for together.
        """
        if share == 0.0 and batch == 1 and earlier.row_count == self.row_count:
            return MissStream(self, len(self), 0.0)
        log, query_count, hit_ratio = self.native.misses(earlier.native, share, policy, batch)
        return MissStream(QueryLog(log), query_count, hit_ratio)


@dataclass(frozen=True)
class MissStream:
    """A log without its hits.

    Args:
        log: What missed; one query per batch.
        query_count: Queries before batches were made.
        hit_ratio: Share of the asked rows that were hits.
    """

    log: QueryLog
    query_count: int
    hit_ratio: float


@dataclass(frozen=True)
class PageReads:
    """The pages some queries read.

    Args:
        pages: Pages read.
        rows: Rows they served.
        absent_rows: Rows asked for that the placement does not have.
        reads_by_useful_rows: At ``u``: how many reads served ``u`` rows.
        index_bytes: Most memory that a snapshot's index of the placement takes.
    """

    pages: int
    rows: int
    absent_rows: int
    reads_by_useful_rows: list[int]
    index_bytes: int

    @property
    def useful_rows_per_page(self) -> float:
        """Rows served per page; 0 without a page."""
        return self.rows / max(1, self.pages)


@dataclass(frozen=True, kw_only=True)
class PlacementInfo:
    """What a placement holds.

    Args:
        row_count: Rows of the table.
        rows_per_page: Rows a page holds.
        page_count: All pages.
        home_page_count: Pages of homes; the others hold replicas.
        replica_count: Copies of rows beyond the first.
        index_bytes: Most memory that a snapshot's index of the placement takes.
        pages_by_rows: At ``n``: how many pages hold ``n`` rows.
        rows_by_pages: At ``n``: how many rows are on ``n`` pages.
    """

    row_count: int
    rows_per_page: int
    page_count: int
    home_page_count: int
    replica_count: int
    index_bytes: int
    pages_by_rows: list[int]
    rows_by_pages: list[int]


class Placement:
    """Rows on pages: every row has a home, some have replicas on further pages.

    Args:
        native: The placement of the native module; use :func:`place` or :meth:`read`.

    Examples:
        >>> queries = (torch.tensor([1, 2, 1, 2, 3]), torch.tensor([0, 2, 5]))
        >>> log = tb.QueryLog.from_batches(10, [queries])
        >>> placed = tb.place(log, rows_per_page=4, method="maxembed")
        >>> placed.write("item.tbp")
    """

    def __init__(self, native: NativePlacement) -> None:
        self.native = native

    @classmethod
    def read(cls, path: Path) -> Placement:
        """Reads a placement file.

        Args:
            path: The file.

        Raises:
            CorruptionError: The file is damaged, or no placement.
        """
        return cls(NativePlacement.read(os.fspath(path)))

    @classmethod
    def read_mapping(cls, path: Path, rows_per_page: int) -> Placement:
        """Reads MaxEmbed's mapping, which does not say how many rows a page holds.

        Args:
            path: The file.
            rows_per_page: Rows a page holds.
        """
        return cls(NativePlacement.read_mapping(os.fspath(path), rows_per_page))

    def write(self, path: Path) -> None:
        """Writes a placement file.

        Args:
            path: The file.
        """
        self.native.write(os.fspath(path))

    def write_mapping(self, path: Path) -> None:
        """Writes MaxEmbed's mapping.

        Args:
            path: The file.
        """
        self.native.write_mapping(os.fspath(path))

    def info(self) -> PlacementInfo:
        """Counts of rows, pages and replicas, bytes of the indexes, and two histograms."""
        return PlacementInfo(**self.native.info())

    def page(self, at: int) -> list[int]:
        """The rows of a page, homes first.

        Args:
            at: Number of the page.

        Raises:
            IndexError: No such page.
        """
        rows = self.native.page(at) if at >= 0 else None
        if rows is None:
            raise IndexError(f"the placement has no page {at}")
        return rows

    def ordered_by_use(self, log: QueryLog) -> Placement:
        """The same pages; each row tries those first that served ``log`` most.

        Args:
            log: Queries.
        """
        return Placement(self.native.ordered_by_use(log.native))

    def reads(
        self,
        log: QueryLog,
        *,
        select: PageSelection = "one_pass",
        index_limit: int | None = 10,
        threads: int = 1,
    ) -> PageReads:
        """Counts the pages that the queries of ``log`` read.

        Args:
            log: Queries, or what is left of them behind a cache.
            select: ``one_pass`` or ``greedy``.
            index_limit: Pages of a row that are chosen among; None is all.
            threads: They change the time, never the counts.
        """
        return PageReads(**self.native.page_reads(log.native, select, index_limit, threads))

    def connectivity(self, log: QueryLog) -> float:
        """Mean number of home pages that hold the rows of a query: reads without replicas.

        Args:
            log: Queries.
        """
        return self.native.connectivity_sum(log.native) / max(1, len(log))


def rows_per_page_of(dim: int, codec: PageCodec = "f32") -> int:
    """Rows of ``dim`` elements, with their ids, that a page of a snapshot holds.

    15 of dim 64 as f32; the papers count 16, without header and ids.

    Args:
        dim: Elements of a row.
        codec: How the snapshot keeps them.

    Raises:
        InvalidError: The row is larger than a page.
    """
    check_word("codec", codec, PageCodec)
    room = _PAGE_BYTES - _HEADER_BYTES
    rows = room // (_ID_BYTES + Codec(codec, dim).code_bytes) if dim > 0 else 0
    if rows < 1:
        raise InvalidError(
            f"dim must be at least 1, and a row with its id fit {room} bytes of a page, to share "
            f"pages; found dim {dim} as {codec}"
        )
    return rows


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """How rows are placed.

    Args:
        method: How; shp_published and maxembed_published bisect as MaxEmbed's programs do.
        rows_per_page: Rows a page holds.
        seed: Equal seeds make equal placements.
        threads: They change the time, never the placement.
        iterations: Exchanges per split of a bisection; 8 by the methods as published.
    """

    method: PlaceMethod = "grown"
    rows_per_page: int = 16
    seed: int = 1
    threads: Positive = 1
    iterations: int = 16


def place(
    log: QueryLog,
    *,
    misses: QueryLog | None = None,
    rows_per_page: int = 16,
    method: PlaceMethod = "grown",
    ratio: float = 0.1,
    homes: Placement | None = None,
    seed: int = 1,
    threads: int = 1,
    iterations: int = 16,
    kept: Path | None = None,
    progress: Progress | None = None,
) -> Placement:
    """Places the rows of a log.

    Args:
        log: The queries.
        misses: What of them misses the cache that will stand in front (:meth:`QueryLog.misses`);
            ``grown`` grows pages for these.
        rows_per_page: As of :class:`PlaceOptions`, and so ``method``, ``seed``, ``threads`` and
            ``iterations``.
        method: How rows are placed.
        ratio: Replicas per row of the table; 0 for methods that make none.
        homes: A placement by ``shp`` of the same log and options, for ``maxembed`` (by
            ``shp_published`` for ``maxembed_published``): saves bisecting again for each of
            several ratios.
        seed: Equal seeds make equal placements.
        threads: They change the time, never the placement.
        iterations: Exchanges per split of a bisection.
        kept: A folder for what ``shp``, ``maxembed`` and ``grown`` have done: a build that was
            stopped goes on there, to the same placement. Delete it when the placement is safe.
        progress: Called with steps done and steps in all: levels of a bisection, about
            thousandths of the work of ``grown``. What it raises ends the build.

    Raises:
        InvalidError: An option is out of range, or unknown; what is kept is of another log or of
            other options.
        CorruptionError: What is kept is damaged; the error names the file.

    Examples:
        >>> queries = (torch.tensor([1, 2, 1, 2, 3]), torch.tensor([0, 2, 5]))
        >>> log = tb.QueryLog.from_batches(10, [queries])
        >>> placed = tb.place(log, rows_per_page=4, method="maxembed")
    """
    options = PlaceOptions(
        method=method,
        rows_per_page=rows_per_page,
        seed=seed,
        threads=threads,
        iterations=iterations,
    )
    placed = place_each(
        log, [ratio], options, misses=misses, homes=homes, kept=kept, progress=progress
    )
    return placed[0]


def place_each(
    log: QueryLog,
    ratios: Iterable[float],
    options: PlaceOptions | None = None,
    *,
    misses: QueryLog | None = None,
    homes: Placement | None = None,
    kept: Path | None = None,
    progress: Progress | None = None,
) -> list[Placement]:
    """Places the rows of a log once for several ratios.

    Args:
        log: The queries.
        ratios: Replicas per row of the table, of one placement each.
        options: How rows are placed.
        misses: As of :func:`place`.
        homes: As of :func:`place`.
        kept: As of :func:`place`.
        progress: As of :func:`place`.

    Returns:
        A placement for each ratio, in their order; equal to those of :func:`place`. Home pages are
        made once where the method makes the same for all.

    Raises:
        InvalidError: An option is out of range, or unknown.
        CorruptionError: What is kept is damaged; the error names the file.
    """
    built = NativePlacement.build(
        log.native,
        None if misses is None else misses.native,
        options or PlaceOptions(),
        list(ratios),
        None if homes is None else homes.native,
        None if kept is None else os.fspath(kept),
        progress,
    )
    return [Placement(native) for native in built]
