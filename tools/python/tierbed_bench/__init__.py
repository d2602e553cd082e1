"""Benchmarks, simulators and comparison stores for Tierbed.

Every suite runs all its systems on the same data, in interleaved rounds, and reports medians;
``training`` gives each a process of its own. Counts (pages, reads, bytes) come first: they do not
depend on who else uses the machine. Times are those of this machine, at this moment.
"""

from typing import TYPE_CHECKING

from tierbed._util.lazy import lazy_names

if TYPE_CHECKING:
    from tierbed_bench.big.suite import BigOptions, run_big
    from tierbed_bench.cluster import ClusterOptions, run_cluster
    from tierbed_bench.exchange import ExchangeOptions, run_exchange
    from tierbed_bench.fresh import FreshOptions, run_fresh
    from tierbed_bench.lookup import run_lookup
    from tierbed_bench.lookup_log import LogOptions, run_lookup_log
    from tierbed_bench.models import ModelOptions, run_models
    from tierbed_bench.placement import PlacementOptions, run_placement
    from tierbed_bench.precision import PrecisionOptions, run_precision
    from tierbed_bench.serving import ServingOptions, run_serving
    from tierbed_bench.tiers import TiersOptions, run_tiers
    from tierbed_bench.training import TrainingOptions, run_training
else:
    # The command line lists the suites without loading them.
    __getattr__ = lazy_names(
        __name__,
        {
            "big": "BigOptions run_big",
            "cluster": "ClusterOptions run_cluster",
            "exchange": "ExchangeOptions run_exchange",
            "fresh": "FreshOptions run_fresh",
            "lookup": "run_lookup",
            "lookup_log": "LogOptions run_lookup_log",
            "models": "ModelOptions run_models",
            "placement": "PlacementOptions run_placement",
            "precision": "PrecisionOptions run_precision",
            "serving": "ServingOptions run_serving",
            "tiers": "TiersOptions run_tiers",
            "training": "TrainingOptions run_training",
        },
    )

__all__ = [
    "BigOptions",
    "ClusterOptions",
    "ExchangeOptions",
    "FreshOptions",
    "LogOptions",
    "ModelOptions",
    "PlacementOptions",
    "PrecisionOptions",
    "ServingOptions",
    "TiersOptions",
    "TrainingOptions",
    "run_big",
    "run_cluster",
    "run_exchange",
    "run_fresh",
    "run_lookup",
    "run_lookup_log",
    "run_models",
    "run_placement",
    "run_precision",
    "run_serving",
    "run_tiers",
    "run_training",
]
