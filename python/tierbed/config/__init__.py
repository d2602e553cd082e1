"""Configuration of tables: shapes, initial values, optimizers, admission of new ids.

Names are those of TorchRec.
"""

from tierbed.config.admission import (
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    FrequencyAdmissionStrategy,
    TimestampBasedEvictionPolicy,
)
from tierbed.config.io import IoOptions
from tierbed.config.optim import SGD, Adagrad, Adam, Optimizer, PartialRowWiseAdam, RowWiseAdagrad
from tierbed.config.tables import (
    Constant,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    Normal,
    PoolingType,
    Uniform,
)

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Constant",
    "CountBasedEvictionPolicy",
    "CountTimestampMixedEvictionPolicy",
    "DataType",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "FrequencyAdmissionStrategy",
    "IoOptions",
    "Normal",
    "Optimizer",
    "PartialRowWiseAdam",
    "PoolingType",
    "RowWiseAdagrad",
    "TimestampBasedEvictionPolicy",
    "Uniform",
]
