"""A class for each system, behind :class:`~tierbed_bench.peers.systems.base.Peer`."""

from __future__ import annotations

from tierbed_bench.peers.systems.base import Peer
from tierbed_bench.peers.systems.maps import Lmdb, MemoryMap
from tierbed_bench.peers.systems.redis import Redis
from tierbed_bench.peers.systems.rocksdb import RocksBlock, RocksPlain
from tierbed_bench.peers.systems.tables import Lance, Sqlite, Tierbed

__all__ = ["OURS", "SYSTEMS", "Peer"]

OURS = "tierbed"
SYSTEMS: dict[str, type[Peer]] = {
    OURS: Tierbed,
    "memory_map": MemoryMap,
    "rocksdb_block": RocksBlock,
    "rocksdb_plain": RocksPlain,
    "lmdb": Lmdb,
    "lance": Lance,
    "sqlite": Sqlite,
    "redis": Redis,
}
