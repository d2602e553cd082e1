"""A drop-in for ``torch.nn.Embedding`` over one table of a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tierbed.config.optim import Optimizer
from tierbed.config.tables import EmbeddingConfig
from tierbed.config.words import OnNonfinite
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn.embedding import Collection, RowSource
from tierbed.nn.leaf import as_leaf, is_traced
from tierbed.nn.one_table import OneTable

__all__ = ["Embedding"]


class Embedding(OneTable):
    """Drop-in for ``torch.nn.Embedding`` whose rows live in a store.

    Initial weights are uniform within plus and minus ``1/sqrt(num_embeddings)``, unlike torch's
    N(0, 1); ``config={"init": tb.Normal(std=1.0)}`` gives those.

    Args:
        num_embeddings: Rows; None for an open vocabulary.
        embedding_dim: Elements per row.
        padding_idx: An id whose vector is zeros, and which is not looked up.
        store: Where the rows live.
        name: Name of the table in the store; several modules of one name share its rows.
        optimizer: As for :class:`EmbeddingBagCollection`.
        optimizer_kwargs: Arguments of a ``torch.optim`` class.
        config: Further fields of the table (``init``, ``seed``, ``weight_init_min``, ...).
        on_nonfinite: As for :class:`EmbeddingBagCollection`.
        device: As for :class:`EmbeddingBagCollection`.

    Examples:
        >>> with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        ...     item = tb.Embedding(1000, 16, store=store, name="item", padding_idx=0)
        ...     item(torch.tensor([[3, 5, 0], [9, 0, 0]])).shape
        torch.Size([2, 3, 16])
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        store: RowSource,
        name: str,
        optimizer: Optimizer | type[Any] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        on_nonfinite: OnNonfinite = "error",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        table = EmbeddingConfig(num_embeddings, embedding_dim, name, **dict(config or {}))
        poolings = {name: "none"}
        self._rows = Collection(
            [table], store, optimizer, optimizer_kwargs, poolings, on_nonfinite, device
        )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        if padding_idx is not None and padding_idx < 0 and num_embeddings is not None:
            padding_idx += num_embeddings
        self.padding_idx = padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """Looks ids up.

        Args:
            input: Ids of any shape.

        Returns:
            ``[..., D]``, the shape of ``input`` and the elements of a row.
        """
        if is_traced(input):
            traced: Tensor = as_leaf(self, input)
            return traced
        rows = self._rows._lookup(self._bags(input), None)
        if self.padding_idx is not None:
            kept = (input.reshape(-1) != self.padding_idx).to(rows.device)
            padded = rows.new_zeros(kept.numel(), self.embedding_dim)
            rows = padded.index_put((kept,), rows)
        return rows.view(*input.shape, self.embedding_dim)

    def _bags(self, *inputs: Any) -> KeyedJaggedTensor:
        ids = inputs[0].reshape(-1)
        if self.padding_idx is not None:
            ids = ids[ids != self.padding_idx]
        bounds = torch.tensor([0, ids.numel()], device="cpu")
        return KeyedJaggedTensor(self._rows.feature_names(), ids, offsets=bounds)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor) -> Tensor:
            """Looks ids up."""

    def extra_repr(self) -> str:
        """Describes the table."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, table={self.table!r}{padding}"
