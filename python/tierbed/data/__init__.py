"""Sources of samples.

Readers of Criteo, Avazu and Parquet logs, the vocabularies that turn tokens into rows, and a
seeded generator. All sources are a :class:`Dataset`: batches in time order, resumable at any
batch, split in time. Memory is bounded by the batch and the budgets given.
"""

from __future__ import annotations

from tierbed.data.batch import Batch
from tierbed.data.dataset import Dataset
from tierbed.data.generator import GeneratedData, scale_for_rows, write_criteo_tsv
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
    "GeneratedData",
    "ParquetColumns",
    "ParquetData",
    "Vocabulary",
    "VocabularyReport",
    "build_parquet_vocabulary",
    "build_vocabulary",
    "scale_for_rows",
    "write_criteo_tsv",
]
