"""Features of DGL's GraphBolt in tables of a store or a snapshot.

GraphBolt samples graphs, and fetches what each node or edge of a minibatch has from a feature
store. Here a feature is a table, and node ``i`` has row ``i``; or row of id ``i``, in a table of
open vocabulary. ``read_async`` reads in a thread of its own, while the pipeline goes on.

Source: DGL 2.5 (``python/dgl/graphbolt/feature_store.py``, ``feature_fetcher.py``). Its released
2.1 asks for ``read``, ``size``, ``update`` and ``metadata`` only, and gets the same.
"""

from __future__ import annotations

from tierbed.adapters.graphbolt.feature import TierbedFeature
from tierbed.adapters.graphbolt.features import TierbedFeatureStore

__all__ = ["TierbedFeature", "TierbedFeatureStore"]
