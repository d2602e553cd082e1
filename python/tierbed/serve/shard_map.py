"""Where each row of a model lies that was published in shards."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tierbed._native import NativeShardMap

__all__ = ["DividedTable", "Shard", "ShardMap"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The snapshot of one shard.

    Attributes:
        folder: Its folder beside ``shards.json``.
        identity: What tells the snapshot from every other.
        file_bytes: Bytes of its files.
    """

    folder: str
    identity: str
    file_bytes: int


@dataclass(frozen=True, kw_only=True)
class DividedTable:
    """A table, and how its rows are divided.

    Attributes:
        name: Its name.
        row_count: Rows over all shards.
        dim: Elements of a row.
        divided_by: ``whole`` (one shard has all), ``everywhere`` (every shard has all), ``rows``
            (ranges of ids), ``hash``, or ``placed`` (a map).
    """

    name: str
    row_count: int
    dim: int
    divided_by: Literal["whole", "everywhere", "rows", "hash", "placed"]


class ShardMap:
    """Which shard has each row, and which of its rows it is there.

    Args:
        native: The map of the native module; use :meth:`open`.

    Examples:
        >>> store = tb.Store.open("run/store", dram_budget="64MiB")
        >>> tables = [tb.EmbeddingBagConfig(name="item", num_embeddings=99, embedding_dim=16)]
        >>> emb = tb.EmbeddingBagCollection(tables, store=store, optimizer=tb.SGD(lr=0.1))
        >>> store.write_rows("item", 0, torch.ones(99, 16))
        >>> shards = tb.Shards(count=3, by="rows", everywhere=0)
        >>> store.publish("run/shards", shards=shards).shard_count
        3
        >>> shard, row = tb.ShardMap.open("run/shards").locate("item", torch.tensor([98, 0]))
        >>> shard.tolist(), row.tolist()
        ([2, 0], [32, 0])
        >>> store.close()
    """

    def __init__(self, native: NativeShardMap) -> None:
        self._native = native
        self._info: dict[str, Any] = native.info()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ShardMap:
        """Opens a folder with ``shards.json``, or that file. Maps are read whole.

        Args:
            path: The folder or the file.

        Raises:
            InvalidError: The folder holds no shards.
            CorruptionError: A file is damaged; the error names the place.
        """
        return cls(NativeShardMap.open(os.fspath(path)))

    @property
    def publish(self) -> int:
        """The number of the publish, which the snapshots of all its shards carry."""
        return int(self._info["publish"])

    @property
    def replicas(self) -> int:
        """Servers of each shard that are wanted."""
        return int(self._info["replicas"])

    @property
    def memory_bytes(self) -> int:
        """Bytes of the maps in memory."""
        return int(self._info["memory_bytes"])

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The snapshots, by number."""
        return tuple(Shard(**shard) for shard in self._info["shards"])

    @property
    def tables(self) -> tuple[DividedTable, ...]:
        """The tables, in the order of every snapshot."""
        return tuple(DividedTable(**table) for table in self._info["tables"])

    def locate(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tells where rows lie.

        Args:
            table: Name of the table.
            ids: ``[E]`` int64; repeated ones are fine.

        Returns:
            The shard of each, ``[E]`` int64, -1 where every shard has it; and its id in the
            snapshot of that shard, ``[E]`` int64.

        Raises:
            InvalidError: No such table, or an id outside it.
        """
        wanted = ids.to(torch.int64).contiguous()
        shards, rows = torch.empty_like(wanted), torch.empty_like(wanted)
        self._native.locate(table, wanted, shards, rows)
        return shards, rows

    def rows_of(self, table: str, shard: int) -> int:
        """Tells how many rows of a table the snapshot of a shard has.

        Args:
            table: Name of the table.
            shard: Number of the shard.
        """
        return self._native.rows_of(table, shard)

    def global_of(self, table: str, shard: int, row: int) -> int | None:
        """Returns the id of a row of a shard over all shards; None where it has no such row.

        Args:
            table: Name of the table.
            shard: Number of the shard.
            row: Its id in the snapshot of that shard.
        """
        return self._native.global_of(table, shard, row)
