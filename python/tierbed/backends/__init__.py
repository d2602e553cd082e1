"""Which stores that are not ours can hold the rows of a training run?

Any object with the few bulk calls of :class:`RowStoreProtocol`: ``tierbed.Store.over(store)``
trains through it, with the same bits, checkpoints and publishing as through our own. Two come
with the package: :class:`SqliteStore` (Python's ``sqlite3``) and :class:`RocksDictStore` (RocksDB
by the package ``rocksdict``). ``tierbed.testing.check_row_store`` tests others.
"""

from tierbed.backends.protocol import RowStoreProtocol
from tierbed.backends.rocks import RocksDictStore
from tierbed.backends.sqlite import SqliteStore

__all__ = ["RocksDictStore", "RowStoreProtocol", "SqliteStore"]
