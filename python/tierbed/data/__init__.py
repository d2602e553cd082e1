"""Sources of samples.

Readers of Criteo, Avazu and Parquet logs, and the vocabularies that turn tokens into rows. All
sources are a :class:`Dataset`: batches in time order, resumable at any
batch, split in time. Memory is bounded by the batch and the budgets given.
"""

from __future__ import annotations

from tierbed.data.batch import Batch
from tierbed.data.dataset import Dataset
from tierbed.data.logs import AvazuData, CriteoData
from tierbed.data.order import BatchOrder
from tierbed.data.parquet import ParquetColumns, ParquetData, build_parquet_vocabulary
from tierbed.data.vocabulary import (
    FeatureReport,
    Vocabulary,
    VocabularyReport,
    build_vocabulary,
)

__all__ = [
    "AvazuData",
    "Batch",
    "BatchOrder",
    "CriteoData",
    "Dataset",
    "FeatureReport",
    "ParquetColumns",
    "ParquetData",
    "Vocabulary",
    "VocabularyReport",
    "build_parquet_vocabulary",
    "build_vocabulary",
]
