"""Collections of sequences whose tables are divided over ranks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tierbed.config.optim import Optimizer, RowWiseAdagrad
from tierbed.config.tables import EmbeddingBagConfig, EmbeddingConfig, feature_labels
from tierbed.config.words import ExchangeKind
from tierbed.dist.collection import ShardedEmbeddingBagCollection
from tierbed.dist.device.store import DeviceStore
from tierbed.dist.exchange import ExchangeOptions
from tierbed.dist.ranks import Rank
from tierbed.dist.sharding import ShardingPlan
from tierbed.errors import InvalidError
from tierbed.jagged import JaggedTensor, KeyedJaggedTensor, as_kjt
from tierbed.train.coded_store import CodedStore
from tierbed.train.session import Announcing
from tierbed.train.store import Store

__all__ = ["ShardedEmbeddingCollection"]

# A bag holds one id here, so that there are as many as a batch has ids of a feature.
_BAGS_MAX = 1 << 20


class ShardedEmbeddingCollection(nn.Module):
    """:class:`tierbed.EmbeddingCollection` for tables that are divided over ranks.

    As :class:`ShardedEmbeddingBagCollection`, which exchanges the rows: every id is a bag of its
    own, and features with fewer ids end in empty bags. So a feature takes room for as many rows as
    the one with most ids in the batch of its rank. Numbers are those of one process, to the last
    bit.

    Args:
        tables: The tables, of one ``embedding_dim``; ids are dense.
        store: As of :class:`ShardedEmbeddingBagCollection`, and so the others.
        plan: Who holds what.
        ranks: Who this rank is.
        exchange: How rows and gradients travel; ``samples_max`` is the most ids of a feature, by
            default 2^20.
        optimizer: As for :class:`tierbed.EmbeddingCollection`; a CodedStore has none.
        optimizer_kwargs: As for :class:`tierbed.EmbeddingCollection`.
        device: As of :class:`ShardedEmbeddingBagCollection`.

    Raises:
        InvalidError: As of :class:`ShardedEmbeddingBagCollection`, or tables of several dims.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        *,
        store: Store | CodedStore | DeviceStore,
        plan: ShardingPlan | None = None,
        ranks: Rank | None = None,
        exchange: ExchangeOptions | ExchangeKind = "auto",
        optimizer: Optimizer | type[Any] = RowWiseAdagrad(),  # noqa: B008  (frozen)
        optimizer_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dims = {config.embedding_dim for config in tables}
        if len(dims) > 1:
            raise InvalidError(f"the tables of an EmbeddingCollection need one dim: {dims}")
        if not isinstance(exchange, ExchangeOptions):
            exchange = ExchangeOptions(kind=exchange, samples_max=_BAGS_MAX)
        self._configs = list(tables)
        self._names = feature_labels(tables)
        self._bags = ShardedEmbeddingBagCollection(
            [_of_bags(config) for config in tables],
            store=store,
            plan=plan,
            ranks=ranks,
            exchange=exchange,
            optimizer=optimizer,
            optimizer_kwargs=optimizer_kwargs,
            device=device,
        )

    @property
    def store(self) -> Store | CodedStore | DeviceStore:
        """Where this rank's rows live."""
        return self._bags.store

    @property
    def plan(self) -> ShardingPlan:
        """Who holds what."""
        return self._bags.plan

    @property
    def exchange(self) -> str:
        """How rows travel, as :attr:`ShardedEmbeddingBagCollection.exchange`."""
        return self._bags.exchange

    def feature_names(self) -> list[str]:
        """Returns the input features, in the order of the output."""
        return self._bags.feature_names()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Returns the tables as they were given."""
        return list(self._configs)

    if TYPE_CHECKING:

        def __call__(self, features: Any) -> dict[str, JaggedTensor]:
            """Looks up a batch."""

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Looks up a batch, together with all ranks.

        Args:
            features: This rank's samples, a :class:`tierbed.KeyedJaggedTensor` or TorchRec's.

        Returns:
            Per feature a :class:`tierbed.JaggedTensor` with values ``[E_f, D]`` and the input's
            lengths, for this rank's samples.

        Raises:
            InvalidError: A bad batch; nothing was sent, and it may be mended.
            TierbedError: Another rank failed or is silent; the message names it.
        """
        bags = as_kjt(features).select(self.feature_names())
        counts = bags.length_per_key()
        rows = self._bags(_single(bags)).to_dict()
        of_features = bags.lengths().view(len(counts), -1)
        return {
            name: JaggedTensor(of_feature[:count], lengths=of_bags.to(of_feature.device))
            for name, of_feature, count, of_bags in zip(
                self._names, rows.values(), counts, of_features, strict=True
            )
        }

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint, as :meth:`ShardedEmbeddingBagCollection.save` does.

        Args:
            path: A new folder, or an address without a checkpoint.
            extra: What belongs to the run beside the tables; that of rank 0 is kept.
        """
        self._bags.save(path, extra)

    def async_save(
        self,
        path: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 3600.0,
    ) -> Future[None]:
        """Begins :meth:`save`, as :meth:`ShardedEmbeddingBagCollection.async_save` does.

        Args:
            path: As of :meth:`save`.
            extra: As of :meth:`save`; it is copied at once.
            timeout_s: How long a rank that is done waits for the others.

        Returns:
            A future that is done when the checkpoint is there.
        """
        return self._bags.async_save(path, extra, timeout_s=timeout_s)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any] | None:
        """Reads a checkpoint, as :meth:`ShardedEmbeddingBagCollection.load` does.

        Args:
            path: Where the checkpoint was saved: a folder or an address.

        Returns:
            The ``extra`` that was saved.
        """
        return self._bags.load(path)

    def _step_session(self) -> Announcing:
        """Returns the control of the look-ahead over all ranks."""
        names = self.feature_names()
        return self._bags._session_for(lambda features: _single(as_kjt(features).select(names)))

    def close(self) -> None:
        """Leaves together with all other ranks; the store stays open."""
        self._bags.close()

    def __enter__(self) -> ShardedEmbeddingCollection:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._bags.__exit__(kind, *rest)


def _single(bags: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the ids as bags of one; features take room for those of the one with most."""
    counts = bags.length_per_key()
    most = max(counts)
    ones = torch.ones(1, dtype=torch.int64)
    lengths = torch.cat([nn.functional.pad(ones.expand(n), (0, most - n)) for n in counts])
    return KeyedJaggedTensor(bags.keys(), bags.values(), lengths=lengths, stride=most)


def _of_bags(config: EmbeddingConfig) -> EmbeddingBagConfig:
    """Returns the same table for bags, each of which holds one id."""
    same = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return EmbeddingBagConfig(**same)
