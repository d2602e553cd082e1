"""Collections that fulfil TorchRec's interfaces; imported where TorchRec is installed.

They are Tierbed's collections, which give TorchRec's classes back: programs may ask for
``to_padded_dense`` of a sequence, regroup pooled rows, or look at the configs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Proxy
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from tierbed import nn as rows
from tierbed.config.optim import Optimizer
from tierbed.config.tables import Init
from tierbed.config.words import OnNonfinite
from tierbed.jagged import KeyedJaggedTensor
from tierbed.nn.embedding import RowSource
from tierbed.torchrec.configs import table_of

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]


class EmbeddingBagCollection(rows.EmbeddingBagCollection, EmbeddingBagCollectionInterface):
    """Pooled rows of a store for models of TorchRec.

    Args:
        tables: ``torchrec.EmbeddingBagConfig`` per table.
        store: As for :class:`tierbed.EmbeddingBagCollection`, and so the others.
        optimizer: Fused optimizer of the rows.
        optimizer_kwargs: Arguments of a ``torch.optim`` class.
        is_weighted: Whether ids carry weights.
        init: Initial weights by table, instead of what its ``init_fn`` says.
        on_nonfinite: What a gradient with nan or inf does.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        store: RowSource,
        optimizer: Optimizer | type[Any] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        init: Mapping[str, Init] | None = None,
        on_nonfinite: OnNonfinite = "error",
    ) -> None:
        super().__init__(
            [table_of(config, init) for config in tables],
            store=store,
            optimizer=optimizer,
            optimizer_kwargs=optimizer_kwargs,
            is_weighted=is_weighted,
            on_nonfinite=on_nonfinite,
        )
        self._given = list(tables)

    def embedding_bag_configs(self) -> list[Any]:
        """Returns TorchRec's configs, as they were given."""
        return self._given

    def bags(self, features: Any) -> KeyedJaggedTensor:
        """Picks and orders the features of a batch, a ``TensorDict`` too."""
        return super().bags(maybe_td_to_kjt(features, None))

    def forward(self, features: Any) -> Any:
        """Looks up a batch and returns a ``torchrec.KeyedTensor``, ``[B, D]`` per feature."""
        pooled = super().forward(features)
        if isinstance(pooled, Proxy):
            return pooled
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values())


class EmbeddingCollection(rows.EmbeddingCollection, EmbeddingCollectionInterface):
    """Rows of sequences of a store for models of TorchRec.

    Args:
        tables: ``torchrec.EmbeddingConfig`` per table.
        store: As for :class:`tierbed.EmbeddingCollection`, and so the others.
        optimizer: Fused optimizer of the rows.
        optimizer_kwargs: Arguments of a ``torch.optim`` class.
        need_indices: Whether the ids come back as weights of the output.
        init: Initial weights by table, instead of what its ``init_fn`` says.
        on_nonfinite: What a gradient with nan or inf does.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        *,
        store: RowSource,
        optimizer: Optimizer | type[Any] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        need_indices: bool = False,
        init: Mapping[str, Init] | None = None,
        on_nonfinite: OnNonfinite = "error",
    ) -> None:
        super().__init__(
            [table_of(config, init) for config in tables],
            store=store,
            optimizer=optimizer,
            optimizer_kwargs=optimizer_kwargs,
            on_nonfinite=on_nonfinite,
        )
        self._given = list(tables)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[Any]:
        """Returns TorchRec's configs, as they were given."""
        return self._given

    def need_indices(self) -> bool:
        """Returns whether the ids come back as weights of the output."""
        return self._need_indices

    def bags(self, features: Any) -> KeyedJaggedTensor:
        """Picks and orders the features of a batch, a ``TensorDict`` too."""
        return super().bags(maybe_td_to_kjt(features, None))

    def forward(self, features: Any) -> dict[str, Any]:
        """Looks up a batch and returns a ``torchrec.JaggedTensor`` per feature."""
        if isinstance(features, Proxy):
            return super().forward(features)
        bags = self.bags(features)
        found = self._sequences(bags)
        ids = [bags[name].values() if self._need_indices else None for name in self._features]
        return {
            name: JaggedTensor(of_feature.values(), weights=of_ids, lengths=of_feature.lengths())
            for (name, of_feature), of_ids in zip(found.items(), ids, strict=True)
        }
