"""Tierbed: embedding tables bigger than memory on NVMe SSDs, for PyTorch recommender models.

A :class:`Store` keeps the tables of a training run on disk within one memory budget. A
collection (:class:`EmbeddingBagCollection`, :class:`EmbeddingCollection`), or an
:class:`EmbeddingBag` or :class:`Embedding` of one table, uses them in a model. :func:`lookahead`
brings the rows of coming batches in. A :class:`Snapshot` reads a published model; a
:class:`CodedStore` keeps trained rows in memory in fewer bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierbed import data, errors, nn
from tierbed._native import version as _version
from tierbed._util.lazy import lazy_names
from tierbed.config import (
    SGD,
    Adagrad,
    Adam,
    Constant,
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    FrequencyAdmissionStrategy,
    IoOptions,
    Normal,
    PartialRowWiseAdam,
    PoolingType,
    RowWiseAdagrad,
    TimestampBasedEvictionPolicy,
    Uniform,
)
from tierbed.errors import (
    ClosedError,
    CorruptionError,
    InvalidError,
    IoError,
    NoSpaceError,
    PoisonedError,
    TierbedError,
    UnsupportedError,
)
from tierbed.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tierbed.nn import Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection
from tierbed.placement import Placement, QueryLog, place
from tierbed.serve import (
    CacheOptions,
    CacheTier,
    Follow,
    HotRows,
    Neighbours,
    NeighbourTier,
    Route,
    ShardClient,
    ShardMap,
    Snapshot,
    TierBudget,
    TierPlan,
    Versions,
    find_neighbours,
    plan_tiers,
)
from tierbed.train import CodedStore, Publisher, Shards, Store
from tierbed.train.lookahead import lookahead
from tierbed.train.row_optimizer import RowOptimizer
from tierbed.train.scalars import scalars

if TYPE_CHECKING:
    from tierbed import (
        accelerate as accelerate,
        backends as backends,
        cli as cli,
        codec as codec,
        config as config,
        dist as dist,
        lightning as lightning,
        placement as placement,
        recipes as recipes,
        serve as serve,
        tables as tables,
        testing as testing,
        torchrec as torchrec,
        train as train,
    )
    from tierbed.serve import compile_dense as compile_dense
else:
    # Loaded on first use, so that importing the package stays quick.
    _NAMES = ("accelerate", "cli", "dist", "lightning", "recipes", "tables", "testing", "torchrec")
    _LAZY = dict.fromkeys(_NAMES, "")
    __getattr__ = lazy_names(__name__, {**_LAZY, "serve": "compile_dense"})

__version__ = _version()

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "CacheOptions",
    "CacheTier",
    "ClosedError",
    "CodedStore",
    "Constant",
    "CorruptionError",
    "CountBasedEvictionPolicy",
    "CountTimestampMixedEvictionPolicy",
    "DataType",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "Follow",
    "FrequencyAdmissionStrategy",
    "HotRows",
    "InvalidError",
    "IoError",
    "IoOptions",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "NeighbourTier",
    "Neighbours",
    "NoSpaceError",
    "Normal",
    "PartialRowWiseAdam",
    "Placement",
    "PoisonedError",
    "PoolingType",
    "Publisher",
    "QueryLog",
    "Route",
    "RowOptimizer",
    "RowWiseAdagrad",
    "ShardClient",
    "ShardMap",
    "Shards",
    "Snapshot",
    "Store",
    "TierBudget",
    "TierPlan",
    "TierbedError",
    "TimestampBasedEvictionPolicy",
    "Uniform",
    "UnsupportedError",
    "Versions",
    "__version__",
    "compile_dense",
    "data",
    "errors",
    "find_neighbours",
    "lookahead",
    "nn",
    "place",
    "plan_tiers",
    "scalars",
]
