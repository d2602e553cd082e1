"""Options of the native module, as dicts with these keys. A stub: there is no such module.

What :mod:`tierbed._native` has no room for is here, too.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, final

from typing_extensions import Self

from tierbed._native import NativeServer, NativeSnapshot, NativeTierBudget
from tierbed.config.words import (
    Backend,
    Durability,
    IoEngine,
    MissMode,
    OnMismatch,
    Order,
    SnapshotBackend,
)
from tierbed.serve.cache import CachePart
from tierbed.serve.models import Scorer
from tierbed.serve.server import ServeOptions

__all__ = [
    "ExchangePlan",
    "FollowOptions",
    "GeneratorOptions",
    "Hyper",
    "LogPosition",
    "NativeFollowing",
    "ReaderOptions",
    "RecordOptions",
    "RecordedGroup",
    "ShardedTable",
    "SnapshotOptions",
    "StoreOptions",
    "TableSchema",
    "VocabularyPolicy",
]


class SnapshotOptions(TypedDict):
    """Options of :class:`NativeSnapshot`. An empty list to ``refresh`` is all tables."""

    dram_budget_bytes: int
    backend: SnapshotBackend
    io_engine: IoEngine
    queue_depth: int
    reader_count: int | None
    cache_bytes_max: int | None
    tiers: Sequence[CachePart]
    neighbours: str | None
    misses: MissMode
    refresh: list[str] | None
    tier_floor_bytes: int | None


class FollowOptions(TypedDict):
    """What to follow; without ``sync_bytes_per_s`` at a part of what the disk takes."""

    location: str
    channel: str
    local: str
    poll_s: float
    sync_bytes_per_s: int | None
    swap_share: float


@final
class NativeFollowing:
    """A channel whose version is open, until a server takes it."""

    def __new__(
        cls, follow: FollowOptions, options: SnapshotOptions, tier_budget: NativeTierBudget | None
    ) -> Self: ...
    def snapshot(self) -> NativeSnapshot:
        """The snapshot that answers first; to be closed before the server follows."""

    @property
    def version(self) -> int: ...
    @property
    def behind(self) -> str | None:
        """Why that is not where the channel is, if it could not be pulled."""

    def serve(self, address: str, model: Scorer | None, options: ServeOptions) -> NativeServer: ...

class RecordedGroup(TypedDict):
    """Tables that are recorded together, and where."""

    tables: list[int]
    folder: str


class RecordOptions(TypedDict):
    """Options of :meth:`NativeSnapshot.record`."""

    groups: list[RecordedGroup]
    sample: float
    seed: int
    file_bytes: int
    bytes_max: int


class ReaderOptions(TypedDict):
    """How a log is read."""

    format: Literal["criteo", "avazu"]
    bad_lines: Literal["fail", "skip"]


class LogPosition(TypedDict):
    """Where a reader is: the next sample begins here."""

    sample_count: int
    file_index: int
    offset_bytes: int
    line_number: int
    skipped_line_count: int


class GeneratorOptions(TypedDict):
    """What to generate."""

    seed: int
    scale: float
    drift: float


class ShardedTable(TypedDict):
    """A table of an exchange.

    ``sharding`` has a ``kind``: ``whole`` with ``rank``, ``rows`` or ``columns`` with ``bounds``,
    or ``mirrored``.
    """

    row_count: int
    dim: int
    sharding: dict[str, Any]


class ExchangePlan(TypedDict):
    """Who holds what; of each feature its table and ``"sum"`` or ``"mean"``."""

    ranks: int
    tables: list[ShardedTable]
    features: list[tuple[int, str]]
    outputs: str
    rows: str


class StoreOptions(TypedDict):
    """Options of ``NativeStore``."""

    dram_budget_bytes: int
    backend: Backend | None
    durability: Durability
    order: Order
    on_mismatch: OnMismatch | None
    shards: int | None
    io_engine: IoEngine
    queue_depth: int
    disk_quota_bytes: int | None
    storage_thread: bool | None
    vocabulary_bytes: int | None
    read_only: bool
    kept: str | None


class TableSchema(TypedDict):
    """A table.

    ``init`` has a ``kind``: ``uniform`` with ``low`` and ``high``, ``normal`` with ``mean`` and
    ``std``, or ``constant`` with ``value``.
    """

    name: str
    row_count: int
    dim: int
    optimizer: str
    state_init: float
    init: dict[str, Any]
    seed: int


class VocabularyPolicy(TypedDict):
    """Which ids of an open vocabulary have rows.

    ``eviction`` has a ``kind``: ``never``, ``count`` with ``threshold`` and ``decay_rate``, ``age``
    with ``ttl``, or ``count_and_age`` with all of these.
    """

    admit_after: int
    eviction: dict[str, Any]


class Hyper(TypedDict):
    """Numbers of an optimizer."""

    lr: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
