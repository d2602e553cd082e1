"""Parts of tables that a rank holds, and rows of files for them.

A run is some consecutive rows of a file, as tensors by name: ``weights`` ``[N, C]`` f32, ``state``
``[N, S]`` f32 and ``use_counts`` ``[N]`` i64 of rows that train, or ``codes`` ``[N, code_bytes]``
u8 of rows that are kept in fewer bytes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from tierbed.codec import Codec
from tierbed.config.optim import SGD
from tierbed.config.tables import DataType, EmbeddingBagConfig
from tierbed.dist.sharding import ShardingPlan, row_count_max
from tierbed.train.coded_store import CodedStore
from tierbed.train.store import Store

if TYPE_CHECKING:
    from tierbed.dist.device.store import DeviceStore

__all__ = ["Held", "Target", "coded_runs", "held_tables", "initial_rows", "target_of"]

CHUNK_ROWS = 65536


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank holds of a table.

    Args:
        config: The table.
        name: What the rank's store calls it.
        rows: Rows that are held.
        columns: Columns that are held.
        blocks: Where ranks take turns in holding blocks of ``rows``: the first one that is held,
            ranks, and rows of a block.
    """

    config: EmbeddingBagConfig
    name: str
    rows: range
    columns: range
    blocks: tuple[int, int, int] | None = None

    def about(self) -> dict[str, Any]:
        """Returns what the manifest says of each file of it."""
        columns = [self.columns.start, self.columns.stop]
        taken = {} if self.blocks is None else {"blocks": list(self.blocks)}
        return {"table": self.config.name, "columns": columns, **taken}

    def overlaps(self, file: Mapping[str, Any]) -> bool:
        """Returns whether ``file`` of a manifest has columns that are held, and may have rows."""
        first, end = file["columns"]
        # Before version 4 nobody said which rows a file has.
        first_row, end_row = file.get("rows", (self.rows.start, self.rows.stop))
        is_its = file["table"] == self.config.name
        if self.blocks is not None and "blocks" in file:
            # Of as many ranks, each holds what it held.
            first_block, *turns = file["blocks"]
            is_its &= turns != list(self.blocks[1:]) or first_block == self.blocks[0]
        has_columns = first < self.columns.stop and end > self.columns.start
        has_rows = first_row < self.rows.stop and end_row > self.rows.start
        return bool(is_its and has_columns and has_rows)


def held_tables(
    tables: Sequence[EmbeddingBagConfig], plan: ShardingPlan, rank: int
) -> Iterator[Held]:
    """Yields what ``rank`` holds by ``plan``."""
    for config in tables:
        way = plan.sharding(config)
        rows, columns = range(row_count_max(config)), range(config.embedding_dim)
        name, blocks = config.name, plan.blocks_of(config, rank)
        if way["kind"] == "whole" and way["rank"] != rank:
            continue
        if way["kind"] == "rows":
            rows = range(way["bounds"][rank], way["bounds"][rank + 1])
        if way["kind"] == "columns":
            columns = range(way["bounds"][rank], way["bounds"][rank + 1])
            name = f"{config.name}.columns.{columns.start}"
        if len(columns) > 0:
            yield Held(config=config, name=name, rows=rows, columns=columns, blocks=blocks)


def initial_rows(
    held: Held, seed: int, *, threads: int = 1, chunk_rows: int = CHUNK_ROWS
) -> Iterator[tuple[int, Tensor]]:
    """Yields first row and initial rows of what is held, some at a time and in order.

    Those of some columns are not those of a narrow table: they come from whole rows.

    Args:
        held: The rows and columns.
        seed: Of the store that they are rows of.
        threads: How many make rows; they are the same.
        chunk_rows: Most rows at a time.
    """
    columns = slice(held.columns.start, held.columns.stop)
    config = dataclasses.replace(held.config, data_type=DataType.FP32)
    with ExitStack() as closing:
        # A store has one caller at a time, so each thread takes one.
        idle: SimpleQueue[Store] = SimpleQueue()
        for _ in range(threads):
            whole = Store.open(backend="memory", dram_budget="64MiB", seed=seed)
            closing.enter_context(whole).add_table(config, SGD())
            idle.put(whole)

        def make(first: int) -> tuple[int, Tensor]:
            whole = idle.get()
            try:
                count = min(chunk_rows, held.rows.stop - first)
                rows = whole.read_rows(config.name, first, count)
                return first, rows[:, columns].contiguous()
            finally:
                idle.put(whole)

        workers = closing.enter_context(ThreadPoolExecutor(threads))
        coming: deque[Future[tuple[int, Tensor]]] = deque()
        for first in range(held.rows.start, held.rows.stop, chunk_rows):
            coming.append(workers.submit(make, first))
            if len(coming) > threads:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


