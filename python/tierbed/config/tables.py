"""Tables of a model, in TorchRec's words.

This module is the only place that translates ``num_embeddings`` and ``embedding_dim`` to the
engine's ``row_count`` and ``dim``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tierbed.config.admission import EvictionPolicy, FrequencyAdmissionStrategy, policy_of
from tierbed.config.optim import Optimizer
from tierbed.config.words import check_word
from tierbed.errors import InvalidError

if TYPE_CHECKING:
    from tierbed._native_options import TableSchema, VocabularyPolicy

__all__ = [
    "BaseEmbeddingConfig",
    "Constant",
    "DataType",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "Init",
    "Normal",
    "PoolingType",
    "Uniform",
]


class PoolingType(str, Enum):
    """How the rows of a bag become one vector.

    Examples:
        >>> tb.EmbeddingBagConfig(1000, 16, "item", pooling="mean").pooling
        <PoolingType.MEAN: 'mean'>
    """

    SUM = "sum"
    MEAN = "mean"
    NONE = "none"


class DataType(str, Enum):
    """What the numbers of a row are kept as.

    Rows train in FP32; the others are for a :class:`tierbed.CodedStore`, which only looks up.

    Examples:
        >>> tb.EmbeddingBagConfig(1000, 16, "item", data_type="int8").data_type
        <DataType.INT8: 'int8'>
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


@dataclass(frozen=True)
class Uniform:
    """Initial weights uniform in ``[low, high)``.

    Args:
        low: Least weight.
        high: Upper bound, not included.

    Examples:
        >>> tb.EmbeddingBagConfig(1000, 16, "item", init=tb.Uniform(-0.1, 0.1)).initial()
        Uniform(low=-0.1, high=0.1)
    """

    low: float
    high: float


@dataclass(frozen=True)
class Normal:
    """Initial weights normal with ``mean`` and standard deviation ``std``.

    Args:
        mean: Mean.
        std: Standard deviation.

    Examples:
        >>> tb.EmbeddingBagConfig(1000, 16, "item", init=tb.Normal(std=0.05)).initial()
        Normal(mean=0.0, std=0.05)
    """

    mean: float = 0.0
    std: float = 0.01


@dataclass(frozen=True)
class Constant:
    """Every initial weight is ``value``.

    Args:
        value: The weight.

    Examples:
        >>> tb.EmbeddingBagConfig(1000, 16, "item", init=tb.Constant(1.0)).initial()
        Constant(value=1.0)
    """

    value: float = 0.0


Init = Uniform | Normal | Constant
# Tables of open vocabulary start as if they had so many rows: weights within 0.01.
OPEN_INIT_ROWS = 10_000


def _word(value: Any) -> Any:
    """Returns the word of an enum of TorchRec; ours are words themselves."""
    return value.name.lower() if isinstance(value, Enum) and not isinstance(value, str) else value


