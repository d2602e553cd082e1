"""Stores of others over Python, to compare with: SQLite and RocksDB.

:class:`SqliteStore` uses Python's ``sqlite3``, :class:`RocksDictStore` the package ``rocksdict``.
``tierbed.Store.over(store)`` trains through either.
"""

from tierbed_bench.stores.rocks import RocksDictStore
from tierbed_bench.stores.sqlite import SqliteStore

__all__ = ["RocksDictStore", "SqliteStore"]
