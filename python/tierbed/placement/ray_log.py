"""Query logs whose blocks lie with the workers of a Ray cluster.

Ray Data reads columns and packs their records into blocks of queries, in the order of the files.
The driver holds references, counts, and results that are as large as a table, never a log.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from tierbed import _native
from tierbed._native import NativePlacement, NativeQueryLog, NativeQueryLogBuilder
from tierbed._util.arrow import arrow_modules
from tierbed.config.words import PageSelection
from tierbed.data.file_parts import open_files
from tierbed.errors import InvalidError
from tierbed.placement.build import LogOptions, PageReads, Placement, PlaceOptions
from tierbed.placement.log_columns import largest_ids, queries_of

__all__ = ["RayQueryLog"]

#: How often a task is done again after its worker died.
RETRIES = 16
#: The column of a block: a list of rows for each query.
ROWS = "rows"

Ref = Any


def log_of_blocks(row_count: int, *blocks: Any) -> NativeQueryLog:
    """Joins blocks of queries into a log.

    Args:
        row_count: Rows of the table.
        blocks: Tables of pyarrow with a column of lists.
    """
    builder = NativeQueryLogBuilder(row_count)
    for block in blocks:
        for chunk in block.column(ROWS).chunks:
            offsets = chunk.offsets.to_numpy().astype("int64")
            values = chunk.values.to_numpy().astype("int64")
            # A slice of a block shares the values of the whole.
            values, offsets = values[offsets[0] : offsets[-1]], offsets - offsets[0]
            builder.push(torch.from_numpy(values), torch.from_numpy(offsets))
    return builder.finish()


def _pack(batch: Any, sizes: Mapping[str, int], rows_max: int | None) -> Any:
    """Makes a block of queries of records; those without a row are none."""
    arrow, compute, _ = arrow_modules()
    values, offsets = queries_of(batch, sizes)
    lists = arrow.LargeListArray.from_arrays(offsets, arrow.array(values, arrow.int64()))
    lists = lists.filter(compute.greater(compute.list_value_length(lists), 0))
    if rows_max is not None:
        lists = compute.list_slice(lists, 0, rows_max)
    return arrow.table({ROWS: lists.cast(arrow.large_list(arrow.uint32()))})


def _largest(batch: Any, names: list[str]) -> Any:
    arrow, _, _ = arrow_modules()
    found = largest_ids(batch, names)
    return arrow.table({name: [value] for name, value in found.items()})


def _count(block: Any) -> int:
    return int(block.num_rows)


def _slice(block: Any, begin: int, end: int) -> Any:
    return block.slice(begin, end - begin)


def _begin(row_count: int, options: PlaceOptions, *blocks: Any) -> tuple[bytes, int]:
    return _native.bisection_begin(log_of_blocks(row_count, *blocks), options)


def _packed(row_count: int, *blocks: Any) -> bytes:
    return log_of_blocks(row_count, *blocks).pack()


def _reads(placement: bytes, row_count: int, how: dict[str, Any], block: Any) -> dict[str, Any]:
    native, log = placement_of(placement), log_of_blocks(row_count, block)
    found = native.page_reads(log, how["select"], how["index_limit"], 1)
    return {**found, "home_pages": native.connectivity_sum(log)}


def _ordered(placement: bytes, log: bytes) -> bytes:
    return bytes_of(placement_of(placement).ordered_by_use(NativeQueryLog.unpack(log)))


def bytes_of(placement: NativePlacement) -> bytes:
    """The file of a placement."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "placement"
        placement.write(str(file))
        return file.read_bytes()


