"""Optimizer state in files: its names, and where it lies beside the rows of a store."""

from __future__ import annotations

from dataclasses import dataclass

from tierbed.config.optim import state_words

__all__ = ["NEEDS_STEPS", "STATE_NAMES", "STEP_NAMES", "StatePart", "part_named", "state_parts"]

# Names of the first and of the second part of a row's state, as torch, TorchRec and FBGEMM spell
# them, and of the steps done.
_FIRST = frozenset({"momentum1", "momentum_1", "sum", "exp_avg"})
_SECOND = frozenset({"momentum2", "momentum_2", "exp_avg_sq"})
STEP_NAMES = frozenset({"step", "iter"})
# State of optimizers that rows do not have.
_OTHERS = frozenset({"momentum_buffer", "max_exp_avg_sq", "square_avg", "grad_avg", "acc_delta"})
#: Last words of names that are no table.
STATE_NAMES = _FIRST | _SECOND | _OTHERS | STEP_NAMES
#: Optimizers whose steps depend on how many were done.
NEEDS_STEPS = frozenset({"adam", "partial_row_wise_adam"})


@dataclass(frozen=True)
class StatePart:
    """A part of the state of a row.

    Args:
        name: As torch calls it.
        first: Its first column in the state of a store.
        width: Its columns.
    """

    name: str
    first: int
    width: int


def state_parts(kind: str, dim: int) -> list[StatePart]:
    """Returns the parts of the state of optimizer ``kind`` beside ``dim`` weights."""
    words = state_words(kind, dim)
    first = min(words, 1 if kind == "row_wise_adagrad" else dim)
    name = "exp_avg" if kind in NEEDS_STEPS else "sum"
    parts = [StatePart(name, 0, first), StatePart("exp_avg_sq", first, words - first)]
    return [part for part in parts if part.width]


def part_named(name: str, parts: list[StatePart]) -> StatePart | None:
    """Returns the part that a file calls ``name``; None where rows have none such."""
    at = 0 if name in _FIRST else 1 if name in _SECOND else len(parts)
    return parts[at] if at < len(parts) else None