@dataclass(frozen=True)
class BaseEmbeddingConfig:
    """What bags and sequences have in common.

    Args:
        num_embeddings: Rows of the table; ids run from 0 to ``num_embeddings - 1``. None: an open
            vocabulary, ids are any 64-bit integers and the table grows with them.
        embedding_dim: Elements per row.
        name: Unique name; it also names the table's file.
        feature_names: Input features that read this table; by default one called ``name``.
        data_type: What rows are kept as; anything but float32 needs a :class:`tierbed.CodedStore`.
        weight_init_max: Upper bound of uniform initial weights.
        weight_init_min: Lower bound; without bounds, plus and minus ``1/sqrt(num_embeddings)``,
            and plus and minus 0.01 for an open vocabulary.
        init: Initial weights of another kind, instead of the two bounds.
        seed: Seed of the initial weights; by default derived from the store's seed and ``name``.
        admission_strategy: When an id of an open vocabulary gets its own row; by default at once.
        virtual_table_eviction_policy: Which ids ``Store.evict`` takes; by default none.
    """

    num_embeddings: int | None
    embedding_dim: int
    name: str
    feature_names: Sequence[str] = ()
    data_type: DataType = DataType.FP32
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init: Init | None = None
    seed: int | None = None
    admission_strategy: FrequencyAdmissionStrategy | None = None
    virtual_table_eviction_policy: EvictionPolicy | None = None

    def __post_init__(self) -> None:
        if isinstance(self.feature_names, str):
            raise InvalidError(
                f"feature_names of table {self.name!r} must be a list of names, "
                f"not the text {self.feature_names!r}",
                {"table": self.name},
            )
        object.__setattr__(self, "feature_names", tuple(self.feature_names) or (self.name,))
        for field in ("num_embeddings", "embedding_dim"):
            value = getattr(self, field)
            if value is None and field == "num_embeddings":
                policy_of(self.admission_strategy, self.virtual_table_eviction_policy)
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidError(
                    f"{field} of table {self.name!r} must be an integer of at least 1, "
                    f"not {value!r}",
                    {"table": self.name, field: str(value)},
                )
        policies = (self.admission_strategy, self.virtual_table_eviction_policy)
        if self.num_embeddings is not None and policies != (None, None):
            raise InvalidError(
                f"table {self.name!r} admits and evicts nobody: give num_embeddings=None",
                {"table": self.name},
            )
        if any(not isinstance(name, str) for name in self.feature_names):
            raise InvalidError(
                f"feature_names of table {self.name!r} must be texts, not {self.feature_names}",
                {"table": self.name},
            )
        kinds = [kind.value for kind in DataType]
        object.__setattr__(self, "data_type", _word(self.data_type))
        check_word(f"data_type of table {self.name!r}", self.data_type, kinds)
        object.__setattr__(self, "data_type", DataType(self.data_type))
        if self.init is not None and (self.weight_init_max, self.weight_init_min) != (None, None):
            raise InvalidError(
                f"table {self.name!r}: give either init or weight_init_min and weight_init_max",
                {"table": self.name},
            )

    def initial(self) -> Init:
        """Returns how rows never written start."""
        if self.init is not None:
            return self.init
        rows = OPEN_INIT_ROWS if self.num_embeddings is None else self.num_embeddings
        bound = 1.0 / math.sqrt(rows)
        low = -bound if self.weight_init_min is None else self.weight_init_min
        high = bound if self.weight_init_max is None else self.weight_init_max
        return Uniform(low, high)

    def schema(self, optimizer: Optimizer, store_seed: int) -> TableSchema:
        """Translates to the engine's table, as ``NativeStore.add_table`` takes it.

        Args:
            optimizer: That of its rows.
            store_seed: Seed of the store.
        """
        return {
            "name": self.name,
            # The engine lets an open table grow from its own first length.
            "row_count": 1 if self.num_embeddings is None else self.num_embeddings,
            "dim": self.embedding_dim,
            "optimizer": optimizer.kind,
            "state_init": optimizer.state_init,
            "init": init_dict(self.initial()),
            "seed": table_seed(store_seed, self.name) if self.seed is None else self.seed,
        }

    def codec_name(self) -> str:
        """Returns the engine's name of the way rows are kept."""
        return {"fp32": "f32", "fp16": "f16"}.get(self.data_type.value, self.data_type.value)

    def policy(self) -> VocabularyPolicy:
        """Translates admission and eviction, as ``NativeStore.add_open_table`` takes them."""
        return policy_of(self.admission_strategy, self.virtual_table_eviction_policy)


@dataclass(frozen=True)
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """One table of pooled features.

    The other arguments are those of :class:`BaseEmbeddingConfig`.

    Args:
        pooling: Sum or mean over the rows of a bag.

    Examples:
        >>> item = tb.EmbeddingBagConfig(
        ...     name="item",
        ...     num_embeddings=1000,
        ...     embedding_dim=16,
        ...     feature_names=["clicked", "bought"],
        ... )
        >>> item.pooling.value, item.feature_names
        ('sum', ('clicked', 'bought'))
    """

    pooling: PoolingType = PoolingType.SUM

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pooling", _word(self.pooling))
        if self.pooling == PoolingType.NONE:
            raise InvalidError(
                f"table {self.name!r}: a bag is pooled by sum or mean; "
                "use EmbeddingConfig and EmbeddingCollection for rows that are not pooled",
                {"table": self.name},
            )
        check_word(f"pooling of table {self.name!r}", self.pooling, ("sum", "mean"))
        object.__setattr__(self, "pooling", PoolingType(self.pooling))


@dataclass(frozen=True)
class EmbeddingConfig(BaseEmbeddingConfig):
    """One table of sequence features, whose rows are not pooled.

    Arguments as those of :class:`BaseEmbeddingConfig`.

    Examples:
        >>> tb.EmbeddingConfig(name="history", num_embeddings=1000, embedding_dim=16).feature_names
        ('history',)
    """


def feature_labels(tables: Sequence[BaseEmbeddingConfig]) -> list[str]:
    """Names every feature of every table in order; ``feature@table`` when several tables use it."""
    features = [feature for config in tables for feature in config.feature_names]
    return [
        feature if features.count(feature) == 1 else f"{feature}@{config.name}"
        for config in tables
        for feature in config.feature_names
    ]


def is_own(table: dict[str, Any]) -> bool:
    """Returns whether a table is an index of an open vocabulary, not a user's."""
    return str(table["name"]).startswith("_ids.")


def init_dict(init: Init) -> dict[str, Any]:
    """Writes ``init`` as the engine's ``{"kind": ..., ...}``."""
    if isinstance(init, Uniform):
        return {"kind": "uniform", "low": init.low, "high": init.high}
    if isinstance(init, Normal):
        return {"kind": "normal", "mean": init.mean, "std": init.std}
    return {"kind": "constant", "value": init.value}


def table_seed(store_seed: int, name: str) -> int:
    """Derives a table's seed (63 bits) from the store's seed and the table's name."""
    digest = hashlib.blake2b(f"{store_seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
