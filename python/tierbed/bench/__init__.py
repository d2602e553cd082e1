"""What does it cost, next to what one would use instead?

Every suite runs all its systems on the same data, in interleaved rounds, and reports medians;
``training`` gives each a process of its own. Counts (pages, reads, bytes) come first: they do not
depend on who else uses the machine. Times are those of this machine, at this moment.
"""

from tierbed.bench.exchange import ExchangeOptions, run_exchange
from tierbed.bench.lookup import run_lookup
from tierbed.bench.lookup_log import LogOptions, run_lookup_log
from tierbed.bench.models import ModelOptions, run_models
from tierbed.bench.placement import PlacementOptions, run_placement
from tierbed.bench.precision import PrecisionOptions, run_precision
from tierbed.bench.tiers import TiersOptions, run_tiers
from tierbed.bench.training import TrainingOptions, run_training

__all__ = [
    "ExchangeOptions",
    "LogOptions",
    "ModelOptions",
    "PlacementOptions",
    "PrecisionOptions",
    "TiersOptions",
    "TrainingOptions",
    "run_exchange",
    "run_lookup",
    "run_lookup_log",
    "run_models",
    "run_placement",
    "run_precision",
    "run_tiers",
    "run_training",
]
