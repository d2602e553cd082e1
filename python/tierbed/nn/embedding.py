"""How does a model use tables that live in a store?

The modules look like those of ``torch.nn`` and TorchRec. Their rows are no parameters: they lie
in the store, the optimizer runs there during backward, and ``state_dict()`` does not hold them.
Each backward through a lookup is one optimizer step on its rows. Outside training mode, or
without gradients, a lookup only reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tierbed import ops
from tierbed.coded import CodedStore
from tierbed.config import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    feature_labels,
)
from tierbed.errors import InvalidError, UnsupportedError
from tierbed.optim import Optimizer, RowWiseAdagrad, as_optimizer
from tierbed.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor, as_kjt
from tierbed.store import Store

__all__ = ["EmbeddingBag", "EmbeddingBagCollection", "EmbeddingCollection", "RowSource"]


class RowSource(Protocol):
    """A :class:`tierbed.Store`, a :class:`tierbed.Snapshot` or a :class:`tierbed.CodedStore`."""

    @property
    def native(self) -> Any:
        """The engine's object."""

    @property
    def is_trainable(self) -> bool:
        """Whether rows may be updated."""

    @property
    def takes_gradients(self) -> bool:
        """Whether a backward reaches the rows, to step them or to refuse."""

    def tables(self) -> list[dict[str, Any]]:
        """Every table's schema, by id."""

    def table_id(self, name: str) -> int:
        """The id of table ``name``."""

    def vocabularies(self) -> dict[str, dict[str, Any]]:
        """The tables of open vocabulary, by name."""


