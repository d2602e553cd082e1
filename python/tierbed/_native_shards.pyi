"""Classes of the native module for shards. A stub: there is no such module."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypedDict, final

from torch import Tensor
from typing_extensions import Self

from tierbed._native import NativeQueryLog, NativeServer, NativeSnapshot
from tierbed.placement.shards import ShardOptions
from tierbed.serve.models import Scorer
from tierbed.serve.server import ServeOptions

__all__ = [
    "NativeRouting",
    "NativeRowShards",
    "NativeShardClient",
    "NativeShardMap",
    "PublishedShards",
    "RoutingOptions",
]

class PublishedShards(Protocol):
    """How a publish is divided, with tables by their ids: any dataclass with these fields."""

    @property
    def count(self) -> int: ...
    @property
    def replicas(self) -> int: ...
    @property
    def by(self) -> Literal["hash", "rows"]: ...
    @property
    def placed(self) -> Sequence[tuple[list[int], str]]: ...
    @property
    def everywhere_bytes(self) -> int: ...

@final
class NativeRowShards:
    """The shard of each row of a placement. Files are named by the placement beside them."""

    @staticmethod
    def divide(log: NativeQueryLog, options: ShardOptions) -> NativeRowShards: ...
    @staticmethod
    def by_hash(shard_count: int, row_count: int) -> NativeRowShards: ...
    @staticmethod
    def by_rows(shard_count: int, row_count: int) -> NativeRowShards: ...
    @staticmethod
    def read(placement: str) -> NativeRowShards: ...
    def write(self, placement: str) -> None: ...
    @property
    def shard_count(self) -> int: ...
    @property
    def row_count(self) -> int: ...
    def shards(self) -> bytes:
        """The shard of each row, u16."""
    def reads(self, log: NativeQueryLog) -> dict[str, Any]:
        """The fields of :class:`tierbed.placement.ShardReads`."""

@final
class NativeShardMap:
    """Where each row of a divided model lies."""

    @staticmethod
    def open(path: str) -> NativeShardMap: ...
    def info(self) -> dict[str, Any]: ...
    def locate(self, table: str, ids: Tensor, shards: Tensor, rows: Tensor) -> None:
        """Writes the shard of each id, -1 for any, and its row there; all ``[E]`` int64."""
    def rows_of(self, table: str, shard: int) -> int: ...
    def global_of(self, table: str, shard: int, row: int) -> int | None: ...

class RoutingOptions(TypedDict):
    """Where the shards are, and how they are asked."""

    route: str
    members: str
    missing_shard: str
    row_type: str
    ca: str | None
    certificate: str | None
    key: str | None
    server_name: str | None
    token: str | None
    wait_s: float


@final
class NativeRouting:
    """Shards that have been found, until a server or client takes them."""

    def __new__(cls, options: RoutingOptions) -> Self: ...
    def snapshot(self) -> NativeSnapshot:
        """What the shards publish beside rows; to be closed before a server answers."""

    def serve(self, address: str, model: Scorer | None, options: ServeOptions) -> NativeServer: ...
    def client(self) -> NativeShardClient: ...


@final
class NativeShardClient:
    """Lookups of a divided model without a gateway."""

    def lookup(
        self, bags: list[tuple[str, bytes, bytes, bytes | None]], pooling: str | None
    ) -> tuple[str, list[tuple[str, int, int, bytes]]]:
        """Generation, and (name, rows, elements of a row, f32 words) of each feature."""

    @property
    def features(self) -> list[str]: ...
