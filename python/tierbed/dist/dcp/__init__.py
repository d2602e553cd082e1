"""Distributed checkpoints of torch (DCP) of tables that are divided over ranks.

An object of :class:`TableState` stands in a state dictionary for a tensor that lies in a store.
Planners of this package let torch read and write it a chunk at a time, so that tables of any size
pass through little memory. Names and shapes are those of TorchRec, whose models load what is
written here, and the other way round.

DCP has no checksums, and its ``.metadata`` is a pickle. It is for moving; the checkpoints to rely
on are those of ``save``.
"""

from tierbed.dist.dcp.planners import LoadPlanner, SavePlanner, load, save
from tierbed.dist.dcp.states import optimizer_states, table_states
from tierbed.dist.dcp.tensors import TableState

__all__ = [
    "LoadPlanner",
    "SavePlanner",
    "TableState",
    "load",
    "optimizer_states",
    "save",
    "table_states",
]
