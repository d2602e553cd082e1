"""Training of tables by several ranks.

Each rank is a process (under ``torchrun``) with its own samples and its own store, which holds
its share of the tables. A lookup of all ranks gives each the vectors of its samples: the rank
that holds a row pools it straight into the output of the rank whose sample it is. Numbers are
those of one process with all samples, to the last bit.
"""

from tierbed.dist.checkpoint_places import find_checkpoints
from tierbed.dist.collection import ShardedEmbeddingBagCollection
from tierbed.dist.device.store import DeviceStore
from tierbed.dist.exchange import ExchangeOptions
from tierbed.dist.ranks import LocalRank, ProcessRank, local_ranks
from tierbed.dist.ray_train import ray_checkpoint, ray_load
from tierbed.dist.sequences import ShardedEmbeddingCollection
from tierbed.dist.sharding import ColumnWise, Mirrored, RowWise, ShardingPlan, TableWise

__all__ = [
    "ColumnWise",
    "DeviceStore",
    "ExchangeOptions",
    "LocalRank",
    "Mirrored",
    "ProcessRank",
    "RowWise",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingPlan",
    "TableWise",
    "find_checkpoints",
    "local_ranks",
    "ray_checkpoint",
    "ray_load",
]
