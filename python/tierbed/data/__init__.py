"""Sources of samples.

:func:`columns` reads files, stores of objects, tables and datasets of other libraries; classes read
the logs of Criteo and Avazu as they are published. Vocabularies and hashes turn tokens into rows.
All sources are a :class:`Dataset`: batches in time order, resumable at any batch, split in time,
shared by ranks and workers. Memory is bounded by the batch and the budgets given.
"""

from __future__ import annotations

from tierbed.data.batch import Batch
from tierbed.data.column_data import ColumnData
from tierbed.data.column_vocabulary import build_column_vocabulary
from tierbed.data.columns import columns
from tierbed.data.dataset import Dataset
from tierbed.data.hashing import hash_ids
from tierbed.data.ids import Hashed, OpenIds, Rows, Tokens
from tierbed.data.logs import AvazuData, CriteoData
from tierbed.data.multi_hot import MLPERF_ROWS, CriteoMultiHotData
from tierbed.data.order import BatchOrder
from tierbed.data.ratings import movielens, read_ratings
from tierbed.data.sequences import sequences
from tierbed.data.vocabulary import (
    FeatureReport,
    Vocabulary,
    VocabularyReport,
    build_vocabulary,
)

__all__ = [
    "MLPERF_ROWS",
    "AvazuData",
    "Batch",
    "BatchOrder",
    "ColumnData",
    "CriteoData",
    "CriteoMultiHotData",
    "Dataset",
    "FeatureReport",
    "Hashed",
    "OpenIds",
    "Rows",
    "Tokens",
    "Vocabulary",
    "VocabularyReport",
    "build_column_vocabulary",
    "build_vocabulary",
    "columns",
    "hash_ids",
    "movielens",
    "read_ratings",
    "sequences",
]
