"""Modules: collections over a store, click models and an n-gram memory on top, and retrieval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierbed.config.optim import Optimizer
from tierbed.errors import InvalidError
from tierbed.nn.bag import EmbeddingBag
from tierbed.nn.ctr import CtrModel
from tierbed.nn.deepfm import DeepFM
from tierbed.nn.dlrm import DLRM
from tierbed.nn.embedding import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    RowSource,
)
from tierbed.nn.ngram import NgramHash, NgramMemory
from tierbed.nn.pnn import PNN
from tierbed.nn.retrieval import RowChunk, TopK, row_chunks, sampled_logits, top_k
from tierbed.nn.single_embedding import Embedding

__all__ = [
    "DLRM",
    "MODELS",
    "PNN",
    "CtrModel",
    "DeepFM",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "NgramHash",
    "NgramMemory",
    "RowChunk",
    "TopK",
    "build_model",
    "row_chunks",
    "sampled_logits",
    "top_k",
]

MODELS: dict[str, type[CtrModel]] = {cls.kind: cls for cls in (DLRM, DeepFM, PNN)}


def build_model(
    config: Mapping[str, Any],
    store: RowSource,
    optimizer: Optimizer | type[Any] | None = None,
) -> CtrModel:
    """Builds a click model from its :meth:`CtrModel.config`.

    Args:
        config: What ``CtrModel.config`` returned.
        store: Where its rows are.
        optimizer: That of its rows.

    Raises:
        InvalidError: An unknown kind.
    """
    kind = config.get("kind")
    if kind not in MODELS:
        raise InvalidError(f"unknown model {kind!r}; there are {sorted(MODELS)}")
    return MODELS[kind](
        int(config["dense_count"]),
        {str(name): int(size) for name, size in config["table_sizes"].items()},
        store=store,
        embedding_dim=config.get("embedding_dim"),
        hidden=config.get("hidden"),
        optimizer=optimizer,
    )
