"""A table as a feature of GraphBolt."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tierbed._util.tensors import as_int64
from tierbed.adapters.base import base_of
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.ops import operators as ops
from tierbed.ops.binding import Binding
from tierbed.serve.snapshot import Snapshot
from tierbed.train.store import Store

if TYPE_CHECKING:
    from dgl.graphbolt import Feature as _Feature
    from typing_extensions import Self
else:
    _Feature = base_of("dgl.graphbolt", "Feature")

__all__ = ["TierbedFeature"]


class TierbedFeature(_Feature):
    """A table as a GraphBolt ``Feature``: rows of ``[D]`` f32 by number, or by id.

    Rows come on the device of the ids. They may be read from several threads. A store belongs to
    one process; GraphBolt fetches features in the process of its ``DataLoader``.

    Args:
        source: The store, or a snapshot, whose rows never change.
        table: Name of the table.
        metadata: What :meth:`metadata` returns.

    Raises:
        InvalidError: No such table.

    Examples:
        >>> from tierbed.adapters.graphbolt import TierbedFeature
        >>> store = tb.Store.open("graph", dram_budget="16MiB")
        >>> table = tb.EmbeddingConfig(name="paper", num_embeddings=1000, embedding_dim=8)
        >>> _ = store.add_table(table)
        >>> feature = TierbedFeature(store, "paper")
        >>> feature.update(torch.ones(1, 8), torch.tensor([7]))
        >>> for stage, future in enumerate(feature.read_async(torch.tensor([7, 3]))):
        ...     pass
        >>> rows = future.wait()
        >>> rows.shape, rows[0].sum().item(), feature.size(), feature.count()
        (torch.Size([2, 8]), 8.0, torch.Size([8]), 1000)
        >>> store.close()
    """

    def __init__(
        self, source: Store | Snapshot, table: str, metadata: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        source.table_id(table)
        self._source = source
        self._table = table
        self._metadata = dict(metadata or {})
        self._reader: ThreadPoolExecutor | None = None
        self._reader_pid = 0
        self._binding: Binding | None = None

    def read(self, ids: Tensor | None = None) -> Tensor:
        """Reads rows, ``[N, D]`` f32.

        Args:
            ids: Rows, or ids of an open vocabulary, ``[N]`` i64 or i32 in any order; None reads all
                rows of the table.

        Raises:
            InvalidError: Rows that the table does not have.
        """
        if ids is None:
            return self._read(torch.arange(self.count(), device="cpu"))
        rows = self._rows(ids)
        return self._read(rows).to(ids.device)

    def read_async(self, ids: Tensor) -> Generator[_Reading, None, None]:
        """Begins to read rows: yields once, what has ``wait()`` for them.

        Of rows that are updated before ``wait()`` returns, either value is read.

        Args:
            ids: As of :meth:`read`.
        """
        ready = None
        if ids.is_cuda:
            # The thread reads them on another stream than what makes them.
            ready = torch.cuda.current_stream(ids.device).record_event()
        yield _Reading(self._pool().submit(self._read_later, ids, ready))

    def read_async_num_stages(self, ids_device: torch.device) -> int:
        """Returns 1, how often :meth:`read_async` yields.

        Args:
            ids_device: Device of the ids.
        """
        return 1

    def size(self) -> torch.Size:
        """Returns the shape of a row, ``[D]``."""
        return torch.Size([int(self._schema()["dim"])])

    def count(self) -> int:
        """Returns how many rows there are; those with room, of an open vocabulary."""
        return int(self._schema()["row_count"])

    def update(self, value: Tensor, ids: Tensor | None = None) -> None:
        """Overwrites rows; the state of their optimizer starts anew.

        Args:
            value: Rows ``[N, D]`` f32.
            ids: As of :meth:`read`; the last value of an id counts, and new ids of an open
                vocabulary get a row. None overwrites all rows.

        Raises:
            InvalidError: Rows that the table does not have, or values of another shape.
            UnsupportedError: A snapshot, or all rows of an open vocabulary.
        """
        if not isinstance(self._source, Store):
            raise UnsupportedError(
                f"rows of a snapshot never change; update table {self._table!r} in its store, and "
                "publish it again",
                {"table": self._table},
            )
        is_open = self._table in self._source.vocabularies()
        if ids is None and is_open:
            raise UnsupportedError(
                f"table {self._table!r} has a row for each id that came in; give the ids to update",
                {"table": self._table},
            )
        count = self.count() if ids is None else ids.numel()
        if value.shape != (count, *self.size()):
            raise InvalidError(
                f"values of table {self._table!r} must be [{count}, {self.size()[0]}], not "
                f"{tuple(value.shape)}",
                {"table": self._table},
            )
        rows = value.detach().to("cpu", torch.float32).contiguous()
        if ids is None:
            self._source.write_rows(self._table, 0, rows)
            return
        numbers, order = as_int64(ids).detach().cpu().sort(stable=True)
        is_last = torch.ones(len(numbers), dtype=torch.bool, device="cpu")
        is_last[:-1] = numbers[1:] != numbers[:-1]
        numbers = numbers[is_last]
        if is_open:
            numbers = self._source.assign_ids(self._table, numbers)
        self._source.scatter_rows(self._table, numbers, rows[order[is_last]])

    def metadata(self) -> dict[str, Any]:
        """Returns what was given as ``metadata``."""
        return self._metadata

    def is_pinned(self) -> bool:
        """Returns False: rows are on the disk, and in the store's budget of memory."""
        return False

    def pin_memory_(self) -> Self:
        """Returns this feature; its rows stay where they are."""
        return self

    def to(self, device: Any) -> Self:
        """Returns this feature; its rows stay where they are, and are read to where the ids are.

        Args:
            device: Anything.
        """
        return self

    # ------------------------------------------------------------ inside

    def _schema(self) -> dict[str, Any]:
        return next(one for one in self._source.tables() if one["name"] == self._table)

    def _rows(self, ids: Tensor) -> Tensor:
        numbers = as_int64(ids).detach().cpu().reshape(-1).contiguous()
        if self._table in self._source.vocabularies():
            return self._source.translate(self._table, numbers)
        return numbers

    def _read(self, rows: Tensor) -> Tensor:
        if isinstance(self._source, Store):
            return self._source.gather_rows(self._table, rows)
        if self._binding is None:
            table = self._source.table_id(self._table)
            self._binding = Binding(self._source.native, [table], ["none"], list(self.size()))
        return ops.lookup(self._binding, rows, torch.tensor([0, len(rows)], device="cpu"), None)

    def _read_later(self, ids: Tensor, ready: torch.cuda.Event | None) -> Tensor:
        if ready is not None:
            ready.synchronize()
        return self.read(ids)

    def _pool(self) -> ThreadPoolExecutor:
        """Returns the thread that reads; a forked child gets its own."""
        if self._reader is None or self._reader_pid != os.getpid():
            self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"graphbolt-{self._table}")
            self._reader_pid = os.getpid()
        return self._reader

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_binding": None}

    def __repr__(self) -> str:
        return f"TierbedFeature({self._source!r}, {self._table!r})"


class _Reading:
    """Rows that a thread reads."""

    def __init__(self, future: Future[Tensor]) -> None:
        self._future: Future[Tensor] | None = future

    def wait(self) -> Tensor:
        """Returns the rows, once.

        Raises:
            InvalidError: They were returned before.
        """
        future, self._future = self._future, None
        if future is None:
            raise InvalidError("these rows were returned before; call read_async again")
        rows = future.result()
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))
        return rows
