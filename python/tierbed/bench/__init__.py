"""What does it cost, next to what one would use instead?

Every suite runs all its systems in one process, on the same data, in interleaved rounds, and
reports medians. Counts (pages, reads, bytes) come first: they do not depend on who else uses the
machine. Times are those of this machine, at this moment.
"""

from tierbed.bench.lookup import run_lookup
from tierbed.bench.training import run_training

__all__ = ["SUITES", "run_lookup", "run_training"]

SUITES = {"lookup": run_lookup, "training": run_training}
