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
from tierbed.serve.neighbours import Neighbours, find_neighbours
from tierbed.serve.resident import plan_tiers
from tierbed.serve.snapshot import Snapshot
from tierbed.serve.versions import Versions

if TYPE_CHECKING:
    from tierbed.serve.server import Limits, Predictor, ServeOptions, Server, load_model
else:
    __getattr__ = lazy_names(
        __name__, {"server": "Limits Predictor ServeOptions Server load_model"}
    )

__all__ = [
    "CacheOptions",
    "CacheTier",
    "Limits",
    "NeighbourTier",
    "Neighbours",
    "Predictor",
    "ServeOptions",
    "Server",
    "Snapshot",
    "TierBudget",
    "TierPlan",
    "TierTable",
    "Versions",
    "find_neighbours",
    "load_model",
    "plan_tiers",
]