class Target(Protocol):
    """Where the rows of one table's files go."""

    def write(self, file: Mapping[str, Any], first_row: int, run: Mapping[str, Tensor]) -> None:
        """Takes consecutive rows of ``file``, all of them held."""

    def finish(self) -> None:
        """Is called after the last file."""


def target_of(
    store: Store | CodedStore | DeviceStore, held: Held, files: Sequence[Mapping[str, Any]]
) -> Target:
    """Returns where the rows of ``files``, those of ``held``, go."""
    if isinstance(store, CodedStore):
        return _CodedTarget(store, held, files)
    return _TrainedTarget(store, held)


def coded_runs(
    store: CodedStore, held: Held, chunk_rows: int = CHUNK_ROWS
) -> Iterator[tuple[range, Tensor]]:
    """Yields rows that are held, ``chunk_rows`` at a time, and their codes."""
    for first in range(held.rows.start, held.rows.stop, chunk_rows):
        rows = range(first, min(first + chunk_rows, held.rows.stop))
        yield rows, store.read_codes(held.name, first, len(rows))


class _TrainedTarget:
    """Rows of a training store, with their optimizer state."""

    def __init__(self, store: Store | DeviceStore, held: Held) -> None:
        self._store = store
        self._held = held

    def write(self, file: Mapping[str, Any], first_row: int, run: Mapping[str, Tensor]) -> None:
        """As :meth:`Target.write`; version 1 has no use counts."""
        held, columns = self._held, range(*file["columns"])
        weights, rows_state, counts = run["weights"], run["state"], run.get("use_counts")
        if columns == held.columns:
            self._store.write_rows(held.name, first_row, weights, rows_state, counts)
            return
        # Some columns of the file are some columns of what is held; the others stay.
        own, own_state = self._store.read_rows_and_state(held.name, first_row, weights.shape[0])
        width, own_width = len(columns), len(held.columns)
        _copy_columns(weights, columns, own, held.columns)
        for word in range(rows_state.shape[1] // width):
            from_file = rows_state[:, word * width : (word + 1) * width]
            place = own_state[:, word * own_width : (word + 1) * own_width]
            _copy_columns(from_file, columns, place, held.columns)
        self._store.write_rows(held.name, first_row, own, own_state, counts)

    def finish(self) -> None:
        """As :meth:`Target.finish`: all is written."""


class _CodedTarget:
    """Rows that are kept in fewer bytes.

    Codes of the same type and columns are taken as they are. Others are numbers first; where they
    come column by column and codes belong to whole rows, a copy in float32 collects them.
    """

    def __init__(self, store: CodedStore, held: Held, files: Sequence[Mapping[str, Any]]) -> None:
        self._store = store
        self._held = held
        self._collected: CodedStore | None = None
        is_partial = any(range(*file["columns"]) != held.columns for file in files)
        if is_partial and held.config.data_type is DataType.INT8:
            self._collected = CodedStore(seed=store.seed)
            exact = dataclasses.replace(held.config, data_type=DataType.FP32)
            self._collected.add_table(exact, held.rows)

    def write(self, file: Mapping[str, Any], first_row: int, run: Mapping[str, Tensor]) -> None:
        """As :meth:`Target.write`."""
        held, columns, codec = self._held, range(*file["columns"]), file.get("codec")
        if columns == held.columns and codec == held.config.codec_name():
            self._store.write_codes(held.name, first_row, run["codes"])
            return
        rows = run["weights"] if codec is None else Codec(codec, len(columns)).decode(run["codes"])
        to = self._store if self._collected is None else self._collected
        if columns != held.columns:
            own = to.read_rows(held.name, first_row, rows.shape[0])
            _copy_columns(rows, columns, own, held.columns)
            rows = own
        to.write_rows(held.name, first_row, rows)

    def finish(self) -> None:
        """As :meth:`Target.finish`."""
        if self._collected is None:
            return
        name, end = self._held.name, self._held.rows.stop
        for first in range(self._held.rows.start, end, CHUNK_ROWS):
            rows = self._collected.read_rows(name, first, min(CHUNK_ROWS, end - first))
            self._store.write_rows(name, first, rows)


def _copy_columns(source: Tensor, columns: range, to: Tensor, to_columns: range) -> None:
    """Copies the columns that both have; ``columns`` are those of ``source``."""
    first, end = max(columns.start, to_columns.start), min(columns.stop, to_columns.stop)
    to[:, first - to_columns.start : end - to_columns.start] = source[
        :, first - columns.start : end - columns.start
    ]
