"""Tables of TorchRec, read by the names of their fields."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from tierbed.config.tables import (
    BaseEmbeddingConfig,
    Constant,
    EmbeddingBagConfig,
    EmbeddingConfig,
    Init,
    Normal,
    Uniform,
)
from tierbed.errors import InvalidError, UnsupportedError

__all__ = ["drawn_by", "init_of_schema", "is_pooled", "table_of"]

# Fields of a config that change what a table is, with their values when nobody set them.
_REFUSED: dict[str, Any] = {
    "num_embeddings_post_pruning": None,
    "input_dim": None,
    "use_virtual_table": False,
    "virtual_table_eviction_policy": None,
    "enable_embedding_update": False,
    "stash_weights": False,
}


def is_pooled(config: Any) -> bool:
    """Whether ``config`` is one of bags, by its field.

    Raises:
        InvalidError: It is no config of TorchRec.
    """
    if isinstance(config, BaseEmbeddingConfig) or not hasattr(config, "init_fn"):
        found = f"{type(config).__module__}.{type(config).__name__}"
        raise InvalidError(
            f"tables must be configs of TorchRec, not {found}; for those of Tierbed make a "
            "tierbed.EmbeddingBagCollection or a tierbed.EmbeddingCollection"
        )
    return hasattr(config, "pooling")


def table_of(config: Any, init: Mapping[str, Init] | None = None) -> Any:
    """Translates a ``torchrec.EmbeddingBagConfig`` or ``torchrec.EmbeddingConfig`` to ours.

    Args:
        config: The table.
        init: Initial weights by table, instead of what its ``init_fn`` says.

    Raises:
        InvalidError: It is no config of TorchRec.
        UnsupportedError: A field that asks for what a store does not do.
    """
    pooled = is_pooled(config)
    for field, unset in _REFUSED.items():
        value = getattr(config, field, unset)
        if value != unset:
            raise UnsupportedError(
                f"table {config.name!r}: {field}={value!r} has no counterpart in a store; leave it "
                "unset (tables of any ids have num_embeddings=None in Tierbed's own configs)",
                {"table": config.name, "field": field},
            )
    if config.data_type.value != "FP32":
        raise UnsupportedError(
            f"table {config.name!r}: rows train in float32, not {config.data_type.value}; give "
            "data_type=DataType.FP32",
            {"table": config.name},
        )
    fields = {
        "num_embeddings": config.num_embeddings,
        "embedding_dim": config.embedding_dim,
        "name": config.name,
        "feature_names": list(config.feature_names),
        "init": _init_of(config, init or {}),
    }
    if pooled:
        return EmbeddingBagConfig(**fields, pooling=config.pooling.value.lower())
    return EmbeddingConfig(**fields)


def _init_of(config: Any, init: Mapping[str, Init]) -> Init:
    """Returns the initial weights of a table: as given, or as its ``init_fn`` draws them."""
    known = init.get(config.name) or drawn_by(config)
    if known is None:
        raise UnsupportedError(
            f"table {config.name!r}: init_fn {config.init_fn!r} is not known to a store, whose "
            "rows begin when they are read; give init={name: tierbed.Normal(std=0.02)}, or a "
            "module whose weights it has drawn",
            {"table": config.name},
        )
    return known


def drawn_by(config: Any) -> Init | None:
    """Returns what the ``init_fn`` of a table draws; None where it is no function known here."""
    call = config.init_fn
    if not isinstance(call, functools.partial):
        return _known_init(call, {})
    return None if call.args else _known_init(call.func, dict(call.keywords))


def init_of_schema(schema: Mapping[str, Any]) -> Init:
    """Returns the initial weights of a table of a store, by its schema."""
    kind, numbers = schema["init"]["kind"], schema["init"]
    if kind == "uniform":
        return Uniform(numbers["low"], numbers["high"])
    if kind == "normal":
        return Normal(numbers["mean"], numbers["std"])
    return Constant(numbers["value"])


def _known_init(drawn: Any, kwargs: dict[str, Any]) -> Init | None:
    """Returns what a function of ``torch.nn.init`` draws with ``kwargs``; None for another."""
    init = torch.nn.init
    if drawn is init.uniform_ and kwargs.keys() <= {"a", "b"}:
        return Uniform(float(kwargs.get("a", 0.0)), float(kwargs.get("b", 1.0)))
    if drawn is init.normal_ and kwargs.keys() <= {"mean", "std"}:
        return Normal(float(kwargs.get("mean", 0.0)), float(kwargs.get("std", 1.0)))
    if drawn is init.constant_ and kwargs.keys() == {"val"}:
        return Constant(float(kwargs["val"]))
    if kwargs or drawn not in (init.zeros_, init.ones_):
        return None
    return Constant(0.0 if drawn is init.zeros_ else 1.0)
