"""A drop-in for ``torch.nn.EmbeddingBag`` over one table of a store."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tierbed._util.tensors import as_int64
from tierbed.config.optim import Optimizer
from tierbed.config.tables import EmbeddingBagConfig
from tierbed.config.words import OnNonfinite, Pooling
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn.embedding import Collection, RowSource
from tierbed.nn.leaf import as_leaf, is_traced
from tierbed.nn.one_table import OneTable

__all__ = ["EmbeddingBag"]

DEFAULT_NAME = "embedding_bag"
# Where an EmbeddingBag without a name lives already.
_WITH_DEFAULT: weakref.WeakSet[Any] = weakref.WeakSet()


def _take_default_name(store: RowSource) -> None:
    if store in _WITH_DEFAULT:
        raise InvalidError(
            f"this store has an EmbeddingBag without a name already, whose table {DEFAULT_NAME!r} "
            "both would share; give each name=..., or the same name to share one table",
            {"table": DEFAULT_NAME},
        )
    _WITH_DEFAULT.add(store)


class EmbeddingBag(OneTable):
    """Drop-in for ``torch.nn.EmbeddingBag`` whose rows live in a store.

    Initial weights are uniform within plus and minus ``1/sqrt(num_embeddings)``, unlike torch's
    N(0, 1); ``config={"init": tb.Normal(std=1.0)}`` gives those.

    Args:
        num_embeddings: Rows; None for an open vocabulary.
        embedding_dim: Elements per row.
        mode: ``"mean"`` (torch's default) or ``"sum"``.
        include_last_offset: Whether ``offsets`` ends with the number of ids.
        padding_idx: An id that adds nothing to a bag, not even to the count of a mean.
        store: Where the rows live.
        name: Name of the table in the store; several modules of one name share its rows. It may be
            left out for one module of a store.
        optimizer: As for :class:`EmbeddingBagCollection`.
        optimizer_kwargs: Arguments of a ``torch.optim`` class.
        config: Further fields of the table (``init``, ``seed``, ``weight_init_min``, ...).
        on_nonfinite: As for :class:`EmbeddingBagCollection`.
        device: As for :class:`EmbeddingBagCollection`.

    Raises:
        UnsupportedError: Another ``mode``.

    Examples:
        >>> with tb.Store.open(backend="memory", dram_budget="16MiB") as store:
        ...     bag = tb.EmbeddingBag(1000, 16, store=store, name="item", mode="sum")
        ...     bag(torch.tensor([3, 5, 9]), torch.tensor([0, 2])).shape
        torch.Size([2, 16])
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        store: RowSource,
        mode: Pooling = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        name: str | None = None,
        optimizer: Optimizer | type[Any] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        on_nonfinite: OnNonfinite = "error",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean"):
            raise UnsupportedError(f"mode must be 'sum' or 'mean', not {mode!r}")
        if name is None:
            _take_default_name(store)
            name = DEFAULT_NAME
        table = EmbeddingBagConfig(
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            name=name,
            **dict(config or {}),
        )
        self._rows = Collection(
            [table], store, optimizer, optimizer_kwargs, {name: mode}, on_nonfinite, device
        )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.mode = mode
        self.include_last_offset = include_last_offset
        if padding_idx is not None and padding_idx < 0 and num_embeddings is not None:
            padding_idx += num_embeddings
        self.padding_idx = padding_idx

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pools bags as ``torch.nn.EmbeddingBag`` does.

        Args:
            input: Ids, ``[B, N]``, or ``[E]`` with ``offsets``.
            offsets: Start of each bag ``[B]``; with ``include_last_offset`` ``[B+1]``.
            per_sample_weights: Like ``input``; only with ``mode="sum"``.

        Returns:
            ``[B, D]``.

        Raises:
            InvalidError: Shapes that do not fit each other, or offsets too many or missing.
        """
        if is_traced(input, offsets, per_sample_weights):
            traced: Tensor = as_leaf(self, input, offsets, per_sample_weights)
            return traced
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise UnsupportedError("per_sample_weights needs mode='sum'")
            if per_sample_weights.shape != input.shape:
                raise InvalidError(
                    f"per_sample_weights {tuple(per_sample_weights.shape)} must have the shape "
                    f"of input {tuple(input.shape)}"
                )
        bags = self._bags(input, offsets, per_sample_weights)
        return self._rows._lookup(bags, bags.weights_or_none())

    def _bags(self, *inputs: Any) -> KeyedJaggedTensor:
        given, offsets, weights = (*inputs, None, None)[:3]
        bounds = self._bounds(given, offsets)
        ids = given.reshape(-1)
        weights = None if weights is None else weights.reshape(-1)
        if self.padding_idx is not None:
            keep = ids != self.padding_idx
            kept_before = torch.cat([bounds.new_zeros(1), torch.cumsum(keep, dim=0)])
            ids, bounds = ids[keep], kept_before[bounds]
            weights = None if weights is None else weights[keep]
        return KeyedJaggedTensor(self._rows.feature_names(), ids, weights, offsets=bounds)

    if TYPE_CHECKING:

        def __call__(
            self,
            input: Tensor,
            offsets: Tensor | None = None,
            per_sample_weights: Tensor | None = None,
        ) -> Tensor:
            """Pools bags."""

    def _bounds(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        if input.dim() == 2:
            if offsets is not None:
                raise InvalidError("offsets must be None when input has two dimensions")
            samples, length = input.shape
            return torch.arange(samples + 1, device=input.device) * length
        if input.dim() != 1 or offsets is None:
            raise InvalidError(
                f"input must be [B, N], or [E] with offsets; found {tuple(input.shape)}"
                f"{'' if offsets is not None else ' without offsets'}"
            )
        bounds = as_int64(offsets)
        if self.include_last_offset:
            return bounds
        return torch.cat([bounds, bounds.new_full((1,), input.numel())])

    def extra_repr(self) -> str:
        """Describes the table."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"
