"""Admission and eviction: which ids have a row of their own.

For tables of open vocabulary (``num_embeddings=None``). Names as in TorchRec and dynamicemb.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierbed.errors import InvalidError

if TYPE_CHECKING:
    from tierbed._native_options import VocabularyPolicy

__all__ = [
    "CountBasedEvictionPolicy",
    "CountTimestampMixedEvictionPolicy",
    "EvictionPolicy",
    "FrequencyAdmissionStrategy",
    "TimestampBasedEvictionPolicy",
]


@dataclass(frozen=True)
class FrequencyAdmissionStrategy:
    """An id has a row of its own from the ``threshold``-th step of training that contains it.

    Until then it reads and trains the table's shared row.

    Args:
        threshold: Steps that contain an id, from which on it has a row; at least 1.

    Examples:
        >>> users = tb.EmbeddingBagConfig(
        ...     None, 16, "user", admission_strategy=tb.FrequencyAdmissionStrategy(threshold=3)
        ... )
    """

    threshold: int


@dataclass(frozen=True)
class CountBasedEvictionPolicy:
    """``Store.evict`` takes ids whose count is below ``eviction_threshold``.

    The count is that of the steps an id appeared in; every eviction first multiplies it by
    ``decay_rate``.

    Args:
        eviction_threshold: Counts below it are too small.
        decay_rate: What a count is multiplied by at each ``Store.evict``.

    Examples:
        >>> rare = tb.CountBasedEvictionPolicy(eviction_threshold=2.0)
        >>> users = tb.EmbeddingBagConfig(None, 16, "user", virtual_table_eviction_policy=rare)
    """

    eviction_threshold: float
    decay_rate: float = 0.99


@dataclass(frozen=True)
class TimestampBasedEvictionPolicy:
    """``Store.evict`` takes ids not trained for more than ``eviction_ttl_mins`` minutes.

    Args:
        eviction_ttl_mins: Minutes without training after which an id is too old.

    Examples:
        >>> old = tb.TimestampBasedEvictionPolicy(eviction_ttl_mins=7 * 24 * 60)
        >>> users = tb.EmbeddingBagConfig(None, 16, "user", virtual_table_eviction_policy=old)
    """

    eviction_ttl_mins: int


@dataclass(frozen=True)
class CountTimestampMixedEvictionPolicy:
    """``Store.evict`` takes ids that are both below the threshold and too old.

    Args:
        eviction_threshold: Counts below it are too small.
        eviction_ttl_mins: Minutes without training after which an id is too old.
        decay_rate: What a count is multiplied by at each ``Store.evict``.

    Examples:
        >>> unused = tb.CountTimestampMixedEvictionPolicy(2.0, eviction_ttl_mins=60)
        >>> users = tb.EmbeddingBagConfig(None, 16, "user", virtual_table_eviction_policy=unused)
    """

    eviction_threshold: float
    eviction_ttl_mins: int
    decay_rate: float = 0.99


EvictionPolicy = (
    CountBasedEvictionPolicy | TimestampBasedEvictionPolicy | CountTimestampMixedEvictionPolicy
)


def policy_of(
    admission: FrequencyAdmissionStrategy | None, eviction: EvictionPolicy | None
) -> VocabularyPolicy:
    """Returns both as ``NativeStore.add_open_table`` takes them.

    Raises:
        InvalidError: A threshold that is no whole number of at least 1.
    """
    threshold: Any = 1 if admission is None else admission.threshold
    if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1:
        raise InvalidError(
            f"an admission threshold must be an integer of at least 1, not {threshold!r}",
            {"threshold": str(threshold)},
        )
    return {"admit_after": threshold, "eviction": _eviction_dict(eviction)}


def _eviction_dict(eviction: EvictionPolicy | None) -> dict[str, Any]:
    if eviction is None:
        return {"kind": "never"}
    if isinstance(eviction, TimestampBasedEvictionPolicy):
        return {"kind": "age", "ttl": eviction.eviction_ttl_mins}
    counted = {"threshold": eviction.eviction_threshold, "decay_rate": eviction.decay_rate}
    if isinstance(eviction, CountBasedEvictionPolicy):
        return {"kind": "count", **counted}
    return {"kind": "count_and_age", "ttl": eviction.eviction_ttl_mins, **counted}
