"""Tierbed: embedding tables bigger than memory on NVMe SSDs, for PyTorch recommender models.

A :class:`Store` keeps the tables of a training run on disk within one memory budget. A
collection (:class:`EmbeddingBagCollection`, :class:`EmbeddingCollection`, :class:`EmbeddingBag`)
uses them in a model. :func:`lookahead` brings the rows of coming batches in. A
:class:`Snapshot` reads a published model; a :class:`CodedStore` keeps trained rows in memory in
fewer bytes.
"""

from __future__ import annotations

from tierbed import data, errors, nn
from tierbed._native import version as _version
from tierbed.admission import (
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    FrequencyAdmissionStrategy,
    TimestampBasedEvictionPolicy,
)
from tierbed.coded import CodedStore
from tierbed.config import (
    Constant,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    Normal,
    PoolingType,
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
from tierbed.lookahead import lookahead
from tierbed.neighbours import Neighbours, find_neighbours
from tierbed.nn import EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection
from tierbed.optim import SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from tierbed.placement import Placement, QueryLog, place
from tierbed.snapshot import Snapshot
from tierbed.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tierbed.store import Store
from tierbed.tier_plan import plan_tiers
from tierbed.tiers import CacheTier, NeighbourTier, TierBudget, TierPlan

__version__ = _version()

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "CacheTier",
    "ClosedError",
    "CodedStore",
    "Constant",
    "CorruptionError",
    "CountBasedEvictionPolicy",
    "CountTimestampMixedEvictionPolicy",
    "DataType",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FrequencyAdmissionStrategy",
    "InvalidError",
    "IoError",
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
    "QueryLog",
    "RowWiseAdagrad",
    "Snapshot",
    "Store",
    "TierBudget",
    "TierPlan",
    "TierbedError",
    "TimestampBasedEvictionPolicy",
    "Uniform",
    "UnsupportedError",
    "__version__",
    "data",
    "errors",
    "find_neighbours",
    "lookahead",
    "nn",
    "place",
    "plan_tiers",
]
