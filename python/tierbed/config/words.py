"""Types of options: closed words, and numbers with bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from tierbed.errors import InvalidError

Backend = Literal[
    "file", "memory", "cold", "lsm", "lsm_plain", "hashdb", "mmap", "rocksdb", "rocksdb_universal"
]
DataFormat = Literal[
    "criteo", "criteo_multi_hot", "avazu", "movielens", "parquet", "arrow", "synthetic"
]
DeviceHeapKind = Literal["auto", "pinned"]
Durability = Literal["checkpoint", "step"]
ExchangeKind = Literal["auto", "one_sided", "collective"]
GivenRows = Literal["copy", "keep"]
IoEngine = Literal["auto", "io_uring", "pread", "inline"]
LogFormat = Literal["auto", "text", "maxembed-text", "maxembed", "criteo", "avazu"]
LogLevel = Literal["off", "error", "warn", "info"]
MissMode = Literal["read", "surrogate", "default"]
MissingShard = Literal["refuse", "default-rows"]
ModelKind = Literal["dlrm", "deepfm", "pnn"]
OnMismatch = Literal["error", "fallback", "fallback_cold"]
OnNonfinite = Literal["error", "skip"]
OnPublishError = Literal["warn", "raise"]
OptimizerKind = Literal["sgd", "adagrad", "row_wise_adagrad", "adam", "partial_row_wise_adam"]
Order = Literal["auto", "forward", "window"]
PageCodec = Literal["f32", "f16", "bf16", "int8", "int4", "gauss4"]
PageSelection = Literal["one_pass", "greedy"]
PublishedMethod = Literal["shp_published", "maxembed_published"]
PlaceMethod = Literal[
    "random", "by_frequency", "shp", "rpp", "fpr", "maxembed", "grown", PublishedMethod
]
Pooling = Literal["sum", "mean"]
PredictMode = Literal["python", "aoti"]
RowType = Literal["f32", "f16", "bf16"]
ServedPooling = Literal["sum", "mean", "none"]
SnapshotBackend = Literal["direct", "mmap", "memory"]
TableFormat = Literal["safetensors", "npy", "pt", "parquet", "faiss", "hugectr", "dynamicemb"]


@dataclass(frozen=True)
class Range:
    """Bounds of a number, both included, as an annotation.

    Args:
        least: The least value.
        most: The largest; None for no bound.
    """

    least: float
    most: float | None = None


@dataclass(frozen=True)
class Unit:
    """What a text says, as an annotation. Files may write a number in its place.

    Args:
        name: ``size`` of bytes, ``seconds``, ``rows``: a number or a share, or ``list`` of words
            with commas between.
    """

    name: Literal["size", "seconds", "rows", "list"]


Positive = Annotated[int, Range(1)]
NotNegative = Annotated[int, Range(0)]
Rate = Annotated[float, Range(0.0)]
SecondsText = Annotated[str, Unit("seconds")]
Share = Annotated[float, Range(0.0, 1.0)]
SizeText = Annotated[str, Unit("size")]
WordsText = Annotated[str, Unit("list")]


def check_word(name: str, value: object, words: Any) -> None:
    """Refuses a ``value`` of the argument ``name`` that is none of ``words``.

    Args:
        name: The argument.
        value: What was given.
        words: A ``Literal``, or a list of words.

    Raises:
        InvalidError: Another word.
    """
    known = get_args(words) or tuple(words)
    if value not in known:
        told = ", ".join(map(str, known))
        raise InvalidError(f"{name} must be one of {told}, not {value!r}", {name: str(value)})
