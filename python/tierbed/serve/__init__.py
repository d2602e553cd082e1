"""Serving: published snapshots, their caches, surrogate rows, the HTTP server."""

from typing import TYPE_CHECKING

from tierbed._util.lazy import lazy_names
from tierbed.serve.cache import (
    CacheOptions,
    CacheTier,
    NeighbourTier,
    TierBudget,
    TierPlan,
    TierTable,
)
from tierbed.serve.follow import Follow
from tierbed.serve.hot_rows import HotRows
from tierbed.serve.neighbours import Neighbours, find_neighbours
from tierbed.serve.resident import plan_tiers
from tierbed.serve.route import Route, ShardClient
from tierbed.serve.shard_map import DividedTable, Shard, ShardMap
from tierbed.serve.snapshot import Snapshot
from tierbed.serve.versions import Versions

if TYPE_CHECKING:
    from tierbed.serve.compiled import compile_dense
    from tierbed.serve.models import ModelFeature, ServedModel, load_model
    from tierbed.serve.server import Limits, ServeOptions, Server
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "compiled": "compile_dense",
            "models": "ModelFeature ServedModel load_model",
            "server": "Limits ServeOptions Server",
        },
    )

__all__ = [
    "CacheOptions",
    "CacheTier",
    "DividedTable",
    "Follow",
    "HotRows",
    "Limits",
    "ModelFeature",
    "NeighbourTier",
    "Neighbours",
    "Route",
    "ServeOptions",
    "ServedModel",
    "Server",
    "Shard",
    "ShardClient",
    "ShardMap",
    "Snapshot",
    "TierBudget",
    "TierPlan",
    "TierTable",
    "Versions",
    "compile_dense",
    "find_neighbours",
    "load_model",
    "plan_tiers",
]
