"""Sizes of a cluster before it is bought: formulas over inputs whose origin is told.

See :func:`plan_serving` and :func:`plan_training`; the command is ``tierbed plan cluster``.
"""

from tierbed.sizing.inputs import Input, Inputs, Measured, read_measured
from tierbed.sizing.serving import Freshness, ServingPlan, plan_freshness, plan_serving
from tierbed.sizing.training import TrainingPlan, plan_training

__all__ = [
    "Freshness",
    "Input",
    "Inputs",
    "Measured",
    "ServingPlan",
    "TrainingPlan",
    "plan_freshness",
    "plan_serving",
    "plan_training",
    "read_measured",
]
