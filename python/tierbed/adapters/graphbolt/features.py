"""Tables as a feature store of GraphBolt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tierbed.adapters.base import base_of
from tierbed.adapters.graphbolt.feature import TierbedFeature
from tierbed.serve.snapshot import Snapshot
from tierbed.train.store import Store

if TYPE_CHECKING:
    from dgl.graphbolt import FeatureStore as _FeatureStore
else:
    _FeatureStore = base_of("dgl.graphbolt", "FeatureStore")

__all__ = ["TierbedFeatureStore"]

#: Domain (``"node"`` or ``"edge"``), type (None in a graph of one type) and name of a feature.
FeatureKey = tuple[str, "str | None", str]


class TierbedFeatureStore(_FeatureStore):
    """Tables as a GraphBolt ``FeatureStore``: features by domain, type and name.

    Args:
        source: The store, or a snapshot.
        tables: Name of the table of each feature, ``{("node", None, "feat"): "paper"}``.

    Raises:
        InvalidError: No such table.

    Examples:
        >>> from tierbed.adapters.graphbolt import TierbedFeatureStore
        >>> store = tb.Store.open("features", dram_budget="16MiB")
        >>> table = tb.EmbeddingConfig(name="paper", num_embeddings=1000, embedding_dim=8)
        >>> _ = store.add_table(table)
        >>> features = TierbedFeatureStore(store, {("node", None, "feat"): "paper"})
        >>> features.read("node", None, "feat", torch.tensor([1, 2])).shape
        torch.Size([2, 8])
        >>> store.close()
    """

    def __init__(self, source: Store | Snapshot, tables: Mapping[FeatureKey, str]) -> None:
        super().__init__()
        self._features: dict[FeatureKey, Any] = {
            key: TierbedFeature(source, table) for key, table in tables.items()
        }

    def __getitem__(self, feature_key: FeatureKey) -> Any:
        return self._features[feature_key]

    def __setitem__(self, feature_key: FeatureKey, feature: Any) -> None:
        """Puts any GraphBolt feature in, such as one in memory beside these."""
        self._features[feature_key] = feature

    def __contains__(self, feature_key: FeatureKey) -> bool:
        return feature_key in self._features

    def __len__(self) -> int:
        return len(self._features)

    def read(
        self, domain: str, type_name: str | None, feature_name: str, ids: Tensor | None = None
    ) -> Tensor:
        """Reads rows of a feature, as :meth:`TierbedFeature.read`.

        Args:
            domain: ``"node"`` or ``"edge"``.
            type_name: Type of node or edge; None in a graph of one type.
            feature_name: Name of the feature.
            ids: Nodes or edges ``[N]``; None for all.
        """
        rows: Tensor = self._features[domain, type_name, feature_name].read(ids)
        return rows

    def size(self, domain: str, type_name: str | None, feature_name: str) -> torch.Size:
        """Returns the shape of a row of a feature.

        Args:
            domain: ``"node"`` or ``"edge"``.
            type_name: Type of node or edge; None in a graph of one type.
            feature_name: Name of the feature.
        """
        shape: torch.Size = self._features[domain, type_name, feature_name].size()
        return shape

    def count(self, domain: str, type_name: str | None, feature_name: str) -> int:
        """Returns how many rows a feature has.

        Args:
            domain: ``"node"`` or ``"edge"``.
            type_name: Type of node or edge; None in a graph of one type.
            feature_name: Name of the feature.
        """
        return int(self._features[domain, type_name, feature_name].count())

    def metadata(self, domain: str, type_name: str | None, feature_name: str) -> dict[str, Any]:
        """Returns the metadata of a feature.

        Args:
            domain: ``"node"`` or ``"edge"``.
            type_name: Type of node or edge; None in a graph of one type.
            feature_name: Name of the feature.
        """
        told: dict[str, Any] = self._features[domain, type_name, feature_name].metadata()
        return told

    def update(
        self,
        domain: str,
        type_name: str | None,
        feature_name: str,
        value: Tensor,
        ids: Tensor | None = None,
    ) -> None:
        """Overwrites rows of a feature, as :meth:`TierbedFeature.update`.

        Args:
            domain: ``"node"`` or ``"edge"``.
            type_name: Type of node or edge; None in a graph of one type.
            feature_name: Name of the feature.
            value: Rows ``[N, D]`` f32.
            ids: Nodes or edges ``[N]``; None for all.
        """
        self._features[domain, type_name, feature_name].update(value, ids)

    def keys(self) -> list[FeatureKey]:
        """Returns the keys of all features."""
        return list(self._features)
