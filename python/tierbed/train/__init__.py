"""Training: stores of tables, look-ahead, checkpoints."""

from typing import TYPE_CHECKING

from tierbed._util.lazy import lazy_names
from tierbed.train.coded_store import CodedStore
from tierbed.train.publisher import Publisher
from tierbed.train.shards import Shards, push_shards
from tierbed.train.stats import OrderState, StoreStats
from tierbed.train.store import Store

if TYPE_CHECKING:
    from tierbed.train.checkpoints import Commit, CommitTable, find_commits, put_in_force
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "checkpoints": "Commit CommitTable find_commits put_in_force",
        },
    )

__all__ = [
    "CodedStore",
    "Commit",
    "CommitTable",
    "OrderState",
    "Publisher",
    "Shards",
    "Store",
    "StoreStats",
    "find_commits",
    "push_shards",
    "put_in_force",
]