def placement_of(written: bytes) -> NativePlacement:
    """The placement of a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "placement"
        file.write_bytes(written)
        return NativePlacement.read(str(file))


@dataclass(frozen=True)
class RayQueryLog:
    """A query log in blocks of a Ray cluster, earliest first.

    Args:
        ray: The module, connected to the cluster.
        blocks: References of tables, each with a list of rows per query.
        counts: Queries of each block.
        row_count: Rows of the table.
    """

    ray: Any
    blocks: list[Ref]
    counts: list[int]
    row_count: int

    @classmethod
    def read(
        cls,
        ray: Any,
        address: str,
        columns: Mapping[str, int | None],
        options: LogOptions | None = None,
        *,
        filesystem: Any = None,
    ) -> RayQueryLog:
        """Reads columns of Parquet files by tasks; the files are read by workers alone.

        Args:
            ray: The module, connected to the cluster.
            address: As of :func:`tierbed.placement.log_of_columns`: a path that all nodes see, a
                pattern, or an address.
            columns: As there.
            options: ``query_rows_max`` bounds queries; parts of a log are not drawn here.
            filesystem: As there.

        Raises:
            InvalidError: No such file or column, an id that is no row, or options beyond
                ``query_rows_max``.
        """
        given = options or LogOptions()
        if given.sample < 1.0 or given.query_count_max is not None or given.row_count is not None:
            raise InvalidError(
                "blocks of a log are read whole; leave out --sample and --rows, or build without "
                "--ray"
            )
        found = open_files(address, filesystem, "parquet")
        missing = [name for name in columns if name not in found.schema.names]
        if missing:
            raise InvalidError(
                f"{address} has no column {', '.join(missing)}; name some of "
                f"{', '.join(found.schema.names)}"
            )
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        data = ray.data.read_parquet(
            found.files, filesystem=found.filesystem, columns=list(columns), file_extensions=None
        )
        sizes = _sizes(data, columns)
        told = {"sizes": sizes, "rows_max": given.query_rows_max}
        packed = data.map_batches(_pack, batch_format="pyarrow", fn_kwargs=told).materialize()
        blocks = packed.to_arrow_refs()
        count = ray.remote(max_retries=RETRIES)(_count)
        counts = ray.get([count.remote(block) for block in blocks])
        kept = [(block, n) for block, n in zip(blocks, counts, strict=True) if n]
        return cls(ray, [one for one, _ in kept], [n for _, n in kept], sum(sizes.values()))

    def __len__(self) -> int:
        return sum(self.counts)

    def remote(self, task: Any, **options: Any) -> Any:
        """The task as one that Ray does again when its worker dies.

        Args:
            task: A function of a module.
            options: Of Ray's ``remote``.
        """
        return self.ray.remote(max_retries=RETRIES, **options)(task)

    def split(self, share: float) -> tuple[RayQueryLog, RayQueryLog]:
        """Splits by time: the earlier ``share`` of the queries, and the later rest.

        Args:
            share: Of the queries, from 0 to 1.

        Raises:
            InvalidError: Another share.
        """
        if not 0.0 <= share <= 1.0:
            raise InvalidError(f"share of a split must be from 0 to 1, not {share}")
        left = min(len(self), int(len(self) * share))
        cut = self.remote(_slice)
        sides: tuple[list[tuple[Ref, int]], list[tuple[Ref, int]]] = ([], [])
        for block, count in zip(self.blocks, self.counts, strict=True):
            here = min(left, count)
            left -= here
            if here in (0, count):
                sides[0 if here else 1].append((block, count))
            else:
                sides[0].append((cut.remote(block, 0, here), here))
                sides[1].append((cut.remote(block, here, count), count - here))
        first, second = (
            RayQueryLog(self.ray, [one for one, _ in side], [n for _, n in side], self.row_count)
            for side in sides
        )
        return first, second

    def packed(self) -> Ref:
        """A reference of the whole log, packed by a worker."""
        return self.remote(_packed).remote(self.row_count, *self.blocks)

    def begin(self, options: PlaceOptions) -> tuple[Ref, int]:
        """The part of a bisection above all others, made by a worker, and its pages.

        Args:
            options: How rows are placed.
        """
        begun = self.remote(_begin, num_returns=2)
        part, pages = begun.remote(self.row_count, options, *self.blocks)
        return part, self.ray.get(pages)

    def ordered_by_use(self, placement: Placement) -> Placement:
        """As :meth:`Placement.ordered_by_use`, by a worker.

        Args:
            placement: The placement.
        """
        task = self.remote(_ordered).remote(bytes_of(placement.native), self.packed())
        return Placement(placement_of(self.ray.get(task)))

    def reads(
        self,
        placement: Placement,
        *,
        select: PageSelection = "one_pass",
        index_limit: int | None = 10,
    ) -> tuple[PageReads, float]:
        """Counts the pages that the log reads, block by block.

        Args:
            placement: The placement.
            select: As of :meth:`Placement.reads`.
            index_limit: As there.

        Returns:
            The pages, and the mean number of home pages of a query.
        """
        task, how = self.remote(_reads), {"select": select, "index_limit": index_limit}
        written = self.ray.put(bytes_of(placement.native))
        found = self.ray.get(
            [task.remote(written, self.row_count, how, block) for block in self.blocks]
        )
        by_useful = [one.pop("reads_by_useful_rows") for one in found]
        useful = [sum(counts) for counts in zip_longest(*by_useful, fillvalue=0)]
        home_pages = sum(one.pop("home_pages") for one in found)
        index_bytes = max((one.pop("index_bytes") for one in found), default=0)
        total = {name: sum(one[name] for one in found) for name in ("pages", "rows", "absent_rows")}
        reads = PageReads(**total, reads_by_useful_rows=useful, index_bytes=index_bytes)
        return reads, home_pages / max(1, len(self))


def _sizes(data: Any, columns: Mapping[str, int | None]) -> dict[str, int]:
    """Rows of each table; tasks look for the largest id of those that are not known."""
    unknown = [name for name, rows in columns.items() if rows is None]
    largest = dict.fromkeys(unknown, -1)
    if unknown:
        found = data.map_batches(_largest, batch_format="pyarrow", fn_kwargs={"names": unknown})
        for row in found.take_all():
            largest = {name: max(value, row[name]) for name, value in largest.items()}
    return {name: largest[name] + 1 if rows is None else rows for name, rows in columns.items()}
