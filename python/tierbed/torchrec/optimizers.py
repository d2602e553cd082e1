"""Optimizers that TorchRec applies in backward, and their state, as the fused ones of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tierbed.config.optim import Optimizer, RowWiseAdagrad, as_optimizer
from tierbed.errors import UnsupportedError

__all__ = ["applied_to", "fused_of", "state_rows", "steps_of"]

_ROW_WISE = "torchrec.optim.rowwise_adagrad.RowWiseAdagrad"
# How steps are computed, not what they are.
_ONLY_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


def applied_to(weight: Tensor) -> torch.optim.Optimizer | None:
    """Returns the optimizer that ``_apply_optimizer_in_backward`` gave ``weight``, if any.

    Raises:
        UnsupportedError: Several.
    """
    applied: Sequence[Any] = getattr(weight, "_in_backward_optimizers", ())
    if len(applied) > 1:
        kinds = [type(one).__name__ for one in applied]
        raise UnsupportedError(f"a table has the optimizers {kinds} in backward; apply one")
    return applied[0] if applied else None


def fused_of(applied: torch.optim.Optimizer) -> Optimizer:
    """Returns the fused optimizer that does the steps of ``applied``.

    Raises:
        UnsupportedError: None does: another kind, or an argument that it does not have.
    """
    kind = type(applied)
    name = f"{kind.__module__}.{kind.__qualname__}"
    group = {key: value for key, value in applied.param_groups[0].items() if key not in _ONLY_HOW}
    if group.get("weight_decay"):
        raise UnsupportedError(
            f"{kind.__name__} with weight_decay decays every row in each step, a store only those "
            "of the batch; give optimizer= with that weight_decay if that will do",
            {"optimizer": name},
        )
    if kind is torch.optim.Adam:
        raise UnsupportedError(
            "torch.optim.Adam moves every row in each step, a store only those of the batch; give "
            "optimizer=tierbed.Adam(lr=...) if that will do",
            {"optimizer": name},
        )
    numbers = {
        key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()
    }
    return as_optimizer(RowWiseAdagrad if name == _ROW_WISE else kind, numbers)


def state_rows(
    applied: torch.optim.Optimizer, weight: Tensor, first: int, end: int
) -> Tensor | None:
    """Returns the state of rows ``first..end`` of ``weight``, ``[N, S]`` f32; None for none."""
    state = applied.state.get(weight, {})
    # The first is of both kinds of Adagrad, the others are of SparseAdam.
    names = [name for name in ("sum", "exp_avg", "exp_avg_sq") if name in state]
    if not names:
        return None
    return torch.cat([state[name][first:end].detach().float().cpu() for name in names], dim=1)


def steps_of(applied: torch.optim.Optimizer, weight: Tensor) -> int:
    """Returns how many steps ``applied`` did on ``weight``; 0 where it keeps no state of it."""
    state = applied.state.get(weight)
    return int(state["step"]) if state else 0
