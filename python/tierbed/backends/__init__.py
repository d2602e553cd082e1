"""Stores of others that can hold the rows of a training run.

Any object with the few bulk calls of :class:`RowStoreProtocol`: ``tierbed.Store.over(store)``
trains through it, with the same bits, checkpoints and publishing as through Tierbed's own. The
package tierbed-bench has two, over SQLite and over RocksDB, to compare with and to read as
examples. ``tierbed.testing.check_row_store`` tests others.
"""

from tierbed.backends.protocol import RowStoreProtocol

__all__ = ["RowStoreProtocol"]