class _Collection(nn.Module):
    """What pooled and unpooled collections have in common."""

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        store: RowSource,
        optimizer: Optimizer | type[Any],
        optimizer_kwargs: Mapping[str, Any] | None,
        poolings: Mapping[str, str],
    ) -> None:
        super().__init__()
        if not tables:
            raise InvalidError("a collection needs at least one table")
        names = [config.name for config in tables]
        if len(set(names)) != len(names):
            raise InvalidError(f"table names must differ: {names}")
        self._configs = list(tables)
        self._store = store
        fused = as_optimizer(optimizer, optimizer_kwargs)
        ids = {config.name: _table_id(store, config, fused) for config in tables}
        pairs = [(feature, config) for config in tables for feature in config.feature_names]
        self._features = [feature for feature, _ in pairs]
        self._names = feature_labels(tables)
        self._dims = [config.embedding_dim for _, config in pairs]
        self._binding = ops.Binding(
            store.native,
            [ids[config.name] for _, config in pairs],
            [poolings[config.name] for _, config in pairs],
            self._dims,
        )
        self._handle = self._binding.handle
        self._is_open = any(config.num_embeddings is None for config in tables)
        self._feature_count = len(pairs)
        self._output_dim = self._binding.output_dim
        self._is_pooled = self._binding.is_pooled
        # Plain attributes: neither parameters nor buffers, so state_dict() lacks them.
        self._hook = ops.new_hook().requires_grad_(store.takes_gradients)
        self._still_hook = torch.zeros(1)
        if isinstance(store, Store):
            store.note_collection(self)

    @property
    def store(self) -> RowSource:
        """Where the rows live."""
        return self._store

    def feature_names(self) -> list[str]:
        """Returns the input features, in the order of the output."""
        return list(self._features)

    def bags(self, features: Any) -> KeyedJaggedTensor:
        """Picks and orders the features of a batch that this collection reads.

        Raises:
            InvalidError: A feature is missing.
        """
        bags = as_kjt(features)
        return bags if bags.keys() == self._features else bags.select(self._features)

    def prefetch(self, batches: Sequence[Any]) -> int:
        """Brings the rows of coming batches into memory; returns how many batches fit.

        Use :func:`tierbed.lookahead`, which calls this at the right moments.
        """
        native = self._store.native
        if not self._store.is_trainable:
            return len(batches)
        pairs = []
        for batch in batches:
            ids, offsets = self._ids(batch)
            pairs.append((self._rows_of(ids, offsets, is_training=False), offsets))
        return int(native.prefetch(self._binding.plan, pairs))

    def end_lookahead(self) -> None:
        """Forgets what was announced by :meth:`prefetch`."""
        if self._store.is_trainable:
            self._store.native.end_lookahead()

    # ------------------------------------------------------------ forward order

    @property
    def may_follow(self) -> bool:
        """Whether a plan of the batches may be made and followed."""
        if self._is_open or not self.training:
            return False
        return isinstance(self._store, Store) and self._store.may_follow_plan

    def position(self) -> tuple[int, int] | None:
        """Returns epochs and batches of the epoch done along the plan; None without a plan."""
        native = self._store.native
        at: tuple[int, int] | None = native.position() if self._store.is_trainable else None
        return at

    def follow(self, source: str, window: int) -> dict[str, Any]:
        """Follows the plan of ``source`` if there is one; returns the engine's answer."""
        answer: dict[str, Any] = json.loads(
            self._store.native.follow(self._binding.plan, source, window)
        )
        return answer

    def start_plan(self, source: str, window: int) -> None:
        """Starts making the plan of ``source``."""
        self._store.native.start_plan(self._binding.plan, source, window)

    def push_planned(self, batch: Any) -> None:
        """Adds the next batch to the plan."""
        self._store.native.push_planned(self._binding.plan, *self._ids(batch))

    def finish_plan(self) -> None:
        """Finishes the plan, which is durable then."""
        self._store.native.finish_plan()

    def pass_planned(self, batch: Any) -> None:
        """Passes the next batch of the plan without a step."""
        self._store.native.pass_planned(self._binding.plan, *self._ids(batch))

    def _ids(self, batch: Any) -> tuple[Tensor, Tensor]:
        bags = self.bags(batch)
        return _int64(bags.values()).detach().cpu(), _int64(bags.offsets()).detach().cpu()

    def iter_full_state(self, chunk_rows: int = 65536) -> Iterator[tuple[str, int, Tensor]]:
        """Streams all rows as (state name, first row, ``[chunk_rows, D]``), in bounded memory."""
        reader = getattr(self._store, "read_rows", None)
        if reader is None:
            raise UnsupportedError("rows of a snapshot are not streamed; use the training store")
        for config in self._configs:
            row_count = config.num_embeddings or self._given_rows(config.name)
            for first in range(0, row_count, chunk_rows):
                count = min(chunk_rows, row_count - first)
                yield (
                    f"embedding_bags.{config.name}.weight",
                    first,
                    reader(config.name, first, count),
                )

    def _given_rows(self, table: str) -> int:
        return int(self._store.vocabularies()[table]["next_row"])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns ``state_dict()`` and all rows, whole, under TorchRec's names.

        For tables that fit in memory; :meth:`iter_full_state` is for the others.
        """
        full: dict[str, Tensor] = dict(self.state_dict())
        chunks: dict[str, list[Tensor]] = {}
        for name, _, rows in self.iter_full_state():
            chunks.setdefault(name, []).append(rows)
        full.update({name: torch.cat(parts) for name, parts in chunks.items()})
        return full

    def _rows_of(self, ids: Tensor, offsets: Tensor, is_training: bool) -> Tensor:
        if not self._is_open:
            return ids
        rows: Tensor = ops.translate(ids, offsets, self._handle, is_training)
        return rows

    def _lookup(self, bags: KeyedJaggedTensor, weights: Tensor | None) -> Tensor:
        offsets = _int64(bags.offsets())
        is_training = self.training and self._store.is_trainable and torch.is_grad_enabled()
        rows: Tensor = ops.lookup(
            self._hook if self.training else self._still_hook,
            self._rows_of(_int64(bags.values()), offsets, is_training),
            offsets,
            weights,
            self._handle,
            self._feature_count,
            self._output_dim,
            self._is_pooled,
            is_training,
        )
        return rows

    def extra_repr(self) -> str:
        """Lists the tables and their features."""
        return "\n".join(
            f"({c.name}): {c.num_embeddings or 'open'} x {c.embedding_dim} "
            f"<- {list(c.feature_names)}"
            for c in self._configs
        )


def _int64(tensor: Tensor) -> Tensor:
    return tensor.to(torch.int64) if tensor.dtype == torch.int32 else tensor


def _table_id(store: RowSource, config: BaseEmbeddingConfig, optimizer: Optimizer) -> int:
    if isinstance(store, CodedStore):
        return store.add_table(config)
    if store.is_trainable:
        return int(store.add_table(config, optimizer))  # type: ignore[attr-defined]
    table = store.table_id(config.name)
    found = next(known for known in store.tables() if known["name"] == config.name)
    row_count = config.num_embeddings
    if config.name in store.vocabularies():
        found = {**found, "row_count": None}
    if (found["row_count"], found["dim"]) != (row_count, config.embedding_dim):
        raise InvalidError(
            f"table {config.name!r} of the snapshot is {found['row_count']} x {found['dim']}, "
            f"not {config.num_embeddings} x {config.embedding_dim}",
            {"table": config.name},
        )
    return table


class EmbeddingBagCollection(_Collection):
    """Pooled rows of many features at once, TorchRec's interface.

    Args:
        tables: The tables; several features may read one table.
        store: Where the rows live: a :class:`tierbed.Store`, or to only look up a
            :class:`tierbed.Snapshot` or a :class:`tierbed.CodedStore`.
        optimizer: Fused optimizer of the rows, or ``torch.optim.{SGD,Adagrad,SparseAdam}``.
        optimizer_kwargs: Arguments of a ``torch.optim`` class.
        is_weighted: Whether ids carry weights (``KeyedJaggedTensor.weights_or_none()``), which
            then receive their gradient.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        *,
        store: RowSource,
        optimizer: Optimizer | type[Any] = RowWiseAdagrad(),  # noqa: B008  (frozen)
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
    ) -> None:
        poolings = {config.name: config.pooling.value for config in tables}
        super().__init__(tables, store, optimizer, optimizer_kwargs, poolings)
        self._is_weighted = is_weighted

    def forward(self, features: Any) -> KeyedTensor:
        """Looks up a batch.

        Args:
            features: A :class:`tierbed.KeyedJaggedTensor` or TorchRec's: the features of the
                tables in any order; others are ignored.

        Returns:
            ``[B, D]`` per feature, side by side.
        """
        bags = self.bags(features)
        weights = bags.weights_or_none() if self._is_weighted else None
        if self._is_weighted and weights is None:
            raise InvalidError("is_weighted=True, but the batch has no weights")
        return KeyedTensor(self._names, self._dims, self._lookup(bags, weights))


