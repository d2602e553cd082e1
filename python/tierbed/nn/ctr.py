"""Base of the click models.

A dense part of ordinary parameters on top of one table per categorical feature. Every model has
the same interface, ``forward(dense [B, dense_count], sparse) -> logits [B]``, and describes
itself by :meth:`CtrModel.config`, so that a checkpoint or a snapshot can build it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tierbed.config.optim import Optimizer
from tierbed.config.tables import EmbeddingBagConfig, Uniform
from tierbed.errors import InvalidError
from tierbed.nn.embedding import EmbeddingBagCollection, RowSource

__all__ = ["CtrModel", "mlp", "pairwise_dots"]


def mlp(sizes: Sequence[int], is_output: bool = False) -> nn.Sequential:
    """Builds linear layers ``sizes[0] -> sizes[1] -> ...`` with ReLU between.

    The last layer has a ReLU too, unless ``is_output``.
    """
    layers: list[nn.Module] = []
    for at, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(fan_in, fan_out))
        if not is_output or at < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def pairwise_dots(vectors: Tensor) -> Tensor:
    """Returns the dot product of every pair of vectors.

    Args:
        vectors: ``[B, N, D]``.

    Returns:
        ``[B, N*(N-1)/2]``, pairs (i, j) with i < j, i before j.
    """
    count = vectors.shape[1]
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    rows, columns = torch.triu_indices(count, count, offset=1, device=vectors.device)
    return products[:, rows, columns]


class CtrModel(nn.Module, ABC):
    """Base of the click models.

    Args:
        dense_count: Numerical features; may be 0.
        table_sizes: Rows of each categorical feature's table, by feature name.
        store: Where the tables live, or a snapshot.
        embedding_dim: Elements per row.
        hidden: Sizes of the hidden layers of the deep part.
        optimizer: Fused optimizer of the rows.

    Raises:
        InvalidError: No categorical feature, or a negative number of numerical ones.
    """

    kind: ClassVar[str] = ""
    default_dim: ClassVar[int] = 16
    default_hidden: ClassVar[tuple[int, ...]] = (256, 64)

    def __init__(
        self,
        dense_count: int,
        table_sizes: Mapping[str, int],
        *,
        store: RowSource,
        embedding_dim: int | None = None,
        hidden: Sequence[int] | None = None,
        optimizer: Optimizer | type[Any] | None = None,
    ) -> None:
        super().__init__()
        if dense_count < 0 or not table_sizes:
            raise InvalidError(
                f"a click model needs categorical features, not {len(table_sizes)}, and no "
                f"negative number of numerical ones ({dense_count})"
            )
        self.dense_count = dense_count
        # A log without numbers feeds a constant instead.
        self.dense_width = max(1, dense_count)
        self.table_sizes = dict(table_sizes)
        self.embedding_dim = self.default_dim if embedding_dim is None else embedding_dim
        self.hidden = tuple(self.default_hidden if hidden is None else hidden)
        self.embeddings = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=size,
                    embedding_dim=self.embedding_dim,
                    feature_names=[name],
                    init=Uniform(-0.01, 0.01),
                )
                for name, size in self.table_sizes.items()
            ],
            store=store,
            optimizer=optimizer,
        )
        self.build()

    @abstractmethod
    def build(self) -> None:
        """Makes the dense layers."""

    @abstractmethod
    def head(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Computes logits ``[B]`` from ``[B, dense_count]`` numbers and ``[B, F, D]`` rows.

        Args:
            dense: Numerical features ``[B, N]`` f32.
            rows: Pooled rows ``[B, F, D]``.
        """

    def config(self) -> dict[str, Any]:
        """Returns what :func:`tierbed.nn.build_model` needs to make this model again."""
        return {
            "kind": self.kind,
            "dense_count": self.dense_count,
            "table_sizes": self.table_sizes,
            "embedding_dim": self.embedding_dim,
            "hidden": list(self.hidden),
        }

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        """Scores a batch.

        Args:
            dense: ``[B, dense_count]`` f32.
            sparse: KeyedJaggedTensor with one feature per table.

        Returns:
            Logits ``[B]``.
        """
        pooled = self.embeddings(sparse).values()
        rows = pooled.view(pooled.shape[0], len(self.table_sizes), self.embedding_dim)
        if self.dense_count == 0:
            dense = rows.new_ones(rows.shape[0], 1)
        return self.head(dense, rows)