class EmbeddingCollection(_Collection):
    """Rows of sequences, not pooled; all tables of one ``embedding_dim``.

    Args:
        tables: The tables.
        store: As for :class:`EmbeddingBagCollection`.
        optimizer: As for :class:`EmbeddingBagCollection`.
        optimizer_kwargs: As for :class:`EmbeddingBagCollection`.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        *,
        store: RowSource,
        optimizer: Optimizer | type[Any] = RowWiseAdagrad(),  # noqa: B008  (frozen)
        optimizer_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        dims = {config.embedding_dim for config in tables}
        if len(dims) > 1:
            raise InvalidError(f"the tables of an EmbeddingCollection need one dim: {dims}")
        poolings = {config.name: "none" for config in tables}
        super().__init__(tables, store, optimizer, optimizer_kwargs, poolings)

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Looks up a batch.

        Args:
            features: As for :class:`EmbeddingBagCollection`.

        Returns:
            Per feature a :class:`JaggedTensor` with values ``[E_f, D]`` and the input's lengths.
        """
        bags = self.bags(features)
        rows = self._lookup(bags, None)
        stride = bags.stride()
        lengths = bags.lengths().view(len(self._names), stride)
        parts = torch.split(rows, lengths.sum(dim=1).tolist())
        return {
            name: JaggedTensor(part, lengths=of_feature)
            for name, part, of_feature in zip(self._names, parts, lengths, strict=True)
        }


class EmbeddingBag(nn.Module):
    """Drop-in for ``torch.nn.EmbeddingBag`` whose rows live in a store.

    Args:
        num_embeddings: Rows; None for an open vocabulary.
        embedding_dim: Elements per row.
        mode: ``"mean"`` (torch's default) or ``"sum"``.
        include_last_offset: Whether ``offsets`` ends with the number of ids.
        padding_idx: An id that adds nothing to a bag, not even to the count of a mean.
        store: Where the rows live.
        name: Name of the table in the store.
        optimizer: Fused optimizer of the rows.
        optimizer_kwargs: Arguments of a ``torch.optim`` class.
        config: Further fields of the table (``init``, ``seed``, ``weight_init_min``, ...).
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        store: RowSource,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        name: str = "embedding_bag",
        optimizer: Optimizer | type[Any] = RowWiseAdagrad(),  # noqa: B008  (frozen)
        optimizer_kwargs: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean"):
            raise UnsupportedError(f"mode must be 'sum' or 'mean', not {mode!r}")
        table = EmbeddingBagConfig(
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            name=name,
            **dict(config or {}),
        )
        self._rows = _Collection([table], store, optimizer, optimizer_kwargs, {name: mode})
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
        """
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise UnsupportedError("per_sample_weights needs mode='sum'")
            if per_sample_weights.shape != input.shape:
                raise InvalidError(
                    f"per_sample_weights {tuple(per_sample_weights.shape)} must have the shape "
                    f"of input {tuple(input.shape)}"
                )
        bounds = self._bounds(input, offsets)
        ids = input.reshape(-1)
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        if self.padding_idx is not None:
            keep = ids != self.padding_idx
            kept_before = torch.cat([bounds.new_zeros(1), torch.cumsum(keep, dim=0)])
            ids, bounds = ids[keep], kept_before[bounds]
            weights = None if weights is None else weights[keep]
        bags = KeyedJaggedTensor(self._rows.feature_names(), ids, weights, offsets=bounds)
        return self._rows._lookup(bags, weights)

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
        bounds = _int64(offsets)
        if self.include_last_offset:
            return bounds
        return torch.cat([bounds, bounds.new_full((1,), input.numel())])

    def extra_repr(self) -> str:
        """Describes the table."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"
